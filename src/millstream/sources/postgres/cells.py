"""Find and gather the cells of pgoutput tuples, a column at a time over many rows.

A tuple is `ncols int16`, then per column `n` (NULL), `u` (unchanged, not sent), or `t` (text) or `b` (the
type's binary form) followed by `length int32` and the bytes; all numbers are big-endian. A cell's place
depends on the cells before it in its row, but not on other rows: so all rows of a chunk advance
together, one column at a time, and no Python runs per row or per cell.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millstream.errors import JournalCorrupt

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

NULL, UNCHANGED, TEXT, BINARY = ord("n"), ord("u"), ord("t"), ord("b")

_SMALL = 1 << 31
"""Up to here 32-bit offsets reach every byte of a chunk."""


class Message:
    """The bytes of a chunk of payloads, and where each of its rows begins and ends in them."""

    def __init__(self, payload: pa.LargeBinaryArray) -> None:
        rows = len(payload)
        _, offsets_buffer, data = payload.buffers()
        offsets: Ints = np.frombuffer(offsets_buffer, np.int64, rows + 1, payload.offset * 8)
        base, end = int(offsets[0]), int(offsets[-1])
        self.buffer: pa.Buffer = data.slice(base, end - base) if data is not None else pa.py_buffer(b"")
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(self.buffer, np.uint8)
        self.begin: Ints = offsets[:-1] - base
        self.end: Ints = offsets[1:] - base
        self.binary: pa.DataType = pa.binary() if end - base < _SMALL else pa.large_binary()
        self._offset: type[np.int32 | np.int64] = np.int32 if end - base < _SMALL else np.int64
        self._longest = int((self.end - self.begin).max(initial=0))

    def int32(self, at: Ints) -> npt.NDArray[np.uint32]:
        """The big-endian 32-bit numbers at these places, as they stand, aligned or not."""
        places = max(0, len(self.bytes) - 3)
        every: npt.NDArray[np.uint32] = np.ndarray((places,), ">u4", self.buffer, strides=(1,))
        return every[at]

    def int16(self, at: Ints) -> npt.NDArray[np.uint16]:
        """The same for 16 bits."""
        places = max(0, len(self.bytes) - 1)
        every: npt.NDArray[np.uint16] = np.ndarray((places,), ">u2", self.buffer, strides=(1,))
        return every[at]

    def lengths(self, at: Ints) -> npt.NDArray[np.unsignedinteger[Any]]:
        """The lengths of cells at these places. In short rows all but the last byte, or two, are zero."""
        if self._longest >= 1 << 16:
            return self.int32(at)
        last = self.bytes[at + 3]
        return last if self._longest < 1 << 8 else np.left_shift(self.bytes[at + 2], 8, dtype=np.uint16) | last

    def bounds(self, columns: int, rows: int) -> npt.NDArray[np.signedinteger[Any]]:
        """Room for the bounds of cells (and one more, see `gather`), as wide as the chunk needs."""
        return np.empty((columns, 2 * rows + 1), self._offset)


@dataclass
class Cells:
    """What each cell is, by column and row, and by column where the cells begin and end.

    `bounds` has begin and end of the first row's cell, then of the second row's, and so on: they
    only grow. A cell that was not sent has no bytes.
    """

    kind: npt.NDArray[np.uint8]
    bounds: npt.NDArray[np.signedinteger[Any]]

    @classmethod
    def missing(cls, message: Message, columns: int) -> Cells:
        """All NULL."""
        rows = len(message.begin)
        cells = cls(np.full((columns, rows), NULL, np.uint8), message.bounds(columns, rows))
        cells.bounds[:, 0:-1:2] = cells.bounds[:, 1::2] = message.begin
        return cells

    def put(self, rows: Ints, other: Cells) -> None:
        """Take over the cells of `other` for these rows."""
        self.kind[:, rows] = other.kind
        self.bounds[:, 2 * rows] = other.bounds[:, 0:-1:2]
        self.bounds[:, 2 * rows + 1] = other.bounds[:, 1::2]

    def of(self, rows: Ints) -> Cells:
        """A copy of the cells of these rows alone."""
        bounds = np.empty((len(self.bounds), 2 * len(rows) + 1), self.bounds.dtype)
        bounds[:, 0:-1:2], bounds[:, 1::2] = self.bounds[:, 2 * rows], self.bounds[:, 2 * rows + 1]
        return Cells(self.kind[:, rows], bounds)


def walk(message: Message, at: Ints, columns: int) -> tuple[Cells, Ints]:
    """Walk the tuple that begins at `at` in each row; returns its cells and where it ends.

    The ends must be compared with where the rows end before a cell is used: only then is it known
    that every cell lies inside its row. Raises IndexError when a length leads out of the chunk.
    """
    if (message.int16(at) != columns).any():
        raise JournalCorrupt(f"a tuple does not have the {columns} columns of its relation")
    cells = Cells(np.empty((columns, len(at)), np.uint8), message.bounds(columns, len(at)))
    at = at + 2
    for column in range(columns):
        kind = message.bytes[at]
        sent = kind == TEXT
        if not sent.all():
            sent |= kind == BINARY
        if sent.all():
            start = at + 5
            at = start + message.lengths(at + 1)
        else:
            if not (sent | (kind == NULL) | (kind == UNCHANGED)).all():
                raise JournalCorrupt("a tuple has a cell of a kind that is not known")
            start = at + np.where(sent, 5, 1)
            length = np.zeros(len(at), np.int64)
            length[sent] = message.lengths(at[sent] + 1)
            at = start + length
        cells.kind[column] = kind
        cells.bounds[column, 0:-1:2], cells.bounds[column, 1::2] = start, at
    return cells, at


def gather(message: Message, bounds: npt.NDArray[np.signedinteger[Any]], sent: Bools | None) -> pa.Array:
    """The cells of one column as a binary array, NULL where not `sent` (None: all are).

    Cells follow each other in the buffer, with other bytes between them. So the bounds are the
    offsets of an Arrow array over that same buffer whose elements are cell, gap, cell, gap ..., and
    taking every second element copies the cells at the speed of memory.
    """
    rows = len(bounds) // 2
    bounds[-1] = bounds[-2]
    both = pa.Array.from_buffers(message.binary, 2 * rows, [None, pa.py_buffer(bounds), message.buffer])
    taken = pc.take(both, _every_second(rows), boundscheck=False)
    if sent is None:
        return taken
    return pa.Array.from_buffers(message.binary, rows, [bitmap(sent), *taken.buffers()[1:]])


def bitmap(mask: Bools) -> pa.Buffer:
    """An Arrow bitmap: one bit a row, lowest first."""
    return pa.py_buffer(np.packbits(mask, bitorder="little"))


def integers(values: npt.NDArray[np.integer[Any]], valid: Bools | None = None) -> pa.Array:
    """An Arrow array over numpy's integers. (`pa.array` would do, but it imports pandas.)"""
    there = None if valid is None else bitmap(valid)
    held = np.ascontiguousarray(values)
    return pa.Array.from_buffers(pa.from_numpy_dtype(held.dtype), len(held), [there, pa.py_buffer(held)])


def strings(values: Sequence[str]) -> pa.StringArray:
    """An Arrow array of these texts, for the same reason."""
    raw = [value.encode() for value in values]
    offsets = np.zeros(len(raw) + 1, np.int32)
    offsets[1:] = np.cumsum([len(value) for value in raw]) if raw else 0
    return pa.Array.from_buffers(pa.string(), len(raw), [None, pa.py_buffer(offsets), pa.py_buffer(b"".join(raw))])


_evens: pa.Array = integers(np.arange(0, 1 << 15, 2, dtype=np.uint32))


def _every_second(rows: int) -> pa.Array:
    if rows <= len(_evens):
        return _evens.slice(0, rows)
    return integers(np.arange(0, 2 * rows, 2, dtype=np.uint32))
