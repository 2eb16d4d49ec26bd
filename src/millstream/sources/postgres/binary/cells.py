"""The bytes of values as numpy arrays, and numpy arrays as columns.

Readers of the binary form work on the values that are there; `Values` cuts them out of a column and
puts what was made of them back between the NULLs.
"""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millstream.errors import JournalCorrupt
from millstream.sources.postgres.casts import Octets, bounds, data_of, valid_of
from millstream.sources.postgres.cells import Bools, Ints, bitmap, integers

Numbers = npt.NDArray[Any]


class Values:
    """Where the values of a binary column are. `first` and `last` leave the NULLs out; `data` is all bytes."""

    def __init__(self, cells: pa.Array) -> None:
        first, last = bounds(cells)
        self.data: Octets = data_of(cells)
        self.valid: Bools = valid_of(cells)
        self.whole = bool(self.valid.all())
        self.first: Ints = first if self.whole else first[self.valid]
        self.last: Ints = last if self.whole else last[self.valid]
        self.rows = len(cells)

    def __len__(self) -> int:
        return len(self.first)

    @property
    def sizes(self) -> Ints:
        return self.last - self.first

    def fixed(self, size: int, what: str) -> Octets:
        """The bytes of values that all have this size, one row each."""
        if (self.sizes != size).any():
            refuse(what)
        if not len(self):
            return np.empty((0, size), np.uint8)
        begin, end = int(self.first[0]), int(self.last[-1])
        if end - begin == size * len(self):
            return self.data[begin:end].reshape(-1, size)
        every: Octets = np.lib.stride_tricks.sliding_window_view(self.data, size)
        return every[self.first]

    def numbers(self, kind: str, what: str) -> Numbers:
        """Values that are one big-endian number each, as numpy's `kind` in the machine's order."""
        form = np.dtype(kind)
        raw = np.ascontiguousarray(self.fixed(form.itemsize, what))
        return raw.view(form).reshape(-1).astype(form.newbyteorder("="))

    def at(self, place: Ints, kind: str, what: str) -> Numbers:
        """Big-endian numbers at these places of `data`, aligned or not."""
        form = np.dtype(kind)
        if len(place) and int(place.max()) + form.itemsize > len(self.data):
            refuse(what)
        if not len(place):
            return np.empty(0, form.newbyteorder("="))
        every: Numbers = np.ndarray((len(self.data) - form.itemsize + 1,), form, self.data, strides=(1,))
        return every[place].astype(form.newbyteorder("="))

    # Back into a column

    def column(self, values: Numbers, to: pa.DataType, home: Bools | None = None) -> tuple[pa.Array, Ints]:
        """A column of fixed width whose values have the bytes of `values`; those outside `home` are odd."""
        there = self.valid
        if not self.whole:
            spread = np.zeros((self.rows, *values.shape[1:]), values.dtype)
            spread[self.valid] = values
            values = spread
        odd = np.empty(0, np.int64)
        if home is not None and not home.all():
            odd = np.flatnonzero(self.valid)[~home]
            there = self.valid.copy()
            there[odd] = False
        mask = None if there.all() else bitmap(there)
        return pa.Array.from_buffers(to, self.rows, [mask, pa.py_buffer(np.ascontiguousarray(values))]), odd

    def text(self, data: Octets, sizes: Numbers) -> pa.Array:
        """A column of the texts that follow each other in `data`, each of its size."""
        spread = np.zeros(self.rows, np.int64)
        spread[self.valid] = sizes
        offsets = np.zeros(self.rows + 1, np.int64)
        np.cumsum(spread, out=offsets[1:])
        mask = None if self.whole else bitmap(self.valid)
        large = offsets[-1] >= 1 << 31
        buffers = [mask, pa.py_buffer(offsets if large else offsets.astype(np.int32)), pa.py_buffer(data)]
        made = pa.Array.from_buffers(pa.large_string() if large else pa.string(), self.rows, buffers)
        return made.cast(pa.string()) if large else made

    def spread(self, texts: pa.Array) -> pa.Array:
        """The same for texts that are an array already."""
        if self.whole:
            return texts
        place = np.cumsum(self.valid) - 1
        return texts.take(integers(np.where(self.valid, place, 0), self.valid))

    def cut(self, first: Ints, last: Ints, there: Bools | None = None) -> pa.Array:
        """The pieces of `data` between these places, which only grow, as a binary array."""
        wide = len(self.data) >= 1 << 31
        both = np.empty(2 * len(first) + 1, np.int64 if wide else np.int32)
        both[0:-1:2], both[1::2], both[-1] = first, last, last[-1] if len(last) else 0
        kind = pa.large_binary() if wide else pa.binary()
        pieces = pa.Array.from_buffers(kind, 2 * len(first), [None, pa.py_buffer(both), pa.py_buffer(self.data)])
        return pc.take(pieces, integers(np.arange(0, 2 * len(first), 2), there), boundscheck=False)


def lists(items: pa.Array, counts: Ints) -> pa.ListArray:
    """The items that follow each other as lists, one with so many of them for each of `counts`."""
    offsets = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=offsets[1:])
    return pa.ListArray.from_arrays(integers(offsets), items)


def refuse(what: str) -> NoReturn:
    """For bytes that no server sends."""
    raise JournalCorrupt(f"a value of type {what} is not in the binary form of that type")
