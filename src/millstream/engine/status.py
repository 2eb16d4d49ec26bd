"""How streams are, seen from outside: from the state store, the journals and the home's lock.

No running process is asked, so a dead one cannot give a wrong answer: what it last said counts
only while it holds the home's lock. Without it a stream is `stopped`, or `failed` if that was its
last word.

What a running process says of a stream is `Runtime(stream, "", state, CaptureReport.to_json())`, and
of a target `Runtime(stream, target, state, TargetReport.to_json())`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from typing import Any, TypeVar

from millstream.engine.home import Home, Owner
from millstream.errors import JournalError, StateError
from millstream.journal import JournalReader, Retained
from millstream.journal.places import position_text
from millstream.model import Cursor, Json, StreamState
from millstream.state.base import Runtime, StateStore

SILENCE = 60.0
"""A running process writes its state every `checkpoint_interval`. Seconds after which it counts as stuck."""

_ALIVE = (StreamState.CATCHING_UP, StreamState.RUNNING)


@dataclass(frozen=True)
class CaptureReport:
    """What a running process says of a stream and of the capture of its source."""

    state: str = ""
    """starting | running | waiting | halted | stopped, as the capture's supervisor has it."""
    pid: int | None = None
    restarts: int = 0
    error: str | None = None
    hint: str | None = None
    source: Mapping[str, Any] = field(default_factory=dict)
    """What the capture process last said: its journal's end, and what `Source.status()` gave."""

    def to_json(self) -> Json:
        return asdict(self)


@dataclass(frozen=True)
class TargetReport:
    """What a running process says of the delivery to one target, counted since its start."""

    events: int = 0
    bytes: int = 0
    batches: int = 0
    retrying: str | None = None
    """Why the batch at hand could not be delivered yet; it is being tried again."""
    error: str | None = None
    hint: str | None = None

    def to_json(self) -> Json:
        return asdict(self)


Report = TypeVar("Report", CaptureReport, TargetReport)


@dataclass(frozen=True)
class SourceStatus:
    """A source and its journal."""

    name: str
    kind: str
    state: str
    pid: int | None
    journal_id: str | None
    incarnation: int | None
    end_seq: int | None
    end_position: str | None
    last_commit_at: datetime | None
    first_seq: int | None
    """The first change that the journal still has,"""
    oldest_commit_at: datetime | None
    """its commit time,"""
    journal_bytes: int | None
    """and what the journal's segments take on disk."""
    retained_bytes: int | None
    """How much log the source keeps for us, as it last said."""
    mode: str | None
    """How the log is read: `streaming` or `bulk`; None while it is not."""
    behind_bytes: int | None
    """How much log the source has beyond what was read, as it last said."""
    bulk_refused: str | None
    """Why the source could not be read in bulk when that was last wanted."""
    error: str | None
    hint: str | None


@dataclass(frozen=True)
class TargetStatus:
    """One target of a stream. `lag_seconds` is the age of the oldest change it does not have yet."""

    name: str
    kind: str
    state: StreamState
    epoch: int | None
    seq: int | None
    position: str | None
    lag_events: int | None
    lag_seconds: float | None
    last_event_at: datetime | None
    events: int
    bytes: int
    batches: int
    retrying: str | None
    error: str | None
    hint: str | None


@dataclass(frozen=True)
class StreamStatus:
    """One stream, its source and its targets."""

    name: str
    mode: str
    state: StreamState
    tables: tuple[str, ...]
    source: SourceStatus
    targets: tuple[TargetStatus, ...]
    reported_at: datetime | None
    """When a process last said something of this stream."""
    silent: bool
    """A process holds the home, but has not said anything of a running stream for too long."""

    @property
    def healthy(self) -> bool:
        """Whether changes flow: the stream, its capture and each of its targets are at work, and say so."""
        working = self.state in _ALIVE and all(target.state in _ALIVE for target in self.targets)
        return working and not self.silent and self.source.error is None


@dataclass(frozen=True)
class HomeStatus:
    """All streams of a home, and the process that runs them, if there is one."""

    home: str
    owner: Owner | None
    streams: tuple[StreamStatus, ...]

    @property
    def healthy(self) -> bool:
        return bool(self.streams) and all(stream.healthy for stream in self.streams)

    def to_json(self) -> Json:
        value: Json = _plain(asdict(self))
        value["healthy"] = self.healthy
        for stream, one in zip(value["streams"], self.streams, strict=True):
            stream["healthy"] = one.healthy
        return value


def home_status(home: Home, stream: str | None = None, *, now: datetime | None = None) -> HomeStatus:
    """The status of one stream or all. Raises StateError for a stream that the home does not have."""
    now = now or datetime.now(UTC)
    owner = home.owner()
    if not home.state_path.exists():
        if stream is not None:
            raise _no_such(stream, home, [])
        return HomeStatus(str(home.path), owner, ())
    store = home.open_state(read_only=True)
    try:
        names = store.list_streams()
        if stream is not None and stream not in names:
            raise _no_such(stream, home, names)
        wanted = names if stream is None else [stream]
        return HomeStatus(str(home.path), owner, tuple(_stream(home, store, name, owner, now) for name in wanted))
    finally:
        store.close()


def _no_such(stream: str, home: Home, names: Sequence[str]) -> StateError:
    known = f"it has {', '.join(names)}" if names else "no stream has run there yet"
    return StateError(f"the home {home.path} has no stream {stream}: {known}", hint="check the name and --home")


def _stream(home: Home, store: StateStore, name: str, owner: Owner | None, now: datetime) -> StreamStatus:
    definition = store.get_stream(name) or {}
    runtimes = {runtime.target: runtime for runtime in store.runtimes(name)}
    cursors = {cursor.target: cursor for cursor in store.cursors(name)}
    source = definition["source"]
    journal = _Journal(home, source["name"], source["kind"])
    whole = runtimes.get("")
    targets = tuple(
        _target(target, runtimes.get(target["name"]), cursors.get(target["name"]), journal, owner, now)
        for target in definition["targets"]
    )
    reported_at = whole.updated_at if whole is not None else None
    state = _whole_state(_state(whole, owner), targets)
    patience = max(SILENCE, 10 * definition["checkpoint_interval_ms"] / 1000)
    return StreamStatus(
        name=name,
        mode=definition["mode"],
        state=state,
        tables=tuple(source["tables"]),
        source=_source(source, whole, journal, owner),
        targets=targets,
        reported_at=reported_at,
        silent=state in _ALIVE and reported_at is not None and (now - reported_at).total_seconds() > patience,
    )


def _state(runtime: Runtime | None, owner: Owner | None) -> StreamState:
    """What the process last said, if it can still be meant; `stopped` or `failed` if it cannot."""
    if runtime is None:
        return StreamState.CREATED
    if _is_stale(runtime, owner) and runtime.state is not StreamState.FAILED:
        return StreamState.STOPPED
    return runtime.state


def _is_stale(runtime: Runtime, owner: Owner | None) -> bool:
    """Whether this was said by a process that is not the one that runs now."""
    return owner is None or (runtime.updated_at is not None and runtime.updated_at < owner.started_at)


def _whole_state(state: StreamState, targets: Sequence[TargetStatus]) -> StreamState:
    """A stream that says it runs while every target of it has failed does not."""
    if state in _ALIVE and targets and all(target.state is StreamState.FAILED for target in targets):
        return StreamState.FAILED
    return state


def _source(source: Mapping[str, Any], runtime: Runtime | None, journal: _Journal, owner: Owner | None) -> SourceStatus:
    report = _report(CaptureReport, runtime)
    alive = runtime is not None and not _is_stale(runtime, owner)
    state = _state(runtime, owner).value
    return SourceStatus(
        name=source["name"],
        kind=source["kind"],
        state=(report.state or state) if alive else state,
        pid=report.pid if alive else None,
        journal_id=journal.journal_id,
        incarnation=journal.incarnation,
        end_seq=journal.seq,
        end_position=journal.text(journal.covered),
        last_commit_at=_time(journal.commit_ts_us),
        first_seq=journal.retained.earliest.seq if journal.retained else None,
        oldest_commit_at=_time(journal.retained.oldest_ts_us) if journal.retained else None,
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
    journal: _Journal,
    owner: Owner | None,
    now: datetime,
) -> TargetStatus:
    report = _report(TargetReport, runtime)
    events, seconds = journal.lag(cursor, now)
    return TargetStatus(
        name=target["name"],
        kind=target["kind"],
        state=_state(runtime, owner),
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
        error=report.error,
        hint=report.hint,
    )


class _Journal:
    """What a journal says of itself; everything is None when there is none or it cannot be read."""

    def __init__(self, home: Home, source: str, kind: str) -> None:
        self._kind = kind
        self._reader: JournalReader | None = None
        self.journal_id: str | None = None
        self.incarnation: int | None = None
        self.seq: int | None = None
        self.covered: int | None = None
        self.commit_ts_us: int | None = None
        self.retained: Retained | None = None
        self.error: str | None = None
        self._first_seq = 1
        path = home.journal_path(source)
        if not (path / "journal.json").exists():
            return
        try:
            self._read(JournalReader([str(path)]))
        except (JournalError, OSError) as error:
            self.error = str(error)

    def _read(self, reader: JournalReader) -> None:
        header, head = reader.header(), reader.head()
        self.journal_id, self.incarnation = header.journal_id, header.incarnation
        self._first_seq = header.first_seq
        if head is not None:
            self._reader = reader
            self.retained = reader.retained()
            self.seq, self.covered = head.seq, head.covered
            self.commit_ts_us = head.commit_ts_us if head.seq >= header.first_seq else None

    def lag(self, cursor: Cursor | None, now: datetime) -> tuple[int | None, float | None]:
        """How many changes a target does not have yet, and how old the oldest of them is."""
        if self._reader is None or self.seq is None:
            return None, None
        if cursor is not None and cursor.journal_id != self.journal_id:
            return None, None
        have = cursor.seq if cursor else self._first_seq - 1
        if self.seq <= have:
            return 0, 0.0
        try:
            oldest = self._reader.plan_end(have, max_events=1, max_bytes=1)
        except JournalError:
            oldest = None
        at = _time(oldest.commit_ts_us) if oldest else None
        return self.seq - have, max(0.0, (now - at).total_seconds()) if at else None

    def text(self, position: int | None) -> str | None:
        return None if position is None else position_text(self._kind, position)


def _report(kind: type[Report], runtime: Runtime | None) -> Report:
    known = {one.name for one in fields(kind)}
    said = runtime.fields if runtime is not None else {}
    return kind(**{key: value for key, value in said.items() if key in known})


def _time(us: int | None) -> datetime | None:
    return None if us is None else datetime.fromtimestamp(us / 1_000_000, UTC)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value.isoformat() if isinstance(value, datetime) else value
