"""The text of floats as Postgres writes it: the shortest decimal that lies between the neighbours' halfway points.

Two things are not as in Python or Arrow. A decimal exactly halfway to a neighbour does not count, even
if it would be read back right; that can only happen from 2^52 on (2^22 for float4). And the exponent
form begins elsewhere. So values of an ordinary size are left to Arrow, and only the others, which are
rare, are written one by one.
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pyarrow as pa

from millstream.sources.postgres.binary.cells import Numbers
from millstream.sources.postgres.cells import integers, strings

_FIXED_FROM = -4
_FIXED_BELOW = {np.dtype(np.float32): 6, np.dtype(np.float64): 15}
_PRECISION = {np.dtype(np.float32): (24, -149), np.dtype(np.float64): (53, -1074)}
"""Bits of the significand, and the exponent of the smallest number."""
_PLAIN_BELOW = {np.dtype(np.float32): 1e6, np.dtype(np.float64): 1e10}
"""Up to here Arrow writes no exponent either."""


def float_texts(numbers: Numbers) -> pa.Array:
    """The texts of these numbers, in their order."""
    size = np.abs(numbers)
    plain = (size == 0) | ((size >= numbers.dtype.type(1e-4)) & (size < _PLAIN_BELOW[numbers.dtype]))
    texts = pa.Array.from_buffers(
        pa.from_numpy_dtype(numbers.dtype), len(numbers), [None, pa.py_buffer(np.where(plain, numbers, 0))]
    ).cast(pa.string())
    if plain.all():
        return texts
    rows = np.flatnonzero(~plain)
    index = np.arange(len(numbers))
    index[rows] = len(numbers) + np.arange(len(rows))
    return pa.concat_arrays([texts, strings([float_text(number) for number in numbers[rows]])]).take(integers(index))


def float_text(number: np.floating) -> str:
    """The text of one number."""
    if math.isnan(number):
        return "NaN"
    sign = "-" if np.signbit(number) else ""
    if math.isinf(number):
        return f"{sign}Infinity"
    if number == 0:
        return f"{sign}0"
    digits, exponent = _shortest(np.abs(number))
    if not _FIXED_FROM <= exponent < _FIXED_BELOW[number.dtype]:
        point = "." if len(digits) > 1 else ""
        return f"{sign}{digits[0]}{point}{digits[1:]}e{'-' if exponent < 0 else '+'}{abs(exponent):02d}"
    if exponent < 0:
        return f"{sign}0.{'0' * (-exponent - 1)}{digits}"
    digits = digits.ljust(exponent + 1, "0")
    rest = f".{digits[exponent + 1 :]}" if len(digits) > exponent + 1 else ""
    return f"{sign}{digits[: exponent + 1]}{rest}"


def _shortest(number: np.floating) -> tuple[str, int]:
    """The digits of the shortest decimal strictly between the halfway points, and the exponent of the first."""
    bits, lowest = _PRECISION[number.dtype]
    value = Fraction(float(number))
    fraction, power = math.frexp(float(number))
    step = Fraction(2) ** max(power - bits, lowest)
    # Below a power of two the numbers lie twice as close.
    closer = 2 if fraction == 0.5 and power - bits > lowest else 1
    low, high = value - step / (2 * closer), value + step / 2
    exponent = int(f"{float(number):.17e}".partition("e")[2])
    for length in range(1, 18):
        unit = Fraction(10) ** (exponent - length + 1)
        down = value // unit
        inside = [count for count in (down, down + 1) if low < count * unit < high]
        if inside:
            best = min(inside, key=lambda count: (abs(count * unit - value), count % 2))
            digits = str(best)
            return digits.rstrip("0"), exponent + len(digits) - length
    raise AssertionError("seventeen digits tell every float")
