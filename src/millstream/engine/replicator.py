"""The management interface of a replicator: declare streams, see how they are, pause, resume, replay."""

from __future__ import annotations

from datetime import datetime
from typing import Protocol

from millstream.engine.stream_status import StreamStatus
from millstream.model import Checkpoint, StreamSpec


class Replicator(Protocol):
    """Every method may be called from any thread and returns when what it says is so. All raise MillstreamError."""

    @property
    def kind(self) -> str:
        """What replicates: `millstream`."""

    def upsert_stream(self, stream: StreamSpec) -> None:
        """Create the stream, or replace the one of its name. One that is the same already is left alone."""

    def delete_stream(self, name: str) -> None:
        """Remove a stream and everything that is kept for it: slot, publications, journal, checkpoints, state."""

    def list_streams(self) -> list[StreamSpec]:
        """Every stream of the home, by name. No password is in them."""

    def get_status(self, name: str) -> StreamStatus:
        """How one stream is, with each of its targets and tables."""

    def pause(self, name: str) -> None:
        """Halt a stream; its checkpoint stays. Idempotent. Returns when the batch at hand has ended."""

    def resume(self, name: str) -> None:
        """Go on from the last checkpoint. Idempotent."""

    def replay(self, name: str, start: Checkpoint | datetime) -> None:
        """Deliver once more what came after a checkpoint, or what was committed from a time on."""
