"""One replication connection: reads the log, answers the server, acknowledges.

Everything happens on the caller's thread. The inner loop does nothing per message but take it
from libpq; a run of messages ends when it is large, or some milliseconds old.

Status updates go out at most ten times a second and at least every status interval. They say
what was received, and separately what need not be sent again: only ever what the caller has
acknowledged, never less than before.

A server that shuts down waits until its log is acknowledged, asking again and again. A target
that stands still would hold it up for ever, so when the questions come fast it is probed, and if
it takes no new connections, ours is given up.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import psycopg
from psycopg import pq
from psycopg.conninfo import make_conninfo
from psycopg.pq.abc import PGconn

from millstream.errors import SourceUnavailable
from millstream.failpoint import failpoint
from millstream.sources.base import Block
from millstream.sources.postgres.assemble import Assembler
from millstream.sources.postgres.connection import command, literal, translate
from millstream.sources.postgres.intake import Intake
from millstream.sources.postgres.lsn import format_lsn
from millstream.sources.postgres.pgoutput import Keepalive, frame, status_update

RUN_BYTES = 2 << 20
"""A run of messages is handed on at this size,"""
RUN_SECONDS = 0.01
"""or this long after its first message."""
QUIET_SECONDS = 0.015
"""After rows, so long without a message means that the source is quiet: they can be committed."""
IDLE_SECONDS = 0.1
"""A source that stays quiet is heard of this often."""
REPLY_SECONDS = 0.1
"""The shortest time between two status updates."""

_IN_USE = b"55006"
"""The SQLSTATE of a slot that somebody reads."""
PROBE_SECONDS = 1.0
"""Two questions within this time make us look whether the server shuts down; no more often than this."""


@dataclass
class _Shutdown:
    """Notices a server that waits for our acknowledgement to shut down."""

    asked_at: float = float("-inf")
    asked_end: int = -1
    probed_at: float = float("-inf")

    def suspected(self, keepalive: Keepalive, now: float) -> bool:
        again = keepalive.wal_end == self.asked_end and now - self.asked_at < PROBE_SECONDS
        self.asked_at, self.asked_end = now, keepalive.wal_end
        if not again or now - self.probed_at < PROBE_SECONDS:
            return False
        self.probed_at = now
        return True


class SlotBusy(Exception):
    """Another session reads the slot: a stranger's, or one of ours that the server has not seen end yet."""


class Replication:
    """A started stream of the log. Owns the connection from the constructor on."""

    def __init__(self, connection: PGconn, assembler: Assembler, *, status_seconds: float) -> None:
        self._connection = connection
        self._assembler = assembler
        self._status_seconds = status_seconds
        self._acked = 0
        self._sent_ack = 0
        self._sent_at = float("-inf")
        self._reply_due = False
        self._unsent = False
        self._shutdown = _Shutdown()
        self._intake = Intake(connection, "the replication connection")

    def start(self, slot: str, position: int, options: Mapping[str, str]) -> None:
        """Begin to stream. The caller has made sure that going on from `position` is exact.

        After SlotBusy it may be tried again.
        """
        chosen = ", ".join(f"{name} {literal(value)}" for name, value in options.items())
        statement = f'START_REPLICATION SLOT "{slot}" LOGICAL {format_lsn(position)} ({chosen})'
        result = self._connection.exec_(statement.encode())
        if result.status != pq.ExecStatus.COPY_BOTH:
            raise self._error(result, "starting replication")
        self._connection.nonblocking = 1
        failpoint("capture.replication_started")

    def rest(self) -> None:
        """Wait a moment before `start` is tried again."""
        command(self._connection, "SELECT pg_sleep(0.02)")

    def acknowledge(self, position: int) -> None:
        """Let the server forget what is at or before `position`; it is told with the next update."""
        self._acked = max(self._acked, position)

    @property
    def acknowledged(self) -> int:
        """What the server was last told that it may forget."""
        return self._sent_ack

    def blocks(self, leave: Callable[[], bool]) -> Iterator[Block]:
        """Blocks until `leave` says so, at least every 100 ms. Raises SourceUnavailable when the stream ends.

        When the last block has come, everything up to the assembler's `received` has been handed over, and
        nothing of what follows. A transaction that is too large for memory is not left in its middle.
        """
        wait = IDLE_SECONDS
        try:
            while self._assembler.spooling or not leave():
                messages, sizes = self._read(wait)
                if not messages:
                    wait = IDLE_SECONDS
                    yield Block()
                else:
                    wait = QUIET_SECONDS
                    for block in self._assembler.feed(frame(messages, sizes)):
                        yield block
                        self.tell()
                    self._answer(self._assembler.keepalives)
                self.tell()
        finally:
            self._assembler.restart()

    def tell(self, *, now: bool = False) -> None:
        """Send a status update if one is due, or at once."""
        clock = time.monotonic()
        waited = clock - self._sent_at
        wanted = self._reply_due or self._acked > self._sent_ack
        if not (now or (wanted and waited >= REPLY_SECONDS) or waited >= self._status_seconds):
            if self._unsent:
                self._flush()
            return
        update = status_update(
            written=max(self._assembler.received, self._acked), flushed=self._acked, unix_us=time.time_ns() // 1000
        )
        try:
            self._connection.put_copy_data(update)
        except psycopg.Error as lost:
            raise self._lost(lost) from None
        self._flush()
        acknowledged, self._sent_ack = self._acked > self._sent_ack, self._acked
        self._sent_at, self._reply_due = clock, False
        if acknowledged:
            failpoint("capture.acked")

    def finish(self) -> None:
        """Tell the last acknowledgement, if the connection still takes it, and let go of it."""
        if self._acked > self._sent_ack:
            with contextlib.suppress(SourceUnavailable):
                self.tell(now=True)
        self._connection.finish()

    # -- reading -----------------------------------------------------------------------------

    def _read(self, wait: float) -> tuple[list[bytes], list[int]]:
        """The next run of messages; an empty one when none came in `wait` seconds."""
        messages: list[bytes] = []
        sizes: list[int] = []
        until, total = time.monotonic() + wait, 0
        while True:
            begun = bool(messages)
            total += self._intake.take(messages, sizes, RUN_BYTES - total)
            if self._intake.ended:
                raise self._ended()
            now = time.monotonic()
            if messages and not begun:
                until = now + RUN_SECONDS
            if now >= until or total >= RUN_BYTES:
                return messages, sizes
            self._intake.wait(until - now)

    # -- answering ---------------------------------------------------------------------------

    def _answer(self, keepalives: list[Keepalive]) -> None:
        for keepalive in keepalives:
            if keepalive.reply:
                self._reply_due = True
                if self._shutdown.suspected(keepalive, time.monotonic()) and not self._takes_connections():
                    raise SourceUnavailable("the server shuts down; the replication connection was given up for it")

    def _takes_connections(self) -> bool:
        connection = self._connection
        address = {"host": connection.host, "hostaddr": connection.hostaddr, "port": connection.port}
        known = {name: value.decode() for name, value in address.items() if value}
        return pq.PGconn.ping(make_conninfo("", connect_timeout=2, **known).encode()) == pq.Ping.OK

    def _flush(self) -> None:
        try:
            self._unsent = self._connection.flush() != 0
        except psycopg.Error as lost:
            raise self._lost(lost) from None

    # -- ends --------------------------------------------------------------------------------

    def _ended(self) -> Exception:
        """Why the server ended the stream."""
        result = self._connection.get_result()
        if result is None or result.status == pq.ExecStatus.COMMAND_OK:
            return SourceUnavailable("the server ended the replication stream")
        return self._error(result, "reading the log")

    def _error(self, result: pq.abc.PGresult, doing: str) -> Exception:
        message = result.error_field(pq.DiagnosticField.MESSAGE_PRIMARY)
        if message is None:
            return SourceUnavailable(f"{doing}: the replication connection was lost")
        state, text = result.error_field(pq.DiagnosticField.SQLSTATE), message.decode("utf-8", "replace")
        if state == _IN_USE:
            return SlotBusy(f"{doing}: {text}")
        return translate(state.decode() if state else None, text, doing)

    def _lost(self, lost: psycopg.Error) -> SourceUnavailable:
        # libpq's message quotes the server's, which is read from the result where there is one.
        return SourceUnavailable(f"the replication connection was lost ({type(lost).__name__})")
