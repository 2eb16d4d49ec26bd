"""A Postgres database as a source: the capture side, put together from the modules beside this one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from psycopg import pq
from psycopg.pq.abc import PGconn, PGresult

from millstream.errors import SourceHalted, SourceUnavailable
from millstream.model import Json, Relation, SourceSpec
from millstream.observe import Event, Level
from millstream.sources.base import Block, Finding, Registrar, Severity, SourceIdentity
from millstream.sources.postgres import catalog, ddl_trigger
from millstream.sources.postgres.assemble import Assembler
from millstream.sources.postgres.checks import build_identity, check_before_start
from millstream.sources.postgres.connection import (
    Connection,
    command,
    connect,
    connect_replication,
    connect_session,
    translated,
)
from millstream.sources.postgres.descriptions import Descriptions
from millstream.sources.postgres.lsn import format_lsn
from millstream.sources.postgres.membership import Publication
from millstream.sources.postgres.options import PostgresOptions
from millstream.sources.postgres.pgoutput import HEARTBEAT_PREFIX
from millstream.sources.postgres.preflight import preflight
from millstream.sources.postgres.publication import drift_error, sync_publications, watch_publications
from millstream.sources.postgres.reading import Reading
from millstream.sources.postgres.session import Session
from millstream.sources.postgres.slot import ensure_slot, lock_source, release_source, slot_info
from millstream.sources.postgres.spool import Spool
from millstream.sources.postgres.streamed import StreamedAssembler
from millstream.sources.postgres.telling import Ears
from millstream.sources.postgres.watching import Watcher
from millstream.sources.postgres.wire import check_wire

STATUS_SECONDS: Final = 1.0
"""A status is not asked again sooner than this."""

Tell = Callable[[Event], None]
"""Hears what a person should know while capture is being prepared. May raise to give up."""


class PostgresSource:
    """Implements `sources.base.Source`. Two connections: one for control, one for the log.

    The control connection holds the lock that makes this the only capture of the source; what is
    seen through it and through the other belongs together, so they are opened and closed together.
    """

    kind = "postgres"

    def __init__(self, spec: SourceSpec, work: Path | None = None, tell: Tell | None = None) -> None:
        """Check the options; connect to nothing. `work` is where large transactions wait."""
        self._spec = spec
        self._options = PostgresOptions.of(spec)
        self._work = work
        self._tell = tell or (lambda _: None)
        self._control: Connection | None = None
        self._stream: PGconn | None = None
        self._reading: Reading | None = None
        self._identity: SourceIdentity | None = None
        self._published: Mapping[str, Publication] | None = None
        self._told: dict[int, Relation] = {}
        """By number of the table what the trigger last told of it,"""
        self._known: dict[int, Relation] = {}
        """and what was last known of it at all."""
        self._look: Json | None = None
        self._recalled: tuple[Relation, ...] = ()
        """The last look, and the descriptions, that the journal has."""
        self._acked = 0
        self._status: Json = {}
        self._status_at = float("-inf")
        self._watched_at = float("-inf")
        self._heard_at = 0.0
        self._heard = 0
        self._left_out: str | None = None
        """What the server said when it left changes out."""

    # -- before capture ----------------------------------------------------------------------

    def preflight(self) -> list[Finding]:
        """Look at the database without changing it."""
        return preflight(self._spec, self._options)

    def relations(self, patterns: Sequence[str]) -> list[Relation]:
        """The tables that the patterns name now."""
        control, own = (self._control, False) if self._control else (connect(self._spec, self._options), True)
        try:
            return [replace(each, types=self._options.types.chosen) for each in catalog.relations(control, patterns)]
        finally:
            if own:
                control.close()

    def prepare(self) -> SourceIdentity:
        """Publications first, then the slot, for a source that has no journal yet."""
        control, stream = self._connections()
        plan = sync_publications(control, self._spec.tables, self._options, first_start=True)
        self._published = plan.publications
        start = ensure_slot(
            control, stream, self._options, publications_created=plan.created, on_wait=self._waits
        ).consistent_point
        self._keep_trigger(control, changed=True)
        identity = build_identity(control, stream, self._options, plan.publications, start)
        return replace(identity, start=start)

    def check(self, identity: SourceIdentity, end: int) -> SourceIdentity:
        """Every way in which server and journal can have come apart; then the patterns as they are now."""
        control, stream = self._connections()
        found = check_before_start(control, stream, identity, end, self._options, expected=self._published)
        self._identity = found
        if self._published is None:
            plan = sync_publications(control, self._spec.tables, self._options, first_start=False)
            self._warn(plan.findings)
            self._published = plan.publications
            self._keep_trigger(control, changed=bool(plan.statements))
        return found

    def recall(self, descriptions: Sequence[Relation], end: int, look: Json | None = None) -> None:
        """What the trigger has told up to the journal's end; of other tables the catalog is asked."""
        self._look, self._recalled = look, tuple(descriptions)
        self._known = {one.oid: one for one in descriptions if one.enriched}
        told = (one for one in descriptions if one.told_at is not None and one.told_at < end)
        self._told = {one.oid: one for one in told if self._options.ddl_trigger}

    def _keep_trigger(self, control: Connection, *, changed: bool) -> None:
        """Install the triggers if that is asked for; else see to it that there are none."""
        if not self._options.ddl_trigger:
            ddl_trigger.remove(control, self._options)
            return
        found = ddl_trigger.found(control, self._options, self._spec.tables)
        if found is not ddl_trigger.State.CURRENT:
            # What happened without it was not told.
            self._told.clear()
        if changed or found is not ddl_trigger.State.CURRENT:
            ddl_trigger.install(control, self._options, self._spec.tables)
        if found is ddl_trigger.State.OTHER:
            said = "the event triggers of ddl_trigger were others (of another version, of other tables, or off)"
            self._tell(Event("source.trigger_replaced", f"{said}: they were replaced", Level.WARNING))

    # -- capture -----------------------------------------------------------------------------

    def capture(self, start: int, register: Registrar) -> Iterator[Block]:
        """Everything that commits after `start`. Call `check` for the same position first."""
        control, stream = self._connections()
        watcher = Watcher(control, self._options, self._spec.tables, self._look)
        watcher.recall(self._recalled)
        ears = Ears()
        descriptions = Descriptions(control, self._options.publications, self._known.keys())

        def describe(relation: Relation) -> int:
            described = self._described(control, descriptions, relation)
            number = register(described)
            watcher.describe(number, described)
            return number

        def hear(message: bytes, position: int, at_us: int) -> None:
            said = ddl_trigger.said(message, self._options)
            if said is None or position < assembler.received:
                return  # not ours, or sent again
            place, what = said
            if isinstance(what, dict):
                ears.hear(place, what, position, at_us)
                return
            told = ddl_trigger.described(what, control)
            self._told[told.oid] = replace(told, types=self._options.types.chosen, told_at=position)
            # Into the journal, so that it is known after a restart as well.
            register(self._told[told.oid])

        kind = Assembler if self._options.protocol == 1 else StreamedAssembler
        assembler = kind(start, describe, Spool(self._work), hear=hear)
        reading = self._read(control, stream, assembler, descriptions)
        self._heard_at, self._watched_at = time.monotonic(), float("-inf")
        self._heard = start
        if self._options.ddl_trigger and (first := watcher.look(start)) is not None:
            # What is told is held against a look.
            yield Block(look=first)
        for block in reading.blocks():
            if self._left_out is not None:
                # Before the block: it may have a part of the transaction in which the publication went.
                raise self._drifted(control) or drift_error([self._left_out], self._options)
            watcher.hear(block)
            heard = ears.take(block)
            yield replace(block, told=watcher.tell(heard)) if heard else block
            if not block.open_transaction:
                self._beat(control, assembler.received)
                self._watch(control)
                look = watcher.look(assembler.received)
                if look is not None:
                    yield Block(look=look)

    def _described(self, control: Connection, descriptions: Descriptions, relation: Relation) -> Relation:
        """A relation with all that is known of it: as the log told it, else as the catalog has it."""
        described = self._told.get(relation.oid)
        if described is None or not catalog.is_same(described, relation):
            described = descriptions.completed(relation, self._known.get(relation.oid))
        if described.enriched:
            self._known[relation.oid] = described
        described = replace(described, types=self._options.types.chosen)
        check_wire(described, self._options.wire, control.info.server_version)
        return described

    def _read(self, control: Connection, stream: PGconn, assembler: Assembler, descriptions: Descriptions) -> Reading:
        """What reads the log, from here on with the stream that was opened."""
        self._reading = reading = Reading(
            self._options,
            assembler,
            descriptions,
            stream=stream,
            open_stream=self._checked_stream,
            open_session=self._session,
            open_reader=self._reader,
            log_end=lambda: _log_end(control),
            status_seconds=self._status_seconds(stream),
            tell=self._tell,
        )
        self._stream = None
        reading.acknowledge(self._acked)
        return reading

    def _session(self) -> Session:
        return Session(self._heeded(connect_session(self._spec, self._options)))

    def _reader(self) -> Session:
        """A session on a connection for replication; a plain one where the server has no more of these."""
        try:
            return Session(self._heeded(connect_replication(self._spec, self._options)))
        except SourceUnavailable:
            return self._session()

    def ack(self, position: int) -> None:
        """Acknowledge with the next status update, which is at most 100 ms away while capture streams."""
        self._acked = max(self._acked, position)
        if self._reading is not None:
            self._reading.acknowledge(self._acked)

    def status(self) -> Json:
        """The server's log end and our slot, at most a second old."""
        control, now = self._control, time.monotonic()
        if control is not None and now - self._status_at >= STATUS_SECONDS:
            self._status = self._ask(control)
            self._status_at = now
        return self._status

    def format_position(self, position: int) -> str:
        return format_lsn(position)

    def close(self) -> None:
        """Send the last acknowledgement if the connection still takes it, and let go of both.

        The next capture of the source may begin as soon as this returns, unless the server does not answer.
        """
        reading, self._reading = self._reading, None
        stream, self._stream = self._stream, None
        control, self._control = self._control, None
        if reading is not None:
            reading.close()
        if stream is not None:
            if stream.transaction_status == pq.TransactionStatus.ACTIVE:
                # Given up while a slot was being made: the server would go on making it without us.
                stream.get_cancel().cancel()
            stream.finish()
        if control is not None:
            release_source(control, self._options.slot)
            control.close()

    # -- connections -------------------------------------------------------------------------

    def _connections(self) -> tuple[Connection, PGconn]:
        if self._control is None:
            self.close()
            control = connect(self._spec, self._options)
            try:
                lock_source(control, self._options.slot)
            except BaseException:
                control.close()
                raise
            self._control = control
        if self._stream is None:
            self._stream = self._heeded(connect_replication(self._spec, self._options))
        return self._control, self._stream

    def _checked_stream(self, position: int) -> PGconn:
        """A new replication connection, on which going on from `position` is exact."""
        control, stream = self._connections()
        if self._identity is not None:
            check_before_start(control, stream, self._identity, position, self._options, expected=self._published)
        self._stream = None
        return stream

    def _heeded(self, reader: PGconn) -> PGconn:
        """The same connection: since Postgres 18 a publication that is gone is only warned of, and changes left out."""

        def hear(notice: PGresult) -> None:
            said = (notice.error_field(pq.DiagnosticField.MESSAGE_PRIMARY) or b"").decode("utf-8", "replace")
            if "skipped loading publication" in said:
                self._left_out = said

        reader.notice_handler = hear
        return reader

    def _status_seconds(self, stream: PGconn) -> float:
        """Our interval, or a third of what the server waits for us, whichever is shorter."""
        ((timeout,),) = command(stream, "SELECT setting FROM pg_settings WHERE name = 'wal_sender_timeout'")
        wanted = self._options.status_interval
        return min(wanted, int(timeout or 0) / 3 or wanted) / 1000

    # -- between blocks ----------------------------------------------------------------------

    def _beat(self, control: Connection, received: int) -> None:
        """When nothing came for a while, write a small message, so that the slot can move on."""
        now = time.monotonic()
        if received > self._heard:
            self._heard, self._heard_at = received, now
        interval = self._options.heartbeat_interval / 1000
        if interval == 0 or now - self._heard_at < interval:
            return
        self._heard_at = now
        with translated("writing a heartbeat"):
            control.execute("SELECT pg_logical_emit_message(false, %s, '')", (HEARTBEAT_PREFIX,))

    def _watch(self, control: Connection) -> None:
        now = time.monotonic()
        if now - self._watched_at < self._options.watch_interval / 1000 or self._published is None:
            return
        self._watched_at = now
        drifted = self._drifted(control)
        if drifted is not None:
            raise drifted

    def _drifted(self, control: Connection) -> SourceHalted | None:
        """The halt for publications, or tables in them, that are not as they were left."""
        if self._published is None:
            return None
        reasons = watch_publications(control, self._options, self._published, self._spec.tables)
        return drift_error(reasons, self._options) if reasons else None

    def _ask(self, control: Connection) -> Json:
        info = slot_info(control, self._options.slot)
        said: Json = {"log_end": _log_end(control)}
        if self._reading is not None:
            said |= self._reading.status(said["log_end"])
        if info is not None:
            said |= {
                "slot": info.name,
                "confirmed": info.confirmed_flush,
                "safe_bytes": info.safe_wal_size,
                "retained_bytes": info.retained_bytes,
                "wal_status": info.wal_status,
                "catalog_xmin_age": info.catalog_xmin_age,
                "spill_bytes": info.spill_bytes,
                "spill_transactions": info.spill_transactions,
            }
        return said

    # -- telling -----------------------------------------------------------------------------

    def _warn(self, findings: Sequence[Finding]) -> None:
        for finding in findings:
            if finding.severity is Severity.WARNING:
                self._tell(Event("source.warning", finding.message, Level.WARNING, fields=finding.to_json()))

    def _waits(self, message: str) -> None:
        self._tell(Event("source.waiting", message, Level.WARNING))


def _log_end(control: Connection) -> int:
    with translated("asking for the end of the log"):
        row = control.execute("SELECT (pg_current_wal_flush_lsn() - '0/0')::int8").fetchone()
    return int(row[0]) if row else 0
