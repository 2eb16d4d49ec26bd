"""`run`: streams from here to a signal, or to their end. One capture per source, one Spark session.

The runner owns the order of things: cursors and journal are compared before anything is written,
capture starts while Spark does, queries start one after another, and on the way out batches are
finished, cursors saved and acknowledged before capture stops.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType

from millstream.engine.faults import FaultLog
from millstream.engine.home import Home
from millstream.engine.operations import Operations
from millstream.engine.reports import CaptureReport
from millstream.engine.requests import RequestDesk
from millstream.engine.running import RunningStreams
from millstream.engine.snapshotter import Snapshotter
from millstream.engine.spark_use import SparkUse
from millstream.engine.ticker import TICK
from millstream.engine.verifier import Verifier
from millstream.errors import MillstreamError
from millstream.model import StreamSpec, StreamState
from millstream.observe import Observers
from millstream.state.base import Runtime, StateStore

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
FIRST_WORD = 10.0
"""Seconds in which a source that is not fit is told before Spark starts. A machine at its limits needs some."""
SETTLED_TICK = 0.25
"""Seconds between two looks at what is asked, when all runs that should: most streams are quiet most of the time."""


def run(
    streams: Sequence[StreamSpec],
    *,
    home: Home,
    once: bool,
    master: str | None,
    observers: Observers,
    conf: Mapping[str, str] | None = None,
) -> int:
    """Run the streams until SIGTERM or SIGINT, or with `once` until what was committed at the start is delivered.

    With no streams at all, those that the home has. Meanwhile other processes may add, pause, resume
    and delete streams of the home. `master` and `conf` are Spark's, for the session that is started if
    the process has none. Returns the exit code: 0 when all is well, 1 when a stream failed. Must be
    called on the main thread, because it takes the signals.
    """
    with home.lock():
        store = home.open_state()
        try:
            return Runner(streams, home, store, once=once, master=master, observers=observers, conf=conf or {}).run()
        finally:
            store.close()


class Runner:
    """One run of one process. Threads: the caller's (the control), the ticker, captures' and queries', Spark's own."""

    def __init__(
        self,
        streams: Sequence[StreamSpec],
        home: Home,
        store: StateStore,
        *,
        once: bool,
        master: str | None,
        observers: Observers,
        conf: Mapping[str, str],
    ) -> None:
        self._streams = streams
        self._store = store
        self._once = once
        self._stop = threading.Event()
        # A new Spark context takes SIGINT for itself, to cancel jobs by it.
        self._spark = SparkUse(home, master, conf, observers, on_started=self._take_signals)
        self._observers = observers
        faults = FaultLog(store, observers)
        self._running = RunningStreams(home, store, self._spark.session, faults, stopping=self._stop, once=once)
        self._operations = Operations(home, store, faults, self._running)
        self._verifier = Verifier(store, self._running, faults)
        self._snapshotter = Snapshotter(home, store, self._running, faults)
        self._desk = RequestDesk(store, self._operations, self._verifier, self._snapshotter)

    def run(self) -> int:
        with self._signals():
            try:
                self._operations.finish_deletions()
                self._operations.upsert(self._streams or self._operations.streams())
                self._running.start_captures(strict=True)
                self._running.start_ticker()
                self._await_sources()
                if not self._stop.is_set():
                    self._spark.session()
                self._loop()
            except MillstreamError as failed:
                self._report_failure(failed)
                raise
            finally:
                self._verifier.interrupt()
                self._running.attempt(self._snapshotter.interrupt)
                self._running.stop()
                self._running.attempt(self._spark.stop)
        return 1 if self._running.failed() else 0

    def stop(self) -> None:
        """Ask for the orderly end, as SIGTERM does. From any thread; `run` returns when it is done."""
        self._stop.set()

    def _await_sources(self) -> None:
        """Spark takes seconds to start: a source that is not fit is told before that."""
        deadline = time.monotonic() + FIRST_WORD
        for capture in self._running.captures:
            capture.await_first_word(deadline - time.monotonic())
            capture.ready(once=self._once)

    def _loop(self) -> None:
        """Start what is due, do what is asked, until told to stop or (once) until all is delivered."""
        started = settled = False
        while not self._stop.wait(SETTLED_TICK if settled and not self._once else TICK):
            self._running.raise_failure()
            settled = self._running.advance(strict=not started)
            started = started or settled
            self._desk.serve()
            if settled and self._is_over():
                return

    def _is_over(self) -> bool:
        queries, captures = self._running.queries, self._running.captures
        if queries and all(query.done for query in queries) and (self._once or not self._any_paused()):
            return True
        if self._once and not queries:
            return True
        # A source that has halted still delivers what is in its journal; then it is over.
        halted = [capture for capture in captures if capture.error is not None]
        return bool(captures) and len(halted) == len(captures) and all(map(self._running.caught_up, halted))

    def _any_paused(self) -> bool:
        return any(self._store.paused(member.name) for member in self._running.members)

    def _report_failure(self, failed: MillstreamError) -> None:
        for stream in self._running.members:
            report = CaptureReport(state="halted", error=failed.message, hint=failed.hint)
            self._store.set_runtime(Runtime(stream.name, "", StreamState.FAILED, report.to_json()))

    # Signals

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """SIGTERM and SIGINT ask for the orderly end; a second one means now."""
        before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
        self._take_signals()
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _take_signals(self) -> None:
        for number in STOP_SIGNALS:
            signal.signal(number, self._asked_to_stop)

    def _asked_to_stop(self, number: int, frame: FrameType | None) -> None:
        if self._stop.is_set():
            raise KeyboardInterrupt
        self.stop()
