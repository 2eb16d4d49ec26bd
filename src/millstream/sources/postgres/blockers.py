"""Who holds up the making of a slot: transactions that have written and are open, in any database of the server.

A transaction that was prepared (PREPARE TRANSACTION) and left behind is one of them, has no session that anybody
could look at or end, and outlives a restart of the server: so it is named with what ends it.

    open_transactions(conn) -> str          for a message of what is waited for
    prepared_transactions(conn) -> list     for preflight
"""

from __future__ import annotations

from dataclasses import dataclass

from millstream.sources.postgres.connection import Connection, literal, translated

_NAMED = 5
"""So many are named, the oldest first; the others are counted."""

_SESSIONS = """
    SELECT pid, coalesce(nullif(application_name, ''), usename::text, 'unnamed'),
        extract(epoch FROM clock_timestamp() - xact_start)::int8
    FROM pg_stat_activity WHERE backend_xid IS NOT NULL AND pid <> pg_backend_pid() ORDER BY xact_start"""
_PREPARED = """
    SELECT gid, owner::text, database::text, extract(epoch FROM clock_timestamp() - prepared)::int8
    FROM pg_prepared_xacts ORDER BY prepared"""


@dataclass(frozen=True)
class Prepared:
    """A transaction that waits for its COMMIT PREPARED or ROLLBACK PREPARED."""

    gid: str
    owner: str
    database: str
    seconds: int

    @property
    def remedy(self) -> str:
        name = literal(self.gid)
        return f"in database {self.database}, COMMIT PREPARED {name} or ROLLBACK PREPARED {name}"

    def __str__(self) -> str:
        return f"prepared transaction {literal(self.gid)} (of {self.owner}, {self.seconds} s; to end it, {self.remedy})"


def prepared_transactions(conn: Connection) -> list[Prepared]:
    """All that are prepared on the server, the oldest first."""
    with translated("looking for prepared transactions"):
        return [Prepared(*row) for row in conn.execute(_PREPARED).fetchall()]


def open_transactions(conn: Connection) -> str:
    """For people: those without a session, which do not end by themselves, and then sessions, each the oldest first."""
    said = [str(one) for one in prepared_transactions(conn)]
    with translated("looking for open transactions"):
        for pid, name, seconds in conn.execute(_SESSIONS).fetchall():
            # Of other roles' sessions a role without pg_read_all_stats is not told since when.
            said.append(f"process {pid} ({name}{'' if seconds is None else f', {seconds} s'})")
    more = f" and {len(said) - _NAMED} more" if len(said) > _NAMED else ""
    return ", ".join(said[:_NAMED]) + more if said else "they are ending just now"
