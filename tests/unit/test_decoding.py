"""A task's slices become the same changes, whether they are decoded here or were by the task of another target."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from millstream.journal import JournalReader
from millstream.journal.format import Slice
from millstream.model import SeqRange
from millstream.spark import decoding as decodings
from millstream.spark.decoding import Decoding, groups
from millstream.spark.rows import CHUNK_ROWS, Opener
from millstream.spark.shelf import Shelf
from tests.fixtures.journals import Journal, shop_table

RELATION = shop_table("orders", 100)


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    """Long runs and short ones of a table, with another one's changes between them."""
    made = Journal.create(tmp_path / "journal")
    made.register(RELATION)
    made.register(shop_table("items", 101))
    for number, rows in enumerate((3000, 5, 2500, 9000, 9000, 700)):
        made.transaction([("public.orders", number * 10_000 + i, f"value {i}") for i in range(rows)])
        made.transaction([("public.items", number * 10_000 + i, "other") for i in range(40)])
    return made


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    made = Shelf(str(tmp_path / "shelf"), readers=2)
    made.prepare()
    return made


def decoding(journal: Journal, shelf: Shelf | None, span: SeqRange, after: int | None = None) -> Decoding:
    reader = JournalReader(journal.locations)
    pieces = [(piece, span) for piece in reader.slices(span) if piece.relation == 1]
    return Decoding(RELATION, 1, "shop-1", after, Opener(tuple(journal.locations), pieces), pieces, shelf)


def table(changes: Decoding) -> pa.Table:
    return pa.Table.from_batches(list(changes), schema=None)


def counts(changes: Decoding) -> tuple[int, int, int, list[int]]:
    return changes.taken, changes.skipped, changes.bytes, changes.seqs


def laid(shelf: Shelf) -> int:
    return len(list(Path(shelf.directory).glob("*.arrow")))


def test_shared_changes_are_those_that_a_task_decodes_alone(journal: Journal, shelf: Shelf) -> None:
    span = SeqRange(0, journal.last_seq)
    alone = decoding(journal, None, span)
    whole = table(alone)
    assert whole.num_rows == 3000 + 5 + 2500 + 9000 + 9000 + 700
    first = decoding(journal, shelf, span)
    assert table(first) == whole
    assert laid(shelf) >= 1
    second = decoding(journal, shelf, span)
    assert table(second) == whole
    assert laid(shelf) == 0, "the second has taken them, and was the last one"
    assert counts(first) == counts(second) == (*counts(alone)[:2], counts(first)[2], counts(alone)[3])


def test_they_are_found_under_another_form_of_the_segment(tmp_path: Path, shelf: Shelf) -> None:
    journal = Journal.create(tmp_path / "other", segment_bytes=64 << 10)
    journal.register(RELATION)
    for number in range(4):
        journal.transaction([("public.orders", number * 10_000 + i, f"value {i}") for i in range(3000)])
    span = SeqRange(0, journal.last_seq)
    first = table(decoding(journal, shelf, span))
    before = {piece.segment for piece in JournalReader(journal.locations).slices(span)}
    journal.seal()
    assert before != {piece.segment for piece in JournalReader(journal.locations).slices(span)}
    assert table(decoding(journal, shelf, span)) == first
    assert laid(shelf) == 0


@pytest.mark.parametrize("span", [SeqRange(100, 2900), SeqRange(0, 20_000), SeqRange(2999, 12_000)])
def test_a_batch_that_ends_elsewhere_gets_its_own_rows(journal: Journal, shelf: Shelf, span: SeqRange) -> None:
    table(decoding(journal, shelf, SeqRange(0, journal.last_seq)))
    assert table(decoding(journal, shelf, span)) == table(decoding(journal, None, span))


def test_a_target_that_had_some_of_them_before_leaves_these_out(journal: Journal, shelf: Shelf) -> None:
    span = SeqRange(0, journal.last_seq)
    table(decoding(journal, shelf, span))
    after = journal.position - 550
    alone, shared = decoding(journal, None, span, after), decoding(journal, shelf, span, after)
    assert table(shared) == table(alone)
    assert (shared.taken, shared.skipped) == (alone.taken, alone.skipped)
    assert shared.skipped > 0


def test_few_changes_are_not_worth_a_file(tmp_path: Path, shelf: Shelf) -> None:
    journal = Journal.create(tmp_path / "small")
    journal.register(RELATION)
    few = decodings.SHARED_ROWS - 1
    journal.transaction([("public.orders", i, "value") for i in range(few)])
    assert table(decoding(journal, shelf, SeqRange(0, few))).num_rows == few
    assert not list(Path(shelf.directory).iterdir())


def test_slices_are_taken_together_as_far_as_a_chunk_goes() -> None:
    span = SeqRange(0, 100_000)

    def piece(rows: int) -> tuple[Slice, SeqRange]:
        return Slice("j", 1, "00000001", 0, 1, 0, 1, rows, 1, rows), span

    sizes = [CHUNK_ROWS - 10, 10, 1, CHUNK_ROWS + 1, 5]
    found = [[one.rows for one, _ in group] for group in groups(map(piece, sizes))]
    assert found == [[CHUNK_ROWS - 10, 10], [1], [CHUNK_ROWS + 1], [5]]
    assert list(groups([])) == []
