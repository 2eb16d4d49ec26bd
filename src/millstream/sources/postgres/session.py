"""A plain session at the source whose statements are waited for in turns.

Capture has one thread and must come round at least every 100 ms, but a statement here can take
minutes. So everything that waits is a generator: it yields when a turn is over without an answer.
"""

from __future__ import annotations

import contextlib
import select
from collections.abc import Generator, Iterator
from contextlib import contextmanager

import psycopg
from psycopg import pq
from psycopg.pq.abc import PGconn, PGresult

from millstream.errors import SourceUnavailable
from millstream.sources.postgres.connection import translate

TURN_SECONDS = 0.1
"""So long a wait lasts before the caller has its turn."""

SESSION = "the session for bulk reading"

_GONE = ("57P", "08")
"""SQLSTATEs of a session that the server has ended, or that never was."""

Rows = list[tuple[str | None, ...]]
Turns = Generator[None, None, None]


class Refused(Exception):
    """The server does not do what was asked, but goes on. `sqlstate` says why."""

    def __init__(self, sqlstate: str, message: str) -> None:
        super().__init__(f"{message} (SQLSTATE {sqlstate})")
        self.sqlstate = sqlstate


class Session:
    """Owns a raw connection. One statement at a time. Not for threads."""

    def __init__(self, connection: PGconn) -> None:
        self.connection = connection
        self._poll = select.poll()
        self._poll.register(connection.socket, select.POLLIN)

    def send(self, statement: str) -> None:
        """Begin a statement, or several in one transaction."""
        with self._alive():
            self.connection.send_query(statement.encode())

    def run(self, statement: str) -> Generator[None, None, Rows]:
        """A statement from beginning to end; returns its rows as text. Raises Refused."""
        self.send(statement)
        rows: Rows = []
        while (result := (yield from self.result())) is not None:
            rows = values(result)
        return rows

    def result(self) -> Generator[None, None, PGresult | None]:
        """The next result of what was sent; None when there is no more. Raises Refused."""
        while self._busy():
            if not self.await_input(TURN_SECONDS):
                yield
        with self._alive():
            result = self.connection.get_result()
        if result is not None and result.status == pq.ExecStatus.FATAL_ERROR:
            raise self._error(result)
        return result

    def tell_position(self, start: str, update: bytes) -> Turns:
        """Begin a replication stream by the command `start`, send one status update, and end the stream.

        What the server sends meanwhile is not looked at. Only on a connection that `replicates`. Raises Refused.
        """
        self.send(start)
        yield from self.result()
        with self._alive():
            self.connection.put_copy_data(update)
            self.connection.put_copy_end()
            while (size := self.connection.get_copy_data(1)[0]) >= 0:
                if not size and not self.await_input(TURN_SECONDS):
                    yield
        while (yield from self.result()) is not None:
            pass

    @property
    def replicates(self) -> bool:
        """Whether the connection is one for replication, which takes statements all the same."""
        return any(option.keyword == b"replication" and option.val for option in self.connection.info)

    def finished(self) -> bool:
        """Whether nothing of what was sent is still under way. Takes in what there is, and waits for nothing.

        Raises Refused if it was refused.
        """
        self.await_input(0)
        while not self._busy():
            with self._alive():
                result = self.connection.get_result()
            if result is None:
                return True
            if result.status == pq.ExecStatus.FATAL_ERROR:
                raise self._error(result)
        return False

    def await_input(self, seconds: float) -> bool:
        """Wait for more input, and take it in; False when none came."""
        readable = bool(self._poll.poll(seconds * 1000))
        # Bytes that TLS has already decrypted are not seen by poll, and must not wait for the next ones.
        if readable or self.connection.ssl_in_use:
            with self._alive():
                self.connection.consume_input()
        return readable

    def cancel(self) -> None:
        """Ask the server to give up what it is doing; the answer still has to be awaited."""
        if self.connection.transaction_status == pq.TransactionStatus.ACTIVE:
            with contextlib.suppress(psycopg.Error):
                self.connection.get_cancel().cancel()

    def close(self) -> None:
        """End the session, and what it is doing: the server would go on without us. Idempotent."""
        if self.connection.status != pq.ConnStatus.BAD:
            self.cancel()
            self.connection.finish()

    def _busy(self) -> bool:
        with self._alive():
            return bool(self.connection.is_busy())

    def _error(self, result: PGresult) -> Exception:
        message = (result.error_field(pq.DiagnosticField.MESSAGE_PRIMARY) or b"").decode("utf-8", "replace")
        state = (result.error_field(pq.DiagnosticField.SQLSTATE) or b"").decode()
        return refusal(state, message)

    @contextmanager
    def _alive(self) -> Iterator[None]:
        try:
            yield
        except psycopg.Error as lost:
            raise SourceUnavailable(f"{SESSION} was lost ({type(lost).__name__})") from None


def refusal(state: str, message: str) -> Exception:
    """The error for what the server says: Refused, unless the session is over."""
    if not state or (state.startswith(_GONE) and state != "57014"):
        return translate(state or None, message or "the connection was lost", "reading in bulk")
    return Refused(state, message)


def values(result: PGresult) -> Rows:
    """The rows of a result as text."""
    return [
        tuple(None if (v := result.get_value(row, at)) is None else v.decode("utf-8", "replace") for at in range(width))
        for row in range(result.ntuples)
        if (width := result.nfields)
    ]
