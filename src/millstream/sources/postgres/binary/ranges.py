"""Ranges and multiranges of the built-in types: a byte of flags, then size and bytes of each bound that is there.

Their bounds are numbers, dates and timestamps, so in the text of one a blank is all that asks for quotes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millstream.sources.postgres.binary import numbers, times
from millstream.sources.postgres.binary.arrays import elements
from millstream.sources.postgres.binary.cells import Values, lists, refuse
from millstream.sources.postgres.binary.numeric import numeric
from millstream.sources.postgres.casts import NONE, Casted, Reader
from millstream.sources.postgres.cells import Bools, Ints, integers, strings

_EMPTY, _LOWER_IN, _UPPER_IN, _LOWER_OPEN, _UPPER_OPEN = 1, 2, 4, 8, 16


@dataclass(frozen=True)
class RangeReader:
    """Reads ranges whose bounds `bound` reads: `[1,5)`, `(,5)`, `empty`."""

    bound: Reader
    what: str

    def __call__(self, cells: pa.Array, to: pa.DataType) -> Casted:
        values = Values(cells)
        if (values.sizes < 1).any():
            refuse(self.what)
        flags = values.at(values.first, "u1", self.what)
        if (flags > 31).any():
            refuse(self.what)
        empty = flags & _EMPTY > 0
        lower, at = self._bounds(values, values.first + 1, ~empty & (flags & _LOWER_OPEN == 0))
        upper, at = self._bounds(values, at, ~empty & (flags & _UPPER_OPEN == 0))
        if (at != values.last).any():
            refuse(self.what)
        begin = _choice("([", flags & _LOWER_IN > 0)
        end = _choice(")]", flags & _UPPER_IN > 0)
        written = pc.binary_join_element_wise(begin, lower, ",", upper, end, "")
        return values.spread(pc.if_else(_bools(empty), "empty", written)), NONE

    def _bounds(self, values: Values, at: Ints, there: Bools) -> tuple[pa.Array, Ints]:
        """The bounds that begin at these places in the rows where there is one, as text, and where they end."""
        rows = np.flatnonzero(there)
        first = at[rows] + 4
        if (first > values.last[rows]).any():
            refuse(self.what)
        last = first + values.at(at[rows], ">i4", self.what).astype(np.int64)
        if (last < first).any() or (last > values.last[rows]).any():
            refuse(self.what)
        texts = self.bound(values.cut(first, last), pa.string())[0]
        quoted = pc.if_else(pc.match_substring(texts, " "), pc.binary_join_element_wise('"', texts, '"', ""), texts)
        end = at.copy()
        end[rows] = last
        place = np.zeros(len(at), np.int64)
        place[rows] = np.arange(1, len(rows) + 1)
        return pa.concat_arrays([strings([""]), quoted]).take(integers(place)), end


@dataclass(frozen=True)
class MultirangeReader:
    """Reads sets of such ranges: how many, then size and bytes of each. `{[1,3),[5,9)}`."""

    ranges: RangeReader
    what: str

    def __call__(self, cells: pa.Array, to: pa.DataType) -> Casted:
        values = Values(cells)
        if (values.sizes < 4).any():
            refuse(self.what)
        count = values.at(values.first, ">i4", self.what).astype(np.int64)
        parts = elements(values, values.first + 4, count, self.what)
        if parts.null_count:
            refuse(self.what)
        joined = pc.binary_join(lists(self.ranges(parts, pa.string())[0], count), ",")
        return values.spread(pc.binary_join_element_wise("{", joined, "}", "")), NONE


def _choice(signs: str, second: Bools) -> pa.Array:
    return strings(list(signs)).take(integers(second.astype(np.int64)))


def _bools(mask: Bools) -> pa.Array:
    return integers(mask.astype(np.uint8)).cast(pa.bool_())


def _readers() -> dict[str, Reader]:
    bounds = {
        "int4": numbers.READERS["int4"],
        "int8": numbers.READERS["int8"],
        "num": numeric,
        "ts": times.timestamp,
        "tstz": times.timestamptz,
        "date": times.date,
    }
    found: dict[str, Reader] = {}
    for name, bound in bounds.items():
        ranges = RangeReader(bound, f"{name}range")
        found |= {f"{name}range": ranges, f"{name}multirange": MultirangeReader(ranges, f"{name}multirange")}
    return found


READERS: dict[str, Reader] = _readers()
