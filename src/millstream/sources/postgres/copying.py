"""The rows that a COPY gives: straight from the socket where that can be done, else through libpq."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
from psycopg import pq

from millstream.errors import SourceUnavailable
from millstream.sources.postgres.copied import rows_of_copy
from millstream.sources.postgres.copy_socket import MORE_BYTES, MORE_SECONDS, RUN_BYTES, CopySocket, is_open_to_read
from millstream.sources.postgres.intake import Intake
from millstream.sources.postgres.session import Session
from millstream.sources.postgres.waiting import awaited

_READER = "the session that reads a chunk"


def copied(session: Session, statement: str) -> Iterator[pa.LargeBinaryArray]:
    """The rows that a binary COPY gives, some megabytes at a time. Raises Refused.

    Who does not read them to the end finds the session of no use any more.
    """
    if not is_open_to_read(session.connection):
        yield from _through_libpq(session, statement)
        return
    with CopySocket(session, _READER) as copy:
        copy.send(statement)
        yield from copy.rows()


def _through_libpq(session: Session, statement: str) -> Iterator[pa.LargeBinaryArray]:
    session.send(statement)
    copying = awaited(session.result())
    if copying is None or copying.status != pq.ExecStatus.COPY_OUT:
        raise SourceUnavailable("the source did not begin to copy")
    intake = Intake(session.connection, _READER)
    first = True
    while not intake.ended:
        pieces: list[bytes] = []
        sizes: list[int] = []
        total = 0
        while not intake.ended and total < RUN_BYTES:
            total += intake.take(pieces, sizes, RUN_BYTES - total)
            if not intake.ended and total < RUN_BYTES:
                intake.wait(MORE_SECONDS, amount=MORE_BYTES)
        rows = rows_of_copy(b"".join(pieces), sizes, first=first)
        first = first and not sizes
        if len(rows):
            yield rows
    while awaited(session.result()) is not None:
        pass
