"""Find and gather the cells of pgoutput tuples, a column at a time over many rows.

A tuple is `ncols int16`, then per column `n` (NULL), `u` (unchanged, not sent) or `t` followed by
`length int32` and the bytes; all numbers are big-endian. A cell's place depends on the cells
before it in its row, but not on other rows: so all rows of a chunk advance together, one column
at a time, and no Python runs per row or per cell.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millstream.errors import JournalCorrupt

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

NULL, UNCHANGED, SENT = ord("n"), ord("u"), ord("t")

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

    def int32(self, at: Ints) -> npt.NDArray[np.uint32]:
        """The big-endian 32-bit numbers at these places, as they stand, aligned or not."""
        places = max(0, len(self.bytes) - 3)
        every: npt.NDArray[np.uint32] = np.ndarray((places,), ">u4", self.buffer, strides=(1,))
        return every[at]

    def int16(self, at: Ints) -> npt.NDArray[np.uint16]:
        places = max(0, len(self.bytes) - 1)
        every: npt.NDArray[np.uint16] = np.ndarray((places,), ">u2", self.buffer, strides=(1,))
        return every[at]


@dataclass
class Cells:
    """Kind, first byte and length of each cell, indexed by column and row. Not sent: length 0."""

    kind: npt.NDArray[np.uint8]
    start: Ints
    length: Ints

    @classmethod
    def missing(cls, columns: int, begin: Ints) -> Cells:
        """All NULL, each at a place inside its own row, so that places grow from row to row."""
        shape = (columns, len(begin))
        return cls(np.full(shape, NULL, np.uint8), np.broadcast_to(begin, shape).copy(), np.zeros(shape, np.int64))

    def put(self, rows: Ints, other: Cells) -> None:
        """Take over the cells of `other` for these rows."""
        self.kind[:, rows] = other.kind
        self.start[:, rows] = other.start
        self.length[:, rows] = other.length

    def copy(self) -> Cells:
        return Cells(self.kind.copy(), self.start.copy(), self.length.copy())


def walk(message: Message, at: Ints, columns: int) -> tuple[Cells, Ints]:
    """Walk the tuple that begins at `at` in each row; returns its cells and where it ends.

    The ends must be compared with where the rows end before a cell is used: only then is it known
    that every cell lies inside its row. Raises IndexError when a length leads out of the chunk.
    """
    if (message.int16(at) != columns).any():
        raise JournalCorrupt(f"a tuple does not have the {columns} columns of its relation")
    shape = (columns, len(at))
    cells = Cells(np.empty(shape, np.uint8), np.empty(shape, np.int64), np.empty(shape, np.int64))
    at = at + 2
    for column in range(columns):
        kind = message.bytes[at]
        sent = kind == SENT
        if sent.all():
            length = message.int32(at + 1)
            start = at + 5
        else:
            if not (sent | (kind == NULL) | (kind == UNCHANGED)).all():
                raise JournalCorrupt("a tuple has a cell that is neither text, NULL nor unchanged")
            length = np.zeros(len(at), np.uint32)
            length[sent] = message.int32(at[sent] + 1)
            start = at + np.where(sent, 5, 1)
        cells.kind[column], cells.start[column], cells.length[column] = kind, start, length
        at = start + length
    return cells, at


_evens: pa.Array = pa.array(np.arange(0, 1 << 15, 2, dtype=np.uint32))


def gather(message: Message, start: Ints, length: Ints, sent: Bools | None) -> pa.Array:
    """The cells of one column as a binary array, NULL where not `sent` (None: all are).

    Cells follow each other in the buffer, with other bytes between them. So an Arrow array over
    that same buffer whose elements are cell, gap, cell, gap ... needs only its offsets written,
    and taking every second element copies the cells at the speed of memory. The array has 32-bit
    offsets unless the chunk is one row too large for them.
    """
    rows = len(start)
    small = len(message.bytes) < _SMALL
    offsets = np.empty(2 * rows + 1, np.int32 if small else np.int64)
    offsets[0:-1:2] = start
    offsets[1::2] = start + length
    offsets[-1] = offsets[-2]
    kind = pa.binary() if small else pa.large_binary()
    both = pa.Array.from_buffers(kind, 2 * rows, [None, pa.py_buffer(offsets), message.buffer])
    taken = both.take(_every_second(rows))
    if sent is None:
        return taken
    return pa.Array.from_buffers(kind, rows, [bitmap(sent), *taken.buffers()[1:]])


def bitmap(mask: Bools) -> pa.Buffer:
    """An Arrow bitmap: one bit a row, lowest first."""
    return pa.py_buffer(np.packbits(mask, bitorder="little"))


def _every_second(rows: int) -> pa.Array:
    if rows <= len(_evens):
        return _evens.slice(0, rows)
    return pa.array(np.arange(0, 2 * rows, 2, dtype=np.uint32))
