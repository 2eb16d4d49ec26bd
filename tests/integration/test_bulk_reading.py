"""Bulk reading gives what a stream gives, row by row, whatever the log holds and wherever they change over."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from millstream.observe import Event
from millstream.sources.postgres import bulk, call, reading
from tests.fixtures.bulk import (
    TABLES,
    copy_slot,
    count,
    drive_copy,
    facts,
    plain,
    small_steps,
    write_history,
    write_long_history,
)
from tests.fixtures.capture import SECONDS, Driver, drive
from tests.fixtures.postgres import Database

pytestmark = pytest.mark.postgres


def streamed(database: Database, work: Path, slot: str) -> Driver:
    with drive_copy(database, work, slot, [], catch_up="streaming") as driver:
        driver.catch_up()
        return driver


def change_over_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave bulk reading after every second call; it begins again as soon as the stream has moved."""
    asked = iter(range(10_000))
    monkeypatch.setattr(reading.Reading, "_is_close", lambda _, behind: behind <= 20_000 or next(asked) % 2 == 1)


def test_bulk_and_stream_give_the_same_rows(
    any_database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = any_database
    small_steps(monkeypatch)
    database.sql(TABLES)
    with drive(database, tmp_path / "own"):
        stream, in_bulk, libpq, mixed = (f"{database.name}_{way}" for way in ("stream", "bulk", "libpq", "mixed"))
        copy_slot(database, stream, in_bulk, libpq, mixed)
    write_long_history(database)
    expected = facts(streamed(database, tmp_path, stream))
    assert len(expected) > 1500

    events: list[Event] = []
    with drive_copy(database, tmp_path, in_bulk, events) as driver:
        driver.catch_up()
        assert facts(driver) == expected
        while not count(events, "source.bulk_ended"):
            assert driver.step().rows is None
    assert count(events, "source.bulk_started") == 1

    with monkeypatch.context() as encrypted, drive_copy(database, tmp_path, libpq, []) as driver:
        encrypted.setattr(call, "is_open_to_read", lambda _: False)
        driver.catch_up()
        assert facts(driver) == expected

    change_over_often(monkeypatch)
    events.clear()
    with drive_copy(database, tmp_path, mixed, events) as driver:
        driver.catch_up()
        assert facts(driver) == expected
    assert count(events, "source.bulk_started") > 3
    assert count(events, "source.bulk_refused") == 0


def test_each_stretch_tells_how_much_of_the_log_is_left(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_steps(monkeypatch)
    database.sql(TABLES)
    with drive(database, tmp_path / "own"):
        in_bulk = f"{database.name}_bulk"
        copy_slot(database, in_bulk)
    write_history(database, range(1, 6))
    events: list[Event] = []
    with drive_copy(database, tmp_path, in_bulk, events) as driver:
        driver.catch_up()
        while not count(events, "source.bulk_ended"):
            driver.step()
    left = [block.left for block in driver.blocks if block.rows is not None]
    assert len(set(left)) > 3
    assert left == sorted(left, reverse=True)
    assert left[-1] == 0


def test_something_is_left_until_the_last_rows_of_a_stretch_are_handed_over(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_steps(monkeypatch)
    for name in ("FIRST_BYTES", "LONGEST_BYTES", "HELD_BYTES"):
        monkeypatch.setattr(bulk, name, 1 << 30)
    database.sql(TABLES)
    with drive(database, tmp_path / "own"):
        in_bulk = f"{database.name}_bulk"
        copy_slot(database, in_bulk)
    for n in range(40):
        database.sql(f"INSERT INTO item SELECT {n} * 10 + i, repeat('n', 100) FROM generate_series(1, 10) i")
    with drive_copy(database, tmp_path, in_bulk, []) as driver:
        driver.catch_up()
    left = [block.left for block in driver.blocks if block.rows is not None]
    assert len(left) > 10
    assert left == sorted(left, reverse=True)
    assert left[-1] == 0
    assert left.count(0) <= 2, "only what the last run has completed: what began before it, and what came with it"


def test_changing_over_in_the_middle_of_a_load(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_steps(monkeypatch)
    change_over_often(monkeypatch)
    database.sql(TABLES)
    with drive(database, tmp_path / "own"):
        stream, live = (f"{database.name}_{way}" for way in ("stream", "live"))
        copy_slot(database, stream, live)
    closing = threading.Event()
    written = threading.Event()

    def load() -> None:
        n = 0
        with database.connect(autocommit=False) as open_writer:
            while not closing.is_set():
                n += 1
                open_writer.execute("INSERT INTO item VALUES (%s)", (-1_000_000 - n,))
                write_history(database, range(n, n + 1))
                if n % 5 == 0:
                    open_writer.commit()
                    written.set()

    worker = threading.Thread(target=load)
    worker.start()
    events: list[Event] = []
    try:
        assert written.wait(SECONDS)
        with drive_copy(database, tmp_path, live, events) as driver:
            driver.connect()
            while count(events, "source.bulk_ended") < 3:
                driver.source.ack(driver.end)
                driver.step()
            closing.set()
            worker.join()
            driver.catch_up()
            found = driver.rows
    finally:
        closing.set()
        worker.join()
    expected = streamed(database, tmp_path, stream).rows
    # What the catalog adds to a relation depends on when it is asked, which was during the load.
    assert [plain(row) for row in found] == [plain(row) for row in expected]
