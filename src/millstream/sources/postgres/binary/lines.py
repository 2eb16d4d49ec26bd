"""Short texts of many rows at once, written from left to right.

Each step adds some characters to all rows, with a mask that says which rows keep which of them. In
the end the characters that are kept, row after row, are the texts.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from millstream.sources.postgres.casts import Octets
from millstream.sources.postgres.cells import Bools

_HEX = np.frombuffer(b"0123456789abcdef", np.uint8)
_HEX_UPPER = np.frombuffer(b"0123456789ABCDEF", np.uint8)
_ZERO = ord("0")

Numbers = npt.NDArray[np.integer[Any]]


class Lines:
    """The texts of `rows` rows. Every method adds to their right end."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self._letters: list[Octets] = []
        self._kept: list[Bools] = []

    def put(self, letters: Octets, kept: Bools) -> None:
        """Any characters, one row of them for each text."""
        self._letters.append(letters)
        self._kept.append(kept)

    def word(self, text: str, where: Bools | None = None) -> None:
        """The same characters in all rows, or only `where`."""
        letters = np.frombuffer(text.encode(), np.uint8)
        shape = (self.rows, len(letters))
        kept = np.ones(self.rows, bool) if where is None else where
        self.put(np.broadcast_to(letters, shape), np.broadcast_to(kept[:, None], shape))

    def number(self, values: Numbers, most: int, least: int = 1, where: Bools | None = None) -> None:
        """Numbers from 0 with up to `most` digits, padded with zeros to `least`."""
        rest = values.astype(np.uint64)
        letters = np.empty((self.rows, most), np.uint8)
        kept = np.ones((self.rows, most), bool)
        for place in range(most - 1, -1, -1):
            if most - place > least:
                kept[:, place] = rest > 0
            rest, digit = np.divmod(rest, np.uint64(10))
            letters[:, place] = digit + np.uint64(_ZERO)
        self.put(letters, kept if where is None else kept & where[:, None])

    def fraction(self, micros: Numbers) -> None:
        """A point and up to six digits, without zeros at the end; nothing for zero."""
        self.word(".", micros > 0)
        powers = 10 ** np.arange(6, -1, -1, dtype=np.int64)
        part = micros.astype(np.int64)[:, None] % powers[:-1]
        self.put((part // powers[1:] + _ZERO).astype(np.uint8), part > 0)

    def hexadecimal(self, values: Numbers, most: int, *, upper: bool = False, where: Bools | None = None) -> None:
        """Numbers from 0 with up to `most` hexadecimal digits, at least one."""
        shifts = np.arange(4 * (most - 1), -1, -4, dtype=np.uint64)
        over = values.astype(np.uint64)[:, None] >> shifts
        kept: Bools = over > 0
        kept[:, -1] = True
        letters = (_HEX_UPPER if upper else _HEX)[(over & np.uint64(15)).astype(np.intp)]
        self.put(letters, kept if where is None else kept & where[:, None])

    def done(self) -> tuple[Octets, npt.NDArray[np.int64]]:
        """All texts after each other, and the size of each."""
        kept = np.concatenate(self._kept, axis=1)
        return np.concatenate(self._letters, axis=1)[kept], np.count_nonzero(kept, axis=1)


def hexed(octets: Octets) -> Octets:
    """Two hexadecimal digits for each byte of the last dimension."""
    letters = np.empty((*octets.shape[:-1], 2 * octets.shape[-1]), np.uint8)
    letters[..., 0::2] = _HEX[octets >> 4]
    letters[..., 1::2] = _HEX[octets & 15]
    return letters
