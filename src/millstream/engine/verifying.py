"""`verify`, whoever runs the home: through the process that does, or in this one if none does."""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack

from millstream.engine.answers import unpacked
from millstream.engine.faults import FaultLog
from millstream.engine.home import Home
from millstream.engine.operations import Operations
from millstream.engine.requests import request, verify_order
from millstream.engine.unknown import unknown_stream
from millstream.engine.verify_report import VerifyReport
from millstream.errors import HomeLocked
from millstream.model import Json
from millstream.observe import Observers
from millstream.state.base import StateStore

TICK = 0.05

Hear = Callable[[str], None]


def verify(
    home: Home,
    name: str,
    *,
    target: str | None,
    tables: tuple[str, ...],
    repair: bool,
    observers: Observers,
    master: str | None = None,
    conf: Mapping[str, str] | None = None,
    on_progress: Hear = lambda text: None,
) -> VerifyReport:
    """Compare a stream's targets with its source. Raises what keeps it from an answer.

    Without a process that runs the home, its capture runs here meanwhile, and the targets that are compared get what
    was committed up to then.
    """
    if not home.state_path.exists():
        raise unknown_stream(name, [], home)
    arguments: Json = {"name": name, "target": target, "tables": list(tables), "repair": repair}
    while True:
        try:
            with ExitStack() as held:
                held.enter_context(home.lock())
                store = home.open_state()
                held.callback(store.close)
                return _Alone(home, store, observers, master, conf or {}).run(arguments, on_progress)
        except HomeLocked as locked:

            def look(store: StateStore) -> None:
                on_progress(_progress(store, name))

            answer = request(home, "verify", arguments, math.inf, locked, look)
        if answer is not None:
            return VerifyReport.from_json(unpacked(answer))


class _Alone:
    """One comparison in a process that runs nothing else."""

    def __init__(
        self, home: Home, store: StateStore, observers: Observers, master: str | None, conf: Mapping[str, str]
    ) -> None:
        from millstream.engine.running import RunningStreams
        from millstream.engine.spark_use import SparkUse
        from millstream.engine.verifier import Verifier

        faults = FaultLog(store, observers)
        self._stopping = threading.Event()
        self._store = store
        self._spark = SparkUse(home, master, conf, observers)
        self._running = RunningStreams(home, store, self._spark.session, faults, stopping=self._stopping, deliver=False)
        self._operations = Operations(home, store, faults, self._running)
        self._verifier = Verifier(store, self._running, faults)

    def run(self, arguments: Json, on_progress: Hear) -> VerifyReport:
        answers: queue.Queue[Json] = queue.Queue()
        order = verify_order(self._operations, arguments, answers.put)
        try:
            self._running.put([self._operations.stream(order.stream)])
            self._running.start_captures(strict=True)
            self._running.start_ticker()
            self._verifier.submit(order)
            while answers.empty():
                self._running.raise_failure()
                for capture in self._running.captures:
                    if capture.error is not None:
                        raise capture.error
                if all(capture.ready(once=False) for capture in self._running.captures):
                    self._verifier.serve()
                on_progress(self._running.comparing(order.stream))
                self._stopping.wait(TICK)
            return VerifyReport.from_json(unpacked(answers.get()))
        finally:
            self._verifier.interrupt()
            self._running.stop()
            self._running.attempt(self._spark.stop)


def _progress(store: StateStore, stream: str) -> str:
    found = ((runtime.target, runtime.fields.get("verifying")) for runtime in store.runtimes(stream))
    return next((f"{target}: {text}" for target, text in found if text), "")
