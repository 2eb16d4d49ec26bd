"""numeric: count of digits, weight of the first one, sign, decimal places after the point; then the digits.

The digits are to the base of 10,000. As text a value is all its groups of four decimal digits between a sign
and a point, of which the zeros around it are then left out. As a decimal of up to 18 digits it is counted in
64 bits; wider ones are read from the text.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from millstream.sources.postgres import casts
from millstream.sources.postgres.binary.cells import Numbers, Values, refuse
from millstream.sources.postgres.casts import NONE, Casted, Octets
from millstream.sources.postgres.cells import Bools, Ints, integers, strings

_NEGATIVE, _NAN, _INFINITY, _MINUS_INFINITY = 0x4000, 0xC000, 0xD000, 0xF000
_COUNTED_DIGITS = 18
_ALWAYS_COUNTED = 4
"""So many digits to the base of 10,000 are no more than that."""
_MOST = 10**_COUNTED_DIGITS - 1
_TENS: Ints = 10 ** np.arange(_COUNTED_DIGITS + 1)
_GROUPS: Octets = (
    np.arange(10_000)[:, None] // np.array([1000, 100, 10, 1]) % 10 + ord("0")
).astype(np.uint8)  # fmt: skip


@dataclass(frozen=True)
class _Heads:
    """What stands before the digits of each value."""

    count: Ints
    weight: Ints
    sign: Ints
    scale: Ints
    finite: Bools

    @classmethod
    def of(cls, values: Values) -> _Heads:
        if (values.sizes < 8).any():
            refuse("numeric")
        head = values.at(values.first, ">i8", "numeric")
        count, sign, scale = (head >> places & 0xFFFF for places in (48, 16, 0))
        weight = (head >> 32).astype(np.int16).astype(np.int64)
        if (values.sizes != 8 + 2 * count).any():
            refuse("numeric")
        return cls(count, weight, sign, scale, (sign == 0) | (sign == _NEGATIVE))


def numeric(cells: pa.Array, to: pa.DataType) -> Casted:
    values = Values(cells)
    heads = _Heads.of(values)
    if pa.types.is_string(to):
        return _texts(values, heads), NONE
    counted = _counted(values, heads, to.precision, to.scale)
    if counted is not None:
        return values.column(counted, to, heads.finite)
    return casts.parsed(_texts(values, heads).view(pa.binary()), to)


def _counted(values: Values, heads: _Heads, precision: int, scale: int) -> Numbers | None:
    """The values in units of the last decimal place, as 128-bit integers; None if one is not that simple."""
    total = _digits(values, heads.count) if precision <= _COUNTED_DIGITS else None
    if total is None:
        return None
    # How many decimal places lie between the last digit and the unit: less than one group, if the unit comes first.
    power = np.where(heads.count > 0, 4 * (heads.weight - heads.count + 1) + scale, 0)
    behind = -scale % 4
    if (power < -behind).any() or (power >= _COUNTED_DIGITS).any():
        return None
    if behind and (beyond := power < 0).any():
        units, rest = np.divmod(total, 10**behind)
        if (rest[beyond] != 0).any():
            return None
        total = np.where(beyond, units, total)
        power = np.maximum(power, 0)
    if (total > _MOST // _TENS[power]).any():
        return None
    total *= _TENS[power]
    if (total >= 10**precision).any():
        return None
    wide = np.empty((len(total), 2), np.int64)
    wide[:, 0] = np.where(heads.sign == _NEGATIVE, -total, total)
    wide[:, 1] = wide[:, 0] >> 63
    return wide


def _digits(values: Values, count: Ints) -> Ints | None:
    """The digits of each value as one number, whatever their weight; None if there are too many, or one is none."""
    total = np.zeros(len(values), np.int64)
    for number in range(int(count.max(initial=0))):
        if number >= _ALWAYS_COUNTED and (total > _MOST // 10_000).any():
            return None
        there = count > number
        place = np.where(there, values.first + 8 + 2 * number, values.first)
        digit = np.where(there, values.at(place, ">u2", "numeric"), 0)
        if (digit > 9999).any():
            return None
        total = np.where(there, total * 10_000 + digit, total)
    return total


def _texts(values: Values, heads: _Heads) -> pa.Array:
    finite, negative = heads.finite, heads.sign == _NEGATIVE
    whole = np.where(finite, np.maximum(heads.weight + 1, 1), 0)
    groups = whole + np.where(finite, (heads.scale + 3) // 4, 0)
    digits = _all_groups(values, heads.count, np.minimum(heads.weight, 0), groups)
    letters, kept = _written(digits, whole, groups, np.where(finite, heads.scale, 0), negative)
    sizes = np.add.reduceat(kept, _starts(4 * groups + 2), dtype=np.int64) if len(values) else NONE
    made = values.text(letters[kept], sizes)
    return made if finite.all() else _named(values, made, heads.sign)


def _all_groups(values: Values, count: Ints, lead: Ints, groups: Ints) -> Numbers:
    """Every group of four digits that is written, row after row: those that were sent, zeros around them.

    `lead` is minus the count of groups of zeros before the first that was sent: of a value below one, the
    one before the point and perhaps some after it.
    """
    row = np.repeat(np.arange(len(groups)), groups)
    place = np.arange(len(row)) - _starts(groups)[row]
    number = place + lead[row]
    sent = (number >= 0) & (number < count[row])
    digits = np.zeros(len(row), np.int64)
    digits[sent] = values.at((values.first[row] + 8 + 2 * number)[sent], ">u2", "numeric")
    if (digits > 9999).any():
        refuse("numeric")
    return digits


def _written(digits: Numbers, whole: Ints, groups: Ints, scale: Ints, negative: Numbers) -> tuple[Octets, Numbers]:
    """Sign, digits, point and digits of all rows, and which of these characters belong to the text."""
    starts = _starts(4 * groups + 2)
    total = int((4 * groups + 2).sum())
    letters, kept = np.empty(total, np.uint8), np.ones(total, bool)
    letters[starts], kept[starts] = ord("-"), negative
    point = starts + 1 + 4 * whole
    letters[point], kept[point] = ord("."), scale > 0
    row = np.repeat(np.arange(len(groups)), groups)
    place = np.arange(len(row)) - _starts(groups)[row]
    at = starts[row] + 1 + 4 * place + (place >= whole[row])
    four = at[:, None] + np.arange(4)
    letters[four] = _GROUPS[digits]
    # Zeros in front: of the first group only, since the first digit that is sent is none.
    first = four[place == 0]
    value = digits[place == 0]
    for number, power in enumerate((1000, 100, 10)):
        kept[first[:, number]] = value >= power
    # Digits behind the scale: of the last group only.
    after = 4 * (place - whole[row])[:, None] + np.arange(4)
    kept[four[(after >= 0) & (after >= scale[row][:, None])]] = False
    return letters, kept


def _named(values: Values, made: pa.Array, sign: Ints) -> pa.Array:
    """The same with the names of those that are no numbers."""
    names = pa.concat_arrays([made, strings(["NaN", "Infinity", "-Infinity"])])
    rows = len(made)
    index = np.arange(rows)
    spread = np.zeros(rows, np.int64)
    spread[values.valid] = sign
    for number, code in enumerate((_NAN, _INFINITY, _MINUS_INFINITY)):
        index[spread == code] = rows + number
    return names.take(integers(index))


def _starts(sizes: Ints) -> Ints:
    """Where each of several runs begins that follow each other."""
    starts: Ints = np.cumsum(sizes) - sizes
    return starts
