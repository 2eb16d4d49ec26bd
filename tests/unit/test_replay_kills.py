"""Kill -9 at each step of a replay: mirrors are never wrong, and a changelog gets every change once more, once."""

from __future__ import annotations

import json
import signal
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from millstream.engine.replay import waiting
from millstream.state.sqlite import SqliteStateStore
from tests.fixtures.delivering import deliver
from tests.fixtures.forks import run
from tests.fixtures.journals import Journal, shop_table
from tests.fixtures.tuples import OID, Change, delete, insert, truncate, update

AT_A_MIRROR = {
    "sqlite": ("replay.begun", "replay.lane_written", "replay.lane_committed", "replay.saved"),
    "delta": ("replay.mirror_committed", "replay.tables_committed"),
}
AT_A_CHANGELOG = {
    "sqlite": ("replay.lane_committed", "replay.delivered"),
    "delta": ("replay.changelog_committed", "replay.finished"),
}
LEFT = [(1, "one"), (2, "two again"), (7, "long"), (8, "new")]
"""What the changes leave. Row 4 became 7 without its long value being sent."""

CHANGES: list[list[Change]] = [
    [insert("9", "truncated")],
    [truncate()],
    [insert("1", "one"), insert("2", "two")],
    [insert("3", "gone"), insert("4", "long")],
    [update(("2", "two again"))],
    [update(("7", ...), key=("4", None))],
    [insert("4", "another"), delete(key=("3", None))],
    [update(("4", ...)), delete(key=("4", None))],
    [insert("8", "new")],
]


def fill(root: Path) -> int:
    journal = Journal.create(root / "journal")
    for changes in CHANGES:
        journal.append(shop_table("orders", OID), changes)
    journal.writer.close()
    return journal.last_seq


def ask(root: Path, end: int, *tables: str, mirror: bool = False) -> None:
    store = SqliteStateStore(root / "state.db")
    store.save_replay("shop", "log", waiting(0, end, tables, newest_first=mirror))
    store.close()


def record(root: Path) -> dict[str, Any]:
    store = SqliteStateStore(root / "state.db")
    found = store.replays("shop")["log"]
    store.close()
    return found


def held(kind: str, path: Path, columns: str) -> list[tuple[Any, ...]]:
    if kind == "sqlite":
        with closing(sqlite3.connect(path)) as lite:
            return lite.execute(f'SELECT {columns} FROM "public.orders" ORDER BY 1').fetchall()
    table = DeltaTable(str(path / "public.orders")).to_pyarrow_table(columns=columns.split(", "))
    return sorted(
        zip(*(table[name].to_pylist() for name in table.column_names), strict=True), key=lambda row: (row[0], repr(row))
    )


class Target:
    """A target that has everything, in processes that can be killed."""

    def __init__(self, root: Path, kind: str, write: str) -> None:
        self.root, self.kind, self.place, self.end = root, kind, root / "there", fill(root)
        self._options = {"path": str(self.place), **({"write": write} if write else {})}
        self.deliver()

    def deliver(self) -> None:
        done = run(deliver, str(self.root), self.kind, self._options)
        assert done.code == 0, done.stderr

    def kill_at(self, step: str) -> None:
        done = run(deliver, str(self.root), self.kind, self._options, environment={"MILLSTREAM_FAILPOINT": step})
        assert done.code == -signal.SIGKILL, (step, done.stderr)

    def rows(self, columns: str = "id, body, _ms_seq") -> list[tuple[Any, ...]]:
        return held(self.kind, self.place, columns)


@pytest.mark.parametrize("kind", AT_A_MIRROR)
def test_a_mirror_is_right_after_every_kill(tmp_path: Path, kind: str) -> None:
    target = Target(tmp_path, kind, "mirror")
    before = target.rows()
    assert [row[:2] for row in before] == LEFT
    ask(tmp_path, target.end, mirror=True)
    for step in AT_A_MIRROR[kind]:
        target.kill_at(step)
        assert target.rows() == before, step
    target.deliver()
    assert (record(tmp_path)["state"], target.rows()) == ("done", before)


def test_a_mirror_that_lost_rows_gets_them_back_and_no_other(tmp_path: Path) -> None:
    target = Target(tmp_path, "delta", "mirror")
    before = target.rows()
    DeltaTable(str(target.place / "public.orders")).delete("id < 3")
    ask(tmp_path, target.end, mirror=True)
    target.kill_at("replay.buried")
    assert set(target.rows()) <= set(before)
    target.deliver()
    assert target.rows() == before


@pytest.mark.parametrize("kind", AT_A_CHANGELOG)
def test_a_changelog_gets_every_change_once_more_and_once(tmp_path: Path, kind: str) -> None:
    target = Target(tmp_path, kind, "changelog")
    first = target.rows("_ms_seq, id, body")
    assert [row[0] for row in first] == list(range(1, target.end + 1))
    ask(tmp_path, target.end, mirror=False)
    for step in AT_A_CHANGELOG[kind]:
        target.kill_at(step)
    target.deliver()
    again = [row for row in target.rows("_ms_seq, id, body, _ms_epoch") if row[3] is not None]
    assert [row[:3] for row in again] == first
    assert {row[3] for row in again} == {record(tmp_path)["epoch"]}


@pytest.mark.parametrize("tables", [(), ("public.orders",)], ids=["all of it", "one table"])
def test_files_have_every_change_once_after_every_kill(tmp_path: Path, tables: tuple[str, ...]) -> None:
    target = Target(tmp_path, "files", "")
    first = listed(target.place)
    assert [row[0] for row in first] == list(range(1, target.end + 1))
    names = files(target.place)
    ask(tmp_path, target.end, *tables)
    for step in ("replay.files_renamed", "replay.files_committed", "replay.delivered"):
        target.kill_at(step)
        assert listed(target.place) == first, step
    target.deliver()
    assert record(tmp_path)["state"] == "done"
    assert listed(target.place) == first
    assert len(files(target.place)) == len(names), "the old ones are gone"
    assert not names & files(target.place)
    (commit,) = (target.place / "_millstream" / "commits").glob("*.json")
    assert json.loads(commit.read_text())["replayed"] == record(tmp_path)["epoch"] == 2


def listed(place: Path) -> list[tuple[Any, ...]]:
    """What the commits of a directory list, in the order of seq."""
    rows: list[tuple[Any, ...]] = []
    for commit in (place / "_millstream" / "commits").glob("*.json"):
        for file in json.loads(commit.read_text())["files"]:
            read = pq.read_table(place / file["path"], partitioning=None)
            rows += zip(*(read[name].to_pylist() for name in ("_ms_seq", "id", "body")), strict=True)
    return sorted(rows)


def files(place: Path) -> set[str]:
    return {path.name for path in place.glob("public.*/*.parquet")}
