"""Going on after a journal was lost: a new incarnation above every seq that was ever given.

A journal that is gone, or was replaced by an older copy, cannot simply be started again: its seqs
would begin low, and every later change would look old to a target that compares versions. A
re-base is therefore a person's decision. The command only leaves a *request* in the home; the next
run executes it, because only the run has the source's credentials.

The new journal begins at the lowest position that all targets have, with a seq above all of theirs.
A target that was further keeps its lead: what it had before is left out by position.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from millstream.engine.capture_order import Rebase
from millstream.engine.home import Home
from millstream.engine.unknown import unknown_stream
from millstream.errors import JournalError, JournalMismatch
from millstream.journal import JournalReader
from millstream.model import Cursor, Json
from millstream.state.base import EpochRecord, StateStore


@dataclass(frozen=True)
class RebaseRequest:
    """What the next run shall do: where the new journal begins, and above which seq."""

    stream: str
    source: str
    first_seq: int
    incarnation: int
    start_position: int
    cursors: tuple[tuple[str, str, int], ...]
    """(stream, target, position) of each target of all streams on the source, at the time of the request."""

    @property
    def order(self) -> Rebase:
        """What capture needs to know of it."""
        return Rebase(self.first_seq, self.incarnation, self.start_position)

    def save(self, path: Path) -> None:
        temporary = path.with_suffix(".tmp")
        with temporary.open("w") as file:
            json.dump(asdict(self), file, indent=2)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)

    @classmethod
    def load(cls, home: Home, source: str) -> RebaseRequest | None:
        """The request that waits for this source, if there is one."""
        try:
            value = json.loads(request_path(home, source).read_text())
        except FileNotFoundError:
            return None
        return cls(**{**value, "cursors": tuple(tuple(one) for one in value["cursors"])})


def rebase(home: Home, stream: str, confirm: bool) -> Json:
    """Plan a re-base of the stream's source, for all streams on it; with `confirm`, leave it for the next run.

    Returns what is (to be) done. A journal that is still there is moved aside, never deleted. Raises
    HomeLocked while the stream runs, JournalMismatch when nothing was delivered yet.
    """
    if not home.path.exists():
        raise unknown_stream(stream, [], home)
    with home.lock():
        store = home.open_state()
        try:
            request = _plan(home, store, stream)
        finally:
            store.close()
        journal = home.journal_path(request.source)
        aside = home.path / "replaced" / f"{request.source}-{datetime.now(UTC):%Y%m%dT%H%M%S}"
        if confirm:
            request.save(request_path(home, request.source))
            if journal.exists():
                aside.parent.mkdir(mode=0o700, exist_ok=True)
                journal.rename(aside)
    cursors = {f"{stream}/{target}": position for stream, target, position in request.cursors}
    plan: Json = {**asdict(request), "cursors": cursors}
    if journal.exists() or aside.exists():
        plan["old_journal"] = str(aside)
    return plan


def request_path(home: Home, source: str) -> Path:
    """Where a request for this source waits."""
    return home.path / f"rebase-{source}.json"


def finish_rebase(home: Home, store: StateStore, request: RebaseRequest, journal_id: str) -> None:
    """Open a delivery epoch of the new journal for each target, then forget the request.

    Runs after the new journal exists and before delivery. A crash in between repeats it.
    """
    for stream, target, position in request.cursors:
        cursor = store.get_cursor(stream, target)
        last = store.current_epoch(stream, target)
        if cursor is None or cursor.journal_id == journal_id:
            continue
        start = request.first_seq - 1
        if last is None or last.journal_id != journal_id:
            epoch = max(cursor.epoch, last.epoch if last else 0) + 1
            reason, now = "the journal was re-based", datetime.now(UTC)
            last = EpochRecord(stream, target, epoch, journal_id, start, position, reason, now)
            store.open_epoch(last)
        store.save_cursor(Cursor(stream, target, journal_id, last.epoch, start, position))
    request_path(home, request.source).unlink(missing_ok=True)


def _plan(home: Home, store: StateStore, stream: str) -> RebaseRequest:
    definition = store.get_stream(stream)
    if definition is None:
        raise unknown_stream(stream, store.list_streams(), home)
    source = str(definition["source"]["name"])
    known = {name: store.get_stream(name) or {} for name in store.list_streams()}
    sharing = {name: one for name, one in known.items() if one["source"]["name"] == source}
    cursors = [cursor for name in sharing for cursor in store.cursors(name)]
    if not cursors:
        raise JournalMismatch(
            f"stream {stream} has delivered nothing yet, so there is nothing to re-base",
            hint=f"remove {home.journal_path(source)} and run the stream again",
        )
    last_seq, incarnation = _old_journal(home.journal_path(source))
    # With `commit: all` an acknowledgement covers every target, also where it went beyond the last row.
    acked = {name: (store.get_ack(source) or 0) if one["commit"] == "all" else 0 for name, one in sharing.items()}
    positions = {
        (one.stream, one.target): max(one.position, acked[one.stream], _left_out(store, one)) for one in cursors
    }
    return RebaseRequest(
        stream=stream,
        source=source,
        first_seq=max(last_seq, *(cursor.seq for cursor in cursors)) + 1,
        incarnation=incarnation + 1,
        start_position=min(positions.values()),
        cursors=tuple((name, target, position) for (name, target), position in positions.items()),
    )


def _left_out(store: StateStore, cursor: Cursor) -> int:
    """Up to where a target has all changes because a baseline brought them, however far its cursor is."""
    epoch = store.current_epoch(cursor.stream, cursor.target)
    return (epoch.after_position or 0) if epoch is not None and epoch.epoch == cursor.epoch else 0


def _old_journal(path: Path) -> tuple[int, int]:
    """Last seq and incarnation of the journal that is being given up, as far as it can be read."""
    reader = JournalReader([str(path)])
    try:
        header = reader.header()
        head = reader.head()
    except (JournalError, OSError):
        return 0, 1
    return (head.seq if head else header.first_seq - 1), header.incarnation
