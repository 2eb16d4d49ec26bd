"""Numbers: big-endian integers and floats, money, and numeric in digits to the base of 10,000."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from millstream.sources.postgres import casts
from millstream.sources.postgres.binary.cells import Numbers, Values, refuse
from millstream.sources.postgres.binary.floats import float_texts
from millstream.sources.postgres.binary.lines import Lines
from millstream.sources.postgres.casts import NONE, Casted, Octets, Reader
from millstream.sources.postgres.cells import Ints, bitmap, integers, strings


def boolean(cells: pa.Array, to: pa.DataType) -> Casted:
    values = Values(cells)
    truth = values.fixed(1, "bool")[:, 0] != 0
    if pa.types.is_string(to):
        lines = Lines(len(values))
        lines.word("t", truth)
        lines.word("f", ~truth)
        return values.text(*lines.done()), NONE
    spread = np.zeros(values.rows, bool)
    spread[values.valid] = truth
    mask = None if values.whole else bitmap(values.valid)
    return pa.Array.from_buffers(to, values.rows, [mask, bitmap(spread)]), NONE


@dataclass(frozen=True)
class Integer:
    """Reads an integer type that is sent as numpy's `kind`."""

    kind: str
    what: str

    def __call__(self, cells: pa.Array, to: pa.DataType) -> Casted:
        values = Values(cells)
        numbers = values.numbers(self.kind, self.what)
        if pa.types.is_string(to):
            return values.spread(integers(numbers).cast(to)), NONE
        if pa.types.is_decimal(to):
            return values.column(_wide(numbers), to)
        return values.column(numbers.astype(to.to_pandas_dtype()), to)


@dataclass(frozen=True)
class Floating:
    """Reads float4 or float8, sent as numpy's `kind`."""

    kind: str
    what: str

    def __call__(self, cells: pa.Array, to: pa.DataType) -> Casted:
        values = Values(cells)
        numbers = values.numbers(self.kind, self.what)
        if pa.types.is_string(to):
            return values.spread(float_texts(numbers)), NONE
        return values.column(numbers, to)


def money(cells: pa.Array, to: pa.DataType) -> Casted:
    """Hundredths. As text `-$1,234.50`, which is how lc_monetary C writes it."""
    values = Values(cells)
    hundredths = values.numbers(">i8", "money")
    if not pa.types.is_string(to):
        return values.column(_wide(hundredths), to)
    # The lowest number has no positive one in 64 bits, but in 64 bits without a sign it has.
    units, rest = np.divmod(np.abs(hundredths).view(np.uint64), np.uint64(100))
    lines = Lines(len(values))
    lines.word("-", hundredths < 0)
    lines.word("$")
    for power in range(15, -1, -3):
        above, group = np.divmod(units // np.uint64(10**power), np.uint64(1000))
        there = (above > 0) | (group > 0) | (power == 0)
        lines.number(np.where(above > 0, group, 0), 3, 3, there & (above > 0))
        lines.number(np.where(above > 0, 0, group), 3, 1, there & (above == 0))
        if power:
            lines.word(",", there)
    lines.word(".")
    lines.number(rest, 2, 2)
    return values.text(*lines.done()), NONE


def _wide(numbers: Numbers) -> Numbers:
    """64-bit integers as the 128-bit ones that Arrow's decimals are."""
    wide = np.empty((len(numbers), 2), np.int64)
    wide[:, 0] = numbers.view(np.int64)
    wide[:, 1] = 0 if numbers.dtype.kind == "u" else numbers >> 63
    return wide


# numeric: count of digits, weight of the first one, sign, digits after the point in decimal; then the
# digits to the base of 10,000. A value is written as all its groups of four decimal digits between a
# sign and a point, of which the zeros around it are then left out.

_NEGATIVE, _NAN, _INFINITY, _MINUS_INFINITY = 0x4000, 0xC000, 0xD000, 0xF000
_GROUPS: Octets = (
    np.arange(10_000)[:, None] // np.array([1000, 100, 10, 1]) % 10 + ord("0")
).astype(np.uint8)  # fmt: skip


def numeric(cells: pa.Array, to: pa.DataType) -> Casted:
    texts = _numeric_texts(Values(cells))
    return (texts, NONE) if pa.types.is_string(to) else casts.parsed(texts.view(pa.binary()), to)


def _numeric_texts(values: Values) -> pa.Array:
    if (values.sizes < 8).any():
        refuse("numeric")
    count, weight, sign, scale = (
        values.at(values.first + 2 * number, kind, "numeric").astype(np.int64)
        for number, kind in enumerate((">u2", ">i2", ">u2", ">u2"))
    )
    if (values.sizes != 8 + 2 * count).any():
        refuse("numeric")
    finite = (sign == 0) | (sign == _NEGATIVE)
    whole = np.where(finite, np.maximum(weight + 1, 1), 0)
    groups = whole + np.where(finite, (scale + 3) // 4, 0)
    digits = _all_groups(values, count, np.minimum(weight, 0), groups)
    letters, kept = _written(digits, whole, groups, np.where(finite, scale, 0), sign == _NEGATIVE)
    sizes = np.add.reduceat(kept, _starts(4 * groups + 2), dtype=np.int64) if len(values) else NONE
    made = values.text(letters[kept], sizes)
    return made if finite.all() else _named(values, made, sign)


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


READERS: dict[str, Reader] = {
    "bool": boolean,
    "int2": Integer(">i2", "int2"),
    "int4": Integer(">i4", "int4"),
    "int8": Integer(">i8", "int8"),
    "oid": Integer(">u4", "oid"),
    "xid": Integer(">u4", "xid"),
    "cid": Integer(">u4", "cid"),
    "xid8": Integer(">u8", "xid8"),
    "float4": Floating(">f4", "float4"),
    "float8": Floating(">f8", "float8"),
    "money": money,
    "numeric": numeric,
}
