"""Several sessions read one log in bulk, stretch by stretch: nothing is missing between them, nothing comes twice."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from millstream.errors import SourceUnavailable
from millstream.model import SourceSpec
from millstream.observe import Event, Level
from millstream.sources.base import Block
from millstream.sources.postgres import bulk, slot_copy
from millstream.sources.postgres.call import Run
from millstream.sources.postgres.connection import connect_replication, connect_session
from millstream.sources.postgres.lsn import format_lsn
from millstream.sources.postgres.options import PostgresOptions
from millstream.sources.postgres.session import Session
from millstream.sources.postgres.slot_copy import SlotCopy
from millstream.sources.postgres.waiting import awaited
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
from tests.fixtures.capture import Driver, drive, source_spec
from tests.fixtures.postgres import Database

pytestmark = pytest.mark.postgres

PAGE = 8192
SESSIONS = "SELECT active_pid FROM pg_replication_slots WHERE temporary AND database = current_database()"
OF_SESSIONS = f"WHERE pid IN ({SESSIONS})"


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


def take_all_senders(taken: ExitStack, source: SourceSpec) -> None:
    """Raises what the server says to one more."""
    while True:
        taken.callback(connect_replication(source, PostgresOptions.of(source)).finish)


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


def test_where_the_server_has_no_sender_left_plain_sessions_read(database: Database, tmp_path: Path) -> None:
    slots, events, kinds = two_slots(database, tmp_path), list[Event](), set[str]()
    source = source_spec(database)
    with ExitStack() as taken, drive_copy(database, tmp_path, slots[0], events) as driver:
        driver.connect()
        with pytest.raises(SourceUnavailable, match="max_wal_senders"):
            take_all_senders(taken, source)
        while len(driver.rows) < 1500:
            driver.step()
            kinds |= {kind for (kind,) in database.sql(f"SELECT backend_type FROM pg_stat_activity {OF_SESSIONS}")}
        taken.close()
        driver.catch_up()
        assert facts(driver) == expected(database, tmp_path, slots[1])
    assert "client backend" in kinds
    assert (count(events, "source.bulk_alone"), count(events, "source.bulk_refused")) == (0, 0)


def test_a_copy_is_skipped_over_what_another_has_and_not_over_much(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    skipped: list[str] = []
    monkeypatch.setattr(slot_copy, "failpoint", skipped.append)
    slots = two_slots(database, tmp_path)
    with drive_copy(database, tmp_path, slots[0], []) as driver:
        watched(driver)
        found = facts(driver)
    assert skipped.count("bulk.copy_skipped") > 2
    skipped.clear()
    monkeypatch.setattr(slot_copy, "SKIPPED_BYTES", -1)
    with drive_copy(database, tmp_path, slots[1], []) as driver:
        watched(driver)
        assert facts(driver) == found
    assert "bulk.copy_skipped" not in skipped


@pytest.mark.parametrize("sessions", [1, 2])
def test_what_no_other_call_waits_for_is_worked_on_as_it_comes(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sessions: int
) -> None:
    """Rows are held back only as long as their session has to be sent to its next call."""
    held: list[int] = []
    fed = bulk.BulkReader._feed_held

    def noted(reader: bulk.BulkReader, runs: deque[Run], stretch: int) -> Iterator[Block]:
        held.append(len(runs))
        return fed(reader, runs, stretch)

    monkeypatch.setattr(bulk, "HELD_BYTES", 1 << 30)
    monkeypatch.setattr(bulk.BulkReader, "_feed_held", noted)
    slots = two_slots(database, tmp_path)
    with drive_copy(database, tmp_path, slots[0], [], catch_up_sessions=sessions) as driver:
        watched(driver)
        assert facts(driver) == expected(database, tmp_path, slots[1])
    with_rows = [runs for runs in held if runs]
    assert max(with_rows) > 5
    assert with_rows[-1] == 1


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


@pytest.mark.parametrize("skipped", [False, True])
def test_where_one_call_ends_and_the_next_begins_nothing_is_missing_and_nothing_comes_twice(
    any_database: Database, tmp_path: Path, skipped: bool
) -> None:
    """What reading side by side rests on, tried on the server: at every page of a log, in its middle.

    The second copy is moved by reading the log up to there, or by telling the server.
    """
    database = any_database
    database.sql(TABLES)
    with drive(database, tmp_path / "own"):
        copy_slot(database, f"{database.name}_a")
    plugin = {"proto_version": "1", "publication_names": database.name, "messages": "true"}
    options = ", ".join(f"'{name}', '{value}'" for name, value in plugin.items())
    source = source_spec(database)
    where = "SELECT (pg_current_wal_flush_lsn() - '0/0')::int8"
    ((begin,),) = database.sql(where)
    write_history(database, range(1, 5))
    for n in range(300):
        database.sql(f"INSERT INTO item VALUES ({-1000 - n})")
    ((end,),) = database.sql(where)

    def read(upto: int | None, after: int | None = None) -> list[tuple[Any, ...]]:
        """Begin, Commit and rows of what a fresh copy gives between two positions."""
        connect = connect_replication if skipped else connect_session
        with closing(Session(connect(source, PostgresOptions.of(source)))) as session:
            copy = SlotCopy(session, f"{database.name}_a", plugin)
            awaited(copy.create(f"{database.name}_a"))
            if after is not None:
                awaited(copy.skip(after) if skipped else copy.advance(after))
                assert copy.place.position == after
            limit = "NULL" if upto is None else f"'{format_lsn(upto)}'"
            given = f"pg_logical_slot_get_binary_changes('{copy.name}', {limit}, NULL, {options})"
            rows = awaited(session.run(f"SELECT lsn::text, encode(substr(data, 1, 1), 'escape'), data FROM {given}"))
        return [row for row in rows if row[1] not in ("R", "Y")]

    whole = read(None)
    assert len(whole) > 1000
    cuts = {bulk._between_records(position) for position in range(begin + PAGE, end - PAGE, PAGE)}
    assert len(cuts) > 20
    for cut in sorted(cuts):
        assert read(cut) + read(None, cut) == whole, format_lsn(cut)
