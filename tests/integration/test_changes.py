"""`millstream.changes`: a table's changes as DataFrames, and nothing left behind."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

import millstream
from millstream.engine.changes import Changes
from millstream.errors import ConfigError, HomeLocked, SourceUnavailable
from millstream.journal import JournalReader
from tests.fixtures.capture import source_spec
from tests.fixtures.postgres import Database

pytestmark = pytest.mark.postgres

NO_SPARK: Any = None
"""Capture needs none; only `stream` and `batch` do."""

SLOTS = "SELECT slot_name FROM pg_replication_slots WHERE database = current_database()"
PUBLICATIONS = "SELECT pubname FROM pg_publication"


@pytest.fixture
def orders(database: Database) -> Database:
    database.sql("CREATE TABLE orders (id int PRIMARY KEY, note text); CREATE TABLE items (id int PRIMARY KEY)")
    return database


def await_rows(handle: Changes, count: int) -> None:
    """Until the journal has so many changes, heartbeats not counted: there are none so soon."""
    reader, deadline = JournalReader([handle.journal]), time.monotonic() + 120
    while (head := reader.head()) is None or head.seq < count:
        assert time.monotonic() < deadline, handle.error
        threading.Event().wait(0.02)


@pytest.mark.spark
def test_a_table_s_changes_are_there_and_then_nothing_is_left(orders: Database, spark: SparkSession) -> None:
    with millstream.changes(spark, orders.uri, "public.orders") as handle:
        assert handle.stream().schema == handle.batch().schema, "known before the first change"
        orders.sql("INSERT INTO orders VALUES (1, 'a'), (2, 'b'); INSERT INTO items VALUES (1); DELETE FROM orders")
        await_rows(handle, 4)
        rows = handle.batch().orderBy("_ms_seq").collect()
        assert [(row["_ms_op"], row["id"], row["note"]) for row in rows] == [
            ("c", 1, "a"),
            ("c", 2, "b"),
            ("d", 1, None),
            ("d", 2, None),
        ]
        assert handle.batch(startingSeq=3).count() == 2
    assert orders.sql(SLOTS) == []
    assert orders.sql(PUBLICATIONS) == []
    assert not Path(handle.journal).exists()
    handle.stop()
    with pytest.raises(ConfigError, match="stopped"):
        handle.batch()


def test_a_home_is_gone_on_with_and_a_source_is_captured_once(orders: Database, tmp_path: Path) -> None:
    spec = source_spec(orders, "public.*")
    with (
        millstream.changes(NO_SPARK, spec, "public.orders", home=tmp_path) as one,
        millstream.changes(NO_SPARK, spec, "public.items", home=tmp_path) as other,
    ):
        assert one.journal == other.journal
        with pytest.raises(ConfigError, match="captured already, but described differently"):
            millstream.changes(NO_SPARK, source_spec(orders, "public.orders"), "public.orders", home=tmp_path)
        elsewhere = millstream.changes(NO_SPARK, orders.uri, "public.items", home=tmp_path)
        elsewhere.stop()
        one.stop()
        orders.sql("INSERT INTO orders VALUES (1, 'a'); INSERT INTO items VALUES (1)")
        await_rows(other, 2)
    assert (orders.name,) in orders.sql(SLOTS), "with a home the slot stays"
    orders.sql("INSERT INTO orders VALUES (2, 'while nobody looked')")
    with millstream.changes(NO_SPARK, spec, home=tmp_path) as again:
        await_rows(again, 3)
    assert millstream.verify(Path(again.journal)) == []


def test_what_is_wrong_is_said(orders: Database, tmp_path: Path) -> None:
    refused: list[tuple[Any, Any, str]] = [
        (orders.uri, "public.order", r"no table public.order among"),
        (source_spec(orders, "public.*"), "public.ordesr", r"did you mean public.orders\?"),
        (orders.uri, None, "which table"),
        ("mysql://root@localhost/x", "public.orders", "neither a SourceSpec nor a URI"),
    ]
    for source, table, said in refused:
        with pytest.raises(millstream.MillstreamError, match=said):
            millstream.changes(NO_SPARK, source, table)
    with pytest.raises(SourceUnavailable):
        millstream.changes(NO_SPARK, "postgresql://nobody@127.0.0.1:1/nothing", "public.orders")
    home = millstream.Home(tmp_path)
    with home.lock(), pytest.raises(HomeLocked):
        millstream.changes(NO_SPARK, orders.uri, "public.orders", home=home)
    assert orders.sql(SLOTS) == []


PROGRAM = """
import sys, millstream
handle = millstream.changes(None, sys.argv[1], "public.orders")
print(handle.journal, handle._capture._supervisor.pid)
"""


def test_the_end_of_the_program_is_the_end_of_its_capture(orders: Database) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, orders.uri], capture_output=True, text=True, check=True, timeout=120
    )
    journal, process = done.stdout.split()
    assert not Path(journal).exists()
    assert not Path("/proc", process).exists()
    assert orders.sql(SLOTS) == []
