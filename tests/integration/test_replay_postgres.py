"""Replay to a mirror in Postgres, from a real source: long values that are not sent, keys that change, truncates."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from millstream import BatchLimits, Engine, Mode, StreamSpec, TargetSpec
from millstream.embedded import EmbeddedPostgres
from tests.fixtures.capture import source_spec
from tests.fixtures.engines import await_that
from tests.fixtures.postgres import Database, fresh_database

pytestmark = pytest.mark.postgres

FEW = BatchLimits(max_ms=0, max_bytes=1 << 30, max_events=4)
ROWS = "SELECT id, flag, md5(note) FROM orders ORDER BY id"
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


def test_an_intact_mirror_is_not_touched_and_lost_rows_come_back(
    engine: Engine, database: Database, other: Database, tmp_path: Path
) -> None:
    database.sql("CREATE TABLE orders (id int PRIMARY KEY, flag bool, note text)")
    database.sql("ALTER TABLE orders ALTER note SET STORAGE EXTERNAL")
    target = TargetSpec("copy", "postgres", FEW, options={"uri": other.uri})
    shop = StreamSpec("shop", source_spec(database), Mode.CDC, (target,), checkpoint_interval_ms=100)

    def finished() -> bool:
        record = engine.get_status("shop").targets[0].replay
        assert record is None or record["error"] is None, record
        return record is not None and record["state"] == "done"

    with engine:
        engine.upsert_stream(shop)
        engine.await_ready("shop", 120)
        write(database)
        expected = database.sql(ROWS)
        database.await_true("SELECT true")
        await_that(lambda: engine.get_status("shop").events_replicated > 0 and other.sql(ROWS) == expected)
        before = other.sql(TOUCHED)
        engine.replay("shop", 1)
        await_that(finished)
        assert other.sql(TOUCHED) == before
        assert other.sql("SELECT count(*) FROM _millstream.tombstones") == [(0,)]
        other.sql("DELETE FROM orders WHERE id IN (2, 3, 8, 14)")
        other.sql("INSERT INTO orders (id, flag, note, _ms_seq) VALUES (1, true, 'should be gone', 3)")
        engine.replay("shop", 1)
        await_that(lambda: finished() and other.sql(ROWS) == expected)
