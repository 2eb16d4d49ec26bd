"""What is told of streams, their sources and their targets: plain values, made by `status`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from millstream.engine.home import Owner
from millstream.engine.table_status import TableStatus, together
from millstream.model import Checkpoint, Json, StreamState

ALIVE = (StreamState.SNAPSHOT, StreamState.CATCHING_UP, StreamState.RUNNING, StreamState.GATED)
"""States in which changes flow, or are about to."""


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
    last_checkpoint: Checkpoint | None
    events_replicated: int
    bytes_replicated: int
    """`events` and `bytes` count from the start of the process, these two from the start of the stream."""
    errors_last_hour: int
    last_error: str | None
    dead_letters: int
    """Changes that it could not take and that no later change has made obsolete."""
    tables: tuple[TableStatus, ...]
    verifying: str | None = None
    """How far a comparison with the source is, while there is one."""
    verified: Mapping[str, Any] | None = None
    """What came of the last one: `TargetVerdict.to_json()`, or `error` if there was no answer."""
    replay: Mapping[str, Any] | None = None
    """The last replay that was asked for: `state` (waiting, running, done or failed), `from_seq` and `until_seq`,
    `progress` from 0 to 1, `events`, `tables`, the `epoch` that marks it, when, and the `error` it ended with."""
    startup: Mapping[str, Any] | None = None
    """How its delivery last began: `path` (resume, restore, cold start), the `reason`, the `seq` it goes on after."""
    baseline: Mapping[str, Any] | None = None
    """How far its first rows are, while they come: `chunks` and how many are `done`, `rows`, `rows_per_second` and
    `seconds_left`. Where they come beside the changes: of the table at hand, and `tables` and `tables_done`."""
    snapshot: Mapping[str, Any] | None = None
    """The last snapshot of its state: `id`, `seq`, `position`, `at`, or the `error` there was instead."""
    restore: Mapping[str, Any] | None = None
    """The last restore: `state` (waiting, restored, done or failed), the snapshot's `id`, `seq`, the `error`."""
    reload: Mapping[str, Any] | None = None
    """The last reload: `state` (waiting, running, done or failed), when it was asked for and ended, and by name its
    `tables`, each with its `state`, `chunks` and how many are `done`, `rows`, `rows_per_second`, `seconds_left`, `seq`,
    `points` (from which chunk on rows were read at which `position`), `tries` and `error`. `baseline`: these are the
    target's first rows."""


@dataclass(frozen=True)
class StreamStatus:
    """One stream, its source and its targets.

    A stream is as far as that target which is furthest behind: so are `last_event`, `last_checkpoint`
    and the lags. Counts are those of all targets together.
    """

    name: str
    mode: str
    state: StreamState
    last_event: datetime | None
    """When the last change was committed that every target has."""
    last_checkpoint: Checkpoint | None
    """Up to where every target has everything. None before the first delivery."""
    lag_seconds: float | None
    """How old the oldest change is that some target does not have; None while nobody can know."""
    lag_events: int | None
    """How many changes of the source's journal that target has still to pass."""
    bytes_replicated: int
    events_replicated: int
    errors_last_hour: int
    last_error: str | None
    """The last thing that went wrong, over or not."""
    deleting: bool
    """Its deletion has begun and was interrupted; the next `delete` goes on."""
    tables: tuple[str, ...]
    source: SourceStatus
    targets: tuple[TargetStatus, ...]
    reported_at: datetime | None
    """When a process last said something of this stream."""
    silent: bool
    """A process holds the home, but has not said anything of a running stream for too long."""

    @property
    def tables_replicated(self) -> tuple[TableStatus, ...]:
        """What was delivered of each table, all targets together."""
        by_name: dict[str, list[TableStatus]] = {}
        for target in self.targets:
            for table in target.tables:
                by_name.setdefault(table.name, []).append(table)
        return tuple(together(name, parts) for name, parts in sorted(by_name.items()))

    @property
    def healthy(self) -> bool:
        """Whether changes flow: the stream, its capture and each of its targets are at work, and say so.

        A copy that is complete has nothing left to do, and is as it should be.
        """
        fine = (*ALIVE, StreamState.COMPLETE)
        working = self.state in fine and all(target.state in fine for target in self.targets)
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
            stream["tables_replicated"] = _plain([asdict(table) for table in one.tables_replicated])
        return value


def _plain(value: Any) -> Any:
    """The value as JSON has it."""
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value.isoformat() if isinstance(value, datetime) else value
