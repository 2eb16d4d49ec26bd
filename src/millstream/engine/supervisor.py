"""The engine's side of a capture process: starts it, hears it, starts it again.

The process leads a session of its own, so that Ctrl-C at the terminal reaches the engine alone,
which then stops capture in its order. When the engine dies, the end of its pipe stops capture.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import IO, Any

from millstream.engine.backoff import Backoff
from millstream.engine.capture_order import HALTED, STOPPED, CaptureOrder
from millstream.errors import MillstreamError, SourceHalted
from millstream.memory import arrow_environment
from millstream.model import Json
from millstream.observe import Event, Level, Observer

HEALTHY_SECONDS = 30.0
"""A process that ran this long makes the next failure count as the first."""


class Supervisor:
    """Keeps one capture process running. Its own thread; every method may be called from any other.

    `state` is starting, running, waiting (between two attempts, or for the source), halted or
    stopped. A halt is final: `error` says why, and only a new supervisor starts again.
    """

    def __init__(self, order: CaptureOrder, observer: Observer) -> None:
        self._order = order
        self._observer = observer
        self._changed = threading.Condition()
        self._process: subprocess.Popen[str] | None = None
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._ack: int | None = None
        self._planned_before: float | None = None
        self._lowest: int | None = None
        self._delivered: int | None = None
        self._state = "stopped"
        self._status: Json = {}
        self._error: MillstreamError | None = None
        self._restarts = 0
        self._first_end: int | None = None
        self._progressed = False

    # -- what the engine asks ----------------------------------------------------------------

    def start(self) -> None:
        """Start the process and watch it. Returns at once."""
        with self._changed:
            if self._thread is not None:
                raise RuntimeError("a supervisor is started once")
            self._state = "starting"
            self._thread = threading.Thread(target=self._watch, name=f"capture {self._order.source.name}", daemon=True)
        self._thread.start()

    def send_ack(self, position: int) -> None:
        """Everything up to `position` is delivered; the source need not send it again."""
        with self._changed:
            if self._ack is not None and position <= self._ack:
                return
            self._ack = position
            self._say({"ack": position})

    def send_planned_before(self, unix: float) -> None:
        """No running batch was planned before this time: what was superseded then can go."""
        with self._changed:
            self._planned_before = unix
            self._say({"planned_before": unix})

    def send_needs(self, lowest: int, delivered: int) -> None:
        """No target needs anything up to `lowest`: retention may remove it. All have the changes up to `delivered`."""
        with self._changed:
            if (self._lowest, self._delivered) != (lowest, delivered):
                self._lowest, self._delivered = lowest, delivered
                self._say({"lowest": lowest, "delivered": delivered})

    def stop(self, timeout: float = 30.0) -> None:
        """Stop cleanly and wait; kill the process if it takes longer than `timeout` seconds."""
        with self._changed:
            self._stopping = True
            self._say({"stop": True})
            self._changed.notify_all()
            thread = self._thread
        if thread is None:
            return
        thread.join(timeout)
        process = self._process
        if thread.is_alive() and process is not None:
            process.kill()
            self._tell(Event("capture.killed", f"capture did not stop within {timeout:g} s", Level.WARNING))
        thread.join()

    def wait_for(self, predicate: Callable[[Supervisor], bool], timeout: float) -> bool:
        """Wait until the predicate holds; it is asked at every status, event and change of state."""
        deadline = time.monotonic() + timeout
        with self._changed:
            while not predicate(self):
                if not self._changed.wait(deadline - time.monotonic()) and time.monotonic() >= deadline:
                    return predicate(self)
        return True

    @property
    def state(self) -> str:
        return self._state

    @property
    def last_status(self) -> Json:
        """What the process last said of itself; empty before its first word."""
        return self._status

    @property
    def error(self) -> MillstreamError | None:
        """Why capture halted, or what the last attempt failed with; None while all is well."""
        return self._error

    @property
    def restarts(self) -> int:
        return self._restarts

    @property
    def pid(self) -> int | None:
        """The process id, while one runs."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else None

    # -- the thread --------------------------------------------------------------------------

    def _watch(self) -> None:
        backoff = Backoff()
        while True:
            started = time.monotonic()
            code = self._run_once()
            if code in (HALTED, STOPPED):
                break
            if self._progressed or time.monotonic() - started >= HEALTHY_SECONDS:
                backoff.reset()
            if not self._rest(code, backoff.next()):
                break
        with self._changed:
            self._set_state("halted" if code == HALTED else "stopped")

    def _run_once(self) -> int:
        process = start_process()
        with self._changed:
            self._process = process
            self._first_end, self._progressed = None, False
            self._say(self._order.to_json())
            said = {"ack": self._ack, "planned_before": self._planned_before}
            needs = {"lowest": self._lowest, "delivered": self._delivered}
            self._say({**said, **needs, "stop": self._stopping})
        try:
            assert process.stdout is not None  # noqa: S101
            self._hear(process.stdout)
            return process.wait()
        finally:
            with self._changed:
                self._process = None
            _close(process)

    def _hear(self, lines: IO[str]) -> None:
        for line in lines:
            try:
                said = json.loads(line)
            except ValueError:  # the last line of a killed process can be torn
                continue
            if "event" in said:
                event = _event(said["event"])
                self._note(event)
                self._tell(event)
            if "status" in said:
                with self._changed:
                    self._status = said["status"]
                    self._note_progress()
                    self._set_state("running" if self._status.get("state") == "running" else self._waiting())
            with self._changed:
                self._changed.notify_all()

    def _note_progress(self) -> None:
        """A process that brought the journal on was healthy, however soon it ended."""
        end = self._status.get("end")
        if self._first_end is None:
            self._first_end = end
        elif end is not None and end > self._first_end:
            self._progressed = True

    def _waiting(self) -> str:
        return "starting" if self._status.get("state") == "starting" else "waiting"

    def _note(self, event: Event) -> None:
        if event.kind == "capture.running":
            self._error = None
        elif event.level >= Level.ERROR or event.kind == "capture.unavailable":
            self._error = _error(event)

    def _rest(self, code: int, seconds: float) -> bool:
        """Wait before the next attempt. False when there shall be none."""
        deadline = time.monotonic() + seconds
        with self._changed:
            if self._stopping:
                return False
            self._restarts += 1
            self._set_state("waiting")
        self._tell(
            Event(
                "capture.restarting",
                f"capture of {self._order.source.name} ended with {code}; starting again in {seconds:.1f} s",
                Level.WARNING,
                fields={"source": self._order.source.name, "code": code},
            )
        )
        with self._changed:
            while not self._stopping and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)
            if not self._stopping:
                self._set_state("starting")
            return not self._stopping

    def _set_state(self, state: str) -> None:
        self._state = state
        self._changed.notify_all()

    def _say(self, line: Json) -> None:
        process = self._process
        if process is None or process.stdin is None:
            return
        try:
            process.stdin.write(json.dumps(line) + "\n")
            process.stdin.flush()
        except (OSError, ValueError):  # it has ended, and whoever waits for it will see that
            return

    def _tell(self, event: Event) -> None:
        self._observer.on_event(event)


def start_process() -> subprocess.Popen[str]:
    """The process, which waits for its order."""
    return subprocess.Popen(
        # -P: a file in the working directory must not stand in for a module.
        [sys.executable, "-P", "-m", "millstream.engine.capture_process"],
        env={**os.environ, **arrow_environment()},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        start_new_session=True,
    )


def _close(process: subprocess.Popen[str]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            try:
                pipe.close()
            except OSError:  # what was still to be said is lost with the process
                continue


def _event(value: Mapping[str, Any]) -> Event:
    return Event(**{**value, "level": Level(value["level"]), "at": datetime.fromisoformat(value["at"])})


def _error(event: Event) -> MillstreamError:
    """The error as the process had it; a kind that is not known here halts all the same."""
    kinds = {kind.__name__: kind for kind in _all_kinds(MillstreamError)}
    kind = kinds.get(str(event.fields.get("error")), SourceHalted)
    # What the process does about it stands in the message too, and is not part of the error.
    return kind(str(event.fields.get("reason") or event.message), hint=event.fields.get("hint"))


def _all_kinds(kind: type[MillstreamError]) -> list[type[MillstreamError]]:
    return [kind, *(deeper for below in kind.__subclasses__() for deeper in _all_kinds(below))]
