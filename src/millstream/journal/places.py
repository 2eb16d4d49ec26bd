"""Places in a journal in words, for messages."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

from millstream.errors import OutOfRange
from millstream.sources.postgres.lsn import format_lsn

_POSITIONS = {"postgres": format_lsn}


def position_text(source_kind: str, position: int) -> str:
    """A position as the people of that kind of source write it."""
    return _POSITIONS.get(source_kind, str)(position)


def time_text(ts_us: int) -> str:
    return datetime.fromtimestamp(ts_us / 1_000_000, UTC).isoformat()


@dataclass(frozen=True)
class Earliest:
    """The first change that is retained: its seq, its commit position, and the oldest commit time there is."""

    seq: int
    position: int
    ts_us: int

    def refuse(self, what: str, source_kind: str) -> OutOfRange:
        """The error for `what`, which lies before it."""
        return OutOfRange(
            f"{what} is not in the journal: it begins at seq {self.seq}, "
            f"position {position_text(source_kind, self.position)}, {time_text(self.ts_us)}",
            hint="begin there, or deliver to a new target, which begins there; what was before can only be read "
            "from the source again",
        )
