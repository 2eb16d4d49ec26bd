"""Kill -9 at each step of taking, restoring and removing a snapshot: it is there whole or not at all."""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from millstream.snapshots import RESTORE
from millstream.state.base import Doubt, Letter
from millstream.state.sqlite import SqliteStateStore
from tests.chaos.rig import failpoints
from tests.fixtures import keeping
from tests.fixtures.forks import run
from tests.fixtures.keeping import ORDERS, create, delete, deliver, kept, restore, rows, spec, wipe
from tests.fixtures.tuples import Change, insert, update
from tests.fixtures.tuples import delete as removed

TAKING = ("keep.begun", "keep.rows_written", "keep.table_written", "keep.written")
RESTORING = ("restore.written", "restore.committed", "restore.brought_back", "restore.noted")
OTHERS = ("keep.finished", "keep.manifest_removed", "restore.asked")

BEFORE: list[list[Change]] = [[insert("1", "one"), insert("2", "two")], [insert("3", "three")]]
AFTER: list[list[Change]] = [[update(("1", "one again"))], [removed(key=("2", None)), insert("4", "four")]]

KINDS = [("sqlite", "mirror"), ("duckdb", "changelog")]


def kill(step: str, function: Callable[..., int | None], *arguments: Any) -> None:
    done = run(function, *arguments, environment={"MILLSTREAM_FAILPOINT": step})
    assert done.code == -signal.SIGKILL, (step, done.stderr)


def does(function: Callable[..., int | None], *arguments: Any) -> None:
    done = run(function, *arguments)
    assert done.code == 0, done.stderr


def ids(root: Path) -> list[str]:
    return [one.id for one in kept(root)]


def letter(root: Path, *, add: bool) -> list[Letter]:
    """The target's dead letters; one of the second change is added, which is in doubt too, or all are removed."""
    with closing(SqliteStateStore(root / "state.db")) as store:
        there = store.letters()
        if add:
            at = datetime.now(UTC)
            store.add_letters([Letter("shop", "log", "public.orders", "e-2", 2, "c", "value", "no", at, None)])
            store.add_doubts([Doubt("shop", "log", "public.orders", "e-2", 2, "3", 1 << 40)])
        else:
            store.remove_letters([one.id for one in there])
            store.set_doubts("shop", "log", [])
        return there


def test_every_step_is_killed_here() -> None:
    mine = {name for name in failpoints() if name.startswith(("keep.", "restore."))}
    assert mine == {*TAKING, *RESTORING, *OTHERS}


@pytest.mark.parametrize(("kind", "write"), KINDS)
def test_a_target_comes_back_exactly_whatever_is_killed(tmp_path: Path, kind: str, write: str) -> None:
    root = str(tmp_path)
    stream = spec(tmp_path, kind, write)
    journal = keeping.home(tmp_path, stream, BEFORE)
    does(deliver, root, kind, write, False)
    first = rows(tmp_path, kind)
    letter(tmp_path, add=True)

    for step in TAKING:
        kill(step, create, root)
        assert kept(tmp_path) == [], step
    kill("keep.finished", create, root)
    (snapshot,) = kept(tmp_path)
    assert (snapshot.seq, snapshot.rows, snapshot.letters and snapshot.letters.rows) == (3, len(first), 1)
    folders = list((tmp_path / "snapshots" / "shop" / "log").iterdir())
    assert [one.name for one in folders] == [snapshot.id], "what was begun before is cleared away"

    for one in AFTER:
        journal.append(ORDERS, one)
    journal.writer.close()
    does(deliver, root, kind, write, False)
    everything = rows(tmp_path, kind)
    assert everything != first
    letter(tmp_path, add=False)
    wipe(tmp_path, kind)

    kill("restore.asked", restore, root)
    assert rows(tmp_path, kind) == []
    for step in RESTORING:
        kill(step, deliver, root, kind, write, False)
        assert rows(tmp_path, kind) == ([] if step == "restore.written" else first), step
    does(deliver, root, kind, write, False)
    assert rows(tmp_path, kind) == everything
    with closing(SqliteStateStore(tmp_path / "state.db")) as store:
        assert [one.key for one in store.doubts("shop", "log")] == ["3"], "what was in doubt is so again"
    assert [one.event_id for one in letter(tmp_path, add=False)] == ["e-2"], "its letter came back with it"
    with closing(SqliteStateStore(tmp_path / "state.db")) as store:
        assert store.notes("shop", RESTORE)["log"]["state"] == "done"
        epoch = store.current_epoch("shop", "log")
        assert epoch is not None
        assert epoch.reason == f"restored from snapshot {snapshot.id}"

    kill("keep.manifest_removed", delete, root, snapshot.id)
    assert kept(tmp_path) == []
    does(create, root)
    assert len(ids(tmp_path)) == 1
    assert len(list((tmp_path / "snapshots" / "shop" / "log").iterdir())) == 1


def test_a_lost_target_begins_with_its_newest_snapshot_by_itself(tmp_path: Path) -> None:
    root, arguments = str(tmp_path), ("sqlite", "mirror", True)
    journal = keeping.home(tmp_path, spec(tmp_path, "sqlite", automatic=True), BEFORE)
    does(deliver, root, *arguments)
    does(create, root)
    for one in AFTER:
        journal.append(ORDERS, one)
    journal.writer.close()
    does(deliver, root, *arguments)
    everything = rows(tmp_path, "sqlite")
    wipe(tmp_path, "sqlite")
    for step in RESTORING:
        kill(step, deliver, root, *arguments)
    does(deliver, root, *arguments)
    assert rows(tmp_path, "sqlite") == everything
