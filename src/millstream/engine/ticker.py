"""The ticker: acknowledges and reports while the control is busy, so that a pause that waits holds up nobody else."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from millstream.engine.captures import Capture
from millstream.engine.members import Roster
from millstream.engine.reporting import Reporter
from millstream.errors import JournalError
from millstream.model import StreamState
from millstream.observe import Event, Level, Observer
from millstream.state.base import StateStore

TICK = 0.1
IDLE_TICK = 0.5
"""Seconds after which the ticker looks although no cursor has moved: positions without rows move once a second."""
PLAN_GRACE = 60.0
"""Seconds a superseded segment outlives the start of the oldest batch that may refer to it."""


class Ticker:
    """Tells sources what was delivered, and everybody who asks how things are. From any thread.

    After `end` and `join` nothing is told any more but by whoever calls `acknowledge` and `report`.
    """

    def __init__(self, roster: Roster, store: StateStore, observer: Observer) -> None:
        self._roster = roster
        self._store = store
        self._observer = observer
        self._reporter = Reporter(store)
        self._reporting = threading.Lock()
        self._wake = threading.Event()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ticker", daemon=True)
        self.failure: Exception | None = None
        """What its thread died of, if it did."""

    def start(self) -> None:
        """Acknowledge and report from now on, on a thread of its own."""
        self._thread.start()

    def wake(self) -> None:
        """A cursor has moved."""
        self._wake.set()

    def end(self) -> None:
        """Have the thread end; it may be at work still."""
        self._over.set()
        self._wake.set()

    def join(self) -> None:
        """Wait until the thread has ended, if it was ever started."""
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._over.is_set():
            self._wake.wait(min(IDLE_TICK, max(TICK, self._shortest_interval() / 2000)))
            self._wake.clear()
            try:
                self.acknowledge()
                self.report(due=True)
            except Exception as failed:  # noqa: BLE001 - the control raises it
                self.failure = failed
                return

    def acknowledge(self) -> None:
        """Tell each capture what all streams of its source have."""
        for capture in self._roster.captures:
            try:
                capture.acknowledge()
            except JournalError as broken:
                # Its journal went from under it: that is its streams' trouble and nobody else's.
                if capture.failure is None:
                    capture.halt(broken)

    @contextmanager
    def silent(self) -> Iterator[None]:
        """While nothing is written down: whoever leaves the roster meanwhile is not heard of any more."""
        with self._reporting:
            yield

    def report(self, everyone: StreamState | None = None, *, due: bool = False) -> None:
        """Write down how things are; with `due`, as often as the shortest `checkpoint_interval` says.

        `everyone`: the state of all that has not failed and is not paused.
        """
        if due and not self._reporter.is_due(self._shortest_interval()):
            return
        with self._reporting:
            for capture in self._roster.captures:
                self._report_source(capture, everyone)

    def _shortest_interval(self) -> int:
        """Milliseconds between two reports of the stream that wants them most often."""
        return min((member.spec.checkpoint_interval_ms for member in self._roster.members), default=1000)

    def _report_source(self, capture: Capture, everyone: StreamState | None) -> None:
        if capture.started and capture.failure is None:
            capture.retain()
            self._note_overtaken(capture)
        mine = self._roster.of(capture)
        planning = [query.planning_since for member in mine for query in member.queries.values()]
        if planning:
            capture.release(min(planning) - PLAN_GRACE)
        report = capture.report()
        for member in mine:
            held = self._roster.held_of(member.name)
            self._reporter.write(member.spec, report, member.queries, member.unfit, everyone, held)

    def _note_overtaken(self, capture: Capture) -> None:
        """Mark targets that stand still while the journal goes on without them; those that run find out themselves."""
        for stream, target, what in capture.overtaken():
            member = self._roster.by_name.get(stream)
            delivery = member.deliveries.get(target) if member is not None else None
            if target in self._store.needs_reload(stream) or (delivery is not None and not delivery.query.done):
                continue
            self._store.set_needs_reload(stream, target, f"changes that it needs are gone: {what}")
            message = f"target {target} of stream {stream} must begin anew: {what}"
            self._observer.on_event(Event("delivery.needs_reload", message, Level.ERROR, stream, target))
