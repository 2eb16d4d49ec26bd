"""The contract of the state store: what Millstream must remember besides journal and targets.

Each write is atomic and durable when the call returns. Readers never wait for writers; another
process may read at any time (`millstream status`). All times are UTC.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Protocol

from millstream.model import Cursor, Json, StreamState
from millstream.registry.kinds import Decided

MISSING_BASE = "missing_base"
"""The kind of letters whose change left out a value that nobody had."""
TRANSFORM = "transform"
"""The kind of letters that a filter or transform fails on: what they hold is the source's change."""
UNSENT = "unsent"
"""The kind of letters that lack what filters or transforms need; they too hold the source's change."""

UNSHAPED = (TRANSFORM, UNSENT)
"""Kinds of letters that were never given to filters and transforms, or failed there."""
INCOMPLETE = (MISSING_BASE, UNSENT)
"""Kinds of letters that lack values: they are of no more use, and go, when a later change writes their row."""

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


class LetterState(enum.StrEnum):
    """Whether a dead letter can still be delivered."""

    WAITING = "waiting"
    SUPERSEDED = "superseded"
    """A later change has written its row: nothing is lost with it any more."""


@dataclass(frozen=True)
class Letter:
    """A change that a target could not take. `key` and `payload` hold values of a user's row; nothing else does."""

    stream: str
    target: str
    table: str
    event_id: str
    seq: int
    op: str
    kind: str
    reason: str
    at: datetime
    key: str | None = field(repr=False)
    """The key of its row as JSON text; None where rows have none."""
    relation_id: int = 0
    relation: Json = field(default_factory=dict, repr=False)
    payload: bytes = field(default=b"", repr=False)
    """The change, in the schema of its relation's changelog, as an Arrow IPC stream; empty in lists."""
    state: LetterState = LetterState.WAITING
    superseded_by: int | None = None
    """The seq of the change that wrote the row later."""
    tries: int = 0
    """How often it was retried in vain."""
    id: int = 0
    """Given by the store; grows."""


@dataclass(frozen=True)
class Doubt:
    """A change that a mirror was given with values of the row that the source had under its key when it was asked.

    `key` holds values of a user's row. See `targets.rejects` for what follows from a doubt.
    """

    stream: str
    target: str
    table: str
    event_id: str
    seq: int
    key: str = field(repr=False)
    """The key of its row as JSON text; or `EVERY_ROW`: of so many rows of the table that they are not told apart."""
    until: int
    """A position of the source: whatever the row showed was committed before it."""


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

    def save_cursor(
        self, cursor: Cursor, tallies: Sequence[Tally] = (), superseded: Mapping[str, int] | None = None
    ) -> None:
        """Move a target's cursor, keep the old one in its history (bounded), and add to its totals: all or nothing.

        `superseded` are event ids of its letters whose rows were written by a later change, with that one's seq.
        They are marked so; those of kind `missing_base` say nothing then that the target does not have, and go.
        So do doubts of these events, and those that end at or before the cursor's position.
        Raises StateError if `cursor` would go back within one journal and epoch.
        """

    def get_cursor(self, stream: str, target: str) -> Cursor | None: ...

    def cursors(self, stream: str | None = None) -> list[Cursor]: ...

    def cursor_history(self, stream: str, target: str, limit: int = 100) -> list[Cursor]:
        """Newest first."""

    def add_totals(self, stream: str, target: str, tallies: Sequence[Tally]) -> None:
        """Add to a target's totals what came beside its batches."""

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

    def add_letters(self, letters: Sequence[Letter], *, keep: int | None = None) -> list[Letter]:
        """Remember letters; one that is there already (stream, target and event id) stays as it is.

        With `keep`, at most so many of each target remain, the newest; returns those that had to go for it.
        """

    def letters(self, stream: str | None = None, target: str | None = None) -> list[Letter]:
        """The letters, oldest first, without relation and payload."""

    def get_letter(self, id: int) -> Letter | None:
        """A letter with everything."""

    def mark_letter(self, id: int, *, superseded_by: int | None = None, reason: str | None = None) -> None:
        """Note that a letter's row was written by a later change, or that it was retried in vain, and why."""

    def remove_letters(self, ids: Sequence[int]) -> int:
        """Forget letters; returns how many there were."""

    def add_doubts(self, doubts: Sequence[Doubt]) -> None:
        """Remember what is in doubt; one of the same event (of stream and target) takes the place of the one before."""

    def doubts(self, stream: str, target: str) -> list[Doubt]:
        """What is in doubt of a target, in order of seq."""

    def set_doubts(self, stream: str, target: str, doubts: Sequence[Doubt]) -> None:
        """Just this of a target is in doubt from now on, and nothing that was. At once: no moment is without both."""

    def set_needs_reload(self, stream: str, target: str, reason: str | None) -> None:
        """Remember that a target has lost changes and must begin anew, and why; None: no longer."""

    def needs_reload(self, stream: str) -> dict[str, str]:
        """The targets of a stream that must begin anew, with the reason."""

    def decide_ddl(self, stream: str, journal_id: str, seq: int, decided: Decided) -> None:
        """Remember what was decided of the schema change that begins at a seq, in place of what was decided before."""

    def ddl_decisions(self, stream: str, journal_id: str) -> dict[int, Decided]:
        """What was decided of a stream's schema changes, by seq."""

    def save_verification(self, stream: str, target: str, result: Json) -> None:
        """Remember what came of the last comparison of a target with its source, in place of the one before."""

    def verifications(self, stream: str) -> dict[str, Json]:
        """The same by target."""

    def save_replay(self, stream: str, target: str, replay: Json) -> None:
        """Remember what is to be delivered once more to a target, and how far that is, in place of the one before."""

    def replays(self, stream: str) -> dict[str, Json]:
        """The same by target."""

    def save_note(self, stream: str, target: str, kind: str, note: Json) -> None:
        """Remember something of a target under the name `kind`, in place of what was remembered there before."""

    def notes(self, stream: str, kind: str) -> dict[str, Json]:
        """What is remembered under that name, by target."""

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
