"""The baseline of a mirror in Postgres: its own logical replication, a SUBSCRIPTION of another server.

The tables of the subscriber are copies as they were before the backlog, kept as a template for each part of the mix, so
that every run begins with the same. All settings of the subscription are at their defaults (among them that its
commits need not wait for the disk).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg

from millstream.bench import content, mix
from millstream.bench.frame import Taken
from millstream.bench.live import fresh_database
from millstream.bench.mix import TABLES, Part
from millstream.bench.rig import PUBLICATION, Backlog, Connection, await_true, await_value
from millstream.embedded import EmbeddedPostgres

NAME = "a SUBSCRIPTION of Postgres itself"
SUBSCRIPTION = "bench_copy"


def template(server: EmbeddedPostgres, part: Part, source: Connection) -> None:
    """Make the part's template: the tables as they are at the source now."""
    with psycopg.connect(server.uri(), autocommit=True) as maintenance:
        maintenance.execute(f"CREATE DATABASE {_template(part)}".encode())
    with psycopg.connect(server.uri(_template(part)), autocommit=True) as copy:
        copy.execute(mix.tables().encode())
        for table in TABLES:
            copy_rows(source, copy, table)
        settle(copy)


def copy_rows(source: Connection, copy: Connection, table: str) -> None:
    """All rows of a table into one of the same columns."""
    with (
        source.cursor().copy(f"COPY {table} TO STDOUT (FORMAT binary)".encode()) as out,
        copy.cursor().copy(f"COPY {table} FROM STDIN (FORMAT binary)".encode()) as into,
    ):
        for block in out:
            into.write(block)


def settle(connection: Connection) -> None:
    """What autovacuum and a checkpoint would have done by now."""
    connection.execute("VACUUM ANALYZE")
    connection.execute("CHECKPOINT")


def drain(backlog: Backlog, server: EmbeddedPostgres) -> Taken:
    """Time from the subscriber's connection to the publisher until the last change is applied."""
    goal = _last_commit(backlog)
    with (
        backlog.slot("baseline") as slot,
        backlog.connect() as source,
        fresh_database(server, "subscriber", template=_template(backlog.part)) as (copy, _),
        _subscribed(copy, backlog.uri, slot),
    ):
        copy.execute(f"ALTER SUBSCRIPTION {SUBSCRIPTION} ENABLE".encode())
        began = await_value(lambda: _connected_at(source), "the subscriber has connected", seconds=60)
        await_true(lambda: _applied(copy, goal), "the subscriber has the last change")
        seconds = time.time() - began
        copy.execute(f"ALTER SUBSCRIPTION {SUBSCRIPTION} DISABLE".encode())
        await_true(lambda: _connected_at(source) is None, "the subscriber has let go", seconds=60)
        return Taken(seconds, content.copies_equal(source, copy))


def _template(part: Part) -> str:
    return f"before_{part.transaction}"


@contextmanager
def _subscribed(copy: Connection, uri: str, slot: str) -> Iterator[None]:
    with_ = f"slot_name = '{slot}', create_slot = false, copy_data = false, enabled = false"
    copy.execute(
        f"CREATE SUBSCRIPTION {SUBSCRIPTION} CONNECTION '{uri}' PUBLICATION {PUBLICATION} WITH ({with_})".encode()
    )
    try:
        yield
    finally:
        # The slot is the rig's: a subscription that is dropped would drop it too.
        for change in ("DISABLE", "SET (slot_name = NONE)"):
            copy.execute(f"ALTER SUBSCRIPTION {SUBSCRIPTION} {change}".encode())
        copy.execute(f"DROP SUBSCRIPTION {SUBSCRIPTION}".encode())


def _last_commit(backlog: Backlog) -> str:
    """Where the last transaction of the backlog ends."""
    with backlog.connect() as connection:
        row = connection.execute(
            "SELECT max(lsn)::text FROM pg_logical_slot_peek_binary_changes('base', NULL, NULL, "
            "'proto_version', '1', 'publication_names', %s)",
            (PUBLICATION,),
        ).fetchone()
    assert row is not None  # noqa: S101 - an aggregate has a row
    return str(row[0])


def _connected_at(source: Connection) -> float | None:
    row = source.execute(
        "SELECT extract(epoch FROM backend_start)::float8 FROM pg_stat_activity "
        "WHERE application_name = %s AND backend_type = 'walsender'",
        (SUBSCRIPTION,),
    ).fetchone()
    return None if row is None else float(row[0])


def _applied(copy: Connection, goal: str) -> bool:
    row = copy.execute(
        "SELECT remote_lsn >= %s::pg_lsn FROM pg_replication_origin_status o "
        "JOIN pg_subscription s ON o.external_id = 'pg_' || s.oid WHERE s.subname = %s",
        (goal, SUBSCRIPTION),
    ).fetchone()
    return row == (True,)
