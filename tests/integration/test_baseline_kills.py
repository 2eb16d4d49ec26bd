"""kill -9 after each durable step of a baseline, under writes: every row once, and every later change once.

Tasks run here without Spark, so that every step is reached within seconds.
"""

from __future__ import annotations

import signal
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pytest

from millstream.embedded import EmbeddedPostgres
from millstream.journal import JournalReader
from millstream.model import Relation
from millstream.targets.directory import directory_of
from tests.fixtures.baselines import NAMES, TABLES, change, differing, rows_read, write
from tests.fixtures.capture import Captured, captured
from tests.fixtures.delivering import deliver
from tests.fixtures.forks import run
from tests.fixtures.postgres import Database, fresh_database
from tests.integration.test_delivery_kills import failpoints

pytestmark = pytest.mark.postgres


class Deliveries:
    """A delivering process that is started again and again; the source changes in between."""

    def __init__(
        self,
        root: Path,
        capture: Captured,
        kind: str,
        options: dict[str, Any],
        process: Callable[..., int | None] = deliver,
        *,
        changing: bool = True,
    ) -> None:
        self._root = root
        self._changing = changing
        self._process = process
        self._capture = capture
        self._order = (str(root), kind, options, capture.database.uri, capture.database.name)
        self._last = 1000

    def run(self, armed: list[str]) -> list[str]:
        """Each failpoint kills once. Returns what has killed."""
        state = self._root / "failpoints"
        state.mkdir(exist_ok=True)
        environment = {"MILLSTREAM_FAILPOINT": ",".join(armed), "MILLSTREAM_FAILPOINT_STATE": str(state)}
        for _ in range(len(armed) + 1):
            if self._changing:
                self.change()
            done = run(self._process, *self._order, environment=environment)
            if done.code == 0:
                break
            assert done.code == -signal.SIGKILL, done.stderr
        assert done.code == 0
        return sorted(path.name.removesuffix(".fired") for path in state.glob("*.fired"))

    def change(self) -> None:
        first, self._last = self._last + 1, self._last + 60
        write(self._capture.database, first, self._last)
        change(self._capture.database, first - 200, self._last)
        self._capture.await_log_end()


def relations(capture: Captured) -> dict[str, Relation]:
    reader = JournalReader([str(capture.journal)])
    return {relation.name: relation for _, relation in sorted(reader.relations().items())}


def test_a_kill_after_each_step_loses_and_doubles_nothing(tmp_path: Path, database: Database) -> None:
    database.sql(TABLES)
    write(database, 1, 1000)
    with captured(database, tmp_path / "journal") as capture:
        capture.await_log_end()
        deliveries = Deliveries(tmp_path, capture, "files", {"path": str(tmp_path / "log")})
        armed = [*failpoints("snapshot"), "delivery.epoch_opened", "files.renamed"]
        assert len(armed) >= 8
        assert deliveries.run(armed) == sorted(armed)
        for _ in range(2):
            deliveries.run([])
        found = relations(capture)
        directories = {name: directory_of(found[name]) for name in NAMES}
        assert differing(database, tmp_path / "log", found, directories) == []
        rows = rows_read(tmp_path / "log", list(directories.values()))
        assert pc.count_distinct(rows["_ms_event_id"]).as_py() == rows.num_rows
        read = rows.filter(pc.equal(rows["_ms_op"], "r"))
        assert pc.count_distinct(read["_ms_seq"]).as_py() == 1, "one snapshot, and no rest of another"
        assert read.num_rows > 3000


def test_a_lane_gets_the_baseline_in_one_transaction(tmp_path: Path, database: Database) -> None:
    database.sql(TABLES)
    database.sql("ALTER TABLE keyless ADD id serial PRIMARY KEY")
    write(database, 1, 1000)
    with captured(database, tmp_path / "journal") as capture:
        capture.await_log_end()
        path = tmp_path / "copy.db"
        deliveries = Deliveries(tmp_path, capture, "sqlite", {"path": str(path)})
        armed = ["snapshot.rows_decoded", "lane.claimed", "lane.written", "lane.committed"]
        assert deliveries.run(armed) == sorted(armed)
        deliveries.run([])
        with closing(sqlite3.connect(path)) as copy:
            held = copy.execute('SELECT id, flag FROM "public.item" ORDER BY id').fetchall()
        expected = database.sql("SELECT id, flag FROM item ORDER BY id")
        assert [(key, None if flag is None else bool(flag)) for key, flag in held] == expected


def test_tables_that_get_their_keys_after_their_rows_get_both_or_nothing(
    tmp_path: Path, database: Database, postgres: EmbeddedPostgres
) -> None:
    database.sql("CREATE TABLE item (id int, region int, note text, flag bool, PRIMARY KEY (region, id))")
    database.sql("INSERT INTO item SELECT i, i % 3, 'x' || i, true FROM generate_series(1, 1000) i")
    rows = "SELECT id, region, note, flag FROM item ORDER BY id"
    with fresh_database(postgres) as copy, captured(database, tmp_path / "journal") as capture:
        capture.await_log_end()
        deliveries = Deliveries(tmp_path, capture, "postgres", {"uri": copy.uri}, changing=False)
        assert deliveries.run(["lane.loaded"]) == ["lane.loaded"]
        assert copy.sql(rows) == database.sql(rows)
        key = "SELECT pg_get_constraintdef(oid) FROM pg_constraint WHERE conrelid = 'item'::regclass AND contype = 'p'"
        assert copy.sql(key) == database.sql(key) == [("PRIMARY KEY (region, id)",)]
        database.sql("UPDATE item SET flag = false WHERE id % 5 = 0; DELETE FROM item WHERE id % 7 = 0")
        capture.await_log_end()
        deliveries.run([])
        assert copy.sql(rows) == database.sql(rows)
