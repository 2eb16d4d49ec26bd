"""The text of times of day and of intervals to numbers, by column: for sources that are asked to (`types`).

A time of day is 00:00:00 to 23:59:59.999999; Postgres has 24:00:00 too, which has no home there. An
interval is what Postgres itself keeps of it: months, days and microseconds, none of which can be
made of another. Since Postgres 17 it may be infinite; that has no home. A time with its zone is two
numbers too: microseconds of the day, and the seconds that its clock is ahead of UTC.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millstream.sources.postgres.casts import Casted, bounds, parsed, valid_of, without
from millstream.sources.postgres.cells import Bools, Ints, bitmap, integers

INTERVAL = pa.struct([("months", pa.int32()), ("days", pa.int32()), ("microseconds", pa.int64())])
TIMETZ = pa.struct([("microseconds", pa.int64()), ("offset_seconds", pa.int32())])

_DAY = "1970-01-01 "
_CLOCK = r"(?P<hours>\d{1,10}):(?P<minutes>\d\d):(?P<seconds>\d\d)(?:\.(?P<rest>\d{1,6}))?"
_NUMBER = r"\+?(?P<{}>-?\d{{1,10}})"
_STYLE = (
    rf"^(?:{_NUMBER.format('years')} years?)?(?: ?{_NUMBER.format('months')} mons?)?"
    rf"(?: ?{_NUMBER.format('days')} days?)?"
    rf"(?: ?(?P<sign>[-+]?){_CLOCK})?$"
)
"""`1 year -2 mons +3 days -04:05:06.7`: each part only if it is not zero, and 00:00:00 if all are."""
_ZONED = rf"^{_CLOCK}(?P<sign>[-+])(?P<ahead>\d\d)(?::(?P<ahead_m>\d\d)(?::(?P<ahead_s>\d\d))?)?$"
"""`12:30:00.5+05:30`"""
_MOST_HOURS = 2_562_047_788
"""How many fit in 64 bits of microseconds."""


def time(cells: pa.Array, to: pa.DataType) -> Casted:
    """Microseconds of the day. Arrow reads no times, but timestamps: so they become those of one day."""
    texts = _texts(cells)
    whole_day = _rows(pc.starts_with(texts, "24"))
    if len(whole_day):
        texts = without(texts, whole_day)
    moments, odd = parsed(pc.binary_join_element_wise(_DAY, texts, ""), pa.timestamp("us"))
    return moments.view(pa.int64()).view(to), np.union1d(whole_day, odd)


def interval(cells: pa.Array, to: pa.DataType) -> Casted:
    """The three numbers of each, from the text in the style `postgres`."""
    texts = _texts(cells)
    parts = pc.extract_regex(texts, _STYLE)
    first, last = bounds(texts)
    valid = valid_of(texts)
    months = 12 * _numbers(parts, "years") + _numbers(parts, "months")
    days = _numbers(parts, "days")
    micros, fits = _micros(parts)
    home = valid & valid_of(parts) & (last > first) & fits & _fits32(months) & _fits32(days)
    children = [integers(months.astype(np.int32)), integers(days.astype(np.int32)), integers(micros)]
    return pa.Array.from_buffers(to, len(texts), [bitmap(home)], children=children), np.flatnonzero(valid & ~home)


def timetz(cells: pa.Array, to: pa.DataType) -> Casted:
    """The two numbers of each; 24:00:00 is one like any other there."""
    texts = _texts(cells)
    parts = pc.extract_regex(texts, _ZONED)
    valid = valid_of(texts)
    home = valid & valid_of(parts)
    minutes = _numbers(parts, "ahead") * 60 + _numbers(parts, "ahead_m")
    seconds = minutes * 60 + _numbers(parts, "ahead_s")
    ahead = np.where(_minus(parts), -seconds, seconds).astype(np.int32)
    children = [integers(_clock(parts).view(np.int64)), integers(ahead)]
    return pa.Array.from_buffers(to, len(texts), [bitmap(home)], children=children), np.flatnonzero(valid & ~home)


def _micros(parts: pa.StructArray) -> tuple[Ints, Bools]:
    """Hours and what is below them, in microseconds, and where these fit in 64 bits."""
    size, minus = _clock(parts), _minus(parts)
    # The lowest number has no positive one in 64 bits, but in 64 bits without a sign it has.
    fits: Bools = (_numbers(parts, "hours") <= _MOST_HOURS) & (size < np.uint64(1 << 63) + minus.astype(np.uint64))
    return np.where(minus, np.uint64(0) - size, size).view(np.int64), fits


def _clock(parts: pa.StructArray) -> npt.NDArray[np.uint64]:
    """The microseconds of hours, which may be many, minutes and seconds, without a sign."""
    hours, minutes, seconds, rest = (
        _numbers(parts, name, 6 if name == "rest" else 0).astype(np.uint64)
        for name in ("hours", "minutes", "seconds", "rest")
    )
    sixty, million = np.uint64(60), np.uint64(10**6)
    size: npt.NDArray[np.uint64] = ((hours * sixty + minutes) * sixty + seconds) * million + rest
    return size


def _minus(parts: pa.StructArray) -> Bools:
    minus = np.zeros(len(parts), bool)
    minus[_rows(pc.equal(pc.struct_field(parts, "sign"), "-"))] = True
    return minus


def _numbers(parts: pa.StructArray, name: str, digits: int = 0) -> Ints:
    """The numbers of one part, 0 where there is none; the digits of a fraction filled up to so many."""
    found = pc.fill_null(pc.struct_field(parts, name), "")
    if digits:
        found = pc.utf8_rpad(found, digits, "0")
    numbers = pc.if_else(pc.equal(found, ""), "0", found).cast(pa.int64())
    return np.frombuffer(numbers.buffers()[1], np.int64, len(numbers), 8 * numbers.offset)


def _fits32(numbers: Ints) -> Bools:
    fits: Bools = (numbers >= -(1 << 31)) & (numbers < 1 << 31)
    return fits


def _texts(cells: pa.Array) -> pa.StringArray:
    """As strings with 32-bit offsets, which such values always fit in."""
    return cells.cast(pa.binary()).view(pa.string())


def _rows(mask: pa.BooleanArray) -> Ints:
    """Where a mask is true. (Arrow's own way to numpy imports pandas.)"""
    found = pc.indices_nonzero(mask)
    return np.frombuffer(found.buffers()[1], np.uint64, len(found)).astype(np.int64)
