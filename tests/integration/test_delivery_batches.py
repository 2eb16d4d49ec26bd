"""A journal arrives in files: every change once, in whole transactions, one Spark job a batch."""

from __future__ import annotations

import json
import random
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

import pytest
from pyspark.sql import SparkSession

from millstream.engine.commit import ack_position
from millstream.model import BatchLimits, StreamState
from millstream.spark.shelf import Shelf
from tests.fixtures.delivery import EVERYTHING, Bench
from tests.fixtures.journals import Journal, delivered, shop_table

pytestmark = pytest.mark.spark


@pytest.fixture
def bench(spark: SparkSession, tmp_path: Path) -> Iterator[Bench]:
    journal = Journal.create(tmp_path / "a journal")
    for number, name in enumerate(("orders", "items", "customers")):
        journal.register(shop_table(name, 100 + number))
    made = Bench(spark, tmp_path, journal)
    yield made
    made.close()


TABLES = ("public.orders", "public.items", "public.customers")


def trade(journal: Journal, transactions: int, rows: int = 10, seed: int = 1) -> None:
    choose = random.Random(seed)
    for number in range(transactions):
        journal.transaction(
            [(choose.choice(TABLES), number * 1000 + i, f"value {choose.random()}") for i in range(rows)],
            commit=number % 3 == 2,
        )
    journal.commit()


def test_every_change_arrives_once_in_whole_transactions(bench: Bench, spark: SparkSession) -> None:
    trade(bench.journal, transactions=60)
    query = bench.deliver_all(BatchLimits(max_ms=0, max_bytes=1 << 30, max_events=250))
    assert (query.state, query.error) == (StreamState.STOPPED, None)
    assert delivered(bench.log) == bench.journal.written
    commits = bench.commits()
    assert all(commit["end"] % 10 == 0 and commit["end"] - commit["start"] <= 250 for commit in commits)
    assert (commits[0]["start"], commits[-1]["end"], len(commits)) == (0, 600, 3)
    assert all(before["end"] == after["start"] for before, after in pairwise(commits))
    assert sum(file["rows"] for commit in commits for file in commit["files"]) == 600
    for file in (file for commit in commits for file in commit["files"]):
        assert (bench.log / file["path"]).stat().st_size == file["bytes"]
    rows = spark.read.parquet(str(bench.log / "public.orders")).orderBy("_ms_seq").collect()
    expected = [(seq, c.id, c.body) for seq, c in bench.journal.written.items() if c.table == "public.orders"]
    assert [(row._ms_seq, row.id, row.body) for row in rows] == expected


def test_the_cursor_covers_the_journal_and_status_counts(bench: Bench) -> None:
    trade(bench.journal, transactions=4)
    query = bench.deliver_all()
    head = bench.journal.writer.head
    cursor = bench.cursor
    assert cursor is not None
    assert (cursor.seq, cursor.position, cursor.epoch) == (head.seq, head.resume_position, 1)
    status = query.status()
    assert (status["events"], status["batches"], status["error"]) == (40, 1, None)
    (batch,) = bench.watching.of("delivery.batch")
    assert sum(batch.fields["tables"].values()) == batch.fields["rows"] == 40
    spec = query._spec
    position = ack_position("all", [spec], {"log": cursor}, journal_id=head.journal_id, head=head, start_position=0)
    assert position == head.covered


def test_changes_that_come_while_it_runs_arrive_and_a_restart_goes_on(bench: Bench) -> None:
    trade(bench.journal, transactions=3, seed=1)
    query = bench.query()
    query.start()
    for seed in range(2, 5):
        trade(bench.journal, transactions=3, seed=seed)
        bench.wait_for_seq(bench.journal.last_seq)
    query.stop()
    assert query.state is StreamState.STOPPED
    trade(bench.journal, transactions=3, seed=9)
    bench.deliver_all()
    assert delivered(bench.log) == bench.journal.written
    assert bench.epochs() == [(1, 0, "first start")]


def test_nothing_to_deliver_ends_at_once(bench: Bench) -> None:
    query = bench.deliver_all()
    assert (query.state, query.error, bench.commits()) == (StreamState.STOPPED, None, [])
    assert bench.cursor is not None
    assert (bench.cursor.seq, bench.cursor.position) == (0, 1000)


def test_a_table_that_changes_its_columns_in_a_batch_goes_on(bench: Bench, spark: SparkSession) -> None:
    bench.journal.transaction([("public.orders", 1, "before")])
    bench.journal.register(shop_table("orders", 100, "more"))
    bench.journal.transaction([("public.orders", 2, "after")], extra=("new",))
    bench.deliver_all()
    frame = spark.read.option("mergeSchema", "true").parquet(str(bench.log / "public.orders")).orderBy("_ms_seq")
    assert [(row.id, row.body, row.more) for row in frame.collect()] == [(1, "before", None), (2, "after", "new")]


@pytest.mark.parametrize("kind", ["files", "sqlite"])
def test_what_one_target_has_decoded_the_next_one_takes(bench: Bench, kind: str) -> None:
    """A second target takes all that the first has laid on the shelf, and has every change."""
    bench.shelf = Shelf(str(bench.root / "shelf"), readers=2)
    bench.shelf.prepare()
    trade(bench.journal, transactions=3, rows=4000)
    path = bench.root / "copy.db" if kind == "sqlite" else bench.root / "copy"
    first = Bench(bench.spark, bench.root / "first", bench.journal, kind=kind, options={"path": str(path)})
    first.shelf = bench.shelf
    assert first.deliver_all().error is None
    assert len(list((bench.root / "shelf").glob("*.arrow"))) >= 3, "a piece of each table at least"
    assert bench.deliver_all().error is None
    assert list((bench.root / "shelf").iterdir()) == []
    assert delivered(bench.log) == bench.journal.written
    if kind == "files":
        assert delivered(path) == bench.journal.written
        return
    with closing(sqlite3.connect(path)) as lite:
        found = {table: lite.execute(f'SELECT id, body FROM "{table}"').fetchall() for table in TABLES}
    # Where a key comes again, the last one counts.
    latest = {(change.table, change.id): change.body for _, change in sorted(bench.journal.written.items())}
    assert {(table, *row) for table, rows in found.items() for row in rows} == {(*k, v) for k, v in latest.items()}


def events_of(spark: SparkSession) -> list[dict[str, Any]]:
    """What Spark has written into its event log, when all that has happened is in it."""
    # The end of a job flushes the log; the job is one of our own, behind all others.
    spark.range(1).count()
    jvm_context: Any = spark.sparkContext._jsc.sc()
    jvm_context.listenerBus().waitUntilEmpty(120_000)
    directory = Path(unquote(urlparse(spark.conf.get("spark.eventLog.dir")).path))
    (log,) = (path for path in directory.iterdir() if spark.sparkContext.applicationId in path.name)
    return [json.loads(line) for line in log.read_text().splitlines() if line.endswith("}")]


def test_a_hundred_tables_are_one_job_and_rows_stay_off_the_driver(spark: SparkSession, tmp_path: Path) -> None:
    journal = Journal.create(tmp_path / "journal")
    choose = random.Random(7)
    tables = [f"t{number}" for number in range(100)]
    for number, name in enumerate(tables):
        journal.register(shop_table(name, 1000 + number))
    for _ in range(20):
        rows = [(f"public.{name}", i, choose.randbytes(150).hex()) for name in tables for i in range(10)]
        journal.transaction(rows, commit=False)
    journal.commit()
    bench = Bench(spark, tmp_path, journal)
    jobs_before = sum(event["Event"] == "SparkListenerJobStart" for event in events_of(spark))
    bench.deliver_all(EVERYTHING)
    (batch,) = bench.watching.of("delivery.batch")
    assert len(batch.fields["tables"]) == 100
    assert delivered(bench.log) == journal.written
    events = events_of(spark)
    jobs = [event for event in events if event["Event"] == "SparkListenerJobStart"][jobs_before:]
    ours = [job for job in jobs if "shop/log" in json.dumps(job["Properties"])]
    assert len(ours) == 1
    stages = set(ours[0]["Stage IDs"])
    results = [
        event["Task Metrics"]["Result Size"]
        for event in events
        if event["Event"] == "SparkListenerTaskEnd" and event["Stage ID"] in stages
    ]
    assert results
    assert sum(results) < batch.fields["bytes"] / 100
