"""Several sessions read one log in bulk, stretch by stretch: nothing is missing between them, nothing comes twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from millstream.observe import Event, Level
from millstream.sources.postgres import bulk
from millstream.sources.postgres.lsn import format_lsn
from tests.fixtures.bulk import (
    TABLES,
    copy_slot,
    count,
    drive_copy,
    facts,
    small_steps,
    write_history,
    write_long_history,
)
from tests.fixtures.capture import Driver, drive
from tests.fixtures.postgres import Database

pytestmark = pytest.mark.postgres

PAGE = 8192
SESSIONS = "SELECT active_pid FROM pg_replication_slots WHERE temporary AND database = current_database()"


@pytest.fixture(autouse=True)
def steps(monkeypatch: pytest.MonkeyPatch) -> None:
    small_steps(monkeypatch)


def two_slots(database: Database, work: Path) -> tuple[str, str]:
    """A history with a transaction that is open for much of it, in two slots."""
    database.sql(TABLES)
    with drive(database, work / "own"):
        names = f"{database.name}_a", f"{database.name}_b"
        copy_slot(database, *names)
    write_long_history(database)
    return names


def expected(database: Database, work: Path, slot: str) -> list[tuple[Any, ...]]:
    with drive_copy(database, work, slot, [], catch_up="streaming") as driver:
        driver.catch_up()
        return facts(driver)


def watched(driver: Driver) -> list[set[int]]:
    """Read the backlog; which sessions there were after each step."""
    seen: list[set[int]] = []
    driver.connect()
    while driver.step().rows is None:
        pass
    while driver.source.status()["mode"] == "bulk" and len(driver.rows) < 1500:
        driver.step()
        seen.append({int(pid) for (pid,) in driver.database.sql(SESSIONS)})
    driver.catch_up()
    return seen


@pytest.mark.parametrize("sessions", [1, 2, 4])
def test_however_many_read_the_rows_are_those_of_a_stream(
    any_database: Database, tmp_path: Path, sessions: int
) -> None:
    slots = two_slots(any_database, tmp_path)
    events: list[Event] = []
    with drive_copy(any_database, tmp_path, slots[0], events, catch_up_sessions=sessions) as driver:
        seen = watched(driver)
        assert facts(driver) == expected(any_database, tmp_path, slots[1])
    assert max(map(len, seen)) == sessions
    assert (count(events, "source.bulk_started"), count(events, "source.bulk_alone")) == (1, 0)


def test_a_call_that_gave_less_than_its_stretch_makes_those_behind_it_useless(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk, "RESULT_BYTES", 4_000)
    slots = two_slots(database, tmp_path)
    with drive_copy(database, tmp_path, slots[0], []) as driver:
        seen = watched(driver)
        assert facts(driver) == expected(database, tmp_path, slots[1])
    assert max(map(len, seen)) == 2
    assert len(set().union(*seen)) > 5, "sessions were ended, and others opened"


def test_one_reads_alone_where_the_server_has_no_slot_for_another(database: Database, tmp_path: Path) -> None:
    slots = two_slots(database, tmp_path)
    taken = "WITH taken AS MATERIALIZED (SELECT FROM pg_replication_slots)"
    all_but_one = (
        "generate_series(2, current_setting('max_replication_slots')::int - (SELECT count(*)::int FROM taken))"
    )
    database.sql(f"{taken} SELECT pg_create_physical_replication_slot('filler_' || n) FROM {all_but_one} n")
    events: list[Event] = []
    try:
        with drive_copy(database, tmp_path, slots[0], events) as driver:
            seen = watched(driver)
            found = facts(driver)
    finally:
        database.sql("SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name ~ '^filler'")
    assert max(map(len, seen)) == 1
    (alone,) = [event for event in events if event.kind == "source.bulk_alone"]
    assert (alone.level, "all replication slots are in use" in alone.message) == (Level.WARNING, True)
    assert count(events, "source.bulk_refused") == 0
    assert found == expected(database, tmp_path, slots[1])


def test_where_one_call_ends_and_the_next_begins_nothing_is_missing_and_nothing_comes_twice(
    any_database: Database, tmp_path: Path
) -> None:
    """What reading side by side rests on, tried on the server: at every page of a log, in its middle."""
    database = any_database
    database.sql(TABLES)
    with drive(database, tmp_path / "own"):
        copy_slot(database, f"{database.name}_a")
    options = f"'proto_version', '1', 'publication_names', '{database.name}', 'messages', 'true'"
    where = "SELECT (pg_current_wal_flush_lsn() - '0/0')::int8"
    ((begin,),) = database.sql(where)
    write_history(database, range(1, 5))
    for n in range(300):
        database.sql(f"INSERT INTO item VALUES ({-1000 - n})")
    ((end,),) = database.sql(where)

    def read(upto: int | None, after: int | None = None) -> list[tuple[Any, ...]]:
        """Begin, Commit and rows of what a fresh copy gives between two positions."""
        with database.connect() as connection:
            # A copy is gone with its session, but that may end a moment after we have left it.
            copy = f"{database.name}_{connection.info.backend_pid}"
            connection.execute(f"SELECT pg_copy_logical_replication_slot('{database.name}_a', '{copy}', true)")
            if after is not None:
                connection.execute(f"SELECT pg_replication_slot_advance('{copy}', '{format_lsn(after)}')")
            limit = "NULL" if upto is None else f"'{format_lsn(upto)}'"
            rows = connection.execute(
                f"SELECT lsn::text, data FROM pg_logical_slot_get_binary_changes('{copy}', {limit}, NULL, {options})"
            ).fetchall()
        return [row for row in rows if row[1][:1] not in b"RY"]

    whole = read(None)
    assert len(whole) > 1000
    cuts = {bulk._between_records(position) for position in range(begin + PAGE, end, PAGE)}
    assert len(cuts) > 20
    for cut in sorted(cuts):
        assert read(cut) + read(None, cut) == whole, format_lsn(cut)
