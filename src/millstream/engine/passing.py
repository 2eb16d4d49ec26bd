"""Changes that lack values and are followed by another one of their row that lacks some as well.

A row that is changed often is at the source as its last change left it, so that only that one can be completed. Those
before it are no letters: whatever becomes of the last one becomes of the row. They are left out of their batch as
letters are, and nothing is taken from their row until it was written.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from millstream.state.base import UNSENT, Letter, LetterState
from millstream.targets.rejects import Held, Reject

_Row = tuple[str, str]
"""A table, and the key of one of its rows."""


class Passing:
    """Of one batch of a mirror."""

    def __init__(self, letters: Iterable[Letter]) -> None:
        """`letters` are those that the target has already."""
        self._last: dict[_Row, int] = {}
        self._held: dict[str, Held] = {}
        for one in letters:
            if one.kind == UNSENT and one.key is not None and one.state is LetterState.WAITING:
                self._see(one.table, one.key, one.seq)

    @property
    def held(self) -> tuple[Held, ...]:
        """What is left out and no letter."""
        return tuple(self._held.values())

    def sifted(self, found: Sequence[Reject], left: Sequence[Reject]) -> list[Reject]:
        """Those of `left`, which could not be completed, that are to be letters. `found` are all that lacked values."""
        for one in found:
            if one.kind == UNSENT and one.key is not None:
                self._see(one.table, one.key, one.seq)
        letters = []
        for one in left:
            if one.kind == UNSENT and one.key is not None and one.seq < self._last[one.table, one.key]:
                self._held[one.event_id] = Held(one.event_id, one.seq, one.table, one.key)
            else:
                letters.append(one)
        return letters

    def _see(self, table: str, key: str, seq: int) -> None:
        self._last[table, key] = max(seq, self._last.get((table, key), 0))
