"""Numbers of a fixed size: big-endian integers and floats, and money."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from millstream.sources.postgres.binary.cells import Numbers, Values
from millstream.sources.postgres.binary.floats import float_texts
from millstream.sources.postgres.binary.lines import Lines
from millstream.sources.postgres.casts import NONE, Casted, Reader
from millstream.sources.postgres.cells import bitmap, integers


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
}
