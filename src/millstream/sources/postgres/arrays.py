"""The text of arrays to Arrow lists, by column.

`{1,NULL,"a \\"b\\""}`: elements stand between braces with a delimiter between them; one that could be
mistaken is quoted, with a backslash before quotes and backslashes in it; NULL without quotes is no
value. All bytes of a column are looked at together: which quotes are escaped, what stands inside
quotes, where elements begin. No Python runs per row, quoted or not.

A list has one dimension and is counted from its begin. So an array of several dimensions (`{{1},{2}}`),
one with bounds of its own (`[0:1]={1,2}`) and one with an element that has no home in the element's
type are odd as a whole.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millstream.sources.postgres.casts import NONE, Casted, Octets, Reader, bounds, data_of, valid_of, without
from millstream.sources.postgres.cells import Bools, Ints, bitmap

_QUOTE, _ESCAPE, _BRACE = ord('"'), ord("\\"), ord("{")
_NULL = np.frombuffer(b"NULL", np.uint32)[0]


@dataclass(frozen=True)
class ListReader:
    """Reads lists whose elements `read` reads. The signs are single ASCII characters."""

    read: Reader
    delimiter: str
    begin: str = "{"
    end: str = "}"

    def __call__(self, cells: pa.Array, to: pa.DataType) -> Casted:
        """Lists of the type `to`, NULL where the text is no plain list of such elements."""
        first, last = bounds(cells)
        data, valid = data_of(cells), valid_of(cells)
        size = last - first
        listed = _framed(data, first, last, self) & valid
        odd = np.flatnonzero(valid & ~listed)
        # Taking rows out also makes every NULL an empty text, so that all bytes belong to lists.
        if len(odd) or (~valid & (size > 0)).any():
            return self._without(cells, odd, to)
        start = int(first[0]) if len(first) else 0
        parts = _split(data[start : int(last[-1])] if len(last) else data, first[valid] - start, size[valid], self)
        if parts is None:
            return self._halved(cells, to)
        elements, counts = parts
        offsets = np.zeros(len(cells) + 1, np.int32)
        offsets[1:][valid] = counts
        np.cumsum(offsets, out=offsets)
        values, refused = self.read(elements, to.value_type)
        buffers = [None if valid.all() else bitmap(valid), pa.py_buffer(offsets)]
        lists = pa.Array.from_buffers(to, len(cells), buffers, children=[values])
        if not len(refused):
            return lists, NONE
        holding = np.unique(np.searchsorted(offsets, refused, side="right") - 1)
        return without(lists, holding), holding

    def _without(self, cells: pa.Array, odd: Ints, to: pa.DataType) -> Casted:
        array, more = self(without(cells, odd), to)
        return array, np.union1d(odd, more)

    def _halved(self, cells: pa.Array, to: pa.DataType) -> Casted:
        """No server writes what cannot be split; which rows hold it is found by halving."""
        if len(cells) == 1:
            return pa.nulls(1, to), np.zeros(1, np.int64)
        middle = len(cells) // 2
        (low, odd), (high, more) = self(cells.slice(0, middle), to), self(cells.slice(middle), to)
        return pa.concat_arrays([low, high]), np.concatenate([odd, more + middle])


def _framed(data: Octets, first: Ints, last: Ints, signs: ListReader) -> Bools:
    """Which rows stand between the signs of a list, and do not begin with a list in the list."""
    framed: Bools = last - first >= 2
    if framed.any():
        begin, end = np.where(framed, first, 0), np.where(framed, last, 2)
        framed &= (data[begin] == ord(signs.begin)) & (data[end - 1] == ord(signs.end))
        framed &= data[begin + 1] != _BRACE
    return framed


def _split(data: Octets, first: Ints, size: Ints, signs: ListReader) -> tuple[pa.Array, Ints] | None:
    """The elements of all lists, and how many each list has. None if some list is not well formed.

    `data` is the lists' text, one after another with nothing between.
    """
    quoting = _quoting(data)
    frame = (data == ord(signs.begin)) | (data == ord(signs.end))
    between = data == ord(signs.delimiter)
    if quoting is not None:
        inside = quoting.inside
        if inside[first].any() or inside[first + size - 1].any() or (quoting.escape & ~inside).any():
            return None
        frame &= ~inside
        between &= ~inside
    if np.count_nonzero(frame) != 2 * len(first):
        return None
    counts = _counts(between, first, size)
    frame |= between
    full = size > 2
    starts, ends = between.copy(), between
    starts[first[full]] = True
    ends[(first + size - 1)[full]] = True
    elements = _elements(data, np.flatnonzero(starts) + 1, np.flatnonzero(ends), frame, quoting)
    return None if elements is None else (elements, counts)


@dataclass(frozen=True)
class _Quoting:
    """Of each byte: whether it stands inside quotes, is a quote that opens or closes, escapes the next."""

    inside: Bools
    quote: Bools
    escape: Bools


def _quoting(data: Octets) -> _Quoting | None:
    """None if nothing is quoted."""
    quote: Bools = data == _QUOTE
    if not quote.any():
        return None
    escape: Bools = data == _ESCAPE
    if escape.any():
        at = np.flatnonzero(escape)
        # In a run of backslashes every second one is itself escaped.
        number = np.arange(len(at))
        fresh = np.append(True, np.diff(at) > 1)
        place = number - np.maximum.accumulate(np.where(fresh, number, 0))
        escape[at[place % 2 == 1]] = False
        escaped = at[place % 2 == 0] + 1
        quote[escaped[escaped < len(data)]] = False
    # Whether the count so far is odd; a count of eight bits is odd when the whole one is.
    inside: Bools = (np.cumsum(quote, dtype=np.uint8) & 1).view(bool)
    return _Quoting(inside, quote, escape)


def _counts(between: Bools, first: Ints, size: Ints) -> Ints:
    """How many elements each list has: one more than delimiters, but none if nothing is in it."""
    if not len(first):
        return NONE
    counts: Ints = np.add.reduceat(between, first, dtype=np.int64)
    return np.where(size > 2, counts + 1, 0)


def _elements(data: Octets, begin: Ints, end: Ints, frame: Bools, quoting: _Quoting | None) -> pa.Array | None:
    """The elements between `begin` and `end`, without quotes and escapes; `frame` are the bytes around them."""
    size = end - begin
    plain: Bools = np.ones(len(begin), bool)
    keep = ~frame
    if quoting is not None:
        plain = data[begin] != _QUOTE
        marked = ~plain
        closed = (size[marked] >= 2).all() and quoting.quote[end[marked] - 1].all()
        if not closed or 2 * np.count_nonzero(marked) != np.count_nonzero(quoting.quote):
            return None
        keep &= ~(quoting.quote | quoting.escape)
    elif (data == _ESCAPE).any():
        return None
    if (size[plain] == 0).any():
        return None
    missing = np.flatnonzero(plain & (size == 4))
    missing = missing[_four_octets(data, begin[missing]) == _NULL]
    offsets = np.zeros(len(begin) + 1, np.int32)
    if len(begin):
        np.cumsum(np.add.reduceat(keep, begin, dtype=np.int32), out=offsets[1:])
    there = np.ones(len(begin), bool)
    there[missing] = False
    buffers = [bitmap(there) if len(missing) else None, pa.py_buffer(offsets), pa.py_buffer(data[keep])]
    return pa.Array.from_buffers(pa.binary(), len(begin), buffers)


def _four_octets(data: Octets, at: Ints) -> npt.NDArray[np.uint32]:
    every: npt.NDArray[np.uint32] = np.ndarray((max(0, len(data) - 3),), np.uint32, data, strides=(1,))
    return every[at]
