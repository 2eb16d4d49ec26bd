"""The server's text to typed Arrow arrays, with the values that have no home split off.

Every function here is total: it returns an array of the asked type, as long as its input, and the
rows whose value could not be held (they are NULL in the array). Nothing is rounded, cut or
guessed. Arrow's parsers are strict: what Postgres writes for infinity, NaN, BC and years beyond
9999 they refuse, so a cast that succeeds is right, and only one that fails needs a closer look.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millstream.sources.postgres.cells import Bools, Ints, bitmap
from millstream.sources.postgres.types import Cast, ColumnType

Casted = tuple[pa.Array, Ints]

NONE: Ints = np.empty(0, np.int64)

_NIBBLE = np.full(256, 0xFF, np.uint8)
_NIBBLE[list(b"0123456789abcdef")] = range(16)


def cast(text: pa.Array, to: ColumnType) -> Casted:
    """Cast a binary array (32- or 64-bit offsets) of the server's text."""
    return _CASTS[to.cast](text, to)


def exact_text(text: pa.Array, rows: Ints) -> pa.StringArray:
    """What `_ms_special` says of these rows: the text itself, or `\\x<hex>` if it is no UTF-8."""
    chosen = text.take(pa.array(rows))
    try:
        return chosen.cast(pa.string())
    except pa.ArrowInvalid:
        return pa.array([_readable(value) for value in chosen.to_pylist()], pa.string())


def _readable(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return "\\x" + value.hex()


def _text(text: pa.Array, to: ColumnType) -> Casted:
    try:
        return text.cast(to.arrow), NONE
    except pa.ArrowInvalid:
        return _without(text, _refused(text, to.arrow), lambda rest: rest.cast(to.arrow))


def _parsed(text: pa.Array, to: ColumnType) -> Casted:
    # The parsers read bytes; a view spares them the check for UTF-8.
    text = text.view(pa.large_string() if pa.types.is_large_binary(text.type) else pa.string())
    try:
        return text.cast(to.arrow), NONE
    except pa.ArrowInvalid:
        pass
    odd = np.flatnonzero(_looks_odd(text, to.arrow))
    try:
        return _without(text, odd, lambda rest: rest.cast(to.arrow))
    except pa.ArrowInvalid:
        return _without(text, _refused(text, to.arrow), lambda rest: rest.cast(to.arrow))


def _looks_odd(text: pa.Array, to: pa.DataType) -> Bools:
    """Values whose shape alone says that they have no home: so many of them cost no search.

    NaN, infinities and BC end in a letter, as no other number, date or time does; a date with a
    four-digit year has its first hyphen after it.
    """
    first, last = _bounds(text)
    data = _data(text)
    present = _valid(text) & (last > first)
    if not present.any():
        return present
    end = data[np.where(present, last - 1, 0)]
    odd: Bools = present & ((end < ord("0")) | (end > ord("9")))
    if pa.types.is_temporal(to):
        long_enough = present & (last - first > 4)
        odd |= long_enough & (data[np.where(long_enough, first + 4, 0)] != ord("-"))
    return odd


def _refused(text: pa.Array, to: pa.DataType) -> Ints:
    """The rows that a cast refuses, found by halving."""
    found: list[int] = []
    todo = [(0, len(text))]
    while todo:
        begin, end = todo.pop()
        try:
            text.slice(begin, end - begin).cast(to)
        except pa.ArrowInvalid:
            if end - begin == 1:
                found.append(begin)
            else:
                middle = (begin + end) // 2
                todo += [(begin, middle), (middle, end)]
    return np.array(sorted(found), np.int64)


def _without(text: pa.Array, odd: Ints, convert: Callable[[pa.Array], pa.Array]) -> Casted:
    """Convert with the odd rows made NULL."""
    keep = np.ones(len(text), bool)
    keep[odd] = False
    index = np.arange(len(text))
    return convert(text.take(pa.array(index, mask=~keep))), odd


def _boolean(text: pa.Array, to: ColumnType) -> Casted:
    first, last = _bounds(text)
    data = _data(text)
    if not len(data):
        return _all_null_but(text, to)
    valid = _valid(text)
    value = data[np.minimum(first, len(data) - 1)]
    known = valid & (last - first == 1) & ((value == ord("t")) | (value == ord("f")))
    array = pa.Array.from_buffers(to.arrow, len(text), [bitmap(known), bitmap(value == ord("t"))])
    return array, np.flatnonzero(valid & ~known)


def _bytea(text: pa.Array, to: ColumnType) -> Casted:
    """`\\x` and two digits a byte. The marks of all values are decoded along with the digits, as
    one wrong byte in front of each, and then left out."""
    data = _data(text)
    if not len(data):
        return _all_null_but(text, to)
    first, last = _bounds(text)
    valid = _valid(text)
    size = last - first
    place = np.minimum(first, len(data) - 1)
    marked = (size >= 2) & (size % 2 == 0) & (data[place] == ord("\\"))
    marked &= data[np.minimum(place + 1, len(data) - 1)] == ord("x")
    # Taking them out also makes every NULL an empty value, which keeps the pairs of digits aligned.
    if (valid & ~marked).any() or (~valid & (size > 0)).any():
        odd = np.flatnonzero(valid & ~marked)
        array, more = _bytea(_without(text, odd, lambda rest: rest)[0], to)
        return array, np.union1d(odd, more)
    begin, end = int(first[0]), int(last[-1])
    digits = _NIBBLE[data[begin:end]]
    wrong = digits == 0xFF
    wrong[first[valid] - begin] = wrong[first[valid] - begin + 1] = False
    if wrong.any():
        rows = np.searchsorted(first, np.flatnonzero(wrong) + begin, side="right") - 1
        odd = np.unique(rows)
        array, _ = _bytea(_without(text, odd, lambda rest: rest)[0], to)
        return array, odd
    values: npt.NDArray[np.uint8] = np.left_shift(digits[0::2], np.uint8(4)) | digits[1::2] & np.uint8(0xF)
    return _drop_first_byte(values, (first - begin) // 2, (last - begin) // 2, valid, to.arrow), NONE


def _drop_first_byte(values: npt.NDArray[np.uint8], first: Ints, last: Ints, valid: Bools, to: pa.DataType) -> pa.Array:
    offsets = np.empty(2 * len(first) + 1, np.int32)
    offsets[0:-1:2] = first
    offsets[1::2] = np.where(valid, first + 1, first)
    offsets[-1] = last[-1]
    both = pa.Array.from_buffers(to, 2 * len(first), [None, pa.py_buffer(offsets), pa.py_buffer(values)])
    return both.take(pa.array(np.arange(1, 2 * len(first), 2), mask=~valid))


def _all_null_but(text: pa.Array, to: ColumnType) -> Casted:
    """No byte at all: every row is NULL or an empty text, and neither type writes an empty text."""
    return pa.nulls(len(text), to.arrow), np.flatnonzero(_valid(text))


def _bounds(text: pa.Array) -> tuple[Ints, Ints]:
    kind = np.dtype(np.int64 if _is_large(text.type) else np.int32)
    offsets = np.frombuffer(text.buffers()[1], kind, len(text) + 1, text.offset * kind.itemsize).astype(np.int64)
    return offsets[:-1], offsets[1:]


def _is_large(kind: pa.DataType) -> bool:
    return bool(pa.types.is_large_binary(kind) or pa.types.is_large_string(kind))


def _data(text: pa.Array) -> npt.NDArray[np.uint8]:
    data = text.buffers()[2]
    return np.frombuffer(data, np.uint8) if data is not None else np.empty(0, np.uint8)


def _valid(text: pa.Array) -> Bools:
    valid: Bools = text.is_valid().to_numpy(zero_copy_only=False)
    return valid


_CASTS: dict[Cast, Callable[[pa.Array, ColumnType], Casted]] = {
    Cast.TEXT: _text,
    Cast.PARSED: _parsed,
    Cast.BOOLEAN: _boolean,
    Cast.BYTEA: _bytea,
}
