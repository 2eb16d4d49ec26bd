"""One call of bulk reading: a COPY of pgoutput messages, begun at once and taken in by runs, in turns.

Straight from the socket where that can be done, which takes a fraction of the time that libpq needs for a row; a
transaction of one row is three of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

import numpy as np
from psycopg import pq

from millstream.errors import SourceUnavailable
from millstream.sources.postgres.copy_socket import HEAD, MORE_BYTES, MORE_SECONDS, CopySocket, is_open_to_read
from millstream.sources.postgres.intake import Intake
from millstream.sources.postgres.pgoutput import Frames, frame_copied, frame_rows
from millstream.sources.postgres.session import SESSION, TURN_SECONDS, Session

RUN_BYTES: Final = 2 << 20
"""Rows are framed in pieces of this size; larger ones are slower, since their memory is always new."""


@dataclass(frozen=True)
class Run:
    """A piece of a result."""

    size: int
    messages: int
    last: bool
    """Whether nothing comes behind it."""
    frames: Callable[[int], Frames]
    """Its messages, given the server's clock. Raises ProtocolError."""


class Call(Protocol):
    """A statement that the server is at. Does not own the session."""

    def runs(self) -> Iterator[Run | None]:
        """The result until its end, None when a turn is over without a run. Raises Refused."""

    def close(self) -> None:
        """Give up what has not come. The session is of no use then. Idempotent."""


def call(session: Session, statement: str) -> Call:
    """Begin a binary COPY of one column."""
    return _Plain(session, statement) if is_open_to_read(session.connection) else _ThroughLibpq(session, statement)


class _Plain:
    def __init__(self, session: Session, statement: str) -> None:
        self._copy = CopySocket(session, SESSION, run_bytes=RUN_BYTES)
        self._copy.send(statement)

    def runs(self) -> Iterator[Run | None]:
        for rows in self._copy.rows(TURN_SECONDS):
            if len(rows):
                yield Run(rows.nbytes, len(rows), self._copy.over, partial(frame_copied, rows, HEAD))
            else:
                yield None
        self.close()

    def close(self) -> None:
        self._copy.close()


class _ThroughLibpq:
    def __init__(self, session: Session, statement: str) -> None:
        self._session = session
        session.send(statement)

    def runs(self) -> Iterator[Run | None]:
        copying = yield from self._session.result()
        if copying is None or copying.status != pq.ExecStatus.COPY_OUT:
            raise SourceUnavailable("the source did not begin to copy")
        intake = Intake(self._session.connection, SESSION)
        first = True
        while not intake.ended:
            run = yield from self._run(intake, first=first)
            first = first and not run.messages
            yield run
        while (yield from self._session.result()) is not None:
            pass

    def close(self) -> None:
        self._session.cancel()

    def _run(self, intake: Intake, *, first: bool) -> Generator[None, None, Run]:
        pieces: list[bytes] = []
        sizes: list[int] = []
        total, turn_at = 0, time.monotonic()
        while True:
            total += intake.take(pieces, sizes, RUN_BYTES - total)
            if intake.ended or total >= RUN_BYTES:
                frames = partial(frame_rows, b"".join(pieces), np.array(sizes, dtype=np.int64), first)
                return Run(total, len(sizes), intake.ended, frames)
            intake.wait(MORE_SECONDS, amount=MORE_BYTES)
            if time.monotonic() - turn_at >= TURN_SECONDS:
                turn_at = time.monotonic()
                yield
