"""A capture that is killed at every step of bulk reading leaves the journal that a stream would have left."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.rig import failpoints
from tests.fixtures.bulk import TABLES, capture_to_journal, copy_slot, count, journal_facts, write_history
from tests.fixtures.capture import drive
from tests.fixtures.postgres import Database

pytestmark = [pytest.mark.postgres, pytest.mark.timeout(180)]

OTHERS = ("capture.block_appended:20", "capture.committed:3", "journal.head_published:5", "capture.replication_started")
COUNTS = {"bulk.chunk_read": 3, "bulk.chunk_appended": 3}


def test_a_kill_at_every_step_leaves_the_same_journal(database: Database, tmp_path: Path) -> None:
    database.sql(TABLES)
    with drive(database, tmp_path / "own"):
        stream, in_bulk = f"{database.name}_stream", f"{database.name}_bulk"
        copy_slot(database, stream, in_bulk)
    with database.connect(autocommit=False) as open_writer:
        write_history(database, range(1, 3))
        open_writer.execute("INSERT INTO item VALUES (0)")
        write_history(database, range(3, 13))
        open_writer.commit()
    ((goal,),) = database.sql("SELECT (pg_current_wal_flush_lsn() - '0/0')::int8")
    capture_to_journal(database, tmp_path / "stream", stream, goal, catch_up="streaming")
    steps = [name for name in failpoints() if name.startswith("bulk.")]
    assert len(steps) >= 6
    kills = (*(f"{name}:{COUNTS.get(name, 1)}" for name in steps), *OTHERS)
    events = capture_to_journal(database, tmp_path / "bulk", in_bulk, goal, kill_at=kills)
    assert count(events, "source.bulk_started") >= len(steps)
    found, expected = journal_facts(tmp_path / "bulk"), journal_facts(tmp_path / "stream")
    assert len(expected) > 1000
    assert found == expected
