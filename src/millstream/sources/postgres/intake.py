"""Takes CopyData messages from libpq, many at a time.

Who waits for a socket is woken for every little that arrives. A server that copies a large result
sends full buffers, and then it is worth while to ask the socket for a good amount at a time. From
a replication stream it is not: the many small messages that would queue up cost the server more
than the waking.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket

import psycopg
from psycopg.pq.abc import PGconn

from millstream.errors import SourceUnavailable

_BURST = 256
"""Messages taken at a time."""


class Intake:
    """The receiving side of a connection that copies out. Does not own it. Not for threads."""

    def __init__(self, connection: PGconn, what: str) -> None:
        """`what` names the connection in the error that says that it was lost."""
        self._connection = connection
        self._what = what
        self._poll = select.poll()
        self._poll.register(connection.socket, select.POLLIN)
        self._amount = 1
        self.ended = False
        """Whether the copy has come to its end, or to an error."""

    def take(self, pieces: list[bytes], sizes: list[int], most: int) -> int:
        """Add what has arrived, until it is `most` bytes or more; returns how many it is.

        `pieces` are messages one after the other, `sizes` the size of each message.
        """
        take, measure = self._connection.get_copy_data, sizes.append
        total, asked = 0, False
        try:
            while total < most and not self.ended:
                # Joined while they are few: thousands of small objects are slow to keep, for Python and for libpq.
                burst: list[memoryview] = []
                size, keep = 0, burst.append
                for _ in range(_BURST):
                    size, message = take(1)
                    if size <= 0:
                        break
                    keep(message)
                    measure(size)
                if burst:
                    pieces.append(b"".join(burst))
                    total += len(pieces[-1])
                if size < 0:
                    self.ended = True
                    self._ask_for(1)  # whoever reads what follows waits for any byte
                elif asked and not burst:
                    break
                elif size == 0:
                    # Libpq takes in a few kilobytes at a time, and there may be more.
                    self._connection.consume_input()
                    asked = True
        except psycopg.Error as lost:
            raise self._lost(lost) from None
        return total

    def wait(self, seconds: float, *, amount: int = 1) -> None:
        """Wait until so many bytes have arrived, or the time is over.

        Bytes that TLS has already decrypted are not seen by poll; `take`, which asks libpq, has found them before.
        """
        self._ask_for(amount)
        self._poll.poll(seconds * 1000)

    def _ask_for(self, amount: int) -> None:
        if amount == self._amount:
            return
        self._amount = amount
        # Not every socket knows this; one that does not wakes us for each message.
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self._connection.socket)) as end:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, amount)

    def _lost(self, lost: psycopg.Error) -> SourceUnavailable:
        # libpq's message quotes the server's, which is read from the result where there is one.
        return SourceUnavailable(f"{self._what} was lost ({type(lost).__name__})")
