"""What a COPY sends, taken from the connection's socket itself.

Libpq hands on a copy row by row, with a call, some memory and a copy each: that takes longer than to decode the row.
But the messages of a copy follow each other in what the socket gives, and where they begin can be found for all of them
at once. So a statement that copies is spoken with the server directly. Libpq has made the session and is idle
meanwhile: it finds the session idle again. Where libpq encrypts what goes over the socket this cannot be done.

    message    tag byte1, length int32 (of itself and what follows), content; numbers are big-endian
    H          the copy begins: ... number of columns int16
    d          a row: the number of columns int16, then its cells. The header of the copy stands in front of the first
    c, C, Z    the copy, the statement, and all of it has ended
    E          it was refused. Others (notices, parameters) are of no interest here
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import time
from collections.abc import Iterator
from os import dup
from types import TracebackType
from typing import Final, Self

import numpy as np
import numpy.typing as npt
import psycopg
import pyarrow as pa
from psycopg.pq.abc import PGconn

from millstream.errors import SourceUnavailable
from millstream.sources.postgres.cells import Ints
from millstream.sources.postgres.pgoutput import ProtocolError, copy_header
from millstream.sources.postgres.session import Session, refusal

RUN_BYTES: Final = 4 << 20
"""So much of a copy is handed on at a time."""
MORE_BYTES, MORE_SECONDS = 256 << 10, 0.005
"""How much is worth to be woken for, and how long it is waited for."""

HEAD: Final = 5
"""So many bytes stand before the row in its message."""

_ROOM = 1 << 20
_PIECE = 64 << 10
_END = b"\xff\xff"
_READY = b"Z\0\0\0\5"
_PASSED_OVER = frozenset(b"cCNSA")


def is_open_to_read(connection: PGconn) -> bool:
    """Whether what goes over the connection's socket is what the server says, and not what libpq makes of it."""
    try:
        return not connection.ssl_in_use and not connection.used_gssapi
    except (AttributeError, psycopg.NotSupportedError):
        # Before psycopg 3.3, or with a libpq before 16, nobody can tell.
        return False


class CopySocket:
    """One statement that copies out, from its beginning to its end. Not for threads.

    The session is idle before and after. Who leaves before the copy has come to its end finds the session closed.
    """

    def __init__(self, session: Session, what: str, *, run_bytes: int | None = None) -> None:
        """`what` names the session in the error that says that it was lost."""
        self._session = session
        self._what = what
        self._run_bytes = RUN_BYTES if run_bytes is None else run_bytes
        self._socket = socket.socket(fileno=dup(session.connection.socket))
        self._poll = select.poll()
        self._buffer: npt.NDArray[np.uint8] = np.empty(self._run_bytes + _ROOM, np.uint8)
        self._have = 0
        self._wanted = self._run_bytes
        self._columns: int | None = None
        self._first = True
        self._refused: Exception | None = None
        self._over = self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def over(self) -> bool:
        """Whether all has come that the statement gives."""
        return self._over

    def close(self) -> None:
        """Let go of the session, and end it unless the copy is over. Idempotent."""
        if self._socket.fileno() < 0:
            return
        self._wake_for(1)
        self._socket.close()
        if not self._over:
            # The server would go on, and libpq would not understand what still comes.
            with contextlib.suppress(psycopg.Error):
                self._session.connection.get_cancel().cancel()
            self._session.connection.finish()

    def rows(self, turn_seconds: float | None = None) -> Iterator[pa.LargeBinaryArray]:
        """The rows of what was sent, some megabytes at a time, each with the head of its message in front.

        Who has other things to do gets an array without rows when a turn is over. Raises Refused when the server
        does not copy (any more).
        """
        while not self._over:
            self._receive(turn_seconds)
            found = self._cut()
            if turn_seconds is not None and not found and not self._over:
                yield _array(np.empty(0, np.uint8), np.zeros(1, np.int64))
            yield from found
            if self._closed and not self._over:
                raise self._refused or self._lost("it was closed")
        if self._refused is not None:
            raise self._refused

    def send(self, statement: str) -> None:
        """Begin the statement."""
        text = statement.encode()
        left = memoryview(b"Q" + struct.pack(">i", len(text) + 5) + text + b"\0")
        self._poll.register(self._socket, select.POLLOUT)
        while left:
            self._poll.poll()
            with self._alive(), contextlib.suppress(BlockingIOError):
                left = left[self._socket.send(left) :]
        self._poll.modify(self._socket, select.POLLIN)

    # Bytes

    def _receive(self, turn_seconds: float | None) -> None:
        """Take in a whole run, or what comes until the end or within a turn; without turns, at least something."""
        free = self._buffer.data
        until = None if turn_seconds is None else time.monotonic() + turn_seconds
        while True:
            if self._wait(turn_seconds):
                with self._alive(), contextlib.suppress(BlockingIOError):
                    count = self._socket.recv_into(free[self._have :])
                    self._have += count
                    self._closed = not count
            ready = self._buffer[max(0, self._have - len(_READY) - 1) : self._have].tobytes().startswith(_READY)
            if self._closed or ready or self._have >= self._wanted or (until and time.monotonic() >= until):
                return

    def _wait(self, seconds: float | None) -> bool:
        """Wait for much, then for anything; False when nothing has come."""
        self._wake_for(MORE_BYTES)
        if self._poll.poll(MORE_SECONDS * 1000):
            return True
        self._wake_for(1)
        return bool(self._poll.poll(None if seconds is None else seconds * 1000))

    def _wake_for(self, amount: int) -> None:
        # Not every socket knows this; one that does not wakes us for each message.
        with contextlib.suppress(OSError):
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, amount)

    @contextlib.contextmanager
    def _alive(self) -> Iterator[None]:
        try:
            yield
        except BlockingIOError:
            raise
        except OSError as lost:
            raise self._lost(type(lost).__name__) from None

    def _lost(self, why: str) -> SourceUnavailable:
        return SourceUnavailable(f"{self._what} was lost ({why})")

    # Messages

    def _cut(self) -> list[pa.LargeBinaryArray]:
        """The rows of the messages that are whole; the rest stays for the next time."""
        found: list[Ints] = []
        at = 0
        while self._first and (end := self._one(at, found)) is not None:
            at = end
        if not self._first:
            at = self._many(at, found)
        data = self._buffer
        self._keep(at)
        # Few rows shall not hold much memory: whoever has asked for them may keep them.
        data = data if 2 * at > len(data) else data[:at].copy()
        return [_array(data, bounds) for bounds in _joined(found)]

    def _many(self, at: int, found: list[Ints]) -> int:
        """All messages from here on that are whole; returns where they end."""
        heads, ends = _heads(self._buffer[: self._have], self._columns or 0)
        # A message is one if it begins where the one before it ends: what only looks like one is never in the chain.
        broken = np.append(np.flatnonzero(heads[1:] != ends[:-1]), len(heads) - 1)
        while True:
            number = int(np.searchsorted(heads, at))
            if number < len(heads) and heads[number] == at:
                last = int(broken[np.searchsorted(broken, number)]) + 1
                whole = number + int(np.searchsorted(ends[number:last], self._have, side="right"))
                if whole == number:
                    return at
                at = int(ends[whole - 1])
                found.append(np.append(heads[number:whole], at))
            elif (end := self._one(at, found)) is not None:
                at = end
            else:
                return at

    def _one(self, at: int, found: list[Ints]) -> int | None:
        """A message of any kind; returns where it ends, None if it is not whole yet."""
        if self._over or self._have < at + HEAD:
            return None
        tag, size = struct.unpack_from(">BI", self._buffer.data, at)
        begin, end = at + HEAD, at + 1 + int(size)
        if end > self._have:
            return None
        if tag == ord("d"):
            if self._first:
                begin += copy_header(self._buffer[begin:end].tobytes())
                self._first = False
                # The row shall look like all others: what stands before it has been read.
                self._buffer[begin - HEAD : begin] = np.frombuffer(_head(end - begin), np.uint8)
            if self._buffer[begin:end].tobytes() != _END and begin < end:
                found.append(np.array([begin - HEAD, end]))
        elif tag == ord("H"):
            (self._columns,) = struct.unpack_from(">h", self._buffer.data, begin + 1)
        elif tag == ord("E"):
            self._refused = _refusal(self._buffer[begin:end].tobytes())
        elif tag == ord("Z"):
            self._over = True
        elif tag not in _PASSED_OVER:
            raise ProtocolError("the server sent what is no part of a copy")
        return end

    def _keep(self, at: int) -> None:
        """Begin another buffer with what is left, with room for all of a message that is larger than a run."""
        rest = self._buffer[at : self._have]
        self._wanted = self._run_bytes
        if len(rest) >= HEAD:
            self._wanted = max(self._run_bytes, 1 + int(struct.unpack_from(">I", rest.data, 1)[0]))
        self._buffer = np.empty(self._wanted + _ROOM, np.uint8)
        self._buffer[: len(rest)] = rest
        self._have = len(rest)


def _heads(data: npt.NDArray[np.uint8], columns: int) -> tuple[Ints, Ints]:
    """Where it looks as if a row of less than 64 KiB began, and where it would end."""
    if len(data) < HEAD + 2:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    found = []
    last = len(data) - HEAD - 1
    # A piece at a time, which the processor keeps at hand from one look to the next.
    for begin in range(0, last, _PIECE):
        end = min(begin + _PIECE, last)
        looks = data[begin:end] == ord("d")
        looks &= data[begin + 1 : end + 1] == 0
        found.append(np.flatnonzero(looks) + begin)
    at = np.concatenate(found)
    at = at[(data[at + 2] == 0) & (data[at + 5] == columns >> 8) & (data[at + 6] == columns & 0xFF)]
    return at, at + 1 + (data[at + 3].astype(np.int64) << 8 | data[at + 4])


def _joined(found: list[Ints]) -> Iterator[Ints]:
    """Bounds of rows that follow each other, those put together that do so without a gap."""
    waiting: list[Ints] = []
    for bounds in found:
        if waiting and bounds[0] != waiting[-1][-1]:
            yield np.concatenate(waiting)
            waiting = []
        waiting[-1:] = [waiting[-1][:-1], bounds] if waiting else [bounds]
    if waiting:
        yield np.concatenate(waiting)


def _array(data: npt.NDArray[np.uint8], bounds: Ints) -> pa.LargeBinaryArray:
    buffers = [None, pa.py_buffer(bounds), pa.py_buffer(data)]
    return pa.Array.from_buffers(pa.large_binary(), len(bounds) - 1, buffers)


def _head(size: int) -> bytes:
    return b"d" + struct.pack(">i", size + 4)


def _refusal(fields: bytes) -> Exception:
    """What the server says against it: fields of a letter and a text each."""
    told = {field[:1]: field[1:] for field in fields.split(b"\0") if field}
    return refusal(told.get(b"C", b"").decode(), told.get(b"M", b"").decode("utf-8", "replace"))
