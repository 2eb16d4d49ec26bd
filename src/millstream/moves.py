"""Rows whose key changes, followed one by one through a run of changes.

A key change moves a row: what it does not send stands where the row was. Keys can pass from row to
row (chains and swaps), so the changes of all keys that take part are gone through in order. They
are few: everything else is folded by column, in `latest`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from millstream.model import Op

Ints = npt.NDArray[np.int64]

KEPT = -1
"""Instead of a place: the target has the value."""
MISSING = -2
"""Instead of a place: nobody can have the value."""

_NONE = np.zeros(0, np.int64)


@dataclass(frozen=True)
class Moved:
    """How it ended: living rows with their last change and places of values, and the keys that are free."""

    change: Ints = field(default_factory=lambda: _NONE)
    base: Ints = field(default_factory=lambda: _NONE)
    """The number of the key that each row had before the changes; -1 for a row made by them."""
    places: Mapping[str, Ints] = field(default_factory=dict)
    gone_key: Ints = field(default_factory=lambda: _NONE)
    gone_change: Ints = field(default_factory=lambda: _NONE)


@dataclass(frozen=True)
class Row:
    """A living row. `change` is -1 for one that only the target has seen."""

    change: int
    base: int
    places: dict[str, int]

    def place(self, column: str) -> int:
        return self.places.get(column, self.change if self.change >= 0 else KEPT)


Seen = Callable[[int, int, Row | None], None]
"""Told after each change of the number of a key that it touched, of the change, and of the row under the key then."""


def follow(
    changes: Ints,
    op: npt.NDArray[np.uint8],
    new: Ints,
    old: Ints,
    places: Mapping[str, Ints],
    is_row: Callable[[int, int], bool],
    has_before: npt.NDArray[np.bool_],
    seen: Seen | None = None,
) -> Moved:
    """Go through `changes`, which are in order. `new` and `old` number the keys after and before each.

    `places` has the columns that some change did not send. `is_row(change, other)` tells whether the
    old row of a change is what another wrote: with a deferrable key two rows share one for a while.
    """
    living: dict[int, Row] = {}
    free: dict[int, int] = {}

    def leave(change: int, key: int) -> Row | None:
        """Take the row that this change found under the key; None if nobody can know its values."""
        row = living.get(key)
        if row is not None and (not has_before[change] or is_row(change, row.change)):
            del living[key]
            free[key] = change
            return row
        if row is None:
            known_free = key in free
            free[key] = change
            return None if known_free else Row(-1, key, {})
        return Row(-1, key, {})

    for change in changes.tolist():
        if op[change] == Op.DELETE:
            leave(change, int(old[change]))
            if seen is not None:
                seen(int(old[change]), change, living.get(int(old[change])))
            continue
        key = int(new[change])
        if op[change] == Op.UPDATE:
            previous = leave(change, int(old[change]))
        else:
            previous = None if key in free or key in living else Row(-1, key, {})
        at = {column: int(place[change]) for column, place in places.items()}
        free.pop(key, None)
        living[key] = _written(change, at, previous)
        if seen is not None:
            for touched in {int(old[change]), key}:
                seen(touched, change, living.get(touched))
    return _moved(living.values(), free, places)


def _moved(rows: Collection[Row], free: Mapping[int, int], columns: Collection[str]) -> Moved:
    return Moved(
        change=np.array([row.change for row in rows], np.int64),
        base=np.array([row.base for row in rows], np.int64),
        places={name: np.array([row.places[name] for row in rows], np.int64) for name in columns},
        gone_key=np.array(list(free), np.int64),
        gone_change=np.array(list(free.values()), np.int64),
    )


def _written(change: int, at: dict[str, int], previous: Row | None) -> Row:
    """The row that a change leaves: what it did not send is where the row before had it."""
    for column, place in at.items():
        if place == KEPT:
            at[column] = MISSING if previous is None else previous.place(column)
    return Row(change, -1 if previous is None else previous.base, at)
