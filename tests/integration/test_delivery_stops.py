"""A stop at every step of a batch: what was not delivered comes again, what was does not."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from millstream.engine import batches, opening
from millstream.engine.delivery import DeliveryQuery
from millstream.model import StreamState
from millstream.state import sqlite
from millstream.state.sqlite import SqliteStateStore
from millstream.targets import files
from tests.fixtures.delivery import Bench
from tests.fixtures.journals import Journal, delivered, shop_table

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]

STEPS = [
    "delivery.epoch_opened",
    "files.recovered",
    "delivery.batch_started",
    "delivery.staged",
    "files.renamed",
    "files.commit_written",
    "delivery.published",
    "state.cursor_saved",
    "delivery.cursor_saved",
]


@pytest.fixture
def bench(spark: SparkSession, tmp_path: Path) -> Iterator[Bench]:
    journal = Journal.create(tmp_path / "journal")
    journal.register(shop_table("orders", 100))
    made = Bench(spark, tmp_path, journal, SqliteStateStore(tmp_path / "state.db"))
    yield made
    made.close()


class Stopper:
    """Stands where failpoints stand; at one of them it asks the query to stop and goes on when that is asked."""

    def __init__(self, step: str, query: DeliveryQuery, *, drain: bool) -> None:
        self._step = step
        self._query = query
        self._drain = drain
        self.thread: threading.Thread | None = None

    def __call__(self, name: str) -> None:
        if name == self._step and self.thread is None:
            self.thread = threading.Thread(target=self._query.stop, kwargs={"drain": self._drain})
            self.thread.start()
            assert self._query.stopping.wait(60)


@pytest.mark.parametrize("drain", [False, True], ids=["interrupted", "drained"])
def test_a_stop_at_every_step_loses_and_doubles_nothing(
    bench: Bench, drain: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, step in enumerate(STEPS):
        bench.journal.transaction([("public.orders", i, f"{number}-{i}") for i in range(20)])
        query = bench.query()
        stopper = Stopper(step, query, drain=drain)
        for module in (batches, opening, files, sqlite):
            monkeypatch.setattr(module, "failpoint", stopper)
        query.start()
        assert query.wait(120), f"the query did not end after a stop at {step}"
        assert stopper.thread is not None, f"{step} was not passed"
        stopper.thread.join(60)
        assert (query.state, query.error) == (StreamState.STOPPED, None)
        monkeypatch.undo()
    bench.deliver_all()
    assert delivered(bench.log) == bench.journal.written
    commits = bench.commits()
    assert (commits[0]["start"], commits[-1]["end"]) == (0, bench.journal.last_seq)
    assert all(before["end"] == after["start"] for before, after in pairwise(commits))
    assert len(bench.epochs()) == 1
