"""Runs streams: one capture per source, one Spark session, one query per stream and target.

The runner owns the order of things: cursors and journal are compared before anything is written,
capture starts while Spark does, queries start one after another, and on the way out batches are
finished, cursors saved and acknowledged before capture stops.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, NamedTuple

from millstream.config.definition import definition
from millstream.engine.captures import Capture, captures_of
from millstream.engine.delivery import DeliveryQuery
from millstream.engine.home import Home
from millstream.engine.status import CaptureReport, TargetReport
from millstream.errors import MillstreamError
from millstream.journal import JournalReader
from millstream.model import Cursor, StreamSpec, StreamState
from millstream.observe import Event, Level, Observers
from millstream.spark.probe import Needed, is_local, look_at_executors
from millstream.spark.session import active_session, build_session
from millstream.state.base import Runtime, StateStore
from millstream.targets import open_target

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
TICK = 0.1
FIRST_WORD = 3.0
PLAN_GRACE = 60.0
"""Seconds a superseded segment outlives the start of the oldest batch that may refer to it."""


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

    `master` and `conf` are Spark's, for the session that is started if the process has none. Returns
    the exit code: 0 when all is well, 1 when a stream failed. Must be called on the main thread,
    because it takes the signals.
    """
    with home.lock():
        store = home.open_state()
        try:
            return Runner(streams, home, store, once=once, master=master, observers=observers, conf=conf or {}).run()
        finally:
            store.close()


class Running(NamedTuple):
    """A delivery that was started, and what it delivers."""

    stream: StreamSpec
    target: str
    query: DeliveryQuery


class Runner:
    """One run of one process. Threads: the caller's (the loop), one per capture and query, Spark's own."""

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
        self._home = home
        self._store = store
        self._once = once
        self._master = master
        self._conf = conf
        self._observers = observers
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._captures = captures_of(streams, home, store, observers)
        self._deliveries: list[Running] = []
        self._reported_at = float("-inf")
        self._spark_is_ours = True
        """False when the caller had a session already: then it is used, and left running."""

    def run(self) -> int:
        for stream in self._streams:
            self._store.put_stream(stream.name, definition(stream))
        spark: SparkSession | None = None
        with self._signals():
            try:
                for capture in self._captures:
                    capture.check()
                for capture in self._captures:
                    capture.start()
                self._await_sources()
                found = active_session()
                spark = build_session(
                    self._home.spark_path, self._master, extra_conf=self._conf, observer=self._observers
                )
                self._spark_is_ours = found is None
                self._take_signals()  # a new Spark context has taken SIGINT for itself, to cancel jobs by it
                self._start_deliveries(spark)
                self._loop()
            except MillstreamError as failed:
                self._report_failure(failed)
                raise
            finally:
                self._shut_down(spark)
        return 1 if self._failed() else 0

    def stop(self) -> None:
        """Ask for the orderly end, as SIGTERM does. From any thread; `run` returns when it is done."""
        self._stop.set()
        self._wake.set()

    # Start

    def _await_sources(self) -> None:
        """Spark takes seconds to start: a source that is not fit is told before that."""
        deadline = time.monotonic() + FIRST_WORD
        for capture in self._captures:
            capture.await_first_word(deadline - time.monotonic())
            capture.ready(once=self._once)

    def _start_deliveries(self, spark: SparkSession) -> None:
        for capture in self._captures:
            while not capture.ready(once=self._once):
                if self._stop.wait(TICK):
                    return
                self._report(everyone=StreamState.CREATED)
            self._look_at_executors(spark, capture)
            for stream in capture.streams:
                for target in stream.targets:
                    delivery = DeliveryQuery(
                        spark,
                        stream,
                        target,
                        open_target(target),
                        capture.locations,
                        self._store,
                        self._home.checkpoint_path(stream.name, target.name),
                        self._observers,
                        once=self._once,
                        on_cursor=self._on_cursor,
                    )
                    self._deliveries.append(Running(stream, target.name, delivery))
                    delivery.start()

    def _look_at_executors(self, spark: SparkSession, capture: Capture) -> None:
        """Tell before the first batch if a cluster is not fit. On one host there is nothing that could differ."""
        if is_local(spark):
            return
        journal_id = JournalReader(capture.locations).header().journal_id
        found = look_at_executors(spark, Needed.here({tuple(capture.locations): journal_id}))
        hosts = sorted({executor.host for executor in found})
        message = f"{len(found)} executors on {', '.join(hosts)} are fit for delivery"
        fields = {"executors": len(found), "hosts": hosts}
        self._observers.on_event(Event("spark.executors_fit", message, fields=fields))

    def _on_cursor(self, cursor: Cursor) -> None:
        self._wake.set()

    # Run

    def _loop(self) -> None:
        """Acknowledge, report, look for failures, until told to stop or (once) until all is delivered."""
        while not self._stop.is_set():
            self._wake.wait(TICK)
            self._wake.clear()
            for capture in self._captures:
                capture.acknowledge()
            self._report()
            if self._over():
                return

    def _over(self) -> bool:
        if self._deliveries and all(running.query.done for running in self._deliveries):
            return True
        # A source that has halted still delivers what is in its journal; then it is over.
        halted = [capture for capture in self._captures if capture.error is not None]
        return len(halted) == len(self._captures) and all(self._caught_up(capture) for capture in halted)

    def _caught_up(self, capture: Capture) -> bool:
        end = capture.report().source.get("seq")
        cursors = [cursor for stream in capture.streams for cursor in self._store.cursors(stream.name)]
        return all(cursor.seq >= (end or 0) for cursor in cursors)

    def _failed(self) -> bool:
        broken = any(running.query.state is StreamState.FAILED for running in self._deliveries)
        return broken or any(capture.error is not None for capture in self._captures)

    # Tell

    def _report(self, everyone: StreamState | None = None, *, now_or_never: bool = False) -> None:
        """Write down how things are, as often as the shortest `checkpoint_interval` says."""
        now = time.monotonic()
        if not now_or_never and now - self._reported_at < self._interval():
            return
        self._reported_at = now
        for capture in self._captures:
            report = capture.report()
            for stream in capture.streams:
                self._store.set_runtime(
                    Runtime(stream.name, "", everyone or self._stream_state(stream, report), report.to_json())
                )
            if capture.started:
                capture.retain()
            planned = [
                running.query.planning_since for running in self._deliveries if running.stream in capture.streams
            ]
            if planned:
                capture.release(min(planned) - PLAN_GRACE)
        for running in self._deliveries:
            self._report_target(running, everyone)

    def _report_target(self, running: Running, state: StreamState | None) -> None:
        said, error = running.query.status(), running.query.error
        report = TargetReport(
            events=said["events"],
            bytes=said["bytes"],
            batches=said["batches"],
            retrying=said["retrying"],
            error=error.message if error else None,
            hint=error.hint if error else None,
        )
        failed = running.query.state is StreamState.FAILED
        shown = running.query.state if failed or state is None else state
        self._store.set_runtime(Runtime(running.stream.name, running.target, shown, report.to_json()))

    def _stream_state(self, stream: StreamSpec, report: CaptureReport) -> StreamState:
        if report.state == "halted":
            return StreamState.FAILED
        states = [running.query.state for running in self._deliveries if running.stream is stream]
        if StreamState.FAILED in states:
            return StreamState.FAILED
        end = report.source.get("seq")
        cursors = self._store.cursors(stream.name)
        behind = end is not None and any(cursor.seq < end for cursor in cursors)
        return StreamState.CATCHING_UP if behind or not states else StreamState.RUNNING

    def _interval(self) -> float:
        return min(stream.checkpoint_interval_ms for stream in self._streams) / 1000

    def _report_failure(self, failed: MillstreamError) -> None:
        for stream in self._streams:
            report = CaptureReport(state="halted", error=failed.message, hint=failed.hint)
            self._store.set_runtime(Runtime(stream.name, "", StreamState.FAILED, report.to_json()))

    # End

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

    def _shut_down(self, spark: SparkSession | None) -> None:
        """Finish batches, acknowledge what they delivered, stop capture, stop Spark."""
        steps: list[Callable[[], None]] = [running.query.stop for running in self._deliveries]
        steps += [self._last_words]
        steps += [capture.stop for capture in self._captures]
        steps += [spark.stop] if spark is not None and self._spark_is_ours else []
        for step in steps:
            try:
                step()
            except Exception as broken:  # noqa: BLE001 - each step must be tried; exactness rests on none of them
                what = f"a step of the orderly end failed: {type(broken).__name__}"
                self._observers.on_event(Event("run.stop_failed", what, Level.WARNING))

    def _last_words(self) -> None:
        if all(capture.started for capture in self._captures):
            for capture in self._captures:
                capture.acknowledge()
            self._report(None if self._failed() else StreamState.STOPPED, now_or_never=True)
