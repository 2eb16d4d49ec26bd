"""A capture that is killed at every step of bulk reading leaves the journal that a stream would have left."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from tests.chaos.rig import failpoints
from tests.fixtures.bulk import (
    CHANGE_OVER,
    TABLES,
    capture_to_journal,
    copy_slot,
    count,
    fired,
    journal_facts,
    write_history,
)
from tests.fixtures.capture import drive
from tests.fixtures.postgres import Database

pytestmark = pytest.mark.postgres

EACH = os.environ.get("MILLSTREAM_CHAOS_EACH") == "1"
OTHERS = (
    "capture.committed:3",
    "capture.replication_started",
    *(("capture.block_appended:3", "journal.head_published:3") if EACH else ()),
)
ROUNDS = 60
COUNTS = {"bulk.chunk_read": 3, "bulk.chunk_appended": 3}


def kills() -> tuple[str, ...]:
    """Every step of bulk reading and of changing over, and some of every capture."""
    steps = [name for name in failpoints() if name.startswith("bulk.")]
    assert len(steps) >= 6
    return (*(f"{name}:{COUNTS.get(name, 1)}" for name in steps), *OTHERS)


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
    capture_to_journal(database, tmp_path / "stream", stream, lambda: goal, catch_up="streaming")
    events = capture_to_journal(database, tmp_path / "bulk", in_bulk, lambda: goal, kill_at=kills())
    assert count(events, "source.bulk_started") >= len(kills()) - len(OTHERS)
    found, expected = journal_facts(tmp_path / "bulk"), journal_facts(tmp_path / "stream")
    assert len(expected) > 1000
    assert found == expected


@pytest.mark.timeout(400)
@pytest.mark.skipif(not EACH, reason="takes a minute or two: `make chaos` runs it")
def test_kills_while_it_changes_over_in_the_middle_of_a_load(database: Database, tmp_path: Path) -> None:
    database.sql(TABLES)
    with drive(database, tmp_path / "own"):
        stream, live = f"{database.name}_stream", f"{database.name}_live"
        copy_slot(database, stream, live)
    ended: list[int] = []
    under_load = threading.Event()

    def load() -> None:
        n, due = 0, {name.partition(":")[0] for name in kills()}
        with database.connect(autocommit=False) as open_writer:
            # A transaction that stays open for a while makes the server read its log again and again.
            while n < ROUNDS and fired(tmp_path / "live", live) != due:
                n += 1
                open_writer.execute("INSERT INTO item VALUES (%s)", (-1_000_000 - n,))
                write_history(database, range(n, n + 1))
                if n % 5 == 0:
                    open_writer.commit()
                    under_load.set()
            open_writer.commit()
        ended.extend(goal for (goal,) in database.sql("SELECT (pg_current_wal_flush_lsn() - '0/0')::int8"))

    def goal() -> int:
        return ended[0] if ended else 1 << 62

    loading = threading.Thread(target=load)
    loading.start()
    try:
        assert under_load.wait(60)
        events = capture_to_journal(database, tmp_path / "live", live, goal, kill_at=kills(), first=CHANGE_OVER)
    finally:
        loading.join()
    assert count(events, "source.bulk_started") > len(kills()) - len(OTHERS)
    capture_to_journal(database, tmp_path / "stream", stream, goal, catch_up="streaming")
    found, expected = (
        # What the catalog adds to a relation depends on when it is asked, which was during the load.
        [(*row[:-2], row[-1] and row[-1].table) for row in journal_facts(tmp_path / way)]
        for way in ("live", "stream")
    )
    assert len(expected) > 1000
    assert found == expected
