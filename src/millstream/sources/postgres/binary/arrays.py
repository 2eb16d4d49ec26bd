"""Arrays: dimensions, a flag for NULLs, the element's type, bounds by dimension; then size and bytes of each element.

What becomes of them is the same as of their text (see `postgres.arrays`): a list, if there is one
dimension counted from 1 and every element has a home. All rows step from element to element
together; where the elements have one size, as numbers have, their places are known without a step.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millstream.sources.postgres import casts
from millstream.sources.postgres.binary.cells import Values, lists, refuse
from millstream.sources.postgres.casts import NONE, Casted, Reader
from millstream.sources.postgres.cells import Bools, Ints, bitmap, strings

_HEADER, _BOUNDS = 12, 8
_MOST_DIMENSIONS = 6


@dataclass(frozen=True)
class ArrayReader:
    """Reads arrays whose elements `element` reads, and whose text has this delimiter between them."""

    element: Reader
    delimiter: str

    def __call__(self, cells: pa.Array, to: pa.DataType) -> Casted:
        values = Values(cells)
        dimensions = _dimensions(values)
        if pa.types.is_string(to):
            return self._texts(values, dimensions), NONE
        single = dimensions == 1
        plain = dimensions == 0
        plain[single] = values.at(values.first[single] + _HEADER + 4, ">i4", "array") == 1
        if not plain.all():
            return self._without(cells, np.flatnonzero(values.valid)[~plain], to)
        counts = np.zeros(len(values), np.int64)
        counts[single] = values.at(values.first[single] + _HEADER, ">i4", "array")
        items, refused = self.element(
            elements(values, values.first + _HEADER + _BOUNDS * single, counts, "array"), to.value_type
        )
        offsets = np.zeros(values.rows + 1, np.int32)
        offsets[1:][values.valid] = counts
        np.cumsum(offsets, out=offsets)
        if len(refused):
            return self._without(cells, np.unique(np.searchsorted(offsets, refused, side="right") - 1), to)
        mask = None if values.whole else bitmap(values.valid)
        return pa.Array.from_buffers(to, values.rows, [mask, pa.py_buffer(offsets)], children=[items]), NONE

    def _without(self, cells: pa.Array, odd: Ints, to: pa.DataType) -> Casted:
        array, more = self(casts.without(cells, odd), to)
        return array, np.union1d(odd, more)

    def _texts(self, values: Values, dimensions: Ints) -> pa.Array:
        """The server's text of arrays. Only odd ones and keys need it, so it is put together one by one."""
        shapes = [
            values.at(first + _HEADER + 4 * np.arange(2 * many), ">i4", "array").reshape(-1, 2).tolist()
            for first, many in zip(values.first.tolist(), dimensions.tolist(), strict=True)
        ]
        if any(size < 1 for shape in shapes for size, _ in shape):
            refuse("array")
        counts = np.array([math.prod(size for size, _ in shape) if shape else 0 for shape in shapes], object)
        parts = elements(values, values.first + _HEADER + _BOUNDS * dimensions, counts, "array")
        items = self.element(parts, pa.string())[0].to_pylist()
        texts, at = [], 0
        for shape, count in zip(shapes, counts.tolist(), strict=True):
            texts.append(_array_text(shape, [self._quoted(item) for item in items[at : at + count]], self.delimiter))
            at += count
        return values.spread(strings(texts))

    def _quoted(self, item: str | None) -> str:
        if item is None:
            return "NULL"
        if item and item.upper() != "NULL" and not re.search(rf'[{{}}"\\ \t\n\r\v\f{re.escape(self.delimiter)}]', item):
            return item
        return '"' + re.sub(r'(["\\])', r"\\\1", item) + '"'


@dataclass(frozen=True)
class VectorReader:
    """Reads int2vector and oidvector, sent as arrays of one dimension counted from 0: `1 2 3`."""

    element: Reader
    what: str

    def __call__(self, cells: pa.Array, to: pa.DataType) -> Casted:
        values = Values(cells)
        if (_dimensions(values) != 1).any():
            refuse(self.what)
        counts = values.at(values.first + _HEADER, ">i4", self.what).astype(np.int64)
        parts = elements(values, values.first + _HEADER + _BOUNDS, counts, self.what)
        if parts.null_count:
            refuse(self.what)
        return values.spread(pc.binary_join(lists(self.element(parts, pa.string())[0], counts), " ")), NONE


def _dimensions(values: Values) -> Ints:
    if (values.sizes < _HEADER).any():
        refuse("array")
    found = values.at(values.first, ">i4", "array").astype(np.int64)
    if ((found < 0) | (found > _MOST_DIMENSIONS)).any() or (values.sizes < _HEADER + _BOUNDS * found).any():
        refuse("array")
    return found


def elements(values: Values, at: Ints, counts: Ints, what: str) -> pa.Array:
    """The bytes of all elements, row after row, each behind its size; `at` is where those of each row begin."""
    if ((counts < 0) | (4 * counts > values.last - at)).any():
        refuse(what)
    counts = counts.astype(np.int64)
    found = _of_one_size(values, at, counts, what)
    first, last, there = _stepped(values, at, counts, what) if found is None else found
    return values.cut(first, last, None if there.all() else there)


def _of_one_size(values: Values, at: Ints, counts: Ints, what: str) -> tuple[Ints, Ints, Bools] | None:
    """The places, if all elements are as long as the first one; None if not."""
    rows = np.flatnonzero(counts)
    if not len(rows):
        return (NONE, NONE, np.zeros(0, bool)) if (at == values.last).all() else None
    size = int(values.at(at[rows[:1]], ">i4", what)[0])
    if size < 0 or (values.last - at != counts * (4 + size)).any():
        return None
    row = np.repeat(np.arange(len(counts)), counts)
    place = at[row] + (4 + size) * (np.arange(len(row)) - (np.cumsum(counts) - counts)[row])
    if (values.at(place, ">i4", what) != size).any():
        return None
    return place + 4, place + 4 + size, np.ones(len(row), bool)


def _stepped(values: Values, at: Ints, counts: Ints, what: str) -> tuple[Ints, Ints, Bools]:
    """The places, found by going from each element to the next in all rows at once."""
    total = int(counts.sum())
    first, last, there = np.zeros(total, np.int64), np.zeros(total, np.int64), np.zeros(total, bool)
    into = np.cumsum(counts) - counts
    at = at.copy()
    rows = np.flatnonzero(counts)
    number = 0
    while len(rows):
        place = at[rows]
        if (place + 4 > values.last[rows]).any():
            refuse(what)
        size = values.at(place, ">i4", what).astype(np.int64)
        sent = size >= 0
        end = place + 4 + np.where(sent, size, 0)
        first[into[rows] + number], last[into[rows] + number], there[into[rows] + number] = place + 4, end, sent
        at[rows] = end
        number += 1
        rows = rows[counts[rows] > number]
    if (at != values.last).any():
        refuse(what)
    return first, last, there


def _array_text(shape: Sequence[Sequence[int]], items: list[str], delimiter: str) -> str:
    """`[0:1]={1,2}`: the bounds only if one of them does not begin with 1."""
    if not shape:
        return "{}"
    for size, _ in reversed(shape):
        items = ["{" + delimiter.join(items[at : at + size]) + "}" for at in range(0, len(items), size)]
    bounds = "".join(f"[{lower}:{lower + size - 1}]" for size, lower in shape)
    return (f"{bounds}=" if any(lower != 1 for _, lower in shape) else "") + items[0]
