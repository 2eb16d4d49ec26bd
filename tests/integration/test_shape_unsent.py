"""SQL and a function over large values that an update did not send, on a real Postgres and real Spark."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from millstream import Engine, Mode, StreamSpec, TargetSpec
from millstream.transforms.shape import Shape, SqlFilter, Step
from tests.fixtures.capture import source_spec
from tests.fixtures.engines import QUICK, await_that
from tests.fixtures.postgres import Database

pytestmark = [
    pytest.mark.postgres,
    pytest.mark.spark,
    pytest.mark.skipif("MILLSTREAM_HISTORIES" not in os.environ, reason="a whole engine with Spark: make histories"),
]

SHAPE = Shape(
    filters=(SqlFilter("name <> 'out'"),),
    transforms=(
        Step("add_sql", (("both", "concat(name, '/', substr(body, 1, 3), '/', length(body))"),)),
        Step("drop", (("body", None),)),
    ),
)
TABLE = """
    CREATE TABLE item (id int PRIMARY KEY, name text, body text);
    ALTER TABLE item ALTER body SET STORAGE EXTERNAL;
    INSERT INTO item SELECT i, 'old', i || repeat('x', 4000) FROM generate_series(1, 8) i;
"""


def copied(root: Path) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(root / "copy.db")) as db:
        return db.execute('SELECT id, name, both FROM "public.item" ORDER BY id').fetchall()


def test_what_sql_needs_and_was_not_sent_is_read_from_the_source(
    spark: SparkSession, database: Database, tmp_path: Path
) -> None:
    database.sql(TABLE)
    targets = (
        TargetSpec("copy", "sqlite", QUICK, options={"path": str(tmp_path / "copy.db")}),
        TargetSpec("log", "files", QUICK, options={"path": str(tmp_path / "log")}),
    )
    source = source_spec(database, "public.item", options={"slot": f"millstream_{database.name}"})
    stream = StreamSpec("shop", source, Mode.SNAPSHOT_THEN_CDC, targets, shape=SHAPE, checkpoint_interval_ms=100)
    with Engine(tmp_path / "home") as engine:
        engine.upsert_streams([stream])
        engine.await_ready("shop", 120)
        engine.pause("shop")
        database.sql("UPDATE item SET name = 'new' WHERE id IN (1, 2)")
        # By the time these are delivered, the source has gone on.
        database.sql("UPDATE item SET name = 'first' WHERE id IN (3, 4)")
        database.sql("UPDATE item SET name = 'second' WHERE id IN (3, 4)")
        database.sql("UPDATE item SET name = 'short lived' WHERE id = 5")
        database.sql("DELETE FROM item WHERE id = 5")
        database.sql("UPDATE item SET name = 'out' WHERE id = 6")
        database.sql("UPDATE item SET id = 70, name = 'moved' WHERE id = 7")
        engine.resume("shop")
        wanted = database.sql(
            "SELECT id, name, concat(name, '/', substr(body, 1, 3), '/', length(body)) FROM item "
            "WHERE name <> 'out' ORDER BY id"
        )
        assert [row[:2] for row in wanted] == [
            (1, "new"), (2, "new"), (3, "second"), (4, "second"), (8, "old"), (70, "moved"),
        ]  # fmt: skip
        await_that(lambda: copied(tmp_path) == wanted)
        # A changelog has a place for each change: those that nobody can complete any more are letters there.
        await_that(lambda: [one.lag_events for one in engine.get_status("shop").targets] == [0, 0])
        await_that(lambda: engine.dead_letters("shop", "copy") == [])
        assert [(one.kind, one.op) for one in engine.dead_letters("shop", "log")] == [("unsent", "u")] * 3
    files = sorted((tmp_path / "log/public.item").glob("*.parquet"))
    changes = [row for file in files for row in pq.read_table(file, partitioning=None).to_pylist()]
    changes.sort(key=lambda row: row["_ms_seq"])
    seen = [(row["_ms_op"], row["id"], row["both"]) for row in changes if row["_ms_op"] != "r"]
    assert seen == [
        ("u", 1, "new/1xx/4001"),
        ("u", 2, "new/2xx/4001"),
        ("u", 3, "second/3xx/4001"),
        ("u", 4, "second/4xx/4001"),
        ("d", 5, None),
        ("d", 6, None),
        ("u", 70, "moved/7xx/4001"),
    ]
