"""What copies of tables take of their source: sessions at once, bytes a second, how long a snapshot is held."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from psycopg.pq.abc import PGconn

from millstream import Engine
from millstream.engine.chunk_jobs import run_chunks
from millstream.errors import SourceHalted
from millstream.model import Relation, SourceSpec
from millstream.sources import take_snapshot
from millstream.sources.postgres import chunks, early
from millstream.sources.postgres.session import Session
from millstream.spark.baseline import BaselinePlan
from millstream.targets.base import Attempt, Receipt
from tests.fixtures.capture import source_spec
from tests.fixtures.engines import await_that
from tests.fixtures.inprocess import FakeSpark, FakeTasks
from tests.fixtures.postgres import Database
from tests.integration.test_reload import Everywhere

pytestmark = pytest.mark.postgres

ROWS = 4000
TABLE = f"""
CREATE TABLE big (id int PRIMARY KEY, note text);
INSERT INTO big SELECT i, repeat('x', 450) FROM generate_series(1, {ROWS}) i;
"""


class ThreadedTasks(FakeTasks):
    def collect(self) -> list[Any]:
        with ThreadPoolExecutor(4) as pool:
            done = pool.map(lambda one: list(self._function(iter([one]))), self._given)
            return [row for rows in done for row in rows]


class ThreadedSpark(FakeSpark):
    """Runs four tasks at a time."""

    def parallelize(self, given: Sequence[Any], tasks: int) -> FakeTasks:
        return ThreadedTasks(given)


class Counting:
    """Counts what it is given."""

    def stage(
        self, relation: Relation, relation_id: int, batches: Iterator[pa.RecordBatch], attempt: Attempt
    ) -> Sequence[Receipt]:
        taken = list(batches)
        rows, size = sum(batch.num_rows for batch in taken), sum(batch.nbytes for batch in taken)
        return [Receipt(relation_id, relation.table, rows, size, 0, 0, {"partition": attempt.partition})]


class Counted(Session):
    """Counts the sessions that are open at once: the server may show one a moment longer than it is."""

    lock, there, most = threading.Lock(), 0, 0

    def __init__(self, connection: PGconn) -> None:
        super().__init__(connection)
        self._is_open = True
        with Counted.lock:
            Counted.there += 1
            Counted.most = max(Counted.most, Counted.there)

    def close(self) -> None:
        with Counted.lock:
            Counted.there -= self._is_open
            self._is_open = False
        super().close()


def copy_once(spec: SourceSpec) -> Sequence[Receipt]:
    """Read all tables; what was read."""
    spark: Any = ThreadedSpark()
    with closing(take_snapshot(spec, lambda _: None, captured=False)) as taken:
        ids = {chunk.relation: 1 for chunk in taken.plan.chunks}
        plan = BaselinePlan(spec, taken.plan, "p", 1, 1, ids, Counting())
        return run_chunks(spark, plan, threading.Event(), parallel=True).receipts


def test_no_more_sessions_copy_at_once_and_no_more_bytes_a_second_than_are_allowed(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(early, "TABLE_BYTES", -1)
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 256 << 10)
    database.sql(TABLE)
    rate = 1 << 20
    spec = source_spec(database, options={"max_connections": 2, "max_rate": rate})
    monkeypatch.setattr(chunks, "Session", Counted)
    results: list[Sequence[Receipt]] = []
    # Two targets of one source: both limits are for all of them together.
    others = [threading.Thread(target=lambda: results.append(copy_once(spec))) for _ in range(2)]
    began = time.monotonic()
    for one in others:
        one.start()
    for one in others:
        one.join()
    seconds = time.monotonic() - began
    assert (Counted.most, Counted.there, len(results)) == (2, 0, 2)
    for receipts in results:
        assert sum(receipt.rows for receipt in receipts) == ROWS
        places = [receipt.detail["partition"] for receipt in receipts]
        assert len(places) == len(set(places)) >= 8, "each chunk has its own name"
    # The rows alone have so many bytes as they are copied: 450 of text and some more.
    assert seconds >= 2 * ROWS * 460 / rate


def test_a_snapshot_that_got_old_gives_way_to_another_one_between_ranges(
    engine: Engine, database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 256 << 10)
    database.sql(TABLE)
    shop = Everywhere(engine, database, tmp_path, only="copy")
    source = source_spec(database, options={"snapshot_at_once": 0, "max_snapshot_age": 1})
    over, failed = threading.Event(), list[Exception]()

    def move() -> None:
        try:
            with database.connect() as connection:
                while not over.wait(0.01):
                    connection.execute("UPDATE big SET id = -id WHERE id = (SELECT max(id) FROM big)")
                    connection.execute("DELETE FROM big WHERE id = (SELECT min(id) FROM big WHERE id > 0)")
        except Exception as error:  # noqa: BLE001 - told below
            failed.append(error)

    writer = threading.Thread(target=move)
    with engine:
        writer.start()
        try:
            engine.upsert_stream(replace(shop.stream, source=source))
            shop.await_reloaded()
        finally:
            over.set()
            writer.join()
        shop.await_equal("big")
        status = engine.get_status("shop").targets[0]
        assert status.reload is not None
        table = status.reload["tables"]["public.big"]
        assert len(table["points"]) == table["chunks"] >= 6, "each range has its own"
        assert sorted(point["position"] for point in table["points"]) == [one["position"] for one in table["points"]]
        await_that(lambda: engine.get_status("shop").targets[0].state == "running")
    assert failed == []


def test_what_needs_one_snapshot_says_so_when_that_may_not_be_held_so_long(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(early, "TABLE_BYTES", -1)
    database.sql(TABLE)
    with pytest.raises(SourceHalted, match="as old as max_snapshot_age allows") as refused:
        copy_once(source_spec(database, options={"max_snapshot_age": 1}))
    assert "raise max_snapshot_age" in (refused.value.hint or "")
