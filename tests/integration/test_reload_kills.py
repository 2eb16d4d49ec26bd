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
from tests.fixtures.delivering import EVERYTHING, ask, fill, reload
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
    "ranges": (
        *("reload.first_asked", "reload.target_begun", "reload.table_begun", "reload.ranges_saved"),
        "reload.filled",
    ),
}
SHORT = {
    *("reload.target_begun", "reload.ranges_saved"),
    *("reload.lane_committed", "reload.finished"),
    *("reload.files_renamed", "reload.mirror_committed", "reload.changelog_committed"),
    "reload.history_merged",
}


EACH = os.environ.get("MILLSTREAM_CHAOS_EACH") == "1"


def steps_of(form: str) -> list[str]:
    return sorted(step for step in STEPS[form] if EACH or step in SHORT)


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


@pytest.mark.parametrize("kind", RANGE_STEPS if os.environ.get("MILLSTREAM_CHAOS_EACH") == "1" else ["sqlite"])
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


MANY = """
CREATE TABLE big (id int PRIMARY KEY, note text);
CREATE TABLE parts (region int, at timestamptz, note text, PRIMARY KEY (region, at)) PARTITION BY LIST (region);
CREATE TABLE parts_one PARTITION OF parts FOR VALUES IN (1);
CREATE TABLE parts_two PARTITION OF parts FOR VALUES IN (2);
CREATE TABLE keyless (id int, note text);
ALTER TABLE big ALTER note SET STORAGE EXTERNAL;
INSERT INTO big SELECT i, CASE WHEN i % 100 = 0 THEN repeat(i::text, 900) ELSE repeat(i::text, 60) END
    FROM generate_series(1, 3000) i;
INSERT INTO parts SELECT 1 + i % 2, timestamptz '2024-01-01' + i * interval '1 s', repeat('p', 100)
    FROM generate_series(1, 2000) i;
INSERT INTO keyless SELECT i % 3, 'same' FROM generate_series(1, 30) i;
"""


class Fills(Deliveries):
    """A mirror that gets its first rows in ranges, in processes that are killed; rows move between the ranges."""

    def __init__(self, root: Path, capture: Captured, kind: str) -> None:
        super().__init__(root, capture, kind, {"path": str(root / "there")}, fill)
        self._kind = kind
        self._round = 0

    def change(self) -> None:
        self._round += 1
        database, low = self._capture.database, self._round * 10
        database.sql(f"UPDATE big SET id = 10000 - id WHERE id % 500 = {low}")
        database.sql(f"UPDATE big SET id = -id, note = 'moved' WHERE id % 500 = {low + 1}")
        database.sql(f"UPDATE big SET id = id + 0 WHERE id % 700 = 0; DELETE FROM big WHERE id % 500 = {low + 2}")
        database.sql(f"INSERT INTO big SELECT i, 'again' FROM generate_series({low + 2}, 3000, 1000) i")
        database.sql(f"UPDATE parts SET region = 3 - region WHERE extract(second FROM at) = {self._round}")
        # A long value is not sent with a change that leaves it alone, and its row may not have come yet.
        database.sql(f"UPDATE big SET id = id + 5000 WHERE id IN ({self._round * 100}, {3000 - self._round * 100})")
        database.sql("INSERT INTO keyless VALUES (9, 'one more')")
        self._capture.await_log_end()

    def killed_at(self, armed: str) -> Json:
        """Run until it is killed there; what was written down of the copy by then."""
        self.change()
        ended = run(fill, *self._order, environment={"MILLSTREAM_FAILPOINT": armed})
        assert ended.code == -signal.SIGKILL, ended.stderr
        return self.record()

    def record(self) -> Json:
        store = SqliteStateStore(self._root / "state.db", read_only=True)
        found = store.notes("shop", RELOAD)["log"]
        store.close()
        return found

    def letters(self) -> list[str]:
        store = SqliteStateStore(self._root / "state.db", read_only=True)
        found = store.letters("shop", "log")
        store.close()
        return [f"{one.kind} {one.state} {one.seq} {one.key}" for one in found]

    def held(self, table: str, *names: str) -> list[tuple[Any, ...]]:
        if self._kind == "delta":
            found = DeltaTable(str(self._root / "there" / f"public.{table}")).to_pyarrow_table()
            return sorted(zip(*(found[name].to_pylist() for name in names), strict=True))
        with closing(sqlite3.connect(self._root / "there")) as copy:
            return sorted(copy.execute(f'SELECT {", ".join(names)} FROM "public.{table}"').fetchall())

    def differing(self) -> list[str]:
        tables = {"big": ("id", "note"), "keyless": ("id", "note"), "parts": ("region", "note")}
        return [
            name
            for name, columns in tables.items()
            if self.held(name, *columns)
            != sorted(self._capture.database.sql(f"SELECT {', '.join(columns)} FROM {name}"))
        ]


@pytest.mark.parametrize("kind", ["sqlite", "delta"] if EACH else ["sqlite"])
def test_first_rows_in_ranges(tmp_path: Path, database: Database, kind: str) -> None:
    database.sql(MANY)
    with captured(database, tmp_path / "journal") as capture:
        capture.await_log_end()
        fills = Fills(tmp_path, capture, kind)
        inside = {"sqlite": ["reload.lane_committed:6", "reload.step_saved:9"], "delta": ["reload.mirror_committed:6"]}
        beginning = [step for step in ("reload.first_asked", "reload.target_begun") if step in steps_of("ranges")]
        armed = [*(step for step in steps_of("ranges") if step not in beginning), *inside[kind]]
        for step in beginning:
            fills.killed_at(step)
        # What is known of it is lost before all rows came: it is not taken for whole.
        fills.killed_at("reload.step_saved:3")
        for path in tmp_path.glob("state.db*"):
            path.unlink()
        assert fills.run(armed) == sorted(one.partition(":")[0] for one in armed)
        assert fills.record()["state"] == "done"
        fills.run([])
        assert fills.differing() == []
        assert fills.letters() == [], "what waited for its row has it"


def test_ranges_that_are_done_are_not_read_again(tmp_path: Path, database: Database) -> None:
    database.sql(MANY)
    with captured(database, tmp_path / "journal") as capture:
        capture.await_log_end()
        fills = Fills(tmp_path, capture, "sqlite")
        # The smaller tables come first, in three ranges and more.
        done = fills.killed_at("reload.step_saved:9")["tables"]["public.big"]
        assert (done["state"], len(done["points"])) == ("running", 1)
        assert 0 < done["done"] < done["chunks"] - 2
        again = fills.killed_at("reload.step_saved:2")["tables"]["public.big"]
        assert again["done"] == done["done"] + 2
        fills.run([])
        table = fills.record()["tables"]["public.big"]
        assert [point["from"] for point in table["points"]] == [0, done["done"], again["done"]]
        assert fills.differing() == []
        # Rows have the version of the snapshot that they were read under, but those that were changed since.
        versions = dict(fills.held("big", "id", "_ms_seq"))
        first, second, third = (point["seq"] for point in table["points"])
        assert first < second < third
        found = [versions[id] for id in sorted(versions) if 0 < id <= 3000 and versions[id] in (first, second, third)]
        assert found == sorted(found)
        assert {first, second, third} == set(found)


REWRITES = {
    "same columns": "ALTER TABLE big ALTER note TYPE text USING 'rewritten ' || id",
    "other columns": "ALTER TABLE big ALTER note TYPE varchar USING left(note, 20), ADD more int DEFAULT 7",
    "truncated": "TRUNCATE big; INSERT INTO big SELECT i, 'other' FROM generate_series(1, 2500) i",
}


@pytest.mark.skipif(not EACH, reason="one of them is in test_reload.py, without a kill: `make chaos` runs all")
@pytest.mark.parametrize("alter", REWRITES)
def test_a_table_that_is_rewritten_between_ranges_begins_again(tmp_path: Path, database: Database, alter: str) -> None:
    database.sql(MANY)
    with captured(database, tmp_path / "journal") as capture:
        capture.await_log_end()
        fills = Fills(tmp_path, capture, "sqlite")
        assert fills.killed_at("reload.step_saved:9")["tables"]["public.big"]["done"] > 0
        database.sql(REWRITES[alter])
        fills.run([])
        table = fills.record()["tables"]["public.big"]
        assert (table["state"], len(table["points"])) == ("done", 1)
        assert fills.differing() == []
