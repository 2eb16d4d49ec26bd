"""Snapshots of targets' states: which there can be, where they are, taking one, and asking for a restore.

A restore is written down before anything is done about it, and done by the delivery of its target before it goes on,
or here when no process runs the home. Killed on the way, the next start does it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from datetime import UTC, datetime
from uuid import uuid4

from millstream.engine.fit import open_target
from millstream.engine.home import Home
from millstream.engine.reload import RELOAD
from millstream.engine.reload import UNFINISHED as UNDONE_RELOAD
from millstream.engine.replay import UNFINISHED
from millstream.errors import (
    ConfigError,
    MillstreamError,
    NotReady,
    NotSupported,
    SnapshotError,
    TargetRefused,
    TargetUnavailable,
)
from millstream.failpoint import failpoint
from millstream.journal import JournalReader
from millstream.model import Json, Mode, StreamSpec, TargetSpec
from millstream.snapshots import DONE, FAILED, RESTORE, RESTORED, UNDONE, WAITING
from millstream.snapshots.letters import Open
from millstream.snapshots.manifest import TargetSnapshot
from millstream.snapshots.restoring import check_usable, letters_of, restore
from millstream.snapshots.rows import Format
from millstream.snapshots.store import SnapshotStore
from millstream.snapshots.taking import Taking
from millstream.state.base import StateStore
from millstream.targets.base import Keepable, Target

PATIENCE = 60.0
"""Seconds that a target which somebody else has is waited for."""
_AGAIN = 0.5


def place_of(stream: StreamSpec, path: str | None) -> SnapshotStore:
    """Where the stream's snapshots are. Raises ConfigError when nothing says it."""
    if path is None and stream.snapshots is not None:
        path = stream.snapshots.path
    if path is None:
        raise ConfigError(
            f"nothing says where the snapshots of stream {stream.name} are",
            hint="give --path, or `snapshots: {path: ...}` in its stream file",
        )
    return SnapshotStore(path)


def keepable(stream: StreamSpec, target: TargetSpec) -> Keepable:
    """The target, as one whose state can be kept. Raises NotSupported if it cannot."""
    made = open_target(target)
    if not is_keepable(made):
        raise NotSupported(
            f"the state of target {target.name} of stream {stream.name} cannot be kept: it is of kind {target.kind}",
            hint="targets of kind sqlite and duckdb can be; of others take copies by their own means",
        )
    assert isinstance(made, Keepable)  # noqa: S101 - just seen
    return made


def is_keepable(target: Target) -> bool:
    """Whether a target's state can be kept."""
    return isinstance(target, Keepable) and target.keeps_state


def kept_targets(stream: StreamSpec, names: Sequence[str], *, one: bool) -> list[TargetSpec]:
    """Of these targets those whose state can be kept; `one` was named, and must. Raises NotSupported."""
    if stream.mode is Mode.SNAPSHOT:
        raise NotSupported(
            f"stream {stream.name} has mode snapshot: no changes follow that a restored target could go on with",
            hint="a new target gets another copy",
        )
    wanted = [target for target in stream.targets if target.name in names]
    if one:
        keepable(stream, wanted[0])
        return wanted
    found = [target for target in wanted if is_keepable(open_target(target))]
    if not found:
        keepable(stream, wanted[0])
    return found


def take(
    home: Home,
    store: StateStore,
    stream: StreamSpec,
    target: TargetSpec,
    *,
    path: str | None,
    format: str | None,
    stopping: threading.Event,
    aside: AbstractContextManager[None] | None = None,
) -> TargetSnapshot:
    """Take a snapshot, note it, and keep no more than the stream's rules say.

    `aside` keeps batches off while a target is read that can only be read alone.
    """
    _refuse_meanwhile(store, stream, target.name)
    rules, made = stream.snapshots, keepable(stream, target)
    chosen = Format(format or (rules.format if rules else Format.ARROW))
    place = place_of(stream, path)
    taking = Taking(
        place, stream, target, made, lambda: _letters(store, stream, target), str(home.path), chosen, stopping
    )
    with aside if aside is not None and made.read_alone else nullcontext():
        snapshot = _patiently(taking)
    if rules is not None and rules.keep is not None and path in (None, rules.path):
        place.prune(stream.name, target.name, rules.keep)
    return snapshot


def _patiently(taking: Taking) -> TargetSnapshot:
    """Try until the target can be read: another process may have it."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            return taking.run()
        except TargetUnavailable:
            if time.monotonic() >= deadline or taking.stopping.wait(_AGAIN):
                raise


def _refuse_meanwhile(store: StateStore, stream: StreamSpec, target: str) -> None:
    replay, due = store.replays(stream.name).get(target), store.notes(stream.name, RESTORE).get(target)
    if replay is not None and replay["state"] in UNFINISHED:
        raise NotReady(
            f"target {target} of stream {stream.name} is being replayed: it is between two states",
            hint="take the snapshot when that is done; `millstream status` shows it",
        )
    reload = store.notes(stream.name, RELOAD).get(target)
    if reload is not None and reload["state"] in UNDONE_RELOAD:
        raise NotReady(
            f"tables of target {target} of stream {stream.name} are being copied anew: it is between two states",
            hint="try again when that is done; `millstream status` shows it",
        )
    if due is not None and due["state"] == WAITING:
        raise NotReady(f"target {target} of stream {stream.name} is about to be restored from snapshot {due['id']}")


def _letters(store: StateStore, stream: StreamSpec, target: TargetSpec) -> Open:
    found = (store.get_letter(one.id) for one in store.letters(stream.name, target.name))
    letters = [letter for letter in found if letter is not None]
    return Open(letters, store.doubts(stream.name, target.name))


def ask_restore(store: StateStore, stream: StreamSpec, target: TargetSpec, journal: JournalReader, asked: Json) -> Json:
    """Write down that a target is to be restored. `asked`: `id`, `path`, `overwrite`. Returns the record.

    Raises what keeps it from that before anything is changed: SnapshotError, OutOfRange, JournalMismatch,
    ConfigError, TargetRefused, NotReady.
    """
    made = keepable(stream, target)
    _refuse_meanwhile(store, stream, target.name)
    place = place_of(stream, asked["path"])
    snapshot = place.get(stream.name, target.name, asked["id"])
    check_usable(snapshot, journal, stream, target)
    refuse_reloaded(store, snapshot)
    if not asked["overwrite"]:
        _refuse_full(made, stream, target)
    record = restore_record(snapshot, overwrite=asked["overwrite"])
    store.set_needs_reload(stream.name, target.name, None)
    store.save_note(stream.name, target.name, RESTORE, record)
    failpoint("restore.asked")
    return record


def _refuse_full(made: Keepable, stream: StreamSpec, target: TargetSpec) -> None:
    try:
        with made.keep(stream.name, target.name) as kept:
            seq = kept.cursor.seq
    except NotReady:
        return
    raise TargetRefused(
        f"target {target.name} of stream {stream.name} is not empty: it is at seq {seq}",
        hint="restore with --overwrite: its tables are replaced by those of the snapshot",
    )


def restore_record(snapshot: TargetSnapshot, *, overwrite: bool, automatic: bool = False) -> Json:
    """A restore as it is written down."""
    return {
        "state": WAITING,
        "id": snapshot.id,
        "base": snapshot.base,
        "seq": snapshot.seq,
        "position": snapshot.position_text,
        "taken_at": snapshot.created_at.isoformat(),
        "overwrite": overwrite,
        "automatic": automatic,
        "token": f"restore {uuid4().hex}",
        "asked_at": datetime.now(UTC).isoformat(),
        "finished_at": None,
        "error": None,
    }


def refuse_reloaded(store: StateStore, snapshot: TargetSnapshot) -> None:
    """Raise SnapshotError for a snapshot from before tables were copied anew: why they were is not in the journal."""
    record = store.notes(snapshot.stream, RELOAD).get(snapshot.target)
    ended = record["finished_at"] if record is not None else None
    if record is not None and (ended is None or datetime.fromisoformat(ended) >= snapshot.created_at):
        raise SnapshotError(
            f"snapshot {snapshot.id} is from before tables of the target were copied anew (reload)",
            hint="restore one that was taken since, or reload them once more in a new target",
        )


def why_unusable(home: Home, stream: StreamSpec, snapshot: TargetSnapshot) -> str | None:
    """Why the stream could not go on from a snapshot now; None if it could."""
    target = next(one for one in stream.targets if one.name == snapshot.target)
    try:
        with closing(home.open_state(read_only=True)) as store:
            refuse_reloaded(store, snapshot)
        check_usable(snapshot, JournalReader([str(home.journal_path(stream.source.name))]), stream, target)
    except MillstreamError as refused:
        return refused.message
    except FileNotFoundError:
        return "the stream has no journal yet"
    return None


class Restoring:
    """The restores of one target. `run` may only be called while nothing is delivered to it."""

    def __init__(self, store: StateStore, stream: StreamSpec, target: TargetSpec, made: Target) -> None:
        self._store = store
        self._stream = stream
        self._target = target
        self._made = made

    @property
    def possible(self) -> bool:
        """Whether this target can be restored, and go on from there."""
        return self._stream.mode is not Mode.SNAPSHOT and is_keepable(self._made)

    def due(self) -> Json | None:
        """A restore that was asked for, or interrupted, and must come first."""
        record = self._store.notes(self._stream.name, RESTORE).get(self._target.name)
        return record if record is not None and record["state"] in UNDONE else None

    def run(self, record: Json, journal: JournalReader) -> Json:
        """Do it. What can never be done ends the restore, and is raised; raises what can pass as well."""
        if record["state"] == RESTORED:
            return record
        try:
            place = SnapshotStore(record["base"])
            snapshot = place.get(self._stream.name, self._target.name, record["id"])
            check_usable(snapshot, journal, self._stream, self._target)
            refuse_reloaded(self._store, snapshot)
            then = letters_of(place, snapshot)
            assert isinstance(self._made, Keepable)  # noqa: S101 - seen before it was asked for
            restore(place, snapshot, self._made, record["token"], overwrite=record["overwrite"])
        except MillstreamError as failed:
            if not failed.transient:
                self.save(record, state=FAILED, error=failed.message, finished_at=datetime.now(UTC).isoformat())
            raise
        failpoint("restore.brought_back")
        self._replace_letters(then, snapshot.seq)
        done = self.save(record, state=RESTORED)
        failpoint("restore.noted")
        return done

    def _replace_letters(self, then: Open, seq: int) -> None:
        """The target has what it had then: what it could not take since comes again, and what it could not before."""
        mine = self._store.letters(self._stream.name, self._target.name)
        self._store.remove_letters([one.id for one in mine if one.seq > seq])
        self._store.add_letters(then.letters)
        self._store.set_doubts(self._stream.name, self._target.name, then.doubts)

    def finish(self) -> None:
        """The delivery goes on from there, in an epoch of its own."""
        record = self.due()
        if record is not None and record["state"] == RESTORED:
            self.save(record, state=DONE, finished_at=datetime.now(UTC).isoformat())

    def save(self, record: Json, **changed: object) -> Json:
        """Write down how far it is."""
        now = {**record, **changed}
        self._store.save_note(self._stream.name, self._target.name, RESTORE, now)
        return now
