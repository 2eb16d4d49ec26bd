"""What lies after a cursor, by relation, in open and sealed segments alike."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from millstream.errors import OutOfRange
from millstream.journal import JournalReader
from millstream.model import SeqRange
from tests.fixtures.journals import Journal, shop_table


def test_every_cursor_is_told_how_many_rows_of_each_table_wait(tmp_path: Path) -> None:
    journal = Journal.create(tmp_path / "journal", segment_bytes=4096)
    for number, name in enumerate(("orders", "items")):
        journal.register(shop_table(name, 7001 + number))
    for turn in range(60):
        journal.transaction([("public.orders", turn, "x" * 40), *[("public.items", turn, "y")] * (turn % 4)])
        journal.seal()
    reader = JournalReader(journal.locations)
    tables = {id: relation.table for id, relation in reader.relations().items()}
    assert len({piece.segment for piece in reader.slices(SeqRange(0, journal.last_seq))}) > 3
    for start in range(0, journal.last_seq + 1, 7):
        found = {tables[id]: one for id, one in reader.backlog(start).items()}
        left = {seq: change for seq, change in journal.written.items() if seq > start}
        assert {name: one.rows for name, one in found.items()} == Counter(one.table for one in left.values())
        for name, one in found.items():
            assert one.first_seq == min(seq for seq, change in left.items() if change.table == name)
            assert one.bytes > one.rows
    with pytest.raises(OutOfRange):
        reader.backlog(journal.last_seq + 1)
    journal.writer.close()
