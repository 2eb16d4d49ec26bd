"""A baseline of which only the target knows: the home's state was lost. No change that it has comes again."""

from __future__ import annotations

import sqlite3
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from millstream.engine import baseline, delivery
from millstream.engine.letters import LetterBox
from millstream.engine.opening import Opening
from millstream.model import BatchLimits, Mode, SourceSpec, StreamSpec, TargetSpec
from millstream.observe import Observers
from millstream.sources import take_snapshot
from millstream.sources.base import Snapshot
from millstream.state.memory import MemoryStateStore
from millstream.targets import open_target
from tests.fixtures.capture import captured, source_spec
from tests.fixtures.inprocess import FakeSpark, InProcessQuery
from tests.fixtures.postgres import Database

pytestmark = pytest.mark.postgres

ONE_BY_ONE = BatchLimits(max_ms=0, max_bytes=1 << 30, max_events=1)


def read_tables(root: Path, stream: StreamSpec, locations: tuple[str, ...]) -> None:
    """A baseline, and nothing after it; what the state knows of it is thrown away."""
    (spec,) = stream.targets
    spark: Any = FakeSpark()
    target = open_target(spec)
    store = MemoryStateStore()
    opening = Opening(stream.name, spec.name, target, locations, store, root / "checkpoints")
    letters = LetterBox(store, stream, spec, target, lambda *_: None)
    assert opening.is_new()
    baseline.Baseline(spark, stream.source, target, opening, letters, lambda *_: None, threading.Event()).run()
    target.close()


def deliver(root: Path, stream: StreamSpec, locations: tuple[str, ...]) -> None:
    (spec,) = stream.targets
    spark: Any = FakeSpark()
    store, places = MemoryStateStore(), root / "checkpoints"
    query = delivery.DeliveryQuery(
        spark, stream, spec, open_target(spec), locations, store, places, Observers(), once=True
    )
    query.start()
    assert query.wait(120)
    assert query.error is None


def held(kind: str, path: Path) -> list[int]:
    if kind == "sqlite":
        with closing(sqlite3.connect(path)) as copy:
            return [n for (n,) in copy.execute('SELECT n FROM "public.t" ORDER BY n')]
    files = (path / "public.t").glob("*.parquet")
    return sorted(n for file in files for n in pq.read_table(file, partitioning=None)["n"].to_pylist())


@pytest.mark.parametrize("kind", ["files", "sqlite"])
def test_what_lies_between_the_journals_end_and_the_snapshot_comes_once(
    tmp_path: Path, database: Database, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    def after_two_more(spec: SourceSpec, on_wait: Any) -> Snapshot:
        for n in (2, 3):
            database.sql(f"INSERT INTO t VALUES ({n})")
        return take_snapshot(spec, on_wait)

    monkeypatch.setattr(delivery, "SliceQuery", InProcessQuery)
    monkeypatch.setattr(baseline, "take_snapshot", after_two_more)
    database.sql("CREATE TABLE t (n int); INSERT INTO t VALUES (1)")
    place = tmp_path / "there"
    spec = TargetSpec("log", kind, ONE_BY_ONE, options={"path": str(place)})
    stream = StreamSpec("shop", source_spec(database), Mode.SNAPSHOT_THEN_CDC, (spec,))
    with captured(database, tmp_path / "journal") as capture:
        capture.await_log_end()
        locations = (str(capture.journal),)
        read_tables(tmp_path, stream, locations)
        assert held(kind, place) == [1, 2, 3]
        capture.await_log_end()
        deliver(tmp_path, stream, locations)
        database.sql("INSERT INTO t VALUES (4)")
        capture.await_log_end()
        deliver(tmp_path, stream, locations)
    assert held(kind, place) == [1, 2, 3, 4]
