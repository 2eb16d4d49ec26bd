"""Replay to a Postgres, from a real source: long values that are not sent, keys that change, truncates."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from millstream import BatchLimits, Engine, Mode, StreamSpec, TargetSpec
from millstream.embedded import EmbeddedPostgres
from tests.fixtures.capture import source_spec
from tests.fixtures.engines import await_that
from tests.fixtures.postgres import Database, fresh_database

pytestmark = pytest.mark.postgres

FEW = BatchLimits(max_ms=0, max_bytes=1 << 30, max_events=4)
ROWS = "SELECT id, flag, md5(note) FROM orders ORDER BY id"
COLUMNS = "SELECT attname::text FROM pg_attribute WHERE attrelid = 'orders'::regclass AND attnum > 0 ORDER BY attnum"
TOUCHED = "SELECT id, xmin::text, ctid::text FROM orders ORDER BY id"


@pytest.fixture
def other(postgres: EmbeddedPostgres) -> Iterator[Database]:
    """The database with the mirror."""
    with fresh_database(postgres) as made:
        yield made


def write(database: Database) -> None:
    database.sql("INSERT INTO orders VALUES (100, true, 'truncated')")
    database.sql("TRUNCATE orders")
    database.sql("INSERT INTO orders SELECT i, false, repeat(md5(i::text), 300) FROM generate_series(1, 8) i")
    database.sql("UPDATE orders SET flag = true WHERE id <= 4")
    database.sql("UPDATE orders SET id = id + 10 WHERE id IN (3, 4, 5)")
    database.sql("INSERT INTO orders VALUES (3, false, 'another')")
    database.sql("DELETE FROM orders WHERE id IN (1, 13)")
    database.sql("UPDATE orders SET flag = NOT flag WHERE id IN (6, 14)")


CHANGES = 1 + 1 + 8 + 4 + 3 + 1 + 2 + 2
"""So many changes that makes."""


def begin(engine: Engine, database: Database, other: Database, **options: str) -> None:
    """Let the stream run, over an empty table."""
    database.sql("CREATE TABLE orders (id int PRIMARY KEY, flag bool, note text)")
    database.sql("ALTER TABLE orders ALTER note SET STORAGE EXTERNAL")
    target = TargetSpec("copy", "postgres", FEW, options={"uri": other.uri, **options})
    engine.upsert_stream(
        StreamSpec("shop", source_spec(database), Mode.CDC, (target,), checkpoint_interval_ms=100),
    )
    engine.await_ready("shop", 120)


def finished(engine: Engine) -> bool:
    record = engine.get_status("shop").targets[0].replay
    assert record is None or record["error"] is None, record
    return record is not None and record["state"] == "done"


def test_a_changelog_gets_the_changes_once_more_beside_the_first_ones(
    engine: Engine, database: Database, other: Database
) -> None:
    with engine:
        begin(engine, database, other, write="changelog")
        write(database)
        await_that(lambda: engine.get_status("shop").events_replicated == CHANGES)
        columns = ", ".join(name for (name,) in other.sql(COLUMNS) if name != "_ms_epoch")
        first = other.sql(f"SELECT {columns} FROM orders ORDER BY _ms_seq")
        assert len(first) == CHANGES
        seq = other.sql("SELECT _ms_seq FROM orders ORDER BY _ms_seq OFFSET 10 LIMIT 1")[0][0]
        engine.replay("shop", 1)
        await_that(lambda: finished(engine))
        engine.replay("shop", seq)
        await_that(lambda: finished(engine))
        assert other.sql(f"SELECT {columns} FROM orders WHERE _ms_epoch IS NULL ORDER BY _ms_seq") == first
        ((again,), (later,)) = other.sql("SELECT DISTINCT _ms_epoch FROM orders WHERE _ms_epoch > 0 ORDER BY 1")
        assert other.sql(f"SELECT {columns} FROM orders WHERE _ms_epoch = {again} ORDER BY _ms_seq") == first
        # Transactions come whole: the change stands in one that began before it.
        rest = other.sql(f"SELECT {columns} FROM orders WHERE _ms_epoch = {later} ORDER BY _ms_seq")
        assert rest == first[-len(rest) :]
        assert CHANGES - 10 <= len(rest) < CHANGES


def test_an_intact_mirror_is_not_touched_and_lost_rows_come_back(
    engine: Engine, database: Database, other: Database
) -> None:
    with engine:
        begin(engine, database, other)
        write(database)
        expected = database.sql(ROWS)
        database.await_true("SELECT true")
        await_that(lambda: engine.get_status("shop").events_replicated > 0 and other.sql(ROWS) == expected)
        before = other.sql(TOUCHED)
        engine.replay("shop", 1)
        await_that(lambda: finished(engine))
        assert other.sql(TOUCHED) == before
        assert other.sql("SELECT count(*) FROM _millstream.tombstones") == [(0,)]
        other.sql("DELETE FROM orders WHERE id IN (2, 3, 8, 14)")
        other.sql("INSERT INTO orders (id, flag, note, _ms_seq) VALUES (1, true, 'should be gone', 3)")
        engine.replay("shop", 1)
        await_that(lambda: finished(engine) and other.sql(ROWS) == expected)
