"""A journal with limits under a stream on real Spark: it forgets while targets read, never what one of them needs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from millstream import Engine, Mode, StreamSpec, TargetSpec
from millstream.engine.prune import prune
from millstream.journal import Pruned
from millstream.model import Retention
from tests.fixtures.capture import source_spec
from tests.fixtures.engines import QUICK, await_that
from tests.fixtures.postgres import Database

pytestmark = [pytest.mark.postgres, pytest.mark.spark]

ROWS = 400
TARGETS = ("log", "spare")


class Kept:
    """What the journal has forgotten, held against what its targets have, at every look."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def cursor(self, target: str) -> int:
        (found,) = [one for one in self._engine.get_status("shop").targets if one.name == target]
        return found.seq or 0

    def forgotten(self) -> int:
        pruned = Pruned.load(self._engine.home.journal_path("shop"))
        seq = pruned.seq if pruned else 0
        # Cursors only grow: who was behind what is gone would be behind it still.
        assert seq <= min(map(self.cursor, TARGETS))
        return seq


def stream(root: Path, database: Database) -> StreamSpec:
    source = replace(source_spec(database), retention=Retention(bytes=64 << 10))
    targets = tuple(TargetSpec(name, "files", QUICK, options={"path": str(root / name)}) for name in TARGETS)
    return StreamSpec("shop", source, Mode.CDC, targets, checkpoint_interval_ms=100)


def ids(directory: Path) -> list[int]:
    files = sorted((directory / "public.item").glob("*.parquet"))
    return sorted(id for file in files for id in pq.ParquetFile(file).read(["id"])["id"].to_pylist())


def test_a_journal_forgets_under_its_readers_and_never_past_the_slowest(
    spark: SparkSession, database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILLSTREAM_SEGMENT_BYTES", str(64 << 10))
    database.sql("CREATE TABLE item (id int PRIMARY KEY, v text)")
    written = 0

    def write(rounds: int) -> None:
        nonlocal written
        for _ in range(rounds):
            database.sql(
                f"INSERT INTO item SELECT i, repeat(md5(i::text), 10) "
                f"FROM generate_series({written + 1}, {written + ROWS}) i"
            )
            written += ROWS

    with Engine(tmp_path / "home") as engine:
        engine.upsert_stream(stream(tmp_path, database))
        engine.await_ready("shop", 120)
        kept = Kept(engine)

        def has_all(*targets: str) -> bool:
            kept.forgotten()
            return all(kept.cursor(target) == written for target in targets)

        # A target needs its last batch too, so the journal forgets what went before that.
        for _ in range(2):
            write(5)
            await_that(lambda: has_all(*TARGETS))
        engine.pause("shop", "spare")
        held = kept.cursor("spare")
        await_that(lambda: kept.forgotten() > 0)
        write(8)
        await_that(lambda: has_all("log"))
        told = prune(engine.home, "shop", Retention(bytes=1), force=False, dry_run=False)
        assert told["held"]["by"][0]["target"] == "spare"
        assert kept.forgotten() <= held
        engine.resume("shop", "spare")
        await_that(lambda: has_all(*TARGETS))
        write(1)
        # Nobody needs any more what the paused target had not got.
        await_that(lambda: has_all(*TARGETS) and kept.forgotten() > held)
    for target in TARGETS:
        assert ids(tmp_path / target) == list(range(1, written + 1))
