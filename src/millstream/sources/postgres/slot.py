"""The replication slot: made once, after the publications, and looked at ever after.

lock_source(conn, options.slot)                               one capture per source
release_source(conn, options.slot)                            the next one may have it
ensure_slot(conn, replication, options, ...) -> SlotStart     first start, no journal yet
slot_info(conn, options.slot)                -> SlotInfo | None
drop_slot(conn, options.slot)                -> bool
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Final

import psycopg
from psycopg import pq
from psycopg.pq.abc import PGconn

from millstream.errors import SourceHalted, SourceUnavailable
from millstream.failpoint import failpoint
from millstream.model import Json
from millstream.sources.postgres.blockers import open_transactions
from millstream.sources.postgres.connection import Connection, command, literal, translated
from millstream.sources.postgres.lsn import parse_lsn
from millstream.sources.postgres.options import PostgresOptions
from millstream.sources.postgres.session import Refused, Session, Turns

PLUGIN = "pgoutput"

RELEASE_SECONDS: Final = 1.0
"""A server that does not answer holds up the end of a capture no longer than this."""


@dataclass(frozen=True)
class SlotInfo:
    """A slot as the server shows it now. Positions are integers, sizes are bytes."""

    name: str
    plugin: str | None
    database: str | None
    temporary: bool
    two_phase: bool
    active_pid: int | None
    wal_status: str | None
    """reserved, extended, unreserved (about to be lost), lost."""
    safe_wal_size: int | None
    """What may still be written before the slot can be lost; None without max_slot_wal_keep_size."""
    invalidation: str | None
    restart_lsn: int | None
    confirmed_flush: int | None
    retained_bytes: int | None
    catalog_xmin_age: int | None
    spill_bytes: int | None
    spill_transactions: int | None

    def to_json(self) -> Json:
        return asdict(self)


@dataclass(frozen=True)
class SlotStart:
    """Where a new journal begins: every transaction that commits after `consistent_point` is sent."""

    consistent_point: int
    created: bool
    """False when a slot that was there already was adopted."""


def lock_source(conn: Connection, slot: str) -> None:
    """Make sure that this is the only capture of the source, for as long as `conn` lives.

    Raises SourceUnavailable, since the holder may be our own predecessor on its way out.
    """
    key = _lock_key(slot)
    with translated("locking the source"):
        row = conn.execute("SELECT pg_try_advisory_lock(%s)", (key,)).fetchone()
        if row == (True,):
            return
        holder = conn.execute(
            "SELECT a.pid, coalesce(host(a.client_addr), 'a local socket') FROM pg_locks l "
            "JOIN pg_stat_activity a USING (pid) WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1 "
            "AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database()) "
            "AND l.classid::int8 = %s AND l.objid::int8 = %s",
            (key >> 32 & 0xFFFFFFFF, key & 0xFFFFFFFF),
        ).fetchone()
    by = f" (server process {holder[0]}, from {holder[1]})" if holder else ""
    raise SourceUnavailable(
        f"another capture holds slot {slot}{by}",
        hint="stop the other Millstream, or give this source a `slot` of its own",
    )


def release_source(conn: Connection, slot: str) -> None:
    """Undo `lock_source`, so that a successor gets both the lock and the slot at once. Close `conn` afterwards.

    A closed connection alone would do it a moment later: the server's process has to notice it first, the one
    that read the slot too. Call when everything that read the slot is closed. Never raises, and takes no longer
    than RELEASE_SECONDS: whatever it could not do, the end of the connection does.
    """
    deadline = time.monotonic() + RELEASE_SECONDS
    with contextlib.suppress(psycopg.Error, SourceUnavailable, Refused):
        if conn.pgconn.transaction_status == pq.TransactionStatus.IDLE:
            for _ in _letting_go(Session(conn.pgconn), slot):
                if time.monotonic() >= deadline:
                    return


def _letting_go(session: Session, slot: str) -> Turns:
    reader = f"SELECT active_pid FROM pg_replication_slots WHERE slot_name = {literal(slot)} AND active"
    while (yield from session.run(reader)):
        yield from session.run("SELECT pg_sleep(0.005)")
        yield
    yield from session.run(f"SELECT pg_advisory_unlock({_lock_key(slot)})")


def _lock_key(slot: str) -> int:
    return int.from_bytes(hashlib.sha256(f"millstream slot {slot}".encode()).digest()[:8], "big", signed=True)


def slot_info(conn: Connection, slot: str) -> SlotInfo | None:
    """The slot of this name, of whatever database and plugin; None when there is none."""
    version = conn.info.server_version
    if version >= 170000:
        invalidation = "s.invalidation_reason"
    elif version >= 160000:
        invalidation = "CASE WHEN s.conflicting THEN 'conflict with recovery' END"
    else:
        invalidation = "NULL"
    query = f"""
        SELECT s.slot_name, s.plugin, s.database, s.temporary, s.two_phase, s.active_pid, s.wal_status, s.safe_wal_size,
            {invalidation}, (s.restart_lsn - '0/0')::int8, (s.confirmed_flush_lsn - '0/0')::int8,
            CASE WHEN NOT pg_is_in_recovery() THEN (pg_current_wal_lsn() - s.restart_lsn)::int8 END,
            age(s.catalog_xmin), t.spill_bytes, t.spill_txns
        FROM pg_replication_slots s LEFT JOIN pg_stat_replication_slots t USING (slot_name)
        WHERE s.slot_name = %s"""
    with translated(f"looking at slot {slot}"):
        row = conn.execute(query.encode(), (slot,)).fetchone()
    return None if row is None else SlotInfo(*row)


def slot_problem(info: SlotInfo, database: str) -> str | None:
    """Why nobody can go on from this slot; None when one can."""
    if info.plugin != PLUGIN:
        return f"slot {info.name} belongs to the plugin {info.plugin}, not to {PLUGIN}"
    if info.database != database:
        return f"slot {info.name} belongs to the database {info.database}, not to {database}"
    if info.temporary:
        return f"slot {info.name} is temporary"
    if info.two_phase:
        return (
            f"slot {info.name} was made with two_phase: it sends transactions when they are prepared, and Millstream "
            "takes them when they commit"
        )
    if info.wal_status == "lost":
        return f"slot {info.name} has lost log that we need ({info.invalidation or 'max_slot_wal_keep_size'})"
    if info.invalidation is not None:
        return f"slot {info.name} was invalidated ({info.invalidation})"
    if info.confirmed_flush is None and info.active_pid is None:
        return f"slot {info.name} was never finished"
    return None


def ensure_slot(
    conn: Connection,
    replication: PGconn,
    options: PostgresOptions,
    *,
    publications_created: bool,
    on_wait: Callable[[str], None] | None = None,
) -> SlotStart:
    """The slot for a source that has no journal yet. Call after `sync_publications` has committed.

    A slot of our name that is sound is adopted where it stands: a start that was killed after making
    it finds it again, and a journal that is made anew misses nothing that the slot still holds.
    Creating waits for every transaction that is open on the server; `on_wait` then hears, every few
    seconds, for which, and may raise to give up.
    """
    info = slot_info(conn, options.slot)
    if info is None:
        return SlotStart(_create(conn, replication, options, on_wait), created=True)
    problem = slot_problem(info, conn.info.dbname)
    if problem is None and info.confirmed_flush is None:
        # A process that was killed while it made the slot leaves a session that goes on making it.
        raise SourceUnavailable(
            f"slot {info.name} is still being made by server process {info.active_pid}",
            hint="it waits for open transactions to end",
        )
    if problem is None and publications_created:
        problem = f"slot {options.slot} is older than the publications, so it cannot be read through them"
    if problem is not None:
        raise SourceHalted(problem, hint=f"drop it to start anew: SELECT pg_drop_replication_slot('{options.slot}')")
    assert info.confirmed_flush is not None  # noqa: S101 - slot_problem has looked
    return SlotStart(info.confirmed_flush, created=False)


def drop_slot(conn: Connection, slot: str) -> bool:
    """Drop the slot if it exists. Raises SourceUnavailable while somebody reads from it."""
    with translated(f"dropping slot {slot}"):
        done = conn.execute(
            "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name = %s", (slot,)
        )
        return done.rowcount > 0


def _create(
    conn: Connection, replication: PGconn, options: PostgresOptions, on_wait: Callable[[str], None] | None
) -> int:
    if conn.info.server_version < 150000:
        how = "NOEXPORT_SNAPSHOT"
    else:
        how = "(SNAPSHOT 'nothing', FAILOVER true)" if options.failover else "(SNAPSHOT 'nothing')"
    seconds = 0

    def tell() -> None:
        nonlocal seconds
        seconds += 1
        if on_wait is not None and seconds % 3 == 0:
            on_wait(f"slot {options.slot} waits for open transactions: {open_transactions(conn)}")

    statement = f'CREATE_REPLICATION_SLOT "{options.slot}" LOGICAL {PLUGIN} {how}'
    ((_, point, *_),) = command(replication, statement, tell)
    failpoint("capture.slot_created")
    return parse_lsn(point or "")
