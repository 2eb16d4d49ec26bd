"""What can come between a source and bulk reading: each is told, streamed around, and loses nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from millstream.errors import SourceUnavailable
from millstream.observe import Event, Level
from millstream.sources.postgres import call, capture, reading, source
from tests.fixtures.bulk import TABLES, copy_slot, count, drive_copy, plain, small_steps, write_history
from tests.fixtures.capture import Driver, drive
from tests.fixtures.postgres import Database

pytestmark = pytest.mark.postgres

BULK_SESSIONS = "FROM pg_replication_slots WHERE temporary AND database = current_database()"


@pytest.fixture
def backlog(database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """A history of some length, in two slots."""
    small_steps(monkeypatch)
    monkeypatch.setattr(source, "STATUS_SECONDS", 0.0)
    database.sql(TABLES)
    slots = f"{database.name}_a", f"{database.name}_b"
    with drive(database, tmp_path / "own"):
        copy_slot(database, *slots)
    write_history(database, range(1, 8))
    return slots


def expected(database: Database, work: Path, slot: str) -> list[dict[str, Any]]:
    with drive_copy(database, work, slot, [], catch_up="streaming") as driver:
        return driver.catch_up()


def same(driver: Driver, rows: list[dict[str, Any]]) -> bool:
    """The relations apart: what the catalog adds to them depends on when it is asked."""
    return [plain(row) for row in driver.rows] == [plain(row) for row in rows]


@contextmanager
def a_tiny_temp_file_limit(database: Database) -> Iterator[None]:
    database.sql(f"ALTER DATABASE {database.name} SET temp_file_limit = 0")
    # A call ends with a whole transaction, so its result is as large as this one at least. What follows keeps its
    # end away from the end of the log, where bulk reading leaves the rest to the stream.
    database.sql("INSERT INTO item SELECT 100000 + i, repeat('x', 200) FROM generate_series(1, 8000) i")
    write_history(database, range(8, 10))
    yield
    database.sql(f"ALTER DATABASE {database.name} RESET ALL")


@contextmanager
def no_free_slot(database: Database) -> Iterator[None]:
    free = "generate_series(1, current_setting('max_replication_slots')::int - (SELECT count(*)::int FROM taken)) n"
    taken = "WITH taken AS MATERIALIZED (SELECT FROM pg_replication_slots)"
    database.sql(f"{taken} SELECT pg_create_physical_replication_slot('filler_' || n) FROM {free}")
    yield
    database.sql("SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name ~ '^filler_'")


@contextmanager
def no_right(database: Database) -> Iterator[None]:
    # Rights do not bind a superuser; a function that is gone does.
    name = "pg_catalog.pg_copy_logical_replication_slot(name, name, boolean)"
    with database.connect() as connection:
        connection.execute("SET allow_system_table_mods = on")
        connection.execute(f"ALTER FUNCTION {name} RENAME TO hidden")
        yield
        connection.execute(f"ALTER FUNCTION {name.replace('pg_copy_logical_replication_slot', 'hidden')} "
                           "RENAME TO pg_copy_logical_replication_slot")  # fmt: skip


@pytest.mark.parametrize(
    ("obstacle", "reason"),
    [
        (a_tiny_temp_file_limit, "temporary file size exceeds"),
        (no_free_slot, "all replication slots are in use"),
        (no_right, "does not exist"),
    ],
)
def test_what_the_server_refuses_is_streamed_and_tried_again(
    obstacle: Callable[[Database], Iterator[None]],
    reason: str,
    backlog: tuple[str, str],
    database: Database,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events: list[Event] = []
    with drive_copy(database, tmp_path, backlog[0], events) as driver:
        with obstacle(database):
            driver.connect()
            while not count(events, "source.bulk_refused"):
                driver.step()
            driver.step()
            assert driver.source.status()["mode"] == "streaming"
            assert reason in str(driver.source.status()["bulk_refused"])
            (refused,) = [event for event in events if event.kind == "source.bulk_refused"]
            assert (refused.level, reason in refused.message) == (Level.WARNING, True)
        monkeypatch.setattr(reading.time, "monotonic", lambda now=time.monotonic: now() + reading.RETRY_SECONDS)
        write_history(database, range(20, 24))
        while count(events, "source.bulk_started") < 2:
            driver.step()
        driver.catch_up()
        assert same(driver, expected(database, tmp_path, backlog[1]))
        while count(events, "source.bulk_ended") < 2:
            driver.step()
        assert driver.source.status()["bulk_refused"] is None
        assert count(events, "source.bulk_refused") == 1


def steps_into_bulk(driver: Driver) -> None:
    """Until some of the backlog has come in bulk, and two sessions are at more of it."""
    while len(driver.rows) < 200:
        driver.step()
    assert driver.source.status()["mode"] == "bulk"
    assert len(driver.database.sql(f"SELECT 1 {BULK_SESSIONS}")) == 2


@contextmanager
def cancelling(database: Database) -> Iterator[None]:
    """Cancel what the sessions do, every few milliseconds: in vain between two calls, but not in a long one."""
    over = threading.Event()

    def cancel() -> None:
        with database.connect() as connection:
            while not over.wait(0.005):
                connection.execute(f"SELECT pg_cancel_backend(active_pid) {BULK_SESSIONS}")

    worker = threading.Thread(target=cancel)
    worker.start()
    try:
        yield
    finally:
        over.set()
        worker.join()


def test_a_cancelled_call_is_streamed_around(
    backlog: tuple[str, str], database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (call, capture):
        monkeypatch.setattr(module, "RUN_BYTES", 1 << 20)
    database.sql("INSERT INTO keyless SELECT 'x' FROM generate_series(1, 100000)")
    events: list[Event] = []
    with drive_copy(database, tmp_path, backlog[0], events) as driver:
        driver.connect()
        steps_into_bulk(driver)
        with cancelling(database):
            while not count(events, "source.bulk_refused"):
                assert not count(events, "source.bulk_ended")
                driver.step()
        driver.catch_up()
        assert same(driver, expected(database, tmp_path, backlog[1]))


@pytest.mark.parametrize("whose", ["ASC", "DESC"])
def test_a_copy_that_vanishes_is_made_anew(
    backlog: tuple[str, str], database: Database, tmp_path: Path, whose: str
) -> None:
    events: list[Event] = []
    with drive_copy(database, tmp_path, backlog[0], events) as driver:
        driver.connect()
        steps_into_bulk(driver)
        one = f"{BULK_SESSIONS} ORDER BY active_pid {whose} LIMIT 1"
        assert database.sql(f"SELECT pg_terminate_backend(active_pid, 60000) {one}") == [(True,)]
        with pytest.raises(SourceUnavailable):
            for _ in iter(driver.step, None):
                pass
        driver.connect()
        driver.catch_up()
        assert same(driver, expected(database, tmp_path, backlog[1]))
    assert count(events, "source.bulk_started") == 2


def test_a_server_that_shuts_down_is_not_held_up(backlog: tuple[str, str], database: Database, tmp_path: Path) -> None:
    with drive_copy(database, tmp_path, backlog[0], []) as driver:
        driver.connect()
        steps_into_bulk(driver)
        database.server.stop(timeout=50)
        with pytest.raises(SourceUnavailable):
            for _ in iter(driver.step, None):
                pass
        database.server.start()
        driver.connect()
        driver.catch_up()
        assert same(driver, expected(database, tmp_path, backlog[1]))


def test_the_slot_moves_by_acknowledgement_alone(backlog: tuple[str, str], database: Database, tmp_path: Path) -> None:
    confirmed = f"SELECT (confirmed_flush_lsn - '0/0')::int8 FROM pg_replication_slots WHERE slot_name = '{backlog[0]}'"
    ((start,),) = database.sql(confirmed)
    with drive_copy(database, tmp_path, backlog[0], []) as driver:
        driver.connect()
        steps_into_bulk(driver)
        assert database.sql(confirmed) == [(start,)]
        driver.source.ack(end := driver.end)
        while (moved := database.sql(confirmed)) == [(start,)]:
            driver.step()
        assert driver.source.status()["mode"] == "bulk"
        assert moved == [(end,)]
        driver.catch_up()
        assert driver.end > end
        assert same(driver, expected(database, tmp_path, backlog[1]))
