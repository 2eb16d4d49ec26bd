"""Delivery by Spark when things go wrong: stops at bad moments, checkpoints that rot, workers that die."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from millstream.model import StreamState
from millstream.targets.base import Stager, Target
from tests.fixtures.delivery import Bench
from tests.fixtures.journals import Journal, delivered, shop_table
from tests.fixtures.stagers import HeldStager, KillingStager

pytestmark = pytest.mark.spark


@pytest.fixture
def bench(spark: SparkSession, tmp_path: Path) -> Iterator[Bench]:
    journal = Journal.create(tmp_path / "journal")
    journal.register(shop_table("orders", 100))
    made = Bench(spark, tmp_path, journal)
    yield made
    made.close()


def trade(journal: Journal, transactions: int = 3) -> None:
    for number in range(transactions):
        journal.transaction([("public.orders", i, f"{number}-{i}") for i in range(10)])


class With:
    """A target with another executor side."""

    def __init__(self, inner: Target, stager: Callable[[Stager], Stager]) -> None:
        self._inner = inner
        self._stager = stager

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def stager(self) -> Stager:
        return self._stager(self._inner.stager())


def staged_by(stager: Callable[[Stager], Stager]) -> Callable[[Target], Target]:
    return lambda target: With(target, stager)  # type: ignore[return-value]


class Hold:
    """Holds every task of a batch until it is let go."""

    def __init__(self, directory: Path) -> None:
        self._pipe = directory / "pipe"
        os.mkfifo(self._pipe)

    def stager(self, inner: Stager) -> Stager:
        return HeldStager(inner, str(self._pipe))

    def wait_until_at_work(self) -> None:
        pause = threading.Event()
        for _ in range(6000):
            if self._pipe.with_suffix(".working").exists():
                return
            pause.wait(0.02)
        raise AssertionError("no task came to work")

    def let_go(self) -> None:
        self._pipe.open("wb").close()


def test_a_stop_in_the_middle_of_a_batch_commits_nothing(bench: Bench) -> None:
    trade(bench.journal)
    hold = Hold(bench.root)
    query = bench.query(wrap=staged_by(hold.stager))
    query.start()
    hold.wait_until_at_work()
    query.stop(drain=False)
    assert (query.state, query.error) == (StreamState.STOPPED, None)
    assert bench.cursor is not None
    assert bench.cursor.seq == 0
    assert (bench.checkpoints / "1" / "offsets" / "0").exists()
    assert not (bench.checkpoints / "1" / "commits" / "0").exists()
    trade(bench.journal)
    bench.deliver_all()
    assert delivered(bench.log) == bench.journal.written
    assert bench.epochs() == [(1, 0, "first start")]
    assert [commit["end"] for commit in bench.commits()] == [30, 60]


def test_a_stop_that_drains_lets_the_batch_finish(bench: Bench) -> None:
    trade(bench.journal)
    hold = Hold(bench.root)
    query = bench.query(wrap=staged_by(hold.stager))
    query.start()
    hold.wait_until_at_work()
    stopping = threading.Thread(target=query.stop)
    stopping.start()
    hold.let_go()
    stopping.join(120)
    assert (query.state, query.error) == (StreamState.STOPPED, None)
    assert delivered(bench.log) == bench.journal.written


def test_a_checkpoint_that_rots_means_a_new_epoch_at_the_cursor(bench: Bench) -> None:
    trade(bench.journal)
    bench.deliver_all()
    (bench.checkpoints / "1" / "offsets" / "0").write_text("{")
    trade(bench.journal)
    query = bench.deliver_all()
    assert (query.state, query.error) == (StreamState.STOPPED, None)
    assert delivered(bench.log) == bench.journal.written
    assert bench.epochs() == [(1, 0, "first start"), (2, 30, "Spark's checkpoint cannot be read")]
    assert bench.cursor is not None
    assert bench.cursor.epoch == 2


def test_a_worker_that_is_killed_costs_a_try_and_nothing_else(bench: Bench) -> None:
    trade(bench.journal)
    kills = bench.root / "kills"
    kills.mkdir()
    query = bench.query(once=True, wrap=staged_by(lambda inner: KillingStager(inner, "files.staged", str(kills))))
    query.start()
    assert query.wait(120)
    assert [path.name for path in kills.glob("*.fired")] == ["files.staged.fired"]
    assert (query.state, bench.watching.of("delivery.retry")) == (StreamState.STOPPED, [])
    assert delivered(bench.log) == bench.journal.written
    assert len(list((bench.log / "public.orders").iterdir())) == 1
