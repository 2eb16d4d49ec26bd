"""A real server with the mix in its slots, as often as it is asked for.

Each part of the mix has a server of its own, whose log ends with the part's last change, and in it:

    origin     a slot from before the first change; never read
    base       a slot from after the first changes of the load; never read. What follows is the *backlog*
    journal    a journal that has those first changes already, made by the real capture process from a copy of `origin`

So every run begins in the same place: a copy of `base` for others; for us a copy of it under the name that the journal
knows, and a copy of that journal. A stream that stands at the journal's end is one that ran, had everything delivered
and acknowledged, lost its server for a while and finds the backlog when it comes back.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

import psycopg

from millstream.bench.mix import CYCLE, ROUND, SCHEMA_NAME, Load, Mix, Part
from millstream.bench.processes import cpu_seconds
from millstream.demo.engine import descendants
from millstream.embedded import EmbeddedPostgres, server_directory
from millstream.engine.capture_order import CaptureOrder
from millstream.engine.supervisor import Supervisor
from millstream.errors import BenchFailed
from millstream.journal import JournalReader
from millstream.model import SourceSpec
from millstream.observe import Observers
from millstream.sources.postgres.slot import lock_source
from millstream.sources.postgres.source import PostgresSource

SOURCE = "bench"
SLOT = "millstream_bench"
PUBLICATION = "millstream_bench"
CPU_NOISE = 0.025
"""Processor seconds that an idle server may use between two looks."""
LONGEST = 1800.0
"""Seconds after which a run counts as stuck."""
SETTINGS = {
    # Everything else is the server's default, fsync and synchronous_commit among it. These two keep
    # the server from doing something of its own in the middle of one run and not of the other.
    "autovacuum": "off",
    "checkpoint_timeout": "1h",
    "max_wal_size": "32GB",
    "wal_sender_timeout": "10min",
}

Connection = psycopg.Connection[tuple[Any, ...]]
T = TypeVar("T")


@dataclass(frozen=True)
class Reference:
    """What the server itself says is in the backlog, by its SQL functions: counts and digests."""

    changes: int
    operations: dict[str, int]
    """By letter: I, U, D."""
    rows: str
    """SHA-256 of all row messages, one after another."""
    transactions: str
    """SHA-256 of position, time and id of all transactions, as their Begin messages have them."""
    lines: str
    """SHA-256 of all messages, each with a line feed behind it: what `pg_recvlogical` writes."""


@dataclass(frozen=True)
class Backlog:
    """One part of the mix on a server of its own."""

    server: EmbeddedPostgres
    part: Part
    directory: Path
    end: str
    """The end of the log after the last change."""
    reference: Reference
    warm: int
    """The seq of the last change before the backlog."""

    @property
    def uri(self) -> str:
        return self.server.uri()

    @property
    def goal(self) -> int:
        """The seq of the last change in our journal."""
        return self.warm + self.part.changes

    def connect(self) -> Connection:
        return psycopg.connect(self.uri, autocommit=True)

    def server_cpu(self) -> float:
        """Processor seconds that the server has used so far."""
        return server_cpu(self.server)

    def source(self, **options: Any) -> SourceSpec:
        return _source(self.uri, **options)

    @contextmanager
    def slot(self, name: str) -> Iterator[str]:
        """A copy of the slot that stands before the backlog, for as long as it is needed."""
        with self.connect() as connection, _copied(connection, "base", name):
            yield name

    @contextmanager
    def cut_off(self, journal: Path) -> Iterator[Line]:
        """Our slot and journal, with the line to the server cut until `Line.restore`."""
        shutil.copytree(self.directory / "journal", journal)
        with self.slot(SLOT), Line(self.uri) as line:
            yield line


def server_cpu(server: EmbeddedPostgres) -> float:
    """Processor seconds that a server has used so far; processes of it that have ended count too.

    One that ends while it is counted goes over to the postmaster's account and may be missed, or counted twice:
    so it is counted until two counts agree.
    """
    postmaster = server.pid
    last: float | None = None

    def agreed() -> float | None:
        nonlocal last
        before = last
        last = sum(cpu_seconds(pid) for pid in descendants(postmaster)) + cpu_seconds(postmaster)
        return last if before is not None and abs(last - before) < CPU_NOISE else None

    return await_value(agreed, "the server is idle", seconds=60, every=0.1)


class Line:
    """Keeps capture from its source as a second capture would, and knows when it came back.

    Time begins when the server took the connection with which capture came back: everything that it does before
    it asks for the first change (checks, catalog, publications) counts.
    """

    def __init__(self, uri: str) -> None:
        self._uri = uri
        self._holder: Connection | None = None
        self._holder_pid = 0

    def __enter__(self) -> Self:
        self._holder = psycopg.connect(self._uri, autocommit=True)
        self._holder_pid = self._holder.info.backend_pid
        lock_source(self._holder, SLOT)
        return self

    def __exit__(self, *_: object) -> None:
        self._let_go()

    def restore(self) -> float:
        """Let capture through. Returns, in Unix time, when the connection began with which it came back."""
        self._let_go()
        with psycopg.connect(self._uri, autocommit=True) as connection:
            return await_value(lambda: self._other(connection), "capture is back", seconds=60)

    def _let_go(self) -> None:
        holder, self._holder = self._holder, None
        if holder is not None:
            holder.close()

    def _other(self, connection: Connection) -> float | None:
        """When the connection began that holds the lock now. Our own may be on its way out still."""
        row = connection.execute(
            "SELECT extract(epoch FROM a.backend_start)::float8 FROM pg_locks l JOIN pg_stat_activity a USING (pid) "
            "WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1 AND a.datname = current_database() "
            "AND a.pid <> %s",
            (self._holder_pid,),
        ).fetchone()
        return None if row is None else float(row[0])


@dataclass
class Rig:
    """The backlogs, and room for runs."""

    directory: Path
    backlogs: dict[str, Backlog]

    def of(self, part: Part) -> Backlog:
        return self.backlogs[part.name]

    def scratch(self, name: str) -> Path:
        """A directory for one run, on the disk that the servers are on. Emptied if it was there."""
        path = self.directory / name
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
        return path


@contextmanager
def rig(
    parts: tuple[Part, ...],
    tell: Callable[[str], None] = lambda _: None,
    *,
    load: Load | None = None,
    open_transaction: bool = False,
    at_base: Callable[[Part, Connection], None] = lambda part, connection: None,
) -> Iterator[Rig]:
    """Start a server per part, write the part into its slots; stop them and remove everything at the end.

    With `open_transaction`, a transaction that has written is open on each server from before the backlog until
    the end: the server must then keep, and read again, what lies behind it. `at_base` is called before each backlog
    is written.
    """
    with ExitStack() as stack:
        directory = server_directory("millstream-bench-")
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        made = Rig(directory, {})
        for number, part in enumerate(parts):
            tell(f"writing {part.changes:,} changes in {part.name}")
            home = directory / f"part{number}"
            server = stack.enter_context(EmbeddedPostgres(home / "data", settings=SETTINGS))
            backlog = _Backlog(server, part, home, load or Mix())
            made.backlogs[part.name] = backlog.write(stack if open_transaction else None, at_base)
        yield made


def await_value(look: Callable[[], T | None], what: str, *, seconds: float = LONGEST, every: float = 0.005) -> T:
    """Look until there is something: for what no one signals. Raises BenchFailed when the time is over."""
    deadline = time.monotonic() + seconds
    while (found := look()) is None:
        if time.monotonic() > deadline:
            raise BenchFailed(f"{what}: not within {seconds:g} s")
        time.sleep(every)
    return found


def await_true(met: Callable[[], bool], what: str, *, seconds: float = LONGEST, every: float = 0.005) -> None:
    """Look until it holds."""
    await_value(lambda: met() or None, what, seconds=seconds, every=every)


@dataclass(frozen=True)
class _Backlog:
    """A backlog in the making."""

    server: EmbeddedPostgres
    part: Part
    directory: Path
    load: Load

    def write(self, holding: ExitStack | None, at_base: Callable[[Part, Connection], None]) -> Backlog:
        uri, first = self.server.uri(), ROUND // CYCLE
        with psycopg.connect(uri, autocommit=True) as connection:
            # What the log holds is the same; only the load need not wait for the disk at each commit.
            connection.execute("SET synchronous_commit = off")
            connection.execute(self.load.schema.encode())
            prepare(uri, "origin")
            self.load.fill(connection)
            self.load.write(connection, ROUND, 1, first)
            with _copied(connection, "origin", SLOT):
                position = _first_journal(uri, self.directory / "journal", self.load.warm)
            connection.execute("SELECT pg_copy_logical_replication_slot('origin', 'base')")
            connection.execute("SELECT pg_replication_slot_advance('base', '0/0'::pg_lsn + %s::numeric)", (position,))
            at_base(self.part, connection)
            if holding is not None:
                _hold_open(uri, holding)
            self.load.write(connection, self.part.transaction, first + 1, first + self.part.cycles)
            end = _settled_end(connection)
            reference = _reference(connection, "base")
        if reference.changes != self.part.changes:
            raise BenchFailed(f"the load wrote {reference.changes} changes where {self.part.changes} were asked for")
        return Backlog(self.server, self.part, self.directory, end, reference, self.load.warm)


def _source(uri: str, **options: Any) -> SourceSpec:
    chosen = {"slot": SLOT, "publication": PUBLICATION, **options}
    return SourceSpec(SOURCE, "postgres", uri, None, (f"{SCHEMA_NAME}.*",), options=chosen)


def prepare(uri: str, slot: str) -> None:
    """Publications, then the slot, as a first start makes them."""
    source = PostgresSource(_source(uri, slot=slot))
    try:
        source.prepare()
    finally:
        source.close()


def _first_journal(uri: str, journal: Path, goal: int) -> int:
    """Capture the first changes; returns the position after them."""
    supervisor = Supervisor(CaptureOrder(_source(uri), journal), Observers())
    supervisor.start()
    try:
        await_true(lambda: _seq(journal, supervisor) >= goal, "the first changes", seconds=300)
    finally:
        supervisor.stop()
    head = JournalReader([str(journal)]).head()
    if head is None or head.seq != goal:
        raise BenchFailed(f"the first journal ends at seq {head.seq if head else None}, not at {goal}")
    return head.resume_position


def _seq(journal: Path, supervisor: Supervisor) -> int:
    if supervisor.state == "halted":
        raise supervisor.error or BenchFailed("capture halted")
    if not (journal / "head").exists():
        return 0
    head = JournalReader([str(journal)]).head()
    return head.seq if head else 0


def _settled_end(connection: Connection) -> str:
    """Let the server's disk have everything; returns the end of the log before that.

    Who reads a row first notes on its page that it was committed. On a page that is untouched since the last
    checkpoint that goes to the log, all of it: the look at the content of the first run would put a third as much
    again behind the last change. So everything is read once before the checkpoint.
    """
    row = connection.execute("SELECT pg_current_wal_insert_lsn()::text").fetchone()
    assert row is not None  # noqa: S101 - the log has an end
    # Nothing is noted of a commit that the disk does not have.
    await_true(lambda: _flushed(connection, row[0]), "the log is on disk", seconds=60)
    listed = "SELECT oid::regclass::text FROM pg_class WHERE relnamespace = %s::regnamespace AND relkind = 'r'"
    for (table,) in connection.execute(listed, (SCHEMA_NAME,)).fetchall():
        connection.execute(f"SELECT max(length(t::text)) FROM {table} t".encode())
    connection.execute("CHECKPOINT")
    return str(row[0])


def _flushed(connection: Connection, position: str) -> bool:
    found = connection.execute("SELECT pg_current_wal_flush_lsn() >= %s::pg_lsn", (position,)).fetchone()
    return found is not None and bool(found[0])


def _hold_open(uri: str, stack: ExitStack) -> None:
    connection = stack.enter_context(psycopg.connect(uri))
    connection.execute("CREATE TEMP TABLE held AS SELECT 1")


@contextmanager
def _copied(connection: Connection, origin: str, copy: str) -> Iterator[None]:
    connection.execute("SELECT pg_copy_logical_replication_slot(%s, %s)", (origin, copy))
    try:
        yield
    finally:
        # Whoever read from it may be on its way out still.
        await_true(lambda: not _active(connection, copy), f"slot {copy} is free", seconds=60)
        connection.execute("SELECT pg_drop_replication_slot(%s)", (copy,))


def _active(connection: Connection, slot: str) -> bool:
    found = connection.execute("SELECT 1 FROM pg_replication_slots WHERE slot_name = %s AND active", (slot,))
    return found.fetchone() is not None


def _reference(connection: Connection, slot: str) -> Reference:
    row = connection.execute(
        "SELECT count(*) FILTER (WHERE tag = 73), count(*) FILTER (WHERE tag = 85), count(*) FILTER (WHERE tag = 68), "
        "encode(sha256(coalesce(string_agg(data, '') FILTER (WHERE tag IN (73, 85, 68)), '')), 'hex'), "
        "encode(sha256(coalesce(string_agg(substring(data FROM 2 FOR 20), '') FILTER (WHERE tag = 66), '')), 'hex'), "
        "encode(sha256(coalesce(string_agg(data || '\\x0a', ''), '')), 'hex') "
        "FROM (SELECT data, get_byte(data, 0) AS tag FROM pg_logical_slot_peek_binary_changes(%s, NULL, NULL, "
        "'proto_version', '1', 'publication_names', %s)) changes",
        (slot, PUBLICATION),
    ).fetchone()
    assert row is not None  # noqa: S101 - an aggregate has a row
    inserts, updates, deletes, rows, transactions, lines = row
    operations = {"I": inserts, "U": updates, "D": deletes}
    return Reference(inserts + updates + deletes, operations, rows, transactions, lines)
