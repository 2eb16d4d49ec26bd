"""A stream that begins with full tables, on real Spark, while others write."""

from __future__ import annotations

import os
import sqlite3
import struct
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psycopg
import pyarrow.compute as pc
import pytest
from pyspark.sql import SparkSession

from millstream import Home, Observers, load_streams, run
from millstream.errors import SourceUnavailable
from millstream.observe import Event
from millstream.sources import read_chunk, take_snapshot
from millstream.sources.base import Snapshot, SnapshotPlan
from millstream.sources.postgres import chunks, early, snapshot
from millstream.sources.postgres.catalog import relations
from millstream.targets.directory import directory_of
from tests.fixtures.baselines import NAMES, TABLES, bare, change, differing, rows_read, write
from tests.fixtures.capture import Driver, drive, source_spec
from tests.fixtures.postgres import Database

pytestmark = pytest.mark.postgres

STREAM = """
name: shop
source: {{kind: postgres, uri: "{uri}", tables: ["public.*"]}}
mode: snapshot_then_cdc
targets:
  - {{name: log, kind: files, path: log, format: parquet}}
  - {{name: copy, kind: sqlite, path: copy.db}}
"""

WRITERS = 3


class Heard:
    """Every event, in order."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def on_event(self, event: Event) -> None:
        self.events.append(event)

    def of(self, kind: str) -> list[Event]:
        return [event for event in self.events if event.kind == kind]


@contextmanager
def writing(database: Database, *, pause: float = 0.0) -> Iterator[None]:
    """Writers of small transactions, some of them rolled back, until the end, with a pause after each."""
    over = threading.Event()
    failed: list[Exception] = []

    def write_on(number: int) -> None:
        try:
            with database.connect() as connection:
                base = 100_000 * number
                while not over.wait(pause):
                    base += 1
                    with connection.transaction(force_rollback=base % 5 == 0):
                        connection.execute("INSERT INTO item (id, note) VALUES (%s, 'w')", [base])
                        connection.execute("INSERT INTO item (id, note) VALUES (%s, 'w')", [-base])
                    connection.execute("UPDATE item SET flag = true WHERE id = %s", [-base])
                    connection.execute("DELETE FROM item WHERE id = %s", [base - 3])
        except psycopg.Error as error:
            failed.append(error)

    threads = [threading.Thread(target=write_on, args=(number,)) for number in range(1, 1 + WRITERS)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert failed == []


@pytest.mark.spark
def test_full_tables_and_then_every_change(
    tmp_path: Path, database: Database, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 256 << 10)
    database.sql(TABLES)
    database.sql("ALTER TABLE keyless ADD id serial PRIMARY KEY")
    write(database, 1, 3000)
    (tmp_path / "shop.yaml").write_text(STREAM.format(uri=database.uri))
    home, heard = Home(tmp_path / "home"), Heard()
    streams = load_streams([tmp_path / "shop.yaml"])

    def deliver() -> None:
        assert run(streams, home=home, once=True, master=None, observers=Observers([heard])) == 0

    with writing(database, pause=0.05):
        deliver()
        change(database, 1, 1500)
    deliver()
    assert len(heard.of("snapshot.finished")) == 2, "once for each target"
    assert all(event.fields["chunks"] > 5 for event in heard.of("snapshot.started"))

    with database.connect() as connection:
        found = {relation.name: relation for relation in relations(connection, ["public.*"])}
    directories = {name: directory_of(found[name]) for name in NAMES}
    assert differing(database, tmp_path / "log", found, directories) == []
    rows = rows_read(tmp_path / "log", list(directories.values()))
    assert pc.count_distinct(rows["_ms_event_id"]).as_py() == rows.num_rows
    with closing(sqlite3.connect(tmp_path / "copy.db")) as copy:
        held = copy.execute('SELECT id, note, flag FROM "public.item" ORDER BY id').fetchall()
    expected = database.sql("SELECT id, note, flag::int FROM item ORDER BY id")
    assert held == expected


def id_of(payload: bytes) -> int:
    """The first column of a message's first tuple, sent as text."""
    (length,) = struct.unpack_from(">I", payload, 9)
    return int(payload[13 : 13 + length])


def alive_at(driver: Driver, position: int) -> set[int]:
    """The ids that the log leaves in `item`, up to a position."""
    alive: set[int] = set()
    for row in driver.rows:
        if row["resume_position"] > position or row["relation"] == 0 or driver.table(row) != "public.item":
            continue
        if chr(row["op"]) == "c":
            alive.add(id_of(row["payload"]))
        elif chr(row["op"]) == "d":
            alive.discard(id_of(row["payload"]))
    return alive


def ids_in(database: Database, plan: SnapshotPlan) -> list[int]:
    """The ids that the chunks of `item` have: its first column, sent in binary form."""
    return [
        struct.unpack_from(">i", bare(row), 6)[0]
        for chunk in plan.chunks
        if chunk.relation.name == "item"
        for rows in read_chunk(source_spec(database), plan, chunk)
        for row in rows.to_pylist()
    ]


def test_a_snapshot_has_what_lies_before_its_position_and_nothing_else(database: Database, tmp_path: Path) -> None:
    database.sql(TABLES)
    rounds = int(os.environ.get("MILLSTREAM_SNAPSHOT_ROUNDS", "5"))
    with drive(database, tmp_path) as driver:
        for _ in range(rounds):
            with writing(database):
                database.await_true("SELECT count(*) > 50 FROM item")
                with closing(take_snapshot(source_spec(database), lambda _: None)) as taken:
                    seen = ids_in(database, taken.plan)
            driver.catch_up()
            assert len(seen) == len(set(seen)) > 0
            assert set(seen) == alive_at(driver, taken.plan.position)
            database.sql("DELETE FROM item")


def test_a_table_that_is_emptied_all_the_time_is_copied_as_it_was(database: Database, tmp_path: Path) -> None:
    """Small tables are read with the snapshot, so that what comes after it does not matter."""
    database.sql("CREATE TABLE hot (generation int, n int)")
    over, failed = threading.Event(), list[Exception]()

    def rewrite() -> None:
        try:
            with database.connect() as connection:
                generation = 0
                while not over.wait(0.1):
                    generation += 1
                    with connection.transaction():
                        connection.execute("TRUNCATE hot")
                        connection.execute("INSERT INTO hot SELECT %s, generate_series(1, 10)", [generation])
        except psycopg.Error as error:
            failed.append(error)

    def newest() -> int:
        return int(database.sql("SELECT coalesce(max(generation), 0) FROM hot")[0][0])

    writer = threading.Thread(target=rewrite)
    with drive(database, tmp_path):
        writer.start()
        try:
            database.await_true("SELECT count(*) = 10 FROM hot")
            with closing(taken_soon(database)) as taken:
                before = newest()
                database.await_true(f"SELECT max(generation) > {before} FROM hot")
                (chunk,) = taken.plan.chunks
                read = read_chunk(source_spec(database), taken.plan, chunk)
                rows = [bare(row) for part in read for row in part.to_pylist()]
        finally:
            over.set()
            writer.join()
    assert failed == []
    found = [(struct.unpack_from(">i", row, 6)[0], struct.unpack_from(">i", row, 14)[0]) for row in rows]
    assert len({generation for generation, _ in found}) == 1
    assert [n for _, n in found] == list(range(1, 11))
    assert found[0][0] <= before
    database.await_true("SELECT count(*) = 0 FROM pg_locks WHERE relation = 'hot'::regclass")


def taken_soon(database: Database) -> Snapshot:
    """A snapshot; again when a table was rewritten in the very moment of it."""
    for _ in range(30):
        with suppress(SourceUnavailable):
            return take_snapshot(source_spec(database), lambda _: None)
    raise AssertionError("rewritten at each of thirty tries")


def test_small_tables_are_read_with_the_snapshot_and_large_ones_are_not(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database.sql("CREATE TABLE small (id int); CREATE TABLE large (id int, note text); CREATE TABLE long (note text)")
    database.sql(
        "INSERT INTO small VALUES (1); INSERT INTO long SELECT repeat('x', 1000000) FROM generate_series(1, 5)"
    )
    database.sql("INSERT INTO large SELECT i, repeat('x', 1000) FROM generate_series(1, 100) i")
    monkeypatch.setattr(early, "TABLE_BYTES", 90 << 10)
    monkeypatch.setattr(early, "TOTAL_BYTES", 1 << 20)
    spec = source_spec(database)
    with drive(database, tmp_path), closing(take_snapshot(spec, lambda _: None)) as taken:
        found = {chunk.relation.name: chunk for chunk in taken.plan.chunks}
        assert {name: chunk.rows is not None for name, chunk in found.items()} == {
            "small": True,
            "large": False,
            "long": False,
        }
        read = {name: sum(map(len, read_chunk(spec, taken.plan, chunk))) for name, chunk in found.items()}
    assert read == {"small": 1, "large": 100, "long": 5}


def test_a_table_that_is_rewritten_while_it_is_read_starts_again(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(early, "TABLE_BYTES", -1)
    database.sql(TABLES)
    write(database, 1, 100)
    with (
        drive(database, tmp_path),
        closing(take_snapshot(source_spec(database), lambda _: None)) as taken,
    ):
        database.sql("ALTER TABLE item ALTER flag TYPE int USING flag::int")
        with pytest.raises(SourceUnavailable, match=r"public\.item was rewritten or replaced"):
            ids_in(database, taken.plan)


def test_who_is_waited_for_is_said_and_the_wait_has_an_end(database: Database, tmp_path: Path) -> None:
    database.sql(TABLES)
    said: list[str] = []
    with drive(database, tmp_path), database.connect(autocommit=False) as open_writer:
        open_writer.execute("INSERT INTO nothing VALUES (1)")
        pid = open_writer.info.backend_pid
        spec = source_spec(database, options={"snapshot_wait": 2500})
        with pytest.raises(SourceUnavailable, match=rf"waited \d+ s for open transactions: process {pid} \("):
            take_snapshot(spec, said.append)
    assert any(f"process {pid}" in message for message in said)
    database.await_true("SELECT count(*) = 0 FROM pg_replication_slots WHERE temporary")


def taken_while(database: Database, monkeypatch: pytest.MonkeyPatch, statements: str) -> SnapshotPlan:
    """The plan of a snapshot; the statements are run when it is exported and nothing was looked at yet."""

    def barrier(*_: object) -> None:
        database.sql(statements)

    monkeypatch.setattr(early, "TABLE_BYTES", -1)
    monkeypatch.setattr(snapshot, "_await_barrier", barrier)
    with closing(take_snapshot(source_spec(database), lambda _: None)) as taken:
        ids_in(database, taken.plan)
        return taken.plan


def test_a_table_that_is_rewritten_before_it_is_planned_starts_again(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database.sql(TABLES)
    write(database, 1, 100)
    with (
        drive(database, tmp_path),
        pytest.raises(SourceUnavailable, match=r"public\.item was rewritten or replaced"),
    ):
        taken_while(database, monkeypatch, "ALTER TABLE item ALTER flag TYPE int USING flag::int")


def test_a_table_that_joins_the_publication_after_the_snapshot_waits_for_the_next(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was written to it in between is neither in the snapshot nor in the log."""
    database.sql(TABLES)
    late = f"CREATE TABLE late (id int PRIMARY KEY); INSERT INTO late VALUES (1); ALTER PUBLICATION {database.name} ADD"
    with drive(database, tmp_path):
        with pytest.raises(SourceUnavailable, match="1 table not in the publication yet"):
            taken_while(database, monkeypatch, f"{late} TABLE late")
        plan = taken_while(database, monkeypatch, "SELECT 1")
    assert "late" in {chunk.relation.name for chunk in plan.chunks}


def test_a_barrier_that_does_not_open_says_so_once_in_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(1000))
    monkeypatch.setattr(snapshot, "_running_now", lambda _: [4])
    monkeypatch.setattr(snapshot, "BARRIER_SECONDS", 50)
    monkeypatch.setattr(snapshot, "TELL_SECONDS", 20)
    monkeypatch.setattr(snapshot, "time", SimpleNamespace(monotonic=lambda: next(clock), sleep=lambda _: None))
    said: list[str] = []
    nobody: Any = None
    with pytest.raises(SourceUnavailable, match="committed but did not end"):
        snapshot._await_barrier(nobody, (5, frozenset()), said.append)
    assert said == ["the snapshot waits for 1 transaction to become visible"] * 2
