"""One table that is copied: which steps there are, where an interrupted copy goes on, and how far it is."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass

from millstream.keyrange import KeyRange
from millstream.model import Json, Relation
from millstream.sources.base import SnapshotPlan
from millstream.targets.lanes.tables import mirror_key

RANGES = "ranges"
"""The kind of note in which the state store has how tables are cut by their keys (`plans`, with values of the keys) and
which `table` is at hand. Nothing when no table is copied."""


class SnapshotOld(Exception):
    """The snapshot at hand is as old as it may become: what is left is copied under another one."""


@dataclass(frozen=True)
class Copying:
    """One table under one snapshot."""

    found: SnapshotPlan
    seq: int
    relation: Relation
    first: int
    """Its chunks are those with numbers from here on"""
    end: int
    """up to this one, which is not its."""
    within: KeyRange | None = None
    """Only this range of its key is read; None: all of it."""

    @property
    def ranges(self) -> Json | None:
        """How it is cut by its key; None: its chunks are this snapshot's alone, or it must come in one step."""
        return self.found.ranges.get(self.relation.table) if mirror_key(self.relation) else None

    def steps(self, done: int, *, by_chunk: bool) -> list[range]:
        """The chunks of each step, but of so many that are `done`."""
        left = range(self.first + done, self.end)
        if by_chunk:
            return [range(number, number + 1) for number in left]
        return [left] if left else []


@dataclass(frozen=True)
class Begun:
    """A copy that was begun, by this snapshot or by an earlier one."""

    mark: int
    since: int
    """The version of its first rows: what is older in the end is not in the source."""
    done: int = 0
    rows: int = 0

    @classmethod
    def anew(cls, copying: Copying) -> Begun:
        return cls(secrets.randbits(48), copying.seq)

    @classmethod
    def known(cls, copying: Copying, kept: Json, table: Json) -> Begun | None:
        """The copy that is gone on with; None if there is none, or the table is not as it was any more.

        `kept` is the note of ranges, `table` what was written down of the table.
        """
        name, ranges = copying.relation.table, copying.ranges
        if not kept or kept["table"] != name or ranges is None or ranges != kept["plans"].get(name):
            return None
        return cls(kept["mark"], kept["since"], table["done"], table["rows"]) if table["done"] else None

    def note(self, copying: Copying) -> Json:
        """What is to be kept, so that `known` finds it."""
        plans = dict(copying.found.ranges)
        return {"table": copying.relation.table, "mark": self.mark, "since": self.since, "plans": plans}


class Speed:
    """How fast steps go, counted from here: what came before an interruption says nothing of it."""

    def __init__(self, begun: Begun, chunks: int) -> None:
        self._begun = begun
        self._chunks = chunks
        self._started = time.monotonic()

    def at(self, done: int, rows: int) -> Json:
        """What `status` tells after so many chunks and rows of the table."""
        seconds = max(time.monotonic() - self._started, 1e-3)
        each = seconds / max(1, done - self._begun.done)
        return {
            "rows_per_second": round((rows - self._begun.rows) / seconds),
            "seconds_left": round(each * (self._chunks - done), 1),
        }
