"""Statements on their way to Postgres that nobody waits for one by one: sent together, in their order.

Each brings its rows along (`given`) and stays prepared in the session, so that a batch over a hundred tables takes one
round trip, and the server plans nothing anew. The first that is refused ends the others; it is known which one it was.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import psycopg

from millstream.errors import RowRefused, TargetUnavailable
from millstream.targets.lanes.database import Values
from millstream.targets.lanes.given import as_parameter, as_rows
from millstream.targets.lanes.sessions import Session, translated

MOST_STATEMENTS = 500
MOST_BYTES = 8 << 20
"""The queue is emptied when it has so much."""

Look = Callable[[str, Sequence[Values]], None]


@dataclass(frozen=True)
class _Waiting:
    statement: str
    name: str
    values: Sequence[Values]
    parameter: str


@dataclass
class Queue:
    """What waits in one transaction."""

    _waiting: list[_Waiting] = field(default_factory=list)
    _given: tuple[str, str, Sequence[Values]] | None = None
    _bytes: int = 0

    def __bool__(self) -> bool:
        return bool(self._waiting)

    @property
    def is_full(self) -> bool:
        return len(self._waiting) >= MOST_STATEMENTS or self._bytes >= MOST_BYTES

    def give(self, name: str, values: Sequence[Values]) -> str:
        """Rows for the next statement: how it is to call them."""
        rows = as_rows(values)
        self._given = rows, name, values
        return rows

    def takes(self, statement: str) -> bool:
        """Whether the statement uses the rows that were given last: then it waits from now on."""
        given, self._given = self._given, None
        if given is None or given[0] not in statement:
            return False
        _, name, values = given
        parameter = as_parameter(values)
        self._waiting.append(_Waiting(statement, name, values, parameter))
        self._bytes += len(parameter)
        return True

    def run(self, session: Session, look: Look) -> None:
        """Run all of it. `look` may know more of values that are refused, and raise it."""
        cursors = [session.connection.cursor() for _ in self._waiting]
        try:
            with session.connection.pipeline():
                for one, cursor in zip(self._waiting, cursors, strict=True):
                    cursor.execute(one.statement.encode(), (one.parameter,), prepare=True)
        except psycopg.Error as failed:
            # Those before the one that failed have their results.
            done = sum(cursor.pgresult is not None for cursor in cursors)
            wrong = self._waiting[min(done, len(self._waiting) - 1)]
            refused = translated(failed, session.where, wrong.values, session.used_before)
            if isinstance(refused, RowRefused) and refused.kind == "value":
                # Only to say it better: a server that does not answer now has said enough.
                with suppress(TargetUnavailable):
                    look(wrong.name, wrong.values)
            raise refused from None
