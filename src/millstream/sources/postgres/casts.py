"""The server's text to typed Arrow arrays, with the values that have no home split off.

A reader is given a binary array (32- or 64-bit offsets) of the server's text and the Arrow type to
make of it. Each is total: it returns an array of that type, as long as its input, and the rows whose
value could not be held, in rising order (they are NULL in the array). Nothing is rounded, cut or
guessed. Arrow's parsers are strict: what Postgres writes for infinity, NaN, BC and years beyond
9999 they refuse, so a cast that succeeds is right, and only one that fails needs a closer look.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millstream.sources.postgres.cells import Bools, Ints, bitmap, integers, strings

Casted = tuple[pa.Array, Ints]
Reader = Callable[[pa.Array, pa.DataType], Casted]
Octets = npt.NDArray[np.uint8]

NONE: Ints = np.empty(0, np.int64)

_NIBBLE = np.full(256, 0xFF, np.uint8)
_NIBBLE[list(b"0123456789abcdef")] = range(16)


def exact_text(text: pa.Array, rows: Ints) -> pa.StringArray:
    """What `_ms_special` says of these rows: the text itself, or `\\x<hex>` if it is no UTF-8."""
    chosen = text.take(integers(rows))
    try:
        return chosen.cast(pa.string())
    except pa.ArrowInvalid:
        return strings([_readable(value) for value in chosen.to_pylist()])


def _readable(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return "\\x" + value.hex()


def text(cells: pa.Array, to: pa.DataType) -> Casted:
    """The text itself; bytes that are no UTF-8 have no home."""
    try:
        return cells.cast(to), NONE
    except pa.ArrowInvalid:
        odd = _refused(cells, to)
        return without(cells, odd).cast(to), odd


def parsed(cells: pa.Array, to: pa.DataType) -> Casted:
    """Numbers, dates and timestamps: what Arrow's own parser refuses has no home in the type."""
    # The parsers read bytes; a view spares them the check for UTF-8.
    cells = cells.view(pa.large_string() if pa.types.is_large_binary(cells.type) else pa.string())
    try:
        return cells.cast(to), NONE
    except pa.ArrowInvalid:
        pass
    odd = np.flatnonzero(_looks_odd(cells, to))
    try:
        return without(cells, odd).cast(to), odd
    except pa.ArrowInvalid:
        odd = _refused(cells, to)
        return without(cells, odd).cast(to), odd


def _looks_odd(cells: pa.Array, to: pa.DataType) -> Bools:
    """Values whose shape alone says that they have no home: so many of them cost no search.

    NaN, infinities and BC end in a letter, as no other number, date or time does; a date with a
    four-digit year has its first hyphen after it.
    """
    first, last = bounds(cells)
    data = data_of(cells)
    present = valid_of(cells) & (last > first)
    if not present.any():
        return present
    end = data[np.where(present, last - 1, 0)]
    odd: Bools = present & ((end < ord("0")) | (end > ord("9")))
    if pa.types.is_temporal(to):
        long_enough = present & (last - first > 4)
        odd |= long_enough & (data[np.where(long_enough, first + 4, 0)] != ord("-"))
    return odd


def _refused(cells: pa.Array, to: pa.DataType) -> Ints:
    """The rows that a cast refuses, found by halving."""
    found: list[int] = []
    todo = [(0, len(cells))]
    while todo:
        begin, end = todo.pop()
        try:
            cells.slice(begin, end - begin).cast(to)
        except pa.ArrowInvalid:
            if end - begin == 1:
                found.append(begin)
            else:
                middle = (begin + end) // 2
                todo += [(begin, middle), (middle, end)]
    return np.array(sorted(found), np.int64)


def without(cells: pa.Array, odd: Ints) -> pa.Array:
    """The same with the odd rows made NULL. No NULL has bytes under it then."""
    keep = np.ones(len(cells), bool)
    keep[odd] = False
    return cells.take(integers(np.arange(len(cells)), keep))


def boolean(cells: pa.Array, to: pa.DataType) -> Casted:
    """`t` and `f`."""
    first, last = bounds(cells)
    data = data_of(cells)
    if not len(data):
        return _all_null_but(cells, to)
    valid = valid_of(cells)
    value = data[np.minimum(first, len(data) - 1)]
    known = valid & (last - first == 1) & ((value == ord("t")) | (value == ord("f")))
    array = pa.Array.from_buffers(to, len(cells), [bitmap(known), bitmap(value == ord("t"))])
    return array, np.flatnonzero(valid & ~known)


def bytea(cells: pa.Array, to: pa.DataType) -> Casted:
    """`\\x` and two digits a byte. The marks of all values are decoded along with the digits, as
    one wrong byte in front of each, and then left out."""
    data = data_of(cells)
    if not len(data):
        return _all_null_but(cells, to)
    first, last = bounds(cells)
    valid = valid_of(cells)
    size = last - first
    place = np.minimum(first, len(data) - 1)
    marked = (size >= 2) & (size % 2 == 0) & (data[place] == ord("\\"))
    marked &= data[np.minimum(place + 1, len(data) - 1)] == ord("x")
    # Taking them out also makes every NULL an empty value, which keeps the pairs of digits aligned.
    if (valid & ~marked).any() or (~valid & (size > 0)).any():
        odd = np.flatnonzero(valid & ~marked)
        array, more = bytea(without(cells, odd), to)
        return array, np.union1d(odd, more)
    begin, end = int(first[0]), int(last[-1])
    digits = _NIBBLE[data[begin:end]]
    wrong = digits == 0xFF
    wrong[first[valid] - begin] = wrong[first[valid] - begin + 1] = False
    if wrong.any():
        rows = np.searchsorted(first, np.flatnonzero(wrong) + begin, side="right") - 1
        odd = np.unique(rows)
        array, _ = bytea(without(cells, odd), to)
        return array, odd
    values: Octets = np.left_shift(digits[0::2], np.uint8(4)) | digits[1::2] & np.uint8(0xF)
    return _drop_first_byte(values, (first - begin) // 2, (last - begin) // 2, valid, to), NONE


def money(cells: pa.Array, to: pa.DataType) -> Casted:
    """`-$1,234.50`, as lc_monetary C writes it: the sign and the commas left out, it is a decimal."""
    first, last = bounds(cells)
    data, valid = data_of(cells), valid_of(cells)
    if not len(data):
        return _all_null_but(cells, to)
    end = len(data) - 1
    negative = data[np.minimum(first, end)] == ord("-")
    known = valid & (last - first - negative >= 5) & (data[np.minimum(first + negative, end)] == ord("$"))
    known &= data[np.maximum(last - 3, 0)] == ord(".")
    odd = np.flatnonzero(valid & ~known)
    if len(odd) or (~valid & (last > first)).any():
        array, more = money(without(cells, odd), to)
        return array, np.union1d(odd, more)
    keep = (data != ord("$")) & (data != ord(","))
    kept = np.zeros(len(data) + 1, np.int64)
    np.cumsum(keep, out=kept[1:])
    offsets = np.append(kept[first], kept[last[-1:]]).astype(np.int32)
    buffers = [bitmap(valid), pa.py_buffer(offsets), pa.py_buffer(data[keep])]
    return parsed(pa.Array.from_buffers(pa.binary(), len(cells), buffers), to)


def _drop_first_byte(values: Octets, first: Ints, last: Ints, valid: Bools, to: pa.DataType) -> pa.Array:
    offsets = np.empty(2 * len(first) + 1, np.int32)
    offsets[0:-1:2] = first
    offsets[1::2] = np.where(valid, first + 1, first)
    offsets[-1] = last[-1]
    both = pa.Array.from_buffers(to, 2 * len(first), [None, pa.py_buffer(offsets), pa.py_buffer(values)])
    return both.take(integers(np.arange(1, 2 * len(first), 2), valid))


def _all_null_but(cells: pa.Array, to: pa.DataType) -> Casted:
    """No byte at all: every row is NULL or an empty text, which these types never write."""
    return pa.nulls(len(cells), to), np.flatnonzero(valid_of(cells))


def bounds(cells: pa.Array) -> tuple[Ints, Ints]:
    """Where the bytes of each row begin and end in `data_of` the array."""
    kind = np.dtype(np.int64 if _is_large(cells.type) else np.int32)
    offsets = np.frombuffer(cells.buffers()[1], kind, len(cells) + 1, cells.offset * kind.itemsize).astype(np.int64)
    return offsets[:-1], offsets[1:]


def _is_large(kind: pa.DataType) -> bool:
    return bool(pa.types.is_large_binary(kind) or pa.types.is_large_string(kind))


def data_of(cells: pa.Array) -> Octets:
    """The bytes that an array of any binary type is over."""
    data = cells.buffers()[2]
    return np.frombuffer(data, np.uint8) if data is not None else np.empty(0, np.uint8)


def valid_of(cells: pa.Array) -> Bools:
    """Which rows are not NULL."""
    there = cells.buffers()[0]
    if there is None or cells.null_count == 0:
        return np.ones(len(cells), bool)
    bits = np.frombuffer(there, np.uint8)[cells.offset // 8 :]
    skipped = cells.offset % 8
    return np.unpackbits(bits, count=skipped + len(cells), bitorder="little")[skipped:].view(bool)
