"""kill -9 after each durable step of copying tables anew, under writes: it goes on, and ends exact.

By itself it kills at some steps; with MILLSTREAM_CHAOS_EACH=1, as `make chaos` has it, at all of them.
"""

from __future__ import annotations

import os
import signal
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pytest
from deltalake import DeltaTable

from millstream.engine.reload import RELOAD, AskedTables
from millstream.model import Json
from millstream.state.sqlite import SqliteStateStore
from millstream.targets.changelogs import ChangelogReader
from millstream.targets.deltas.changes import DeltaChanges
from millstream.targets.directory import directory_of
from tests.fixtures.baselines import NAMES, TABLES, differing, write
from tests.fixtures.capture import Captured, captured
from tests.fixtures.delivering import EVERYTHING, ask, reload
from tests.fixtures.forks import run
from tests.fixtures.postgres import Database
from tests.integration.test_baseline_kills import Deliveries, relations
from tests.integration.test_delivery_kills import failpoints

pytestmark = pytest.mark.postgres

STEPS = {
    "sqlite": (
        *("reload.begun", "reload.lane_written", "reload.lane_committed"),
        *("reload.step_saved", "reload.table_saved", "reload.finished"),
    ),
    "files": ("reload.files_renamed", "reload.files_committed"),
    "delta": (
        *("reload.versions_lowered", "reload.mirror_committed", "reload.mirror_swept", "reload.mirror_replaced"),
    ),
    "delta changelog": ("reload.changelog_committed",),
    "delta scd2": ("reload.history_merged", "reload.history_swept", "reload.history_begun"),
}
SHORT = {
    *("reload.lane_committed", "reload.finished"),
    *("reload.files_renamed", "reload.mirror_committed", "reload.changelog_committed"),
    "reload.history_merged",
}


def steps_of(form: str) -> list[str]:
    each = os.environ.get("MILLSTREAM_CHAOS_EACH") == "1"
    return sorted(step for step in STEPS[form] if each or step in SHORT)


def test_every_step_is_killed_here() -> None:
    here = {step for steps in STEPS.values() for step in steps} | {"reload.asked"}
    # Of a target that has lost changes: tests/integration/test_journal_limit.py.
    here.add("reload.skipped")
    assert here == set(failpoints("reload"))


class Reloads(Deliveries):
    """Every table is copied anew, in processes that are killed; the source changes in between."""

    def __init__(self, root: Path, capture: Captured, kind: str, **options: str) -> None:
        super().__init__(root, capture, kind, {"path": str(root / "there"), **options}, reload)
        self._state = root / "state.db"
        self.run([])

    def ask(self, asked: AskedTables = EVERYTHING, *, killed: bool = False) -> None:
        if not killed:
            ask(*self._order, asked=asked)
            return
        ended = run(ask, *self._order, environment={"MILLSTREAM_FAILPOINT": "reload.asked"})
        assert ended.code == -signal.SIGKILL, ended.stderr

    def record(self) -> Json:
        store = SqliteStateStore(self._state, read_only=True)
        found = store.notes("shop", RELOAD)["log"]
        store.close()
        return found


def test_a_mirror_in_a_database(tmp_path: Path, database: Database) -> None:
    database.sql(TABLES)
    write(database, 1, 300)
    with captured(database, tmp_path / "journal") as capture:
        capture.await_log_end()
        reloads = Reloads(tmp_path, capture, "sqlite")
        with closing(sqlite3.connect(tmp_path / "there")) as copy, copy:
            copy.execute('DELETE FROM "public.item" WHERE id % 2 = 0')
            copy.execute('UPDATE "public.parts" SET note = NULL')
            copy.execute('DELETE FROM "public.keyless" WHERE n = 1')
        database.sql("ALTER TABLE parts_two DETACH PARTITION parts_two_a")
        reloads.ask(killed=True)
        steps = steps_of("sqlite")
        assert reloads.run(steps) == steps
        assert reloads.record()["state"] == "done"
        with closing(sqlite3.connect(tmp_path / "there")) as copy:
            for table, columns in {"item": "id, flag, note", "parts": "id, region, note", "keyless": "what, n"}.items():
                held = copy.execute(f'SELECT {columns} FROM "public.{table}"').fetchall()
                expected = database.sql(f"SELECT {columns.replace('flag', 'flag::int')} FROM {table}")
                assert sorted(held, key=repr) == sorted(expected, key=repr), table


def test_files(tmp_path: Path, database: Database) -> None:
    database.sql(TABLES)
    write(database, 1, 300)
    with captured(database, tmp_path / "journal") as capture:
        capture.await_log_end()
        reloads = Reloads(tmp_path, capture, "files")
        database.sql("ALTER TABLE parts_two DETACH PARTITION parts_two_a")
        reloads.ask()
        steps = steps_of("files")
        assert reloads.run(steps) == steps
        found = relations(capture)
        directories = {name: directory_of(found[name]) for name in NAMES}
        assert differing(database, tmp_path / "there", found, directories) == []


FEW = """
CREATE TABLE parts (id int PRIMARY KEY, note text) PARTITION BY RANGE (id);
CREATE TABLE parts_a PARTITION OF parts FOR VALUES FROM (0) TO (100);
CREATE TABLE parts_b PARTITION OF parts FOR VALUES FROM (100) TO (10000);
CREATE TABLE keyless (id int, note text);
INSERT INTO parts SELECT i, 'part' FROM generate_series(90, 300) i;
INSERT INTO keyless SELECT i % 3, 'same' FROM generate_series(1, 30) i;
"""


class FewTables(Reloads):
    def change(self) -> None:
        database = self._capture.database
        database.sql("INSERT INTO keyless VALUES (9, 'one more')")
        database.sql("DELETE FROM parts WHERE id = (SELECT min(id) FROM parts WHERE id > 150)")
        database.sql("UPDATE parts SET note = note || '+', id = id + 1000 WHERE id IN (SELECT max(id) FROM parts)")
        database.sql("UPDATE parts SET note = note || '.' WHERE id % 7 = 0")
        self._capture.await_log_end()


@pytest.mark.parametrize("form", ["delta", "delta changelog", "delta scd2"])
def test_lakes(tmp_path: Path, database: Database, form: str) -> None:
    database.sql(FEW)
    kind, _, write = form.partition(" ")
    with captured(database, tmp_path / "journal") as capture:
        capture.await_log_end()
        reloads = FewTables(tmp_path, capture, kind, **({"write": write} if write else {}))
        database.sql("ALTER TABLE parts DETACH PARTITION parts_a")
        reloads.ask()
        steps = steps_of(form)
        assert reloads.run(steps) == steps
        assert reloads.record()["state"] == "done"
        found = relations(capture)
        for table in ("parts", "keyless"):
            if write == "changelog":
                reader = ChangelogReader(DeltaChanges(str(tmp_path / "there")))
                parts: Any = list(reader.read(found[table], {}))
            else:
                parts = [DeltaTable(str(tmp_path / "there" / f"public.{table}")).to_pyarrow_table()]
            if write == "scd2":
                ended = parts[0].filter(pc.invert(parts[0]["is_current"]))
                assert pc.all(pc.less_equal(ended["valid_from"], ended["valid_to"])).as_py()
                assert pc.all(pc.less(ended["_ms_position"], ended["_ms_end_position"])).as_py()
                parts = [parts[0].filter(parts[0]["is_current"])]
            held = [row for part in parts for row in zip(*(part[n].to_pylist() for n in ("id", "note")), strict=True)]
            assert sorted(held) == sorted(database.sql(f"SELECT id, note FROM {table}")), table


RANGE_STEPS = {
    "sqlite": ("reload.lane_written", "reload.lane_committed", "reload.step_saved"),
    "delta": ("reload.versions_lowered", "reload.mirror_committed", "reload.mirror_swept"),
}


@pytest.mark.parametrize("kind", RANGE_STEPS)
def test_a_range_of_a_table(tmp_path: Path, database: Database, kind: str) -> None:
    database.sql(FEW)
    with captured(database, tmp_path / "journal") as capture:
        capture.await_log_end()
        reloads = FewTables(tmp_path, capture, kind)
        database.sql("ALTER TABLE parts DETACH PARTITION parts_a")
        if kind == "sqlite":
            with closing(sqlite3.connect(tmp_path / "there")) as copy, copy:
                copy.execute("UPDATE \"public.parts\" SET note = 'damaged'")
        else:
            DeltaTable(str(tmp_path / "there" / "public.parts")).update(updates={"note": "'damaged'"})
        reloads.ask(AskedTables(("public.parts",), where="id < 200"))
        steps = sorted(step for step in RANGE_STEPS[kind] if step in steps_of(kind))
        assert reloads.run(steps) == steps
        assert reloads.record()["state"] == "done"
        held = dict(_held(tmp_path / "there", kind))
        expected = dict(database.sql("SELECT id, note FROM parts"))
        assert {id_: note for id_, note in held.items() if id_ < 200} == {
            id_: note for id_, note in expected.items() if id_ < 200
        }
        assert held.keys() == expected.keys(), "what is gone at the source was in the range"
        outside = {note for id_, note in held.items() if 200 <= id_ <= 290 and id_ % 7}
        assert outside == {"damaged"}


def _held(place: Path, kind: str) -> list[tuple[int, str]]:
    if kind == "sqlite":
        with closing(sqlite3.connect(place)) as copy:
            return copy.execute('SELECT id, note FROM "public.parts"').fetchall()
    found = DeltaTable(str(place / "public.parts")).to_pyarrow_table()
    return list(zip(found["id"].to_pylist(), found["note"].to_pylist(), strict=True))
