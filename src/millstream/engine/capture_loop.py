"""From a source into its journal: append, commit in groups, acknowledge. Knows no database.

One thread. The source yields at least every 100 ms, and everything else happens between two of
its blocks, when no transaction is open. What can pass (a lost connection, a full disk) is waited
for here, for ever; what cannot is raised.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable
from dataclasses import replace

from millstream.engine.backoff import Backoff
from millstream.engine.capture_order import CaptureOrder, Control, Report
from millstream.engine.retained import SourceLog
from millstream.engine.retainer import Retainer
from millstream.errors import JournalFull, PreflightError, SourceHalted, SourceUnavailable
from millstream.failpoint import failpoint
from millstream.journal.format import SEGMENT_BYTES
from millstream.journal.head import journal_exists
from millstream.journal.looks import CatalogChange
from millstream.journal.writer import JournalWriter
from millstream.model import AckPolicy, Json
from millstream.observe import Event, Level, counted
from millstream.sources.base import Block, Look, Severity, Source, SourceIdentity

COMMIT_SECONDS = 0.025
"""Rows wait no longer than this for their commit,"""
COMMIT_BYTES = 8 << 20
"""nor do more than this;"""
BEHIND_SECONDS = 0.2
"""those of a source that is far behind wait so long: many at once are written in the order that readers like."""
PROGRESS_SECONDS = 1.0
"""How often a position without rows is made durable."""
LOOK_SECONDS = 1.0
"""How often the source is asked how it is, and a full disk looked at."""
MORE_BYTES, ENOUGH_BYTES, RETRY_SECONDS = 1 << 20, 64 << 20, 30.0
"""After a full disk capture goes on when there is so much more room, or so much, or so late in any case."""


class CaptureLoop:
    """Runs one source until it is told to stop."""

    def __init__(
        self, order: CaptureOrder, make: Callable[[Callable[[Event], None]], Source], control: Control, report: Report
    ) -> None:
        """`make` opens the source; it is given the function that hears the source's events."""
        self._order = order
        self._spec = order.source
        self._source = make(self._heard)
        self._control = control
        self._report = report
        self._log = SourceLog(self._spec, self._event)
        self._retainer = Retainer(self._spec, control, self._event)
        self._writer: JournalWriter | None = None
        self._state = "starting"
        self._acked = 0
        self._rows = 0
        self._open_transaction = False
        self._was_full = False
        self._progress_at = float("-inf")
        self._looked_at = float("-inf")
        self._dropped_at = float("-inf")
        self._facts: Json = {}
        self._said: Json = {}

    def run(self) -> None:
        """Until `control.stopping`. Raises what a person, or a new process, must deal with."""
        backoff = Backoff()
        try:
            while not self._control.stopping.is_set():
                try:
                    self._stream(self._journal(), backoff)
                except SourceUnavailable as lost:
                    self._await_source(lost, backoff.next())
                except JournalFull as full:
                    self._await_room(full)
        finally:
            self._close()

    # -- one connection ----------------------------------------------------------------------

    def _stream(self, writer: JournalWriter, backoff: Backoff) -> None:
        """Capture until told to stop, or until the connection is lost."""
        self._source.recall(writer.described, writer.end, writer.look)
        self._bind(writer, self._source.check(_identity(writer), writer.end))
        try:
            for block in self._source.capture(writer.end, writer.register):
                if self._state != "running":
                    self._enter("running")
                    self._event("capture.running", f"capturing from {self._text(writer.end)}", position=writer.end)
                    backoff.reset()
                self._append(writer, block)
                if block.open_transaction:
                    continue
                if block.told:
                    self._hear(writer)
                if block.look is not None:
                    self._note_look(writer, block.look)
                if self._between(writer, block):
                    return
                if self._retainer.full:
                    self._await_targets(writer)
                    return
        except SourceUnavailable:
            self._settle()
            raise

    def _bind(self, writer: JournalWriter, identity: SourceIdentity) -> None:
        """Before the first row from a server that took the place of another."""
        before = writer.header.identity
        changed = sorted(name for name, value in identity.facts.items() if before.get(name) != value)
        if changed:
            writer.bind(identity.facts)
            said = f"another server took the place of source {self._spec.name}, and has all that the journal has"
            self._event("capture.source_moved", said, Level.WARNING, changed=changed, position=writer.end)

    def _hear(self, writer: JournalWriter) -> None:
        """What the log told of tables is to be known at once: deliveries may have to wait for it."""
        self._commit(writer, now=True)
        for found in writer.heard:
            self._tell_of(found, f"told at {self._text(found.position)}")

    def _note_look(self, writer: JournalWriter, look: Look) -> None:
        """What a look at the catalog found stands in the journal behind every change that was committed before it."""
        self._commit(writer, now=True)
        for found in writer.note_look(look):
            self._tell_of(found, "no change tells of it")
        failpoint("capture.look_saved")

    def _tell_of(self, found: CatalogChange, how: str) -> None:
        what = f"{found.kind} of {found.table}" + (f": {found.part}" if found.part else "")
        fields = {"id": f"c{found.number}", "change": found.kind, "table": found.table, "partition": found.part}
        self._event("source.catalog_changed", f"{what}: {how}", Level.WARNING, **fields)

    def _between(self, writer: JournalWriter, block: Block) -> bool:
        """Everything that is done between two transactions. True when it is time to stop."""
        self._commit(writer, idle=block.rows is None, within=BEHIND_SECONDS if block.behind else COMMIT_SECONDS)
        if not block.left and not block.behind:
            # Behind the rows, not before them: who waits for the end of a backlog would go without the last ones.
            writer.nothing_left()
        self._acknowledge(writer)
        self._look(writer)
        writer.maintain()
        self._drop_superseded(writer)
        self._retainer.look(writer)
        self._tell(writer)
        if not self._control.stopping.is_set():
            return False
        self._enter("stopping")
        self._commit(writer, now=True)
        self._acknowledge(writer)
        return True

    def _settle(self) -> None:
        """The connection is gone: keep what is whole, so that the journal's end is where to go on."""
        if self._writer is None:
            return
        if self._open_transaction:
            self._abandon()
        else:
            self._writer.commit()
            self._writer.nothing_left()

    def _append(self, writer: JournalWriter, block: Block) -> None:
        if block.rows is None and block.progress is None:
            return
        if block.open_transaction and not self._open_transaction and not block.behind:
            # What is whole shall not wait for the end of a giant, nor be lost with one that is cut off.
            self._commit(writer, now=True)
        writer.append(block)
        failpoint("capture.block_appended")
        self._open_transaction = block.open_transaction
        if block.rows is not None:
            self._rows += block.rows.num_rows

    def _commit(
        self, writer: JournalWriter, *, idle: bool = False, now: bool = False, within: float = COMMIT_SECONDS
    ) -> None:
        clock, since = time.monotonic(), writer.pending_since
        if since is None:
            return
        if writer.pending_bytes:
            due = idle or clock - since >= within or writer.pending_bytes >= COMMIT_BYTES
        else:
            due = clock - self._progress_at >= PROGRESS_SECONDS
        if not (due or now) or writer.commit() is None:
            return
        failpoint("capture.committed")
        self._progress_at = clock
        self._log.committed(writer.end)
        if self._was_full:
            self._was_full = False
            self._event("capture.disk_full_over", "there is room on the journal's disk again")

    def _acknowledge(self, writer: JournalWriter) -> None:
        """Never what is not durable in the journal; never back."""
        if self._spec.ack is AckPolicy.JOURNALED:
            wanted = writer.end
        else:
            wanted = max(min(self._control.ack or 0, writer.end), self._log.release)
        if wanted > self._acked:
            self._source.ack(wanted)
            self._acked = wanted

    def _look(self, writer: JournalWriter) -> None:
        """Ask the source how it is, and hold what it keeps for us against the limit."""
        clock = time.monotonic()
        if clock - self._looked_at < LOOK_SECONDS:
            return
        self._looked_at = clock
        self._log.look(self._source.status(), acked=self._acked, end=writer.end)

    def _drop_superseded(self, writer: JournalWriter) -> None:
        before = self._control.planned_before
        if before is not None and before > self._dropped_at:
            self._dropped_at = before
            writer.drop_superseded(before)

    # -- the journal -------------------------------------------------------------------------

    def _journal(self) -> JournalWriter:
        if self._writer is None:
            path = self._order.journal
            size = self._order.segment_bytes or SEGMENT_BYTES
            if journal_exists(path):
                self._writer = JournalWriter.open(path, segment_bytes=size, tenant=self._spec.tenant)
            else:
                self._writer = self._create()
            header = self._writer.header
            if (header.source, header.source_kind) != (self._spec.name, self._spec.kind):
                raise SourceHalted(
                    f"the journal at {path} belongs to source {header.source} ({header.source_kind}), "
                    f"not to {self._spec.name} ({self._spec.kind})",
                    hint="give the source its own name, or another home",
                )
        return self._writer

    def _create(self) -> JournalWriter:
        """The first start of a source, or the first after its journal was lost and that was accepted."""
        rebase = self._order.rebase
        if rebase is None and self._order.expect_journal:
            raise SourceHalted(
                f"targets of source {self._spec.name} have cursors, but there is no journal at {self._order.journal}",
                hint="put the journal back, or begin a new one above all old seqs: millstream journal rebase",
            )
        # Raises while the source cannot be reached, which preflight would report as a finding.
        tables = [relation.table for relation in self._source.relations(self._spec.tables)]
        self._event("capture.first_start", f"preparing to capture {counted(len(tables), 'table')}", tables=tables)
        self._preflight()
        identity = self._source.prepare()
        start = identity.start
        if rebase is not None:
            if identity.start > rebase.start_position:
                raise SourceHalted(
                    f"source {self._spec.name} has its log from {self._text(identity.start)} on, but the targets are "
                    f"only at {self._text(rebase.start_position)}: what is between them is lost",
                    hint="reload the tables",
                )
            start = rebase.start_position
            self._source.check(identity, start)
        writer = JournalWriter.create(
            self._order.journal,
            source=self._spec.name,
            source_kind=self._spec.kind,
            identity=identity.facts,
            start_position=start,
            first_seq=rebase.first_seq if rebase else 1,
            incarnation=rebase.incarnation if rebase else 1,
            segment_bytes=self._order.segment_bytes or SEGMENT_BYTES,
            tenant=self._spec.tenant,
        )
        failpoint("capture.journal_created")
        self._event("capture.journal_created", f"a new journal begins at {self._text(start)}", position=start)
        return writer

    def _preflight(self) -> None:
        findings = self._source.preflight()
        for finding in findings:
            if finding.severity is Severity.WARNING:
                fields = {"check": finding.check, "fix": finding.fix, "table": finding.table}
                self._event("capture.preflight", finding.message, Level.WARNING, **fields)
        wrong = [finding for finding in findings if finding.severity is Severity.ERROR]
        if wrong:
            raise PreflightError(
                f"source {self._spec.name} is not fit for capture: " + "; ".join(f.message for f in wrong),
                hint="; ".join(f.fix for f in wrong if f.fix) or None,
            )

    # -- waiting -----------------------------------------------------------------------------

    def _await_source(self, lost: SourceUnavailable, seconds: float) -> None:
        self._source.close()
        self._enter("waiting")
        self._event(
            "capture.unavailable",
            f"source {self._spec.name}: {lost.message}; trying again in {seconds:.1f} s",
            Level.WARNING,
            error=type(lost).__name__,
            reason=lost.message,
            hint=lost.hint,
            retry_seconds=round(seconds, 3),
        )
        self._retain()
        self._control.stopping.wait(seconds)

    def _await_room(self, full: JournalFull) -> None:
        """Let go of the source while the disk is full; go on from the journal's end when it is not."""
        self._source.close()
        with contextlib.suppress(JournalFull):
            self._settle()
        self._was_full = True
        self._enter("waiting")
        hint = full.hint or "make room on the journal's disk"
        self._event("capture.disk_full", full.message, Level.ERROR, error=type(full).__name__, hint=hint)
        before, deadline = self._free(), time.monotonic() + RETRY_SECONDS
        while not self._control.stopping.wait(LOOK_SECONDS):
            with contextlib.suppress(JournalFull):
                self._retain()
            free = self._free()
            if free >= min(before + MORE_BYTES, ENOUGH_BYTES) or time.monotonic() >= deadline:
                return

    def _await_targets(self, writer: JournalWriter) -> None:
        """Let go of the source while the journal is at its limit; the source keeps its log meanwhile."""
        self._commit(writer, now=True)
        self._acknowledge(writer)
        self._source.close()
        self._enter("waiting")
        self._event(
            "capture.journal_full",
            f"the journal of source {self._spec.name} takes {writer.size} bytes and is at its limit: capture waits for "
            "targets that are behind, and the source keeps its log",
            Level.ERROR,
            error=JournalFull.__name__,
            hint="let the targets catch up, delete those that are given up, or raise max_bytes",
        )
        while self._retainer.full and not self._control.stopping.wait(LOOK_SECONDS):
            writer.maintain()
            self._drop_superseded(writer)
            self._retainer.look(writer)
            self._tell(writer)
        if not self._retainer.full:
            self._event("capture.journal_full_over", "there is room in the journal again")

    def _retain(self) -> None:
        """What may be forgotten goes while capture waits, too."""
        if self._writer is not None and not self._writer.pending:
            self._retainer.look(self._writer)

    def _free(self) -> int:
        return shutil.disk_usage(self._order.journal.parent).free

    def _abandon(self) -> None:
        """Drop the writer; a transaction that it had in part is cut when the journal is opened again."""
        writer, self._writer, self._open_transaction = self._writer, None, False
        if writer is not None:
            with contextlib.suppress(JournalFull):
                writer.close()

    def _close(self) -> None:
        """Everything whole into the journal, the last acknowledgement out, everything let go."""
        try:
            self._abandon()
        finally:
            self._source.close()

    # -- telling -----------------------------------------------------------------------------

    def _enter(self, state: str) -> None:
        if state != self._state:
            self._state = state
            self._tell(self._writer)

    def _tell(self, writer: JournalWriter | None) -> None:
        if writer is not None:
            self._facts = {
                "journal_id": writer.header.journal_id,
                "incarnation": writer.header.incarnation,
                "seq": writer.head.seq,
                "end": writer.end,
                "commit_ts_us": writer.head.commit_ts_us,
            }
        said: Json = {
            **self._log.to_json(),
            **self._facts,
            "state": self._state,
            "rows": self._rows,
            "acked": self._acked,
        }
        if said != self._said:
            self._said = said
            self._report.status(said)

    def _heard(self, event: Event) -> None:
        """What the source says while it prepares itself. Ends a wait that a stop should not wait for."""
        self._report.event(replace(event, fields={"source": self._spec.name, **event.fields}))
        if self._control.stopping.is_set():
            raise SourceUnavailable("capture was told to stop")

    def _event(self, kind: str, message: str, level: Level = Level.INFO, **fields: object) -> None:
        self._report.event(Event(kind, message, level, fields={"source": self._spec.name, **fields}))

    def _text(self, position: int) -> str:
        return self._source.format_position(position)


def _identity(writer: JournalWriter) -> SourceIdentity:
    header = writer.header
    return SourceIdentity(header.source_kind, header.identity, header.start_position)
