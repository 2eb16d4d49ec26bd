"""A database that is written to while it is read: the load keeps a pace, inside the server.

Each use gets a fresh database on the bench's server, so that what went before leaves nothing behind.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psycopg

from millstream.bench.mix import CYCLE, schema
from millstream.bench.rig import SETTINGS, SLOT, Connection, await_true
from millstream.embedded import EmbeddedPostgres, server_directory

CHANGES_A_SECOND = 1_000
TRANSACTION = 20


@dataclass
class Live:
    """A fresh database on the bench's server, with the load's tables. `committed` counts cycles."""

    server: EmbeddedPostgres
    database: str
    connection: Connection
    directory: Path
    committed: int = 0
    began_us: int = field(default=0)

    @property
    def uri(self) -> str:
        return self.server.uri(self.database)

    def trickle(self, seconds: float) -> float:
        """Keep the pace for so long, for one transaction at least; returns the changes per second that were reached."""
        pace = CHANGES_A_SECOND / TRANSACTION
        first = self.committed + 1
        self.committed += max(1, round(seconds * pace)) * (TRANSACTION // CYCLE)
        self.began_us = self.clock_us()
        self.connection.execute("CALL bench.trickle(%s, %s, %s)", (first, self.committed, pace))
        changes = (self.committed - first + 1) * CYCLE
        # The last transaction begins one turn before the time is over.
        return changes / ((self.clock_us() - self.began_us) / 1e6 + 1 / pace)

    def clock_us(self) -> int:
        """What time it is on the server, in microseconds of Unix time."""
        row = self.connection.execute("SELECT (extract(epoch FROM clock_timestamp()) * 1e6)::int8").fetchone()
        assert row is not None  # noqa: S101 - the clock runs
        return int(row[0])

    @property
    def changes(self) -> int:
        return self.committed * CYCLE


@contextmanager
def fresh_database(
    server: EmbeddedPostgres, database: str, *, template: str | None = None
) -> Iterator[tuple[Connection, str]]:
    """A database, empty or like another one, with a connection to it and its URI. Dropped at the end."""
    like = f" TEMPLATE {template} STRATEGY file_copy" if template else ""
    with psycopg.connect(server.uri(), autocommit=True) as maintenance:
        maintenance.execute(f"CREATE DATABASE {database}{like}".encode())
        try:
            with psycopg.connect(server.uri(database), autocommit=True) as connection:
                yield connection, server.uri(database)
            # Whoever read from its slot may be on its way out still.
            await_true(lambda: not slot_is_read(maintenance), "the slot is free", seconds=60)
            maintenance.execute(
                "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name = %s", (SLOT,)
            )
        finally:
            maintenance.execute(f"DROP DATABASE {database} WITH (FORCE)".encode())


@contextmanager
def live(server: EmbeddedPostgres, database: str, directory: Path, tables: str | None = None) -> Iterator[Live]:
    """A database with empty tables (`tables` is their SQL, that of the mix by default), and a directory beside it.

    It is dropped at the end, with the slot that was made for it.
    """
    directory.mkdir()
    with fresh_database(server, database) as (connection, _):
        connection.execute((tables or schema()).encode())
        yield Live(server, database, connection, directory)


def slot_is_read(connection: Connection) -> bool:
    """Whether somebody reads the bench's slot now."""
    found = connection.execute("SELECT 1 FROM pg_replication_slots WHERE slot_name = %s AND active", (SLOT,))
    return found.fetchone() is not None


@contextmanager
def room() -> Iterator[Path]:
    """A directory that servers may use too; removed at the end."""
    made = server_directory("millstream-bench-")
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def another_server(stack: ExitStack) -> EmbeddedPostgres:
    """A server for copies, with the settings of the bench's own; the stack stops and removes it."""
    return stack.enter_context(EmbeddedPostgres(stack.enter_context(room()) / "data", settings=SETTINGS))
