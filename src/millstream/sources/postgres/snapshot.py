"""A snapshot of the source at an exact position, held open while many tasks read it.

The steps, in this order (the publication is committed before, if changes are to follow; without that, the tables
are read as the options describe them, and step 0 has nothing to look at):

0. Which tables are published is read **first**: a table that joins later has changes, of transactions that are
   open then, which neither the snapshot nor the log has. It waits for the next snapshot.
1. A **temporary slot** with an exported snapshot, on a connection of its own. The server waits for every open
   transaction first. A change is in the snapshot if and only if its commit lies before the slot's consistent
   point; that is the plan's position.
2. The **barrier**: a transaction that has written its commit but is still on the list of running ones counts as
   finished in the snapshot. Who reads its rows in that moment takes them for aborted and marks them so on the
   source, for good. So nobody reads a table before no such transaction is left.
3. Only then chunks are planned and read. Small tables are locked right after 1 and read right after 2 (`early`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta

from psycopg import pq
from psycopg.pq.abc import PGconn

from millstream.errors import SourceHalted, SourceUnavailable
from millstream.failpoint import failpoint
from millstream.model import SourceSpec
from millstream.observe import counted
from millstream.sources.base import SnapshotPlan, Wanted
from millstream.sources.postgres.blockers import open_transactions
from millstream.sources.postgres.chunks import described, plan_chunks, published
from millstream.sources.postgres.connection import (
    Connection,
    Crossed,
    command,
    connect,
    connect_replication,
    connect_session,
    literal,
    translated,
)
from millstream.sources.postgres.early import EarlyTables
from millstream.sources.postgres.lsn import parse_lsn
from millstream.sources.postgres.options import PostgresOptions
from millstream.sources.postgres.session import Session

LOOK_SECONDS = 0.02
"""How often the barrier looks whether the last transaction is through: it is a matter of milliseconds."""
BARRIER_SECONDS = 60.0
TELL_SECONDS = 1.0

Waiting = Callable[[str], None]
"""Hears what is waited for, about once a second; may raise to give up."""


class HeldSnapshot:
    """Owns the connections that keep the snapshot alive. Close it when all of it was read."""

    def __init__(
        self, spec: SourceSpec, on_wait: Waiting, *, captured: bool = True, wanted: Wanted | None = None
    ) -> None:
        options = PostgresOptions.of(spec)
        self._stack = ExitStack()
        try:
            control = self._stack.enter_context(connect(spec, options))
            before = published(control, options) if captured else None
            exporter = connect_replication(spec, options)
            self._stack.callback(_let_go, exporter)
            reader = Session(connect_session(spec, options))
            self._stack.callback(reader.close)
            early = EarlyTables(control, reader, *described(control, spec, options, before, wanted), options.max_rate)
            # Before the slot is asked for: no change that is not in the snapshot was committed earlier.
            taken_at = _clock(control)
            name, position = _export(control, exporter, options, on_wait)
            held_since = datetime.now(UTC)
            failpoint("snapshot.exported")
            seen = _running_in(reader.connection, name)
            early.lock()
            _await_barrier(control, seen, on_wait, early.let_go)
            failpoint("snapshot.barrier_passed")
            early.read()
            planned = plan_chunks(control, spec, options, name, before, wanted)
            chunks, age = early.found_in(planned.chunks), options.max_snapshot_age
            until = None if age is None else held_since + timedelta(milliseconds=age)
            self.plan = SnapshotPlan(position, taken_at, name, chunks, planned.rows, planned.ranges, until)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let go of the snapshot, and of the temporary slot with it. Idempotent."""
        self._stack.close()


def _clock(control: Connection) -> datetime:
    """What time it is at the source."""
    with translated("asking for the time"):
        ((now,),) = control.execute("SELECT extract(epoch FROM clock_timestamp())::float8").fetchall()
    return datetime.fromtimestamp(float(now), UTC)


def _let_go(exporter: PGconn) -> None:
    """End the connection, and what it is doing: the server would go on making the slot without us."""
    if exporter.transaction_status == pq.TransactionStatus.ACTIVE:
        exporter.get_cancel().cancel()
    exporter.finish()


def _export(control: Connection, exporter: PGconn, options: PostgresOptions, on_wait: Waiting) -> tuple[str, int]:
    """The name of the exported snapshot, and its position."""
    waited = time.monotonic()

    def waits() -> None:
        seconds = time.monotonic() - waited
        if seconds * 1000 > options.snapshot_wait:
            raise SourceUnavailable(
                f"the snapshot waited {seconds:.0f} s for open transactions: {open_transactions(control)}",
                hint="end them, or raise snapshot_wait",
            )
        on_wait(f"the snapshot waits for open transactions: {open_transactions(control)}")

    # Unique on the server while the connection lives, and within the 63 bytes of a name.
    slot = f"{options.slot[:40]}_snapshot_{exporter.backend_pid}"
    made = None
    while made is None:
        try:
            made = command(
                exporter, f'CREATE_REPLICATION_SLOT "{slot}" TEMPORARY LOGICAL pgoutput EXPORT_SNAPSHOT', waits
            )
        except Crossed:
            # A snapshot lists the transactions that it leaves out. Those that were rolled back, or are open, while the
            # oldest one was can be more than the server has room for; the next one begins after them.
            if (time.monotonic() - waited) * 1000 > options.snapshot_wait:
                raise
            on_wait("the snapshot is taken again: too much was going on to list what it leaves out")
    ((_, point, name, _),) = made
    if name is None or point is None:
        raise SourceHalted("the server made a slot without a snapshot")
    return name, parse_lsn(point)


def _running_in(reader: PGconn, snapshot: str) -> tuple[int, frozenset[int]]:
    """From where on transactions count as not begun in the snapshot, and those below that count as running.

    The transaction stays open, under the snapshot.
    """
    command(reader, "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
    command(reader, f"SET TRANSACTION SNAPSHOT {literal(snapshot)}")
    # Nothing else may be read here: this is before the barrier.
    ((text,),) = command(reader, "SELECT pg_current_snapshot()::text")
    _, end, running = (text or "").split(":")
    return int(end), frozenset(int(each) for each in running.split(",") if each)


def _await_barrier(
    control: Connection,
    seen: tuple[int, frozenset[int]],
    on_wait: Waiting,
    give_back: Callable[[], None] = lambda: None,
) -> None:
    """`give_back` is called when it takes longer than usual: nobody shall wait for what is held meanwhile."""
    end, counted_running = seen
    began = told = time.monotonic()
    while late := [each for each in _running_now(control) if each < end and each not in counted_running]:
        now = time.monotonic()
        if now - began > BARRIER_SECONDS:
            raise SourceUnavailable(
                f"{counted(len(late), 'transaction')} committed but did not end; a snapshot cannot be read beside them",
                hint="synchronous_standby_names may name a standby that does not answer",
            )
        if now - told >= TELL_SECONDS:
            told = now
            give_back()
            on_wait(f"the snapshot waits for {counted(len(late), 'transaction')} to become visible")
        time.sleep(LOOK_SECONDS)


def _running_now(control: Connection) -> list[int]:
    with translated("looking for running transactions"):
        row = control.execute("SELECT pg_current_snapshot()::text").fetchone()
    return [int(each) for each in str(row[0]).split(":")[2].split(",") if each] if row else []
