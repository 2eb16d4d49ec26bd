"""A journal that targets keep too large: what each policy does, on a real database, by content."""

from __future__ import annotations

import signal
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from millstream import Engine, Mode, StreamSpec, StreamState, TargetSpec
from millstream.engine.stream_status import StreamStatus, TargetStatus
from millstream.errors import NotReady
from millstream.model import JournalLimit, OnFull
from tests.fixtures.capture import source_spec
from tests.fixtures.delivering import run_home
from tests.fixtures.delivery import Watching
from tests.fixtures.engines import QUICK, await_that
from tests.fixtures.forks import run
from tests.fixtures.postgres import Database

pytestmark = pytest.mark.postgres

SEGMENT = 128 << 10
LIMIT = 1 << 20
ROWS = 400
"""Rows of about one kilobyte in a transaction."""


@pytest.fixture(autouse=True)
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLSTREAM_SEGMENT_BYTES", str(SEGMENT))


def stream(root: Path, database: Database, policy: OnFull, *targets: str) -> StreamSpec:
    spec = source_spec(database, "public.item", options={"slot": f"millstream_{database.name}"})
    specs = tuple(TargetSpec(name, "sqlite", QUICK, options={"path": str(root / f"{name}.db")}) for name in targets)
    limited = replace(spec, journal=JournalLimit(LIMIT, policy))
    return StreamSpec("shop", limited, Mode.CDC, specs, checkpoint_interval_ms=100)


def started(engine: Engine, database: Database, root: Path, policy: OnFull) -> None:
    """A stream to two targets, of which one stands still."""
    database.sql("CREATE TABLE item (id int PRIMARY KEY, body text)")
    engine.upsert_stream(stream(root, database, policy, "fast", "slow"))
    engine.await_ready("shop", 120)
    engine.pause("shop", "slow")


def fill(database: Database, first: int, transactions: int) -> None:
    for number in range(first, first + transactions):
        database.sql(
            f"INSERT INTO item SELECT {number * ROWS} + i, repeat(md5(i::text), 32) FROM generate_series(1, {ROWS}) i"
        )


def rows(root: Path, target: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(root / f"{target}.db", timeout=60)) as db:
        if not db.execute("SELECT 1 FROM sqlite_master WHERE name = 'public.item'").fetchall():
            return []
        return db.execute('SELECT id, body FROM "public.item" ORDER BY id').fetchall()


def expected(database: Database) -> list[tuple[Any, ...]]:
    return database.sql("SELECT id, body FROM item ORDER BY id")


def target(status: StreamStatus, name: str) -> TargetStatus:
    return next(one for one in status.targets if one.name == name)


def equal(database: Database, root: Path, *targets: str) -> None:
    whole = expected(database)
    for name in targets:
        await_that(lambda name=name: rows(root, name) == whole)  # type: ignore[misc]


def test_a_full_journal_blocks_capture_until_targets_catch_up(
    engine: Engine, database: Database, tmp_path: Path
) -> None:
    with engine:
        started(engine, database, tmp_path, OnFull.BLOCK)
        fill(database, 0, 4)
        await_that(lambda: engine.get_status("shop").source.state == "waiting")
        fill(database, 4, 12)
        status = engine.get_status("shop")
        assert "is at its limit" in (status.source.error or "")
        assert not status.healthy
        assert len(rows(tmp_path, "fast")) < len(expected(database)), "what is beyond the limit stays at the source"
        ((kept,),) = database.sql(
            "SELECT (pg_current_wal_flush_lsn() - confirmed_flush_lsn)::int8 "
            f"FROM pg_replication_slots WHERE slot_name = 'millstream_{database.name}'"
        )
        assert kept > 4 << 20
        assert (status.source.journal_bytes or 0) < 4 * LIMIT
        engine.resume("shop", "slow")
        equal(database, tmp_path, "fast", "slow")
        await_that(lambda: engine.get_status("shop").healthy)
        for number in (-1, -2, -3):
            # The last batch of a target stays in the journal until there are later ones.
            database.sql(f"INSERT INTO item VALUES ({number}, 'the next batch')")
            equal(database, tmp_path, "fast", "slow")
        await_that(lambda: (engine.get_status("shop").source.journal_bytes or 0) < 2 * LIMIT)


def test_a_full_journal_fails_the_stream_where_that_is_asked_for(
    engine: Engine, database: Database, tmp_path: Path
) -> None:
    with engine:
        started(engine, database, tmp_path, OnFull.ERROR)
        fill(database, 0, 12)
        await_that(lambda: engine.get_status("shop").state is StreamState.FAILED)
        assert "on_full is error" in (engine.get_status("shop").source.error or "")
        engine.resume("shop", "slow")
        await_that(lambda: target(engine.get_status("shop"), "slow").lag_events == 0)
        engine.resume("shop")
        equal(database, tmp_path, "fast", "slow")
        await_that(lambda: engine.get_status("shop").healthy)


def test_the_oldest_changes_are_dropped_on_consent_and_the_target_must_begin_anew(
    engine: Engine, database: Database, watching: Watching, tmp_path: Path
) -> None:
    with engine:
        started(engine, database, tmp_path, OnFull.DROP_OLDEST)
        engine.resume("shop", "slow")
        database.sql("INSERT INTO item VALUES (0, 'first')")
        equal(database, tmp_path, "fast", "slow")
        engine.pause("shop", "slow")
        for number in range(16):
            # Not so much at once that it would overtake the other target, too.
            fill(database, number, 1)
            equal(database, tmp_path, "fast")
        await_that(lambda: target(engine.get_status("shop"), "slow").state is StreamState.NEEDS_RELOAD)
        lost = target(engine.get_status("shop"), "slow")
        assert "the journal begins at" in (lost.error or "")
        assert "new target" in (lost.hint or "")
        await_that(lambda: bool(watching.of("capture.journal_dropped")))
        await_that(lambda: engine.get_status("shop").source.error is None)
        with pytest.raises(NotReady, match="target slow"):
            engine.await_ready("shop", 120)
        # What it can never get does not hold the source's log either.
        slot = f"FROM pg_replication_slots WHERE slot_name = 'millstream_{database.name}'"
        database.await_true(f"SELECT pg_current_wal_flush_lsn() - confirmed_flush_lsn < 1000000 {slot}")
        # It is given another try, and says the same.
        engine.resume("shop", "slow")
        await_that(lambda: target(engine.get_status("shop"), "slow").state is StreamState.NEEDS_RELOAD)
        assert rows(tmp_path, "slow") == [(0, "first")]
    # Without any process it is known too.
    assert target(engine.get_status("shop"), "slow").state is StreamState.NEEDS_RELOAD
    with pytest.raises(NotReady, match="target slow of stream shop has lost changes of all its tables"):
        engine.reload("shop", "slow", tables=["public.item"])
    engine.reload("shop", "slow")
    killed = run(run_home, str(engine.home.path), environment={"MILLSTREAM_FAILPOINT": "reload.skipped"})
    assert killed.code == -signal.SIGKILL, killed.stderr
    database.sql("DELETE FROM item WHERE id % 7 = 0; UPDATE item SET body = 'while it is down' WHERE id % 5 = 0")
    with engine:
        equal(database, tmp_path, "fast", "slow")
        await_that(lambda: (target(engine.get_status("shop"), "slow").reload or {})["state"] == "done")
        database.sql("DELETE FROM item WHERE id % 3 = 0; INSERT INTO item VALUES (-1, 'later')")
        equal(database, tmp_path, "fast", "slow")
        await_that(lambda: engine.get_status("shop").healthy)
    with engine:
        engine.upsert_stream(stream(tmp_path, database, OnFull.DROP_OLDEST, "fast", "anew"))
        engine.await_ready("shop", 120)
        database.sql("UPDATE item SET body = 'changed'")
        equal(database, tmp_path, "fast", "anew")
