"""inet and cidr: family, bits of the mask, a flag, the count of bytes, and the address.

An address of IPv6 is written with `::` for its longest run of zero words, and with its last two words as
an address of IPv4 where it holds one: the server's rules, word by word.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from millstream.sources.postgres.binary.cells import Values, refuse
from millstream.sources.postgres.binary.lines import Lines
from millstream.sources.postgres.casts import NONE, Casted, Octets, Reader
from millstream.sources.postgres.cells import Bools, Ints

_FAMILY_4, _FAMILY_6 = 2, 3


@dataclass(frozen=True)
class Address:
    """Reads inet, or cidr, whose text always has the mask."""

    what: str
    always_masked: bool

    def __call__(self, cells: pa.Array, to: pa.DataType) -> Casted:
        what = self.what
        values = Values(cells)
        if (values.sizes < 4).any():
            refuse(what)
        family, mask, count = (values.at(values.first + at, "u1", what).astype(np.int64) for at in (0, 1, 3))
        six = family == _FAMILY_6
        if (~six & (family != _FAMILY_4)).any() or (count != np.where(six, 16, 4)).any():
            refuse(what)
        if (values.sizes != 4 + count).any():
            refuse(what)
        lines = Lines(len(values))
        _four(lines, _octets(values, np.where(six, -1, values.first + 4), 4, what), ~six)
        if six.any():
            _six(lines, _octets(values, np.where(six, values.first + 4, -1), 16, what), six)
        masked = np.full(len(values), self.always_masked) | (mask != np.where(six, 128, 32))
        lines.word("/", masked)
        lines.number(mask, 3, 1, masked)
        return values.text(*lines.done()), NONE


def _octets(values: Values, at: Ints, count: int, what: str) -> Octets:
    """`count` bytes from each place; zeros where the place is -1."""
    found = np.zeros((len(at), count), np.uint8)
    rows = np.flatnonzero(at >= 0)
    found[rows] = values.data[at[rows][:, None] + np.arange(count)]
    return found


def _four(lines: Lines, octets: Octets, where: Bools) -> None:
    for number in range(4):
        if number:
            lines.word(".", where)
        lines.number(octets[:, number], 3, 1, where)


def _six(lines: Lines, octets: Octets, where: Bools) -> None:
    words = octets[:, 0::2].astype(np.int64) << 8 | octets[:, 1::2]
    begin, length = _longest_zeros(words)
    # These hold an address of IPv4: compatible (but for ::1 and ::), or mapped.
    holds = (begin == 0) & (
        (length == 6) | ((length == 7) & (words[:, 7] != 1)) | ((length == 5) & (words[:, 5] == 0xFFFF))
    )
    for number in range(8):
        inside = (number >= begin) & (number < begin + length)
        lines.word(":", where & (number == begin))
        plain = where & ~inside & (~holds | (number < 6))
        if number:
            lines.word(":", plain | (where & holds & (number == 6) & ~inside))
        lines.hexadecimal(words[:, number], 4, where=plain)
    lines.word(":", where & (length > 0) & (begin + length == 8) & ~holds)
    _four(lines, octets[:, 12:], where & holds)


def _longest_zeros(words: Ints) -> tuple[Ints, Ints]:
    """Where the longest run of at least two zero words begins, and its length: the first of several."""
    rows = len(words)
    best_at, best = np.full(rows, -1), np.zeros(rows, np.int64)
    run = np.zeros(rows, np.int64)
    for number in range(8):
        run = np.where(words[:, number] == 0, run + 1, 0)
        longer = run > best
        best, best_at = np.where(longer, run, best), np.where(longer, number + 1 - run, best_at)
    counts = best >= 2
    return np.where(counts, best_at, -1), np.where(counts, best, 0)


READERS: dict[str, Reader] = {
    "inet": Address("inet", always_masked=False),
    "cidr": Address("cidr", always_masked=True),
}
