"""How a delivery begins: it resumes, restores a snapshot of its target, or starts cold. Chosen here, and told."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime

from millstream.engine.snapshots import Restoring, place_of, restore_record
from millstream.errors import MillstreamError
from millstream.journal import JournalReader
from millstream.model import Json, StreamSpec, TargetSpec
from millstream.observe import Level
from millstream.snapshots.restoring import check_usable
from millstream.snapshots.store import SnapshotStore
from millstream.state.base import StateStore
from millstream.targets.base import Target

RESUME, RESTORE, COLD = "resume", "restore", "cold start"
NO_SNAPSHOT = "there is no snapshot of it"

Tell = Callable[[str, str, Level, Json], None]
"""kind, message, level, fields"""


class Startup:
    """Of one delivery, on its thread; `said` can be read at any time."""

    def __init__(
        self,
        stream: StreamSpec,
        spec: TargetSpec,
        target: Target,
        store: StateStore,
        journal: JournalReader,
        tell: Tell,
    ) -> None:
        self._stream = stream
        self._spec = spec
        self._target = target
        self._restoring = Restoring(store, stream, spec, target)
        self._journal = journal
        self._tell = tell
        self._path: str | None = None
        self._reason = ""
        self._unusable = ""
        self.said: Json | None = None
        """The path that was taken and why, once it was: `path`, `reason`, `seq`, `at`."""

    def restore(self, is_new: Callable[[], bool], on_begin: Callable[[], None]) -> str | None:
        """Bring the target back to a snapshot, if that was asked for or is the way to begin.

        That is so for a target that has nothing, where the stream says where its snapshots are. Returns why a new
        epoch begins, if it does. Raises what an asked restore cannot be done for.
        """
        record = self._restoring.due()
        if record is not None and not (record["automatic"] and is_new()):
            on_begin()
            record = self._finished(record)
        elif self._stream.snapshots is None or not self._restoring.possible or not is_new():
            return None
        else:
            on_begin()
            record = self._newest()
        if record is None:
            return None
        self._path = RESTORE
        # One that began by itself may have been interrupted, and only come to its end now.
        why = "the target is empty" if record["automatic"] else "that was asked for"
        self._reason = f"{why}; snapshot {record['id']} is at seq {record['seq']}"
        return f"restored from snapshot {record['id']}"

    def _finished(self, record: Json) -> Json | None:
        """Do what was asked for, or interrupted. None: what began by itself is of no use to the target any more."""
        try:
            return self._restoring.run(record, self._journal)
        except MillstreamError as failed:
            if failed.transient or not record["automatic"]:
                raise
            return None

    def _newest(self) -> Json | None:
        """Restore the newest snapshot that can be gone on from; None if there is none, and why is remembered."""
        failed: list[str] = []
        try:
            place = place_of(self._stream, None)
            for id in reversed(place.ids(self._stream.name, self._spec.name)):
                record = self._tried(place, id, failed)
                if record is not None:
                    return record
        except MillstreamError as unreadable:
            if unreadable.transient:
                raise
            failed.append(unreadable.message)
        self._unusable = failed[0] if failed else NO_SNAPSHOT
        return None

    def _tried(self, place: SnapshotStore, id: str, failed: list[str]) -> Json | None:
        try:
            snapshot = place.find(self._stream.name, self._spec.name, id)
            if snapshot is None:
                return None
            check_usable(snapshot, self._journal, self._stream, self._spec)
            record = self._restoring.save(restore_record(snapshot, overwrite=False, automatic=True))
            return self._restoring.run(record, self._journal)
        except MillstreamError as refused:
            if refused.transient:
                raise
            failed.append(refused.message)
            return None

    def baseline(self) -> None:
        """The target has nothing, and all rows of the source come first."""
        self._path, self._reason = COLD, "the target is empty; it begins with all rows of the source"

    def begun(self, seq: int, reason: str | None) -> None:
        """The delivery goes on after `seq`; `reason` is that of a new epoch. Says how it began, once."""
        self._restoring.finish()
        if self._path is None and self._target.cursor() is None:
            self._path, self._reason = COLD, f"the target is empty; it begins after seq {seq} of the journal"
        if self._path is None and self.said is not None:
            return
        path = self._path or RESUME
        why = self._reason or f"the target is at seq {seq}" + (f"; {reason}" if reason else "")
        if path == COLD and self._unusable:
            why += f"; not from a snapshot: {self._unusable}"
        self.said = {"path": path, "reason": why, "seq": seq, "at": datetime.now(UTC).isoformat()}
        # A first start has no snapshot to begin with; one that is there and cannot be used is worth a look.
        level = Level.WARNING if path == COLD and self._unusable not in ("", NO_SNAPSHOT) else Level.INFO
        self._tell("delivery.startup", f"{path}: {why}", level, {"path": path, "reason": why, "seq": seq})
        self._path, self._reason, self._unusable = None, "", ""
