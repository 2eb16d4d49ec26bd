"""How streams are, seen from outside: from the state store, the journals and the home's lock.

No running process is asked, so a dead one cannot give a wrong answer: what it last said counts
only while it holds the home's lock. Without it a stream is `stopped`, or `failed` if that was its
last word.

What a running process says of a stream is `Runtime(stream, "", state, CaptureReport.to_json())`, and
of a target `Runtime(stream, target, state, TargetReport.to_json())`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

from millstream.engine.home import Home, Owner
from millstream.engine.journal_status import JournalStatus, from_us
from millstream.engine.reload import RELOAD as COPIES
from millstream.engine.replay import DONE, REWOUND, RUNNING
from millstream.engine.reports import CaptureReport, TargetReport
from millstream.engine.stream_status import ALIVE, HomeStatus, SourceStatus, StreamStatus, TargetStatus
from millstream.engine.table_status import TableStatus, tables_of
from millstream.engine.unknown import unknown_stream
from millstream.model import Checkpoint, Cursor, Json, StreamState
from millstream.snapshots import RESTORE, SNAPSHOT
from millstream.state.base import Fault, LetterState, Runtime, StateStore

SILENCE = 60.0
"""A running process writes its state every `checkpoint_interval`. Seconds after which it counts as stuck."""

RELOAD = (
    "have all of its tables copied anew (millstream reload NAME --target TARGET), give the stream a new target "
    "(another name, an empty place), or resume it once it was restored from a copy"
)
"""What to do about a target that lacks changes which are gone."""

UNCAPTURED = "not captured"
"""The state of a source that is only copied."""

Report = TypeVar("Report", CaptureReport, TargetReport)


def home_status(
    home: Home, stream: str | None = None, *, now: datetime | None = None, table_lags: bool = True
) -> HomeStatus:
    """The status of one stream or all; without `table_lags`, which take the longest, the lags of tables are None.

    Raises UnknownStream for one that the home does not have.
    """
    now = now or datetime.now(UTC)
    owner = home.owner()
    if not home.state_path.exists():
        if stream is not None:
            raise unknown_stream(stream, [], home)
        return HomeStatus(str(home.path), owner, ())
    store = home.open_state(read_only=True)
    try:
        names = store.list_streams()
        if stream is not None and stream not in names:
            raise unknown_stream(stream, names, home)
        wanted = names if stream is None else [stream]
        return HomeStatus(
            str(home.path), owner, tuple(_stream(home, store, name, owner, now, table_lags) for name in wanted)
        )
    finally:
        store.close()


def _stream(
    home: Home, store: StateStore, name: str, owner: Owner | None, now: datetime, table_lags: bool
) -> StreamStatus:
    definition = store.get_stream(name) or {}
    runtimes = {runtime.target: runtime for runtime in store.runtimes(name)}
    cursors = {cursor.target: cursor for cursor in store.cursors(name)}
    source = definition["source"]
    journal = JournalStatus(home, source["name"], source["kind"], table_lags=table_lags)
    whole = runtimes.get("")
    known = _Known(store, name, definition, now)
    targets = tuple(
        _target(target, runtimes.get(target["name"]), cursors.get(target["name"]), journal, known, owner, now)
        for target in definition["targets"]
    )
    last = min(targets, key=lambda target: target.seq if target.seq is not None else -1)
    reported_at = whole.updated_at if whole is not None else None
    state = _whole_state(_state(whole, owner, paused="" in known.paused), targets)
    patience = max(SILENCE, 10 * definition["checkpoint_interval_ms"] / 1000)
    return StreamStatus(
        name=name,
        mode=definition["mode"],
        state=state,
        last_event=last.last_event_at,
        last_checkpoint=last.last_checkpoint,
        lag_seconds=last.lag_seconds,
        lag_events=last.lag_events,
        bytes_replicated=sum(target.bytes_replicated for target in targets),
        events_replicated=sum(target.events_replicated for target in targets),
        errors_last_hour=known.errors_last_hour(),
        last_error=known.last_error(),
        deleting=name in store.deletions(),
        tables=tuple(source["tables"]),
        source=_source(source, whole, journal, owner),
        targets=targets,
        reported_at=reported_at,
        silent=state in ALIVE and reported_at is not None and (now - reported_at).total_seconds() > patience,
    )


def _state(runtime: Runtime | None, owner: Owner | None, *, paused: bool = False) -> StreamState:
    """What the process last said, if it can still be meant; `stopped` or `failed` if it cannot.

    What is paused is so, whether or not anything runs.
    """
    if paused:
        return StreamState.PAUSED
    if runtime is None:
        return StreamState.CREATED
    if _is_stale(runtime, owner) and runtime.state not in (StreamState.FAILED, StreamState.COMPLETE):
        return StreamState.STOPPED
    return runtime.state


def _is_stale(runtime: Runtime, owner: Owner | None) -> bool:
    """Whether this was said by a process that is not the one that runs now."""
    return owner is None or (runtime.updated_at is not None and runtime.updated_at < owner.started_at)


def _whole_state(state: StreamState, targets: Sequence[TargetStatus]) -> StreamState:
    """A stream that says it runs while every target of it has failed does not; paused is one with all of them."""
    if targets and all(target.state is StreamState.PAUSED for target in targets):
        return StreamState.PAUSED
    broken = (StreamState.FAILED, StreamState.NEEDS_RELOAD)
    if state in ALIVE and targets and all(target.state in broken for target in targets):
        return StreamState.FAILED
    return state


def _source(
    source: Mapping[str, Any], runtime: Runtime | None, journal: JournalStatus, owner: Owner | None
) -> SourceStatus:
    report = _report(CaptureReport, runtime)
    alive = runtime is not None and not _is_stale(runtime, owner)
    state = _state(runtime, owner).value
    if not alive and not report.error and state == StreamState.FAILED.value:
        state = StreamState.STOPPED.value  # it was a target that failed, and the capture ended with the process
    return SourceStatus(
        name=source["name"],
        kind=source["kind"],
        state=(report.state or state) if alive else state,
        pid=report.pid if alive else None,
        journal_id=journal.journal_id,
        incarnation=journal.incarnation,
        end_seq=journal.seq,
        end_position=journal.text(journal.covered),
        last_commit_at=from_us(journal.commit_ts_us),
        first_seq=journal.retained.earliest.seq if journal.retained else None,
        oldest_commit_at=from_us(journal.retained.oldest_ts_us) if journal.retained else None,
        journal_bytes=journal.retained.bytes if journal.retained else None,
        retained_bytes=_retained(report.source),
        mode=report.source.get("mode") if alive else None,
        behind_bytes=report.source.get("behind_bytes") if alive else None,
        bulk_refused=report.source.get("bulk_refused") if alive else None,
        error=report.error or journal.error,
        hint=report.hint,
    )


def _retained(source: Mapping[str, Any]) -> int | None:
    """What the source says it keeps for us; else what lies between the end of its log and our last ack."""
    if source.get("retained_bytes") is not None:
        return int(source["retained_bytes"])
    end, confirmed = source.get("log_end"), source.get("confirmed")
    return None if end is None or confirmed is None else max(0, int(end) - int(confirmed))


def _target(
    target: Mapping[str, Any],
    runtime: Runtime | None,
    cursor: Cursor | None,
    journal: JournalStatus,
    known: _Known,
    owner: Owner | None,
    now: datetime,
) -> TargetStatus:
    report = _report(TargetReport, runtime)
    events, seconds = journal.lag(cursor, now)
    name = target["name"]
    lost = known.reloads.get(name)
    tables = known.tables(name, cursor, journal)
    return TargetStatus(
        name=name,
        kind=target["kind"],
        state=StreamState.NEEDS_RELOAD
        if lost
        else _state(runtime, owner, paused=not known.paused.isdisjoint({"", name})),
        epoch=cursor.epoch if cursor else None,
        seq=cursor.seq if cursor else None,
        position=journal.text(cursor.position) if cursor else None,
        lag_events=events,
        lag_seconds=seconds,
        last_event_at=cursor.commit_ts if cursor else None,
        events=report.events,
        bytes=report.bytes,
        batches=report.batches,
        retrying=report.retrying,
        error=lost or report.error,
        hint=RELOAD if lost else report.hint,
        last_checkpoint=_checkpoint(cursor),
        events_replicated=sum(table.events_replicated for table in tables),
        bytes_replicated=sum(table.bytes_replicated for table in tables),
        errors_last_hour=known.errors_last_hour(name),
        last_error=known.last_error(name),
        dead_letters=known.dead_letters(name),
        tables=tables,
        verifying=None if runtime is None or _is_stale(runtime, owner) else report.verifying,
        verified=known.verified.get(name),
        replay=_replay(known.replays.get(name), cursor),
        startup=report.startup,
        baseline=None if runtime is None or _is_stale(runtime, owner) else report.baseline,
        snapshot=known.snapshots.get(name),
        restore=_without(known.restores.get(name), "token"),
        reload=_without(known.copies.get(name), "all", "names", "patterns", "excluded", "where", "resolved", "lost"),
    )


def _replay(record: Json | None, cursor: Cursor | None) -> Json | None:
    """A replay with how far it is. One by which a target was taken back is as far as its cursor."""
    if record is None:
        return None
    start, end, done, state = record["from_seq"], record["until_seq"], record["done_seq"], record["state"]
    if state == REWOUND:
        done = min(end, cursor.seq if cursor else start)
        state = DONE if done >= end else RUNNING
    whole = max(1, end - start)
    moved = 0 if done is None else max(done - start, 0)
    if state != DONE and record["state"] != REWOUND and record.get("newest_first"):
        moved = 0 if done is None else end - done
    progress = 1.0 if state == DONE else round(moved / whole, 4)
    return {**record, "state": state, "progress": progress}


def _without(record: Json | None, *hidden: str) -> Json | None:
    """A record as people are told of it."""
    return None if record is None else {key: value for key, value in record.items() if key not in hidden}


def _checkpoint(cursor: Cursor | None) -> Checkpoint | None:
    """Where a target is. Its wall clock is the source's: when the last change up to there was committed."""
    return None if cursor is None else Checkpoint(cursor.seq, cursor.position, cursor.commit_ts or cursor.updated_at)


class _Known:
    """What the state store knows of one stream besides its cursors."""

    def __init__(self, store: StateStore, stream: str, definition: Json, now: datetime) -> None:
        self._copied = definition["mode"] == "snapshot"
        self._patterns = definition["source"]["tables"]
        self._now = now
        self._totals = store.totals(stream)
        self._faults = store.faults(stream)
        self._since = now - timedelta(hours=1)
        self._letters = Counter(one.target for one in store.letters(stream) if one.state is LetterState.WAITING)
        self.paused = store.paused(stream)
        self.verified = store.verifications(stream)
        self.reloads = store.needs_reload(stream)
        self.replays = store.replays(stream)
        self.snapshots, self.restores = (store.notes(stream, kind) for kind in (SNAPSHOT, RESTORE))
        self.copies = store.notes(stream, COPIES)

    def dead_letters(self, target: str) -> int:
        return self._letters[target]

    def tables(self, target: str, cursor: Cursor | None, journal: JournalStatus) -> tuple[TableStatus, ...]:
        mine = [total for total in self._totals if total.target == target]
        copies = {name: one["state"] for name, one in self.copies.get(target, {"tables": {}})["tables"].items()}
        return tables_of(mine, cursor, self._patterns, journal, self._now, copied=self._copied, copies=copies)

    def errors_last_hour(self, target: str | None = None) -> int:
        return sum(fault.at > self._since for fault in self._of(target))

    def last_error(self, target: str | None = None) -> str | None:
        return next((fault.message for fault in self._of(target)), None)

    def _of(self, target: str | None) -> list[Fault]:
        return [fault for fault in self._faults if target in (None, fault.target)]


def _report(kind: type[Report], runtime: Runtime | None) -> Report:
    known = {one.name for one in fields(kind)}
    said = runtime.fields if runtime is not None else {}
    return kind(**{key: value for key, value in said.items() if key in known})
