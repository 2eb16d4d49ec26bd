"""The contract of the state store: what Millstream must remember besides journal and targets.

Each write is atomic and durable when the call returns. Readers never wait for writers; another
process may read at any time (`millstream status`). All times are UTC.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Protocol

from millstream.model import Cursor, Json, StreamState

FAULTS = 1000
"""How many faults of each stream are kept."""


@dataclass(frozen=True)
class EpochRecord:
    """A delivery epoch: from which seq a Spark checkpoint directory started, and why.

    `after_position`: changes whose resume position is at or below it were delivered in an earlier
    incarnation of the journal and are left out (None: nothing is).
    """

    stream: str
    target: str
    epoch: int
    journal_id: str
    start_seq: int
    after_position: int | None
    reason: str
    opened_at: datetime


@dataclass(frozen=True)
class Runtime:
    """What a running process last said of a stream and, with `target`, of one of its targets."""

    stream: str
    target: str
    state: StreamState
    fields: Mapping[str, Any] = field(default_factory=dict)
    updated_at: datetime | None = None


@dataclass(frozen=True)
class Tally:
    """What a batch brought of one table to one target."""

    table: str
    events: int
    bytes: int
    last_seq: int


@dataclass(frozen=True)
class Total:
    """What a target has been brought of one table since the stream exists."""

    stream: str
    target: str
    table: str
    events: int
    bytes: int
    last_seq: int


@dataclass(frozen=True)
class Fault:
    """Something went wrong with a stream or (with `target`) one of its targets. No value of a row, no secret."""

    stream: str
    target: str
    kind: str
    message: str
    at: datetime


@dataclass(frozen=True)
class Request:
    """What another process wants of the one that runs the home, and what it was told."""

    id: int
    verb: str
    arguments: Mapping[str, Any]
    submitted_at: datetime
    answer: Mapping[str, Any] | None = None
    """None: nobody has done it yet."""


class StateStore(Protocol):
    """Streams, cursors with history, delivery epochs, acknowledgements, runtime state, what is asked for."""

    def put_stream(self, name: str, definition: Json) -> None:
        """Remember a stream's definition (never a secret, only references to one)."""

    def get_stream(self, name: str) -> Json | None: ...

    def list_streams(self) -> list[str]: ...

    def delete_stream(self, name: str, *, source: str | None = None) -> None:
        """Forget everything that is known of the stream, also that it is paused or being deleted. Idempotent.

        With `source`, also what was acknowledged to that and captured from it: it has no journal any more.
        """

    def begin_deletion(self, name: str, options: Json) -> None:
        """Remember that the stream is being deleted, and how. Said again, the new options count."""

    def deletions(self) -> dict[str, Json]:
        """The streams whose deletion has begun and not ended, with its options."""

    def set_paused(self, stream: str, target: str, paused: bool) -> None:
        """Remember that a target (`""`: the whole stream) is paused, or no longer is. Idempotent."""

    def paused(self, stream: str) -> set[str]:
        """What is paused of the stream: names of targets, and `""` for all of it."""

    def save_cursor(self, cursor: Cursor, tallies: Sequence[Tally] = ()) -> None:
        """Move a target's cursor, keep the old one in its history (bounded), and add to its totals: all or nothing.

        Raises StateError if `cursor` would go back within one journal and epoch.
        """

    def get_cursor(self, stream: str, target: str) -> Cursor | None: ...

    def cursors(self, stream: str | None = None) -> list[Cursor]: ...

    def cursor_history(self, stream: str, target: str, limit: int = 100) -> list[Cursor]:
        """Newest first."""

    def totals(self, stream: str | None = None) -> list[Total]:
        """What was delivered, by stream, target and table."""

    def open_epoch(self, record: EpochRecord) -> None:
        """Remember a new delivery epoch. Raises StateError unless it is above all earlier ones."""

    def current_epoch(self, stream: str, target: str) -> EpochRecord | None: ...

    def save_ack(self, source: str, position: int) -> None:
        """Remember, before it is said, that `position` is acknowledged to the source. Never goes back.

        Cursors stand at transactions, acknowledgements also at progress without rows: what a lost
        journal had covered can only be known from here.
        """

    def get_ack(self, source: str) -> int | None: ...

    def add_captured(self, source: str, patterns: Sequence[str]) -> None:
        """Remember that these patterns of tables were captured from a source; those of before stay."""

    def captured(self, source: str) -> list[str]:
        """Every pattern that was ever captured from the source, in order of text."""

    def set_runtime(self, runtime: Runtime) -> None: ...

    def runtimes(self, stream: str | None = None) -> list[Runtime]: ...

    def add_fault(self, fault: Fault) -> None:
        """Remember what went wrong; the latest `FAULTS` of each stream are kept."""

    def faults(self, stream: str) -> list[Fault]:
        """Newest first."""

    def submit(self, verb: str, arguments: Json) -> int:
        """Ask the process that runs the home for something. Returns the request's id."""

    def pending(self) -> list[Request]:
        """The requests that nobody has answered, oldest first."""

    def answer(self, id: int, answer: Json) -> None:
        """Say what became of a request. One that was withdrawn meanwhile is left alone."""

    def get_request(self, id: int) -> Request | None: ...

    def withdraw(self, id: int) -> bool:
        """Take a request back. False if it was answered already, or is not there."""

    def close(self) -> None: ...
