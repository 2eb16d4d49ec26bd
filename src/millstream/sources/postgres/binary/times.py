"""Dates and times: counted from 2000 on the wire, in days or microseconds."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from millstream.sources.postgres.binary.cells import Values
from millstream.sources.postgres.binary.lines import Lines
from millstream.sources.postgres.casts import NONE, Casted, Reader
from millstream.sources.postgres.cells import Bools, Ints

_DAYS_TO_2000 = 10_957
_DAY = 86_400_000_000
_FIRST_DAY, _LAST_DAY = -719_162, 2_932_896
"""0001-01-01 and 9999-12-31, in days since 1970: what a year of four digits reaches."""
_INT32, _INT64 = np.iinfo(np.int32), np.iinfo(np.int64)


def date(cells: pa.Array, to: pa.DataType) -> Casted:
    values = Values(cells)
    days = values.numbers(">i4", "date").astype(np.int64)
    if pa.types.is_string(to):
        low, high = days == _INT32.min, days == _INT32.max
        lines = Lines(len(days))
        finite = _infinities(lines, low, high)
        era = _date(lines, np.where(finite, days + _DAYS_TO_2000, 0), finite)
        lines.word(" BC", finite & era)
        return values.text(*lines.done()), NONE
    days += _DAYS_TO_2000
    return values.column(days.astype(np.int32), to, (days >= _FIRST_DAY) & (days <= _LAST_DAY))


def timestamp(cells: pa.Array, to: pa.DataType) -> Casted:
    return _timestamp(cells, to, "", "timestamp")


def timestamptz(cells: pa.Array, to: pa.DataType) -> Casted:
    """The session's zone is UTC, so that is the zone of every text."""
    return _timestamp(cells, to, "+00", "timestamptz")


def _timestamp(cells: pa.Array, to: pa.DataType, zone: str, what: str) -> Casted:
    values = Values(cells)
    micros = values.numbers(">i8", what)
    low, high = micros == _INT64.min, micros == _INT64.max
    finite = ~(low | high)
    if pa.types.is_string(to):
        lines = Lines(len(micros))
        _infinities(lines, low, high)
        days, rest = np.divmod(np.where(finite, micros, 0), _DAY)
        era = _date(lines, days + _DAYS_TO_2000, finite)
        lines.word(" ", finite)
        _clock(lines, rest, finite)
        lines.word(zone, finite)
        lines.word(" BC", finite & era)
        return values.text(*lines.done()), NONE
    home = (micros >= (_FIRST_DAY - _DAYS_TO_2000) * _DAY) & (micros < (_LAST_DAY + 1 - _DAYS_TO_2000) * _DAY)
    # The last years that Postgres knows are beyond 64 bits when counted from 1970.
    return values.column(np.where(home, micros, 0) + _DAYS_TO_2000 * _DAY, to, home)


def time(cells: pa.Array, to: pa.DataType) -> Casted:
    values = Values(cells)
    micros = values.numbers(">i8", "time")
    if pa.types.is_time(to):
        return values.column(micros, to, (micros >= 0) & (micros < _DAY))
    lines = Lines(len(values))
    _clock(lines, micros)
    return values.text(*lines.done()), NONE


def timetz(cells: pa.Array, to: pa.DataType) -> Casted:
    values = Values(cells)
    raw = values.fixed(12, "timetz")
    micros = np.ascontiguousarray(raw[:, :8]).view(">i8").reshape(-1).astype(np.int64)
    west = np.ascontiguousarray(raw[:, 8:]).view(">i4").reshape(-1).astype(np.int64)
    if pa.types.is_struct(to):
        first, ahead = values.column(micros, pa.int64())[0], values.column(-west.astype(np.int32), pa.int32())[0]
        return pa.Array.from_buffers(to, values.rows, first.buffers()[:1], children=[first, ahead]), NONE
    lines = Lines(len(values))
    _clock(lines, micros)
    lines.word("-", west > 0)
    lines.word("+", west <= 0)
    minutes, seconds = np.divmod(np.abs(west), 60)
    hours, minutes = np.divmod(minutes, 60)
    lines.number(hours, 2, 2)
    more = (minutes > 0) | (seconds > 0)
    lines.word(":", more)
    lines.number(minutes, 2, 2, more)
    lines.word(":", seconds > 0)
    lines.number(seconds, 2, 2, seconds > 0)
    return values.text(*lines.done()), NONE


def interval(cells: pa.Array, to: pa.DataType) -> Casted:
    """Its three numbers, or their text in the style `postgres`: `1 year -2 mons +3 days -04:05:06.7`.

    The extreme value of all three parts is infinity, as it is since Postgres 17.
    """
    values = Values(cells)
    raw = values.fixed(16, "interval")
    micros = np.ascontiguousarray(raw[:, :8]).view(">i8").reshape(-1).astype(np.int64)
    days = np.ascontiguousarray(raw[:, 8:12]).view(">i4").reshape(-1).astype(np.int64)
    months = np.ascontiguousarray(raw[:, 12:]).view(">i4").reshape(-1).astype(np.int64)
    low = (micros == _INT64.min) & (days == _INT32.min) & (months == _INT32.min)
    high = (micros == _INT64.max) & (days == _INT32.max) & (months == _INT32.max)
    if pa.types.is_struct(to):
        first, odd = values.column(months.astype(np.int32), pa.int32(), ~(low | high))
        others = [values.column(days.astype(np.int32), pa.int32())[0], values.column(micros, pa.int64())[0]]
        return pa.Array.from_buffers(to, values.rows, first.buffers()[:1], children=[first, *others]), odd
    lines = Lines(len(values))
    finite = _infinities(lines, low, high)
    begun, minus = np.zeros(len(values), bool), np.zeros(len(values), bool)
    years = np.sign(months) * (np.abs(months) // 12)
    for amount, unit in ((years, "year"), (months - 12 * years, "mon"), (days, "day")):
        there = finite & (amount != 0)
        lines.word(" ", there & begun)
        lines.word("-", there & (amount < 0))
        lines.word("+", there & (amount > 0) & minus)
        lines.number(np.abs(amount), 10, 1, there)
        lines.word(f" {unit}", there)
        lines.word("s", there & (amount != 1))
        minus = np.where(there, amount < 0, minus)
        begun |= there
    there = finite & ((micros != 0) | ~begun)
    lines.word(" ", there & begun)
    lines.word("-", there & (micros < 0))
    lines.word("+", there & (micros >= 0) & minus)
    # The lowest number has no positive one in 64 bits, but in 64 bits without a sign it has.
    _clock(lines, np.abs(micros).view(np.uint64), there)
    return values.text(*lines.done()), NONE


def _infinities(lines: Lines, low: Bools, high: Bools) -> Bools:
    """Write those that are infinite; returns which rows are finite."""
    lines.word("-", low)
    lines.word("infinity", low | high)
    finite: Bools = ~(low | high)
    return finite


def _date(lines: Lines, days: Ints, where: Bools) -> Bools:
    """Write the date of these days since 1970 in the Gregorian calendar; returns which are BC."""
    shifted = days + 719_468
    cycle, day = np.divmod(shifted, 146_097)
    year = (day - day // 1460 + day // 36_524 - day // 146_096) // 365
    day -= 365 * year + year // 4 - year // 100
    # Months count from March, so that the leap day is the last of its year.
    month = (5 * day + 2) // 153
    day -= (153 * month + 2) // 5 - 1
    month = np.where(month < 10, month + 3, month - 9)
    year += cycle * 400 + (month <= 2)
    before: Bools = year <= 0
    lines.number(np.where(before, 1 - year, year), 7, 4, where)
    lines.word("-", where)
    lines.number(month, 2, 2, where)
    lines.word("-", where)
    lines.number(day, 2, 2, where)
    return before


def _clock(lines: Lines, micros: Ints, where: Bools | None = None) -> None:
    """Write `04:05:06.789`; hours go on beyond 99."""
    seconds, rest = np.divmod(micros, micros.dtype.type(1_000_000))
    minutes, seconds = np.divmod(seconds, seconds.dtype.type(60))
    hours, minutes = np.divmod(minutes, minutes.dtype.type(60))
    lines.number(hours, 10, 2, where)
    lines.word(":", where)
    lines.number(minutes, 2, 2, where)
    lines.word(":", where)
    lines.number(seconds, 2, 2, where)
    lines.fraction(rest if where is None else np.where(where, rest, 0))


READERS: dict[str, Reader] = {
    "date": date,
    "timestamp": timestamp,
    "timestamptz": timestamptz,
    "time": time,
    "timetz": timetz,
    "interval": interval,
}
