"""The captures of a run: one supervised process per source, and what is told to it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from millstream.engine.capture_order import CaptureOrder
from millstream.engine.commit import ack_position
from millstream.engine.holders import delivered, holders, lowest
from millstream.engine.home import Home
from millstream.engine.rebase import RebaseRequest, finish_rebase
from millstream.engine.reports import CaptureReport
from millstream.engine.supervisor import Supervisor
from millstream.errors import (
    ConfigError,
    JournalError,
    JournalMismatch,
    MillstreamError,
    SecretError,
    SourceError,
    SourceUnavailable,
)
from millstream.journal import JournalReader, check_cursor, journal_exists
from millstream.journal.format import SEGMENT_BYTES
from millstream.model import Mode, SourceSpec, StreamSpec
from millstream.observe import Event, Level, Observer
from millstream.sources import shadowed_tables
from millstream.state.base import StateStore


class Capture:
    """One source: its process, its journal, and all streams of the home that read it, running or not.

    `acknowledge`, `retain`, `release` and `report` may be called from another thread than the rest.
    """

    def __init__(
        self, source: SourceSpec, streams: Sequence[StreamSpec], home: Home, store: StateStore, observer: Observer
    ) -> None:
        self.source = source
        self.streams = tuple(streams)
        self.failure: MillstreamError | None = None
        """Why the process was never started, or what became of its journal, if something did."""
        self._guard = threading.RLock()
        self._home = home
        self._store = store
        self._path: Path = home.journal_path(source.name)
        self._reader = JournalReader([str(self._path)])
        self._request = RebaseRequest.load(home, source.name)
        self._observer = observer
        self._supervisor: Supervisor | None = None
        self._acked = 0
        self._unnamed: dict[str, MillstreamError] | None = None
        """By stream what is wrong with its tables; None while nobody has looked."""
        self.goal: int | None = None
        """With `run --once`: the end of the source's log as it was when capture first saw it."""

    @property
    def locations(self) -> list[str]:
        """Where readers find the journal."""
        return [str(self._path)]

    @property
    def started(self) -> bool:
        return self._supervisor is not None

    @property
    def error(self) -> MillstreamError | None:
        """Why capture cannot go on without a person."""
        supervisor = self._supervisor
        return self.failure or (supervisor.error if supervisor and supervisor.state == "halted" else None)

    def halt(self, failed: MillstreamError) -> None:
        """Nothing more can be captured, for this reason, which is told."""
        self.failure = failed
        fields = {"source": self.source.name, "error": type(failed).__name__, "hint": failed.hint}
        self._observer.on_event(Event("capture.halted", failed.message, Level.ERROR, fields=fields))

    def check(self, streams: Iterable[str]) -> None:
        """Compare the streams' cursors and the journal before capture can write a row into one that is not theirs."""
        cursors = [cursor for stream in streams for cursor in self._store.cursors(stream)]
        if (self._path / "journal.json").exists():
            for cursor in cursors:
                if self._request is None:
                    check_cursor(self._reader, cursor)
        elif cursors and self._request is None:
            raise JournalMismatch(
                f"targets of source {self.source.name} have cursors (up to seq {max(c.seq for c in cursors)}), "
                f"but there is no journal at {self._path}",
                hint="put the journal back, or begin a new one above all old seqs: "
                f"millstream journal rebase {self.streams[0].name} --confirm",
            )

    def check_tables(self, stream: str) -> None:
        """Raise ConfigError for a stream whose tables are captured under names that are another stream's.

        A source that cannot be asked now is no reason against it.
        """
        if self._unnamed is None:
            sharing = {one.name: one.source.tables for one in self.streams if one.mode is not Mode.SNAPSHOT}
            with suppress(SourceError, SecretError):
                found = shadowed_tables(self.source, sharing)
                self._unnamed = {one.stream: ConfigError(one.message, hint=one.fix) for one in found}
        if self._unnamed and stream in self._unnamed:
            raise self._unnamed[stream]

    def start(self) -> None:
        """Start the process. Returns at once."""
        expected = any(self._store.cursors(stream.name) for stream in self.streams)
        rebase = self._request.order if self._request else None
        # Small segments let tests roll and seal a journal in seconds instead of hours.
        size = int(os.environ.get("MILLSTREAM_SEGMENT_BYTES", SEGMENT_BYTES))
        order = CaptureOrder(self.source, self._path, expected, rebase, size)
        with self._guard:
            self.failure = None
            self._supervisor = Supervisor(order, self._observer)
            self._supervisor.start()

    def change(self, source: SourceSpec, streams: Sequence[StreamSpec]) -> None:
        """Serve other streams from now on. A running process is started again if it has to read something else."""
        with self._guard:
            self.streams, self._unnamed = tuple(streams), None
            changed, self.source = source != self.source, source
        if changed and self._supervisor is not None:
            self.restart()

    def restart(self) -> None:
        """Stop the process, whatever its state, and start one anew."""
        self.stop()
        self.start()

    def await_first_word(self, seconds: float) -> None:
        """Wait until the source has answered one way or the other, so that what is wrong is told at once."""
        self._current().wait_for(
            lambda it: (
                "journal_id" in it.last_status or it.state == "halted" or isinstance(it.error, SourceUnavailable)
            ),
            seconds,
        )

    def ready(self, *, once: bool) -> bool:
        """Whether delivery can begin: the journal is there and, with `once`, holds what was committed at the start.

        Raises what halted capture and, with `once`, what keeps it from the source.
        """
        if self.error is not None:
            raise self.error
        status = self._current().last_status
        if once and isinstance(self._current().error, SourceUnavailable) and self.goal is None:
            raise self._current().error or SourceUnavailable("the source cannot be reached")
        if "journal_id" not in status:
            return False
        if self._request is not None:
            finish_rebase(self._home, self._store, self._request, status["journal_id"])
            self._request = None
        if not once:
            return True
        if self.goal is None and status.get("state") == "running":
            self.goal = status.get("log_end")
        return self.goal is not None and int(status["end"]) >= self.goal

    def acknowledge(self) -> None:
        """Tell capture what all streams of this source have, by their policies."""
        with self._guard:
            if self._begun() and self.streams:
                self._acknowledge()

    def _begun(self) -> bool:
        """Whether a process has opened the journal that the cursors speak of."""
        supervisor = self._supervisor
        return self._request is None and supervisor is not None and "journal_id" in supervisor.last_status

    def _acknowledge(self) -> None:
        header, head = self._reader.header(), self._reader.head()
        if head is None and not journal_exists(self._path):
            raise JournalError(
                f"the journal at {self._path} is gone, while it was being written",
                hint="stop the process and put the journal back, or begin a new one: millstream journal rebase",
            )
        positions = [
            ack_position(
                stream.commit,
                stream.targets,
                {cursor.target: cursor for cursor in self._store.cursors(stream.name)},
                journal_id=header.journal_id,
                head=head,
                start_position=header.start_position,
                lost=self._store.needs_reload(stream.name),
            )
            for stream in self.streams
        ]
        position = min(positions)
        if position > self._acked:
            # Written down first: after a lost journal it is the only word on what was covered without rows.
            self._store.save_ack(self.source.name, position)
            self._acked = position
        self._current().send_ack(position)

    def release(self, planned_before: float) -> None:
        """No running batch was planned before this Unix time."""
        if self._supervisor is not None:
            self._supervisor.send_planned_before(planned_before)

    def retain(self) -> None:
        """Tell capture what nobody needs any more, if its journal has limits."""
        with self._guard:
            if self._begun() and (self.source.retention or self.source.journal):
                header = self._reader.header()
                free = lowest(holders(self._store, self.source.name, header), header)
                self._current().send_needs(free, delivered(self._store, self.source.name, header))

    def overtaken(self) -> list[tuple[str, str, str]]:
        """The targets (stream, target, what happened) that do not have changes which the journal has let go of."""
        if not self._begun():
            return []
        with self._guard:
            header, first = self._reader.header(), self._reader.first_seq()
        found = []
        for stream in self.streams:
            for cursor in self._store.cursors(stream.name):
                if cursor.journal_id == header.journal_id and cursor.seq + 1 < first:
                    what = f"it has the changes up to seq {cursor.seq}, and the journal begins at {first}"
                    found.append((cursor.stream, cursor.target, what))
        return found

    def report(self) -> CaptureReport:
        """What `millstream status` shows of the capture."""
        supervisor, failed = self._supervisor, self.failure
        if supervisor is None or failed is not None:
            state = "halted" if failed else "starting"
            return CaptureReport(state, error=failed.message if failed else None, hint=failed.hint if failed else None)
        error = supervisor.error
        return CaptureReport(
            state=supervisor.state,
            pid=supervisor.pid,
            restarts=supervisor.restarts,
            error=error.message if error else None,
            hint=error.hint if error else None,
            source=supervisor.last_status,
        )

    def stop(self) -> None:
        if self._supervisor is not None:
            self._supervisor.stop()

    def forget(self) -> None:
        """Stop, and touch the journal no more: it may be removed when this returns."""
        self.stop()
        with self._guard:
            self.streams, self._supervisor = (), None

    def _current(self) -> Supervisor:
        if self._supervisor is None:
            raise RuntimeError("the capture was not started")
        return self._supervisor
