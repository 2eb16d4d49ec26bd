"""The contract of the state store: what Millstream must remember besides journal and targets.

Each write is atomic and durable when the call returns. Readers never wait for writers; another
process may read at any time (`millstream status`). All times are UTC.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Protocol

from millstream.model import Cursor, Json, StreamState


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


class StateStore(Protocol):
    """Streams, cursors with history, delivery epochs, acknowledgements, runtime state."""

    def put_stream(self, name: str, definition: Json) -> None:
        """Remember a stream's definition (never a secret, only references to one)."""

    def get_stream(self, name: str) -> Json | None: ...

    def list_streams(self) -> list[str]: ...

    def delete_stream(self, name: str) -> None:
        """Forget the stream with its cursors, epochs and runtime state."""

    def save_cursor(self, cursor: Cursor) -> None:
        """Move a target's cursor and keep the old one in its history (bounded).

        Raises StateError if `cursor` would go back within one journal and epoch.
        """

    def get_cursor(self, stream: str, target: str) -> Cursor | None: ...

    def cursors(self, stream: str | None = None) -> list[Cursor]: ...

    def cursor_history(self, stream: str, target: str, limit: int = 100) -> list[Cursor]:
        """Newest first."""

    def open_epoch(self, record: EpochRecord) -> None:
        """Remember a new delivery epoch. Raises StateError unless it is above all earlier ones."""

    def current_epoch(self, stream: str, target: str) -> EpochRecord | None: ...

    def save_ack(self, source: str, position: int) -> None:
        """Remember, before it is said, that `position` is acknowledged to the source. Never goes back.

        Cursors stand at transactions, acknowledgements also at progress without rows: what a lost
        journal had covered can only be known from here.
        """

    def get_ack(self, source: str) -> int | None: ...

    def set_runtime(self, runtime: Runtime) -> None: ...

    def runtimes(self, stream: str | None = None) -> list[Runtime]: ...

    def close(self) -> None: ...
