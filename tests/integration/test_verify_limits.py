"""What a comparison takes of its source: no more sessions at once, and no more bytes a second, than a copy may."""

from __future__ import annotations

import sqlite3
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from millstream import Engine, load_streams
from millstream.engine.verify import TargetVerification
from millstream.sources.postgres import chunks, early
from tests.fixtures.engines import await_that
from tests.fixtures.postgres import Database

pytestmark = [pytest.mark.postgres, pytest.mark.spark, pytest.mark.timeout(300)]

ROWS = 2000
TABLES = f"""
CREATE TABLE big (id int PRIMARY KEY, note text);
INSERT INTO big SELECT i, repeat('x', 450) FROM generate_series(1, {ROWS}) i;
CREATE TABLE shaped (id int PRIMARY KEY, note text);
INSERT INTO shaped SELECT i, repeat('y', 450) FROM generate_series(1, {ROWS}) i;
"""
RATE = 1 << 20
# Of one table Spark itself makes the rows, so that both ways to read a source are in it.
STREAM = """
name: shop
source: {{kind: postgres, uri: "{uri}", tables: ["public.*"], max_connections: 2, max_rate: 1MiB}}
mode: snapshot_then_cdc
filter: {{public.shaped: "id % 2 = 0"}}
targets:
  - {{name: copy, kind: sqlite, path: copy.db}}
"""
WAITING = """
SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'
"""
BEYOND_SECONDS = 1.0
"""So long it is looked whether more sessions come than may."""


class Held:
    """Holds the tables when a comparison is about to read them, and counts the sessions that come to wait for them.

    None of those can end: were there more of them than may be, the server would have to show them all.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self.most = 0

    def compare(self, *arguments: Any) -> Any:
        with self._database.connect() as holder:
            holder.execute("BEGIN")
            holder.execute("SET LOCAL lock_timeout = '60s'")
            holder.execute("LOCK TABLE big, shaped IN ACCESS EXCLUSIVE MODE")
            counting = threading.Thread(target=self._count, args=(holder,))
            counting.start()
            try:
                return COMPARE(*arguments)
            finally:
                counting.join()

    def _count(self, holder: Any) -> None:
        try:
            await_that(lambda: self._waiting() >= 2)
            over = threading.Event()
            threading.Timer(BEYOND_SECONDS, over.set).start()
            while not over.wait(0.05):
                self._waiting()
        finally:
            holder.execute("ROLLBACK")

    def _waiting(self) -> int:
        ((now,),) = self._database.sql(WAITING)
        self.most = max(self.most, now)
        return int(now)


COMPARE = TargetVerification._compare


def held_by(copy: Path) -> list[int]:
    if not copy.exists():
        return []
    try:
        with closing(sqlite3.connect(copy, timeout=60)) as lite:
            names = ("public.big", "public.shaped")
            return [lite.execute(f'SELECT count(*) FROM "{name}"').fetchone()[0] for name in names]
    except sqlite3.OperationalError:
        return []  # not there yet


def test_a_comparison_has_no_more_sessions_and_reads_no_faster_than_its_source_allows(
    tmp_path: Path, database: Database, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(early, "TABLE_BYTES", -1)
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 128 << 10)
    database.sql(TABLES)
    (tmp_path / "shop.yaml").write_text(STREAM.format(uri=database.uri))
    with Engine(tmp_path / "home") as engine:
        engine.upsert_streams(load_streams([tmp_path / "shop.yaml"]))
        engine.await_ready("shop", 120)
        await_that(lambda: held_by(tmp_path / "copy.db") == [ROWS, ROWS // 2])
        held = Held(database)
        monkeypatch.setattr(TargetVerification, "_compare", lambda *arguments: held.compare(*arguments))
        report = engine.verify("shop")
    (verdict,) = report.targets
    assert [(table.table, table.source_rows, table.equal) for table in verdict.tables] == [
        ("public.big", ROWS, True),
        ("public.shaped", ROWS // 2, True),
    ]
    assert held.most == 2
    # The rows alone have so many bytes as they are copied: 450 of text and some more.
    assert verdict.seconds >= BEYOND_SECONDS + 2 * ROWS * 460 / RATE
