"""Taking copied data from libpq: an end is seen whenever it comes."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import cast

import pytest
from psycopg.pq.abc import PGconn

from millstream.sources.postgres.intake import Intake


class Libpq:
    """Answers as libpq does: what it has read is given out, the rest waits on the socket."""

    def __init__(self, arrivals: list[list[bytes | None]]) -> None:
        self._arrivals = iter(arrivals)
        self._read: list[bytes | None] = []
        self._ends = socket.socketpair()
        self.socket = self._ends[0].fileno()

    def get_copy_data(self, _: int) -> tuple[int, bytes]:
        if not self._read:
            return 0, b""
        message = self._read.pop(0)
        return (-1, b"") if message is None else (len(message), message)

    def consume_input(self) -> None:
        self._read += next(self._arrivals, [])

    def close(self) -> None:
        for end in self._ends:
            end.close()


END = None
CASES: dict[str, tuple[list[list[bytes | None]], list[int]]] = {
    "with the data": ([[b"one", b"two", END]], [6]),
    "alone, after data": ([[b"one"], [END]], [3]),
    "alone, after silence": ([[], [END]], [0, 0]),
    "alone, at first": ([[END]], [0]),
}


@pytest.fixture
def closing() -> Iterator[list[Libpq]]:
    made: list[Libpq] = []
    yield made
    for one in made:
        one.close()


@pytest.mark.parametrize("case", CASES)
def test_the_end_is_seen_whenever_it_comes(case: str, closing: list[Libpq]) -> None:
    arrivals, taken = CASES[case]
    libpq = Libpq(arrivals)
    closing.append(libpq)
    intake = Intake(cast(PGconn, libpq), "the connection")
    for size in taken:
        assert not intake.ended
        assert intake.take([], [], 1 << 20) == size
    assert intake.ended
