"""From a source into its journal: append, commit in groups, acknowledge. Knows no database.

One thread. The source yields at least every 100 ms, and everything else happens between two of
its blocks, when no transaction is open. What can pass (a lost connection, a full disk) is waited
for here, for ever; what cannot is raised.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from collections.abc import Callable
from typing import Protocol

from millstream.engine.backoff import Backoff
from millstream.engine.capture_order import CaptureOrder
from millstream.engine.retained import SourceLog
from millstream.errors import JournalFull, PreflightError, SourceHalted, SourceUnavailable
from millstream.failpoint import failpoint
from millstream.journal import JournalWriter
from millstream.model import AckPolicy, Json
from millstream.observe import Event, Level
from millstream.sources.base import Block, Severity, Source, SourceIdentity

COMMIT_SECONDS = 0.025
"""Rows wait no longer than this for their commit,"""
COMMIT_BYTES = 8 << 20
"""nor do more than this."""
PROGRESS_SECONDS = 1.0
"""How often a position without rows is made durable."""
LOOK_SECONDS = 1.0
"""How often the source is asked how it is, and a full disk looked at."""
FREE_BYTES = 16 << 20
"""So much room must be there again before capture goes on after a full disk."""


class Control:
    """What the engine wants, set from another thread."""

    def __init__(self) -> None:
        self.stopping = threading.Event()
        self.ack: int | None = None
        """Everything up to here has been delivered; None while nobody has said anything."""
        self.planned_before: float | None = None
        """No running batch was planned before this Unix time."""


class Report(Protocol):
    """Where capture tells what happens. Never blocks."""

    def event(self, event: Event) -> None: ...

    def status(self, status: Json) -> None: ...


class CaptureLoop:
    """Runs one source until it is told to stop."""

    def __init__(
        self, order: CaptureOrder, open_source: Callable[[], Source], control: Control, report: Report
    ) -> None:
        self._order = order
        self._spec = order.source
        self._source = open_source()
        self._control = control
        self._report = report
        self._log = SourceLog(self._spec, self._event)
        self._writer: JournalWriter | None = None
        self._state = "starting"
        self._acked = 0
        self._rows = 0
        self._rows_since: float | None = None
        self._bytes = 0
        self._covered: int | None = None
        self._progress_at = float("-inf")
        self._looked_at = float("-inf")
        self._dropped_at = float("-inf")
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
        self._forget_pending()
        self._source.check(_identity(writer), writer.end)
        for block in self._source.capture(writer.end, writer.register):
            if self._state != "running":
                self._enter("running")
                self._event("capture.running", f"capturing from {self._text(writer.end)}", position=writer.end)
                backoff.reset()
            self._append(writer, block)
            if block.open_transaction:
                continue
            self._commit(writer, idle=block.rows is None)
            self._acknowledge(writer)
            self._look(writer)
            writer.maintain()
            self._drop_superseded(writer)
            self._tell(writer)
            if self._control.stopping.is_set():
                self._enter("stopping")
                self._commit(writer, now=True)
                self._acknowledge(writer)
                return

    def _append(self, writer: JournalWriter, block: Block) -> None:
        if block.rows is None and block.progress is None:
            return
        writer.append(block)
        failpoint("capture.block_appended")
        if block.rows is not None:
            self._rows += block.rows.num_rows
            self._bytes += block.rows.nbytes
            self._rows_since = self._rows_since or time.monotonic()
        if block.progress is not None:
            self._covered = block.progress

    def _commit(self, writer: JournalWriter, *, idle: bool = False, now: bool = False) -> None:
        clock = time.monotonic()
        if self._rows_since is not None:
            due = idle or clock - self._rows_since >= COMMIT_SECONDS or self._bytes >= COMMIT_BYTES
        else:
            due = self._covered is not None and clock - self._progress_at >= PROGRESS_SECONDS
        if not (due or now):
            return
        if writer.commit() is not None:
            failpoint("capture.committed")
            self._log.committed(writer.end)
        self._forget_pending()
        self._progress_at = clock

    def _forget_pending(self) -> None:
        self._rows_since, self._bytes, self._covered = None, 0, None

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
            self._writer = JournalWriter.open(path) if (path / "journal.json").exists() else self._create()
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
        )
        failpoint("capture.journal_created")
        self._event("capture.journal_created", f"a new journal begins at {self._text(start)}", position=start)
        return writer

    def _preflight(self) -> None:
        findings = self._source.preflight()
        for finding in findings:
            if finding.severity is Severity.WARNING:
                self._event("capture.preflight", finding.message, Level.WARNING, **finding.to_json())
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
            hint=lost.hint,
            retry_seconds=round(seconds, 3),
        )
        self._control.stopping.wait(seconds)

    def _await_room(self, full: JournalFull) -> None:
        """Let go of the source while the disk is full; go on from the journal's end when it is not."""
        self._source.close()
        self._abandon()
        self._enter("waiting")
        self._event("capture.disk_full", full.message, Level.ERROR, hint=full.hint or "make room on the journal's disk")
        while not self._control.stopping.wait(LOOK_SECONDS):
            if shutil.disk_usage(self._order.journal.parent).free >= FREE_BYTES:
                self._event("capture.disk_full_over", "there is room on the journal's disk again")
                return

    def _abandon(self) -> None:
        """Drop the writer; what it had not committed is cut when the journal is opened again."""
        writer, self._writer = self._writer, None
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
        said: Json = {"state": self._state, "rows": self._rows, "acked": self._acked, **self._log.to_json()}
        if writer is not None:
            said |= {
                "journal_id": writer.header.journal_id,
                "incarnation": writer.header.incarnation,
                "seq": writer.head.seq,
                "end": writer.end,
                "commit_ts_us": writer.head.commit_ts_us,
            }
        if said != self._said:
            self._said = said
            self._report.status(said)

    def _event(self, kind: str, message: str, level: Level = Level.INFO, **fields: object) -> None:
        self._report.event(Event(kind, message, level, fields={"source": self._spec.name, **fields}))

    def _text(self, position: int) -> str:
        return self._source.format_position(position)


def _identity(writer: JournalWriter) -> SourceIdentity:
    header = writer.header
    return SourceIdentity(header.source_kind, header.identity, header.start_position)
