"""The capture process: `python -m millstream.engine.capture_process`. Neither Spark nor pandas is in it.

Lines of JSON in both directions. The first line of stdin is a `CaptureOrder`; later ones are (any of them)
`{"ack": position, "planned_before": unix time, "lowest": seq, "delivered": seq, "stop": true}`. The end of stdin means
that the engine is gone: whatever is whole is committed, and the process ends. Stdout has
`{"event": {...}}` and `{"status": {...}}`. SIGTERM is a clean stop; SIGINT is the engine's affair.
"""

from __future__ import annotations

import gc
import json
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any, TextIO

import numpy.ma  # noqa: F401 - `numpy.unique` would import it, in the middle of the first rows

from millstream.engine.capture_order import HALTED, STOPPED, TRANSIENT, CaptureOrder, Control
from millstream.errors import JournalLocked, MillstreamError
from millstream.memory import keep_freed, use_small_pages
from millstream.model import Json
from millstream.observe import Event, Level, counted

CRASHED = 1
STATUS_SECONDS = 0.25
"""The shortest time between two statuses of the same state."""
KEPT_EVENTS = 1000
"""So many events wait for an engine that does not read; older ones are dropped, and counted."""
LAST_WORDS_SECONDS = 2.0
KEPT_BYTES = 32 << 20
"""Memory that was freed and is kept for the next rows."""


class Voice:
    """Writes lines on a thread of its own, so that an engine that does not read never stops capture."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._changed = threading.Condition()
        self._events: deque[Event] = deque()
        self._status: Json | None = None
        self._said_state: Any = None
        self._dropped = 0
        self._closing = False
        self._thread = threading.Thread(target=self._speak, name="voice", daemon=True)
        self._thread.start()

    def event(self, event: Event) -> None:
        with self._changed:
            if len(self._events) >= KEPT_EVENTS:
                self._events.popleft()
                self._dropped += 1
            self._events.append(event)
            self._changed.notify()

    def status(self, status: Json) -> None:
        """Only the latest counts."""
        with self._changed:
            before, self._status = self._status, status
            # Else the thread is awake or has a time to wake up at: to wake it for each block costs both threads.
            if before is None or status.get("state") != before.get("state"):
                self._changed.notify()

    def close(self) -> None:
        """Say what is left, as long as somebody listens."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(LAST_WORDS_SECONDS)

    def _speak(self) -> None:
        spoke_at = float("-inf")
        while True:
            with self._changed:
                while not self._ready(spoke_at):
                    soon = spoke_at + STATUS_SECONDS - time.monotonic() if self._status is not None else None
                    self._changed.wait(soon)
                if self._closing and not self._events and self._status is None:
                    return
                events, self._events = list(self._events), deque()
                dropped, self._dropped = self._dropped, 0
                status, self._status = self._status, None
            if dropped:
                events.insert(
                    0, Event("capture.events_dropped", f"{counted(dropped, 'event')} not heard", Level.WARNING)
                )
            lines = [{"event": _plain(event)} for event in events]
            if status is not None:
                lines.append({"status": status})
                spoke_at, self._said_state = time.monotonic(), status.get("state")
            try:
                self._out.write("".join(json.dumps(line, default=str) + "\n" for line in lines))
                self._out.flush()
            except OSError:  # the engine is gone; the end of stdin says so too
                return

    def _ready(self, spoke_at: float) -> bool:
        if self._events or self._closing:
            return True
        if self._status is None:
            return False
        changed = self._status.get("state") != self._said_state
        return changed or time.monotonic() - spoke_at >= STATUS_SECONDS


class NoPandas:
    """An import finder that refuses pandas.

    pyarrow imports it at the first `pa.array` if it can, which costs 40 MB and half a second for nothing.
    """

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == "pandas":
            raise ModuleNotFoundError("pandas is not used in the capture process", name=name)


def listen(lines: Iterable[str], control: Control) -> None:
    """Take what the engine says until it says no more; then stop."""
    try:
        for line in lines:
            said = json.loads(line)
            if said.get("ack") is not None:
                control.ack = max(control.ack or 0, int(said["ack"]))
            if said.get("planned_before") is not None:
                control.planned_before = float(said["planned_before"])
            if said.get("lowest") is not None:
                control.lowest = int(said["lowest"])
            if said.get("delivered") is not None:
                control.delivered = int(said["delivered"])
            if said.get("stop"):
                break
    finally:
        control.stopping.set()


def main() -> int:
    """Run until told to stop. Returns the exit code (see `capture_order`)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control = Control()
    signal.signal(signal.SIGTERM, lambda _signal, _frame: control.stopping.set())
    order = CaptureOrder.from_json(json.loads(sys.stdin.readline()))
    threading.Thread(target=listen, args=(sys.stdin, control), name="listen", daemon=True).start()
    voice = Voice(sys.stdout)
    try:
        return _run(order, control, voice)
    finally:
        voice.close()


def _capture(order: CaptureOrder, control: Control, voice: Voice) -> None:
    sys.meta_path.insert(0, NoPandas())
    keep_freed(KEPT_BYTES)
    use_small_pages()
    from millstream.engine.capture_loop import CaptureLoop
    from millstream.sources import open_source

    loop = CaptureLoop(order, lambda tell: open_source(order.source, order.journal / "spool", tell), control, voice)
    # Columns come and go, and let the collector look for garbage: not through all that was imported, each time.
    gc.collect()
    gc.freeze()
    loop.run()


def _run(order: CaptureOrder, control: Control, voice: Voice) -> int:
    try:
        _capture(order, control, voice)
    except MillstreamError as error:
        passes = error.transient or isinstance(error, JournalLocked)
        voice.event(
            Event(
                "capture.failed" if passes else "capture.halted",
                error.message,
                Level.ERROR,
                fields={"source": order.source.name, "error": type(error).__name__, "hint": error.hint},
            )
        )
        return TRANSIENT if passes else HALTED
    except Exception as error:  # noqa: BLE001 - told and passed on as an exit code, without what may quote a row
        where = traceback.extract_tb(error.__traceback__)
        last = where[-1]
        sys.stderr.write("".join(traceback.format_list(where)) + f"{type(error).__name__}\n")
        voice.event(
            Event(
                "capture.crashed",
                f"{type(error).__name__} in {last.name}, line {last.lineno} of {last.filename}",
                Level.ERROR,
                fields={"source": order.source.name, "error": type(error).__name__},
            )
        )
        return CRASHED
    voice.event(Event("capture.stopped", "capture stopped", fields={"source": order.source.name}))
    return STOPPED


def _plain(event: Event) -> Json:
    return {**asdict(event), "level": int(event.level), "at": event.at.isoformat()}


if __name__ == "__main__":
    sys.exit(main())
