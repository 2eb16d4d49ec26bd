"""Delivery by Spark into a database: one task a batch, its transaction with the cursor in it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from millstream.model import BatchLimits, StreamState
from millstream.targets.base import Target
from tests.fixtures.delivery import Bench
from tests.fixtures.journals import Journal, shop_table
from tests.fixtures.postgres import Database
from tests.fixtures.stagers import Killed
from tests.fixtures.tuples import delete, truncate, update

pytestmark = [pytest.mark.spark, pytest.mark.postgres]

ORDERS = shop_table("orders", 16_400)


@pytest.fixture
def bench(spark: SparkSession, tmp_path: Path, database: Database) -> Iterator[Bench]:
    journal = Journal.create(tmp_path / "journal")
    journal.register(ORDERS)
    journal.register(shop_table("items", 16_401))
    made = Bench(spark, tmp_path, journal, kind="postgres", options={"uri": database.uri})
    yield made
    made.close()


def test_tables_arrive_whole_though_a_worker_is_killed_after_its_commit(bench: Bench, database: Database) -> None:
    for number in range(6):
        rows = [("public.orders", number * 10 + i, f"{number}-{i}") for i in range(10)]
        bench.journal.transaction([*rows, ("public.items", number, "an item")])
    bench.journal.append(ORDERS, [update(["1000", "moved"], key=["0", None]), delete(key=["11", None])])
    bench.journal.append(shop_table("items", 16_401), [truncate()])
    limits = BatchLimits(max_ms=0, max_bytes=1 << 30, max_events=40)
    kills = bench.root / "kills"
    kills.mkdir()

    def killed(target: Target) -> Any:
        return Killed(target, "lane.committed", kills)

    query = bench.query(once=True, limits=limits, wrap=killed)
    query.start()
    assert query.wait(120)
    assert (query.state, query.error) == (StreamState.STOPPED, None)
    assert "lane.committed.fired" in {path.name for path in kills.iterdir()}
    expected = {change.id: change.body for change in bench.journal.written.values() if change.table == "public.orders"}
    del expected[0], expected[11]
    assert dict(database.sql("SELECT id, body FROM orders")) == {**expected, 1000: "moved"}
    assert database.sql("SELECT count(*) FROM items") == [(0,)]
    batches = bench.watching.of("delivery.batch")
    assert sum(batch.fields["rows"] for batch in batches) == bench.journal.last_seq
    assert database.sql("SELECT seq FROM _millstream.cursors") == [(bench.journal.last_seq,)]


def test_rows_that_the_database_refuses_are_letters_and_the_others_arrive(bench: Bench, database: Database) -> None:
    database.sql("CREATE TABLE orders (id int PRIMARY KEY, body text CHECK (body <> 'bad'))")
    rows = [("public.orders", number, "bad" if number in (3, 70) else f"body {number}") for number in range(100)]
    bench.journal.transaction([*rows, ("public.items", 1, "bad")])
    bench.journal.append(ORDERS, [update(["3", "better"]), delete(key=["5", None])])
    limits = BatchLimits(max_ms=0, max_bytes=1 << 30, max_events=101)
    assert bench.deliver_all(limits).error is None
    letters = [(one.seq, one.kind, one.state.value) for one in bench.store.letters("shop", "log")]
    assert letters == [(4, "constraint", "superseded"), (71, "constraint", "waiting")]
    expected = {id_: body for _, id_, body in rows} | {3: "better"}
    del expected[5], expected[70]
    assert dict(database.sql("SELECT id, body FROM orders")) == expected
    assert database.sql("SELECT id, body FROM items") == [(1, "bad")]
