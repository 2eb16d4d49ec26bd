"""Which tables of a shared journal are a stream's, also when they change their names."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

from millstream.journal import JournalReader
from millstream.model import Relation, SeqRange
from millstream.spark.tables import OwnTables, belongs, share
from tests.fixtures.journals import Journal, shop_table

ORDERS, ITEMS = shop_table("orders", 100), shop_table("items", 200)
OWN = OwnTables(("public.orders", "public.late"), ("public.items", "public.late", "public.orders"))


def journal(path: Path, *relations: Relation) -> Journal:
    """One transaction a relation, of as many rows as its number."""
    made = Journal.create(path)
    for number, relation in enumerate(relations, 1):
        made.register(relation)
        made.transaction([(relation.table, id_, "x") for id_ in range(number)])
    return made


def owned(made: Journal, own: OwnTables) -> list[bool]:
    header = made.writer.header
    ids = sorted(JournalReader(made.locations).relations())
    return [belongs(tuple(made.locations), header.journal_id, id_, own) for id_ in ids]


def test_a_renamed_table_stays_with_its_stream(tmp_path: Path) -> None:
    made = journal(tmp_path / "j", ORDERS, ITEMS, replace(ORDERS, name="sales"), replace(ITEMS, name="things"))
    assert owned(made, OWN) == [True, False, True, False]


def test_a_table_that_nobodys_patterns_mean_goes_to_everybody(tmp_path: Path) -> None:
    made = journal(tmp_path / "j", replace(ORDERS, name="renamed_before_it_changed"), ITEMS)
    assert owned(made, OWN) == [True, False]
    assert belongs(tuple(made.locations), made.writer.header.journal_id, 0, OWN), "logical messages are everybody's"


def test_the_rows_of_others_are_counted_where_a_batch_cuts_them(tmp_path: Path) -> None:
    made = journal(tmp_path / "j", ORDERS, ITEMS, replace(ITEMS, name="things"))
    for span, expected in ((SeqRange(0, 6), {2: 2, 3: 3}), (SeqRange(0, 2), {2: 1}), (SeqRange(2, 5), {2: 1, 3: 2})):
        pieces = [(piece, span) for piece in JournalReader(made.locations).slices(span)]
        mine, others = share(tuple(made.locations), OWN, pieces)
        assert others == Counter(expected)
        assert {piece.relation for piece, _ in mine} == ({1} if span.start == 0 else set())
        assert share(tuple(made.locations), None, pieces) == (pieces, Counter())
