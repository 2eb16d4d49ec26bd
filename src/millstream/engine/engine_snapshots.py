"""What an `Engine` can do about the states of its targets: keep them, and bring them back."""

from __future__ import annotations

import math
import queue
import threading
from typing import TYPE_CHECKING, Any

from millstream.engine.answers import unpacked
from millstream.engine.engine_part import EnginePart
from millstream.engine.faults import FaultLog
from millstream.engine.operations import Operations
from millstream.engine.requests import request, snapshot_order
from millstream.engine.unknown import unknown_stream
from millstream.errors import ConfigError, HomeLocked, RequestFailed
from millstream.model import Json, StreamSpec

if TYPE_CHECKING:
    from millstream.engine.snapshotter import Snapshotter
    from millstream.snapshots.manifest import TargetSnapshot


class EngineSnapshots(EnginePart):
    """The part of `Engine` that is about snapshots of its targets' states."""

    _snapshotter: Snapshotter | None

    def create_snapshot(
        self, name: str, target: str | None = None, *, path: str | None = None, format: str | None = None
    ) -> list[TargetSnapshot]:
        """Keep the state of a target, or of each that can be kept, with its position, while the stream goes on.

        `path` is a directory or URL, and `format` arrow or jsonl; by default what the stream's `snapshots` says.
        Returns when the snapshots are whole and durable. Raises NotSupported for a target of another kind than
        sqlite and duckdb, NotReady for one that has nothing yet, SnapshotError where they cannot be written,
        ConfigError for a path that can be none, or has a key in it.
        """
        from millstream.snapshots.store import SnapshotStore
        from millstream.snapshots.urls import check_address

        # Before it is written down for another process: there may be a key in it.
        check_address(path)
        arguments: Json = {"name": name, "target": target, "path": path, "format": format}
        done = self._take_running(arguments) if self.is_running else self._take_elsewhere(arguments)
        if done["failed"] and not done["snapshots"]:
            raise RequestFailed("; ".join(f"{one}: {why}" for one, why in done["failed"].items()))
        return [SnapshotStore(one["base"]).get(name, one["target"], one["id"]) for one in done["snapshots"]]

    def list_snapshots(self, name: str, target: str | None = None, *, path: str | None = None) -> list[TargetSnapshot]:
        """The snapshots that are whole, by target, oldest first. Raises UnknownStream, ConfigError, SnapshotError."""
        from millstream.engine.snapshots import place_of

        stream = self._known(name, target)
        place = place_of(stream, path)
        names = [one.name for one in stream.targets if target in (None, one.name)]
        return [snapshot for one in names for snapshot in place.all_of(name, one)]

    def inspect_snapshot(
        self, name: str, id: str = "latest", target: str | None = None, *, path: str | None = None, check: bool = False
    ) -> tuple[TargetSnapshot, str | None]:
        """A snapshot, and why the stream could not go on from it now; None if it could.

        `check` reads all of its files, and raises SnapshotError for one that is not what was written.
        """
        from millstream.engine.snapshots import why_unusable
        from millstream.snapshots.store import SnapshotStore

        snapshot = self._one(name, id, target, path)
        if check:
            SnapshotStore(snapshot.base).check(snapshot)
        return snapshot, why_unusable(self._home, self._known(name, target), snapshot)

    def restore_snapshot(
        self,
        name: str,
        id: str = "latest",
        target: str | None = None,
        *,
        path: str | None = None,
        overwrite: bool = False,
    ) -> Json:
        """Bring a target back to a snapshot; its delivery then goes on from there, with no gap and no double.

        Where the home runs it is written down, and the target's delivery does it before it goes on (a paused one when
        it is resumed); else it is done here. Returns the restore as status has it. The target must be empty, unless
        `overwrite`. Raises OutOfRange, which names the earliest change there is, when the journal does not hold
        what follows any more; JournalMismatch, SnapshotError, TargetRefused.
        """
        snapshot = self._one(name, id, target, path)
        asked: Json = {"id": snapshot.id, "path": snapshot.base, "overwrite": overwrite}
        if self.is_running:
            return self._do_later(lambda operations: operations.restore(name, snapshot.target, asked))
        return self._ask("restore", {"name": name, "target": snapshot.target, "asked": asked})

    def delete_snapshot(
        self, name: str, id: str, target: str | None = None, *, path: str | None = None
    ) -> TargetSnapshot:
        """Remove a snapshot; returns what it was. Raises UnknownName if there is none."""
        from millstream.snapshots.store import SnapshotStore

        snapshot = self._one(name, id, target, path)
        SnapshotStore(snapshot.base).delete(snapshot)
        return snapshot

    def prune_snapshots(
        self, name: str, target: str | None = None, *, keep: int | None = None, path: str | None = None
    ) -> list[TargetSnapshot]:
        """Remove all but the newest `keep` snapshots of each target (by default what the stream says).

        What was begun more than a day ago and never finished goes as well.
        """
        from millstream.engine.snapshots import place_of

        stream = self._known(name, target)
        if keep is None and stream.snapshots is not None:
            keep = stream.snapshots.keep
        if keep is None or keep < 1:
            raise ConfigError(
                f"nothing says how many snapshots of stream {name} are kept",
                hint="give --keep, 1 or more, or `snapshots: {keep: ...}` in its stream file",
            )
        place = place_of(stream, path)
        names = [one.name for one in stream.targets if target in (None, one.name)]
        return [gone for one in names for gone in place.prune(name, one, keep)]

    def _one(self, name: str, id: str, target: str | None, path: str | None) -> TargetSnapshot:
        """The snapshot that is meant. Without a target it is that of the only one that has any."""
        from millstream.engine.snapshots import kept_targets, place_of

        stream = self._known(name, target)
        able = kept_targets(stream, [one.name for one in stream.targets if target in (None, one.name)], one=False)
        if len(able) > 1:
            raise ConfigError(
                f"stream {name} has several targets with snapshots: {', '.join(one.name for one in able)}",
                hint="say which with --target",
            )
        return place_of(stream, path).get(name, able[0].name, id)

    def _known(self, name: str, target: str | None) -> StreamSpec:
        """The stream as the home has it. Raises UnknownStream, also for a target that it does not have."""
        if not self._home.state_path.exists():
            raise unknown_stream(name, [], self._home)
        store = self._home.open_state(read_only=True)
        try:
            return Operations(self._home, store, self._observers).known(name, target)
        finally:
            store.close()

    def _take_running(self, arguments: Json) -> Json:
        answers: queue.Queue[Json] = queue.Queue()
        snapshotter = self._snapshotter

        def begin(operations: Operations) -> None:
            if snapshotter is not None:
                snapshotter.submit(snapshot_order(operations, arguments, answers.put))

        self._do(begin)
        while True:
            try:
                return unpacked(answers.get(timeout=1.0))
            except queue.Empty:
                if not self.is_running:
                    raise RequestFailed("the engine has stopped") from None

    def _take_elsewhere(self, arguments: Json) -> Json:
        """Have the process that runs the home take it, or take it here if none does."""
        from millstream.engine.snapshotter import take_all

        self._known(arguments["name"], arguments["target"])
        while True:
            try:
                with self._home.lock():
                    store = self._home.open_state()
                    try:
                        faults = FaultLog(store, self._observers)
                        order = snapshot_order(Operations(self._home, store, faults), arguments, _nobody)
                        return take_all(self._home, store, faults, order, threading.Event())
                    finally:
                        store.close()
            except HomeLocked as locked:
                answer = request(self._home, "snapshot", arguments, math.inf, locked)
            if answer is not None:
                return unpacked(answer)


def _nobody(answer: Any) -> None:
    """Nobody waits for it: it is returned."""
