"""Every version of every row in a run of changes, by column: what a table of history has to write.

    versions(changes, key) -> Versions
        ended   keys that the changes touch, each with the transaction that ended what was there before them
        rows    what was there under a key after a transaction, from that transaction to the next one of the key

A transaction is seen when it commits. So several changes of a key in one transaction leave one version, the last;
one that begins and ends in the same transaction was never there. A row whose key changes ends under the old key and
begins under the new one.

Changes of one relation, in seq order, without a truncate among them. They may be cut anywhere, also within a
transaction, if who writes them drops a version that ends in the transaction it began in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millstream.changelog import END_POSITION
from millstream.latest import SEQ, Bools, Fold, Ints, one_letter, whole, whole_numbers
from millstream.model import Op
from millstream.moves import KEPT, Row

VALID_FROM, VALID_TO, IS_CURRENT = "valid_from", "valid_to", "is_current"
POSITION = "_ms_position"

ADDED = (VALID_FROM, VALID_TO, IS_CURRENT)
"""Columns of a table of history that are neither the source's nor have a name of ours."""


@dataclass(frozen=True)
class Versions:
    """What is to be written, in this order: `ended`, `rows`. For the rest see `latest.Latest`."""

    ended: pa.Table
    """The key's columns, `_ms_seq`, `valid_to` and `_ms_end_position`; one row per key."""
    rows: pa.Table
    """The relation's columns, `_ms_seq`, `_ms_position`, `_ms_end_position`, `valid_from`, `valid_to`, `is_current`."""
    kept: Mapping[str, Bools]
    base: pa.Table | None
    special: Mapping[str, pa.StringArray]
    missing: Sequence[int]


def versions(changes: pa.Table, key: Sequence[str]) -> Versions:
    """All versions that changes of one relation (schema: `changelog.schema`) leave and end."""
    return _Versions(changes, tuple(key)).found()


class _Touched(NamedTuple):
    """Keys that changes have touched, in the order of the changes for each key."""

    key: Ints
    change: Ints
    version: Ints
    """The change that wrote what is there afterwards; -1 where nothing is."""
    base: Ints
    places: Mapping[str, Ints]


class _Versions(Fold):
    def __init__(self, changes: pa.Table, key: tuple[str, ...]) -> None:
        super().__init__(changes, one_letter(whole(changes["_ms_op"])), key, None)
        self._position, self._time = whole(changes[POSITION]), whole(changes["_ms_commit_ts"])
        codes = self._position.dictionary_encode().indices
        self._transaction = np.frombuffer(codes.buffers()[1], np.int32, len(codes), codes.offset * 4)

    def found(self) -> Versions:
        new, old, place_of = self._numbered()
        touched = self._touched(new, old, len(place_of))
        order = np.argsort(touched.key, kind="stable")
        key, transaction = touched.key[order], self._transaction[touched.change[order]]
        # What counts of a transaction is its last word on a key.
        last = np.ones(len(order), bool)
        last[:-1] = (key[1:] != key[:-1]) | (transaction[1:] != transaction[:-1])
        at, key = order[last], key[last]
        goes_on = key[1:] == key[:-1]
        end = np.full(len(at), -1, np.int64)
        end[:-1][goes_on] = touched.change[at][1:][goes_on]
        first = np.ones(len(at), bool)
        first[1:] = ~goes_on
        lives = touched.version[at] >= 0
        found = self._gathered(
            touched.version[at[lives]],
            {name: place[at[lives]] for name, place in touched.places.items()},
            touched.base[at[lives]],
            place_of,
        )
        rows = self._with_times(found.rows, touched.change[at[lives]], end[lives])
        return Versions(
            self._ended(key[first], touched.change[at[first]], place_of),
            rows,
            found.kept,
            found.base,
            found.special,
            found.missing,
        )

    def _touched(self, new: Ints, old: Ints, count: int) -> _Touched:
        concerned = self._concerned(new, old, count)
        settled = np.flatnonzero(~concerned)
        filled = self._all_filled(settled, new)
        by_column = _Touched(
            new[settled],
            settled,
            np.where(self.op[settled] == Op.DELETE, -1, settled),
            new[settled],
            {name: filled[name][settled] for name in self.places},
        )
        if not concerned.any():
            return by_column
        followed = self._followed(np.flatnonzero(concerned), new, old)
        return _Touched(
            np.concatenate([by_column.key, followed.key]),
            np.concatenate([by_column.change, followed.change]),
            np.concatenate([by_column.version, followed.version]),
            np.concatenate([by_column.base, followed.base]),
            {name: np.concatenate([at, followed.places[name]]) for name, at in by_column.places.items()},
        )

    def _followed(self, changes: Ints, new: Ints, old: Ints) -> _Touched:
        """The same for keys that pass from row to row, which are few."""
        seen: list[tuple[int, int, int, int]] = []
        places: dict[str, list[int]] = {name: [] for name in self.places}

        def see(key: int, change: int, row: Row | None) -> None:
            version = -1 if row is None else row.change
            if version >= 0 and self._transaction[version] != self._transaction[change]:
                # The row that the change took was not the one that is there.
                return
            seen.append((key, change, version, -1 if row is None else row.base))
            for name, found in places.items():
                found.append(KEPT if row is None else row.place(name))

        self._follow(changes, new, old, see)
        columns = np.array(seen, np.int64).reshape(-1, 4).T
        key, change, version, base = (np.ascontiguousarray(column) for column in columns)
        return _Touched(key, change, version, base, {name: np.array(at, np.int64) for name, at in places.items()})

    def _with_times(self, rows: pa.Table, begun: Ints, ended: Ints) -> pa.Table:
        end = whole_numbers(np.maximum(ended, 0), ended >= 0)
        begin = whole_numbers(begun)
        valid_from, valid_to = self._time.take(begin), self._time.take(end)
        more = {
            POSITION: self._position.take(begin),
            END_POSITION: self._position.take(end),
            VALID_FROM: valid_from,
            # The clock of the source may have been set back: no version ends before it begins.
            VALID_TO: pc.if_else(pc.less(valid_to, valid_from), valid_from, valid_to),
            IS_CURRENT: end.is_null(),
        }
        for name, values in more.items():
            rows = rows.append_column(name, values)
        return rows

    def _ended(self, keys: Ints, changes: Ints, place_of: Ints) -> pa.Table:
        at = whole_numbers(changes)
        more = {SEQ: self.new[SEQ], VALID_TO: self._time, END_POSITION: self._position}
        ended = self._keys_at(place_of[keys])
        for name, values in more.items():
            ended = ended.append_column(name, values.take(at))
        return ended
