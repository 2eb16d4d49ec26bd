"""After a catch-up the log is read in bulk until the slot has followed, or until that has taken too long."""

from __future__ import annotations

from pathlib import Path

import pytest
from psycopg.pq import PGconn

from millstream.observe import Event
from millstream.sources.postgres import reading, slot_mover
from millstream.sources.postgres.session import Session
from millstream.sources.postgres.slot_copy import SlotCopy, Stretch
from tests.fixtures.bulk import TABLES, copy_slot, count, drive_copy, plain, small_steps, write_history
from tests.fixtures.capture import Driver, drive
from tests.fixtures.postgres import Database

pytestmark = pytest.mark.postgres


def prepared(database: Database, work: Path, monkeypatch: pytest.MonkeyPatch, *, seconds: float) -> tuple[str, str]:
    """Two slots that hold the same history: much more than a stream would read again without a thought."""
    small_steps(monkeypatch)
    monkeypatch.setattr(reading, "LINGER_BYTES", 60_000)
    monkeypatch.setattr(reading, "LINGER_SECONDS", seconds)
    database.sql(TABLES)
    with drive(database, work / "own"):
        slots = f"{database.name}_stream", f"{database.name}_bulk"
        copy_slot(database, *slots)
    write_history(database, range(1, 6))
    return slots


def let_the_slot_follow(driver: Driver, events: list[Event]) -> None:
    """Acknowledge until bulk reading ends.

    A slot moves to where the server has noted which transactions were running. That is what a checkpoint does; but the
    server does so every few seconds, too, and each move goes to the first such place only.
    """
    while not count(events, "source.bulk_ended"):
        driver.database.sql("CHECKPOINT")
        driver.catch_up()
        driver.source.ack(driver.end)
        driver.step()


def test_new_rows_come_in_bulk_until_the_slot_has_followed(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, in_bulk = prepared(database, tmp_path, monkeypatch, seconds=600)
    events: list[Event] = []
    with drive_copy(database, tmp_path, in_bulk, events) as driver:
        driver.catch_up()
        write_history(database, range(6, 8))
        driver.catch_up()
        assert count(events, "source.bulk_ended") == 0, "the slot holds everything back"
        let_the_slot_follow(driver, events)
        write_history(database, range(8, 9))
        driver.catch_up()
    with drive_copy(database, tmp_path, stream, [], catch_up="streaming") as other:
        other.catch_up()
        assert [plain(row) for row in driver.rows] == [plain(row) for row in other.rows]


def test_the_slot_follows_sooner_when_capture_is_close(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, in_bulk = prepared(database, tmp_path, monkeypatch, seconds=600)
    monkeypatch.setattr(slot_mover, "MOVE_SECONDS", 3600.0)
    monkeypatch.setattr(slot_mover, "NEAR_SECONDS", 0.0)
    where = f"SELECT (restart_lsn - '0/0')::int8 FROM pg_replication_slots WHERE slot_name = '{in_bulk}'"
    ((before,),) = database.sql(where)
    events: list[Event] = []
    with drive_copy(database, tmp_path, in_bulk, events) as driver:
        driver.catch_up()
        let_the_slot_follow(driver, events)
    ((after,),) = database.sql(where)
    assert after > before


def test_a_source_to_which_nothing_happens_is_not_read(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, in_bulk = prepared(database, tmp_path, monkeypatch, seconds=600)
    sent: list[Stretch] = []
    send = SlotCopy.send

    def counted(copy: SlotCopy, stretch: Stretch, messages: int) -> None:
        sent.append(stretch)
        send(copy, stretch, messages)

    monkeypatch.setattr(SlotCopy, "send", counted)
    with drive_copy(database, tmp_path, in_bulk, []) as driver:
        driver.catch_up()
        for _ in range(20):
            driver.step()  # the message that `catch_up` writes may come behind what it waits for
        quiet = len(sent)
        for _ in range(20):
            driver.step()
        assert len(sent) - quiet <= 1, "one should the server write into its log by itself"
        write_history(database, range(6, 7))
        driver.catch_up()
        assert len(sent) > quiet
    with drive_copy(database, tmp_path, stream, [], catch_up="streaming") as other:
        other.catch_up()
        assert [plain(row) for row in driver.rows] == [plain(row) for row in other.rows]


def test_the_slot_is_moved_a_while_after_capture_came_close(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database.sql(TABLES)
    with drive(database, tmp_path / "own"):
        copy_slot(database, f"{database.name}_copy")
    write_history(database, range(1, 3))
    ((end,),) = database.sql("SELECT (pg_current_wal_flush_lsn() - '0/0')::int8")
    now = 100.0
    monkeypatch.setattr(slot_mover.time, "monotonic", lambda: now)
    opened: list[Session] = []

    def connect() -> Session:
        opened.append(Session(PGconn.connect(database.uri.encode())))
        return opened[-1]

    mover = slot_mover.SlotMover(connect, f"{database.name}_copy", 0)
    near_after = slot_mover.NEAR_SECONDS
    now += near_after
    mover.turn(end, near=False)
    mover.turn(end, near=True)
    now += near_after - 0.1
    mover.turn(end, near=True)
    assert not opened, "what was read last is still on its way"
    now += 0.1
    mover.turn(end, near=True)
    assert len(opened) == 1
    for _ in mover.settle():
        pass


def test_it_does_not_wait_for_ever(database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream, in_bulk = prepared(database, tmp_path, monkeypatch, seconds=0.5)
    events: list[Event] = []
    with drive_copy(database, tmp_path, in_bulk, events) as driver:
        driver.catch_up()
        while not count(events, "source.bulk_ended"):
            driver.step()
        write_history(database, range(6, 7))
        driver.catch_up()
    with drive_copy(database, tmp_path, stream, [], catch_up="streaming") as other:
        other.catch_up()
        assert [plain(row) for row in driver.rows] == [plain(row) for row in other.rows]
