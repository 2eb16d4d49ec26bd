"""The comparisons in a process that runs streams: asked for or on a schedule, one after another, on their own thread.

The thread asks the control to hold one target after another: its delivery ends at a batch and is not started again
before it is let go. The control never waits for a comparison, so that everything else goes on.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from millstream.engine.answers import error_answer
from millstream.engine.reload import RELOAD, is_copying
from millstream.engine.verify import Asked, TargetVerification, VerifyStopped, can_repair, check_asked
from millstream.engine.verify_report import TargetVerdict, VerifyReport
from millstream.errors import (
    ConfigError,
    MillstreamError,
    NotReady,
    NotSupported,
    RequestFailed,
    UnknownName,
    VerifyFailed,
)
from millstream.model import Json, Mode
from millstream.observe import Event, Level, Observer
from millstream.state.base import StateStore

if TYPE_CHECKING:
    from millstream.engine.running import RunningStreams

CALL_SECONDS = 0.1
SCHEDULE_SECONDS = 1.0
"""How often it is looked whether a comparison is due."""

T = TypeVar("T")


@dataclass(frozen=True)
class Order:
    """One comparison that is wanted. `done` hears the answer, as `requests` says it, on the thread or the control's."""

    stream: str
    targets: tuple[str, ...]
    asked: Asked
    done: Callable[[Json], None]
    scheduled: bool = False


class Verifier:
    """All methods are the control's."""

    def __init__(self, store: StateStore, running: RunningStreams, observer: Observer) -> None:
        self._store = store
        self._running = running
        self._observer = observer
        self._waiting: deque[Order] = deque()
        self._calls: queue.Queue[tuple[Callable[[], Any], Future[Any]]] = queue.Queue()
        self._current: Order | None = None
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._looked_at = float("-inf")
        running.on_leaving = self.interrupt

    def submit(self, order: Order) -> None:
        """Compare when what was asked for before is over."""
        self._waiting.append(order)

    def serve(self) -> None:
        """Do what the thread asks for, and begin with what waits or is due."""
        while not self._calls.empty():
            act, future = self._calls.get()
            _settle(act, future)
        if self._thread is not None and not self._thread.is_alive():
            self._thread, self._current = None, None
        self._look_at_schedule()
        if self._thread is None and self._waiting:
            order = self._waiting.popleft()
            self._current, self._stopping = order, threading.Event()
            self._thread = threading.Thread(target=self._work, args=(order, self._stopping), name="verify", daemon=True)
            self._thread.start()

    def interrupt(self, stream: str | None = None) -> None:
        """Give up the comparison of this stream, or whatever there is; returns when it has ended."""
        for order in [order for order in self._waiting if stream in (None, order.stream)]:
            self._waiting.remove(order)
            order.done(error_answer(_given_up()))
        thread = self._thread
        if thread is not None and self._current is not None and stream in (None, self._current.stream):
            self._stopping.set()
            while thread.is_alive():
                self._refuse_calls()
                thread.join(CALL_SECONDS)
            self._refuse_calls()
            self._thread, self._current = None, None

    def _refuse_calls(self) -> None:
        """The thread shall end: nothing more is held for it."""
        while not self._calls.empty():
            self._calls.get()[1].set_exception(VerifyStopped())

    def _look_at_schedule(self) -> None:
        if time.monotonic() - self._looked_at < SCHEDULE_SECONDS:
            return
        self._looked_at = time.monotonic()
        for member in self._running.members:
            every = member.spec.verify_every_ms
            known = {order.stream for order in (*self._waiting, *([self._current] if self._current else []))}
            if every is None or member.name in known or not member.ready:
                continue
            done = self._store.verifications(member.name)
            targets = [t.name for t in member.spec.targets if t.name in member.deliveries]
            copies = self._store.notes(member.name, RELOAD)
            due = tuple(n for n in targets if _is_due(done.get(n), every) and not is_copying(copies.get(n)))
            if due:
                self.submit(Order(member.name, due, Asked(), lambda _: None, scheduled=True))

    # The thread

    def _work(self, order: Order, stopping: threading.Event) -> None:
        try:
            answer: Json = {"result": self._report(order, stopping).to_json()}
        except VerifyStopped:
            answer = error_answer(_given_up())
        except MillstreamError as failed:
            answer = error_answer(failed)
        except Exception as defect:  # noqa: BLE001 - whoever asked must hear of it
            answer = error_answer(VerifyFailed(f"the comparison ended: {type(defect).__name__}"))
        order.done(answer)

    def _report(self, order: Order, stopping: threading.Event) -> VerifyReport:
        """Every target's verdict. One that cannot be compared keeps no other from it; alone it is an error.

        So is a table that no target can be asked for: the stream does not have it.
        """
        verdicts, failures = [], {}
        for target in order.targets:
            try:
                verdicts.append(self._one(order, target, stopping))
            except UnknownName:
                raise
            except MillstreamError as failed:
                if len(order.targets) == 1:
                    raise
                failures[target] = str(failed)
        return VerifyReport(order.stream, tuple(verdicts), failures)

    def _check(self, order: Order, target: str) -> Asked:
        """Refuse what cannot be before a delivery is stopped for it. Returns what is to be done.

        Where all targets are to be repaired, those that cannot be are only compared.
        """
        stream = self._running.spec(order.stream)
        spec = next((one for one in stream.targets if one.name == target), None) if stream else None
        if stream is None or spec is None:
            raise NotReady(f"stream {order.stream} with a target {target} does not run here")
        if stream.mode is Mode.SNAPSHOT:
            raise NotSupported(
                f"stream {stream.name} gets no changes: its targets cannot be brought to a position of the source",
                hint="only streams with changes can be compared",
            )
        if stream.mode is not Mode.CDC and self._store.get_cursor(stream.name, target) is None:
            raise NotReady(f"target {target} has not got its baseline yet", hint="try again when it has")
        asked = order.asked
        if is_copying(self._store.notes(stream.name, RELOAD).get(target), asked.tables):
            raise NotReady(
                f"tables are still being copied to target {target}",
                hint=f"try again when they are there: millstream status {stream.name}",
            )
        if asked.repair and len(order.targets) > 1 and not can_repair(spec):
            asked = replace(asked, repair=False)
        check_asked(spec, asked)
        return asked

    def _one(self, order: Order, target: str, stopping: threading.Event) -> TargetVerdict:
        try:
            asked = self._call(partial(self._check, order, target), stopping)
        except MillstreamError as refused:
            # Whoever asked is told; what a schedule wants in vain has to be told otherwise.
            if order.scheduled:
                self._note_failure(order.stream, target, refused)
            raise
        try:
            return self._compare(order.stream, target, asked, stopping)
        except MillstreamError as failed:
            # A table that was named wrongly says nothing of the target: what is known of it stays.
            if order.scheduled or not isinstance(failed, ConfigError):
                self._note_failure(order.stream, target, failed)
            raise

    def _compare(self, stream: str, target: str, asked: Asked, stopping: threading.Event) -> TargetVerdict:
        held = self._call(lambda: self._running.hold(stream, target), stopping)
        try:
            comparing = TargetVerification(
                held.spark,
                held.stream,
                held.target,
                held.place,
                self._store,
                self._observer,
                stopping,
                lambda text: self._running.say(stream, target, text),
            )
            verdict = comparing.run(asked)
            self._store.save_verification(stream, target, {**verdict.to_json(), "only": list(asked.tables)})
            return verdict
        finally:
            self._running.let_go(stream, target)

    def _note_failure(self, stream: str, target: str, failed: MillstreamError) -> None:
        """What could not be compared is tried again when it is due again, and not before."""
        at = datetime.now(UTC).isoformat()
        self._store.save_verification(stream, target, {"compared_at": at, "equal": None, "error": failed.message})
        fields = {"error": type(failed).__name__, "hint": failed.hint}
        self._observer.on_event(Event("verify.failed", failed.message, Level.ERROR, stream, target, fields))

    def _call(self, act: Callable[[], T], stopping: threading.Event) -> T:
        """Have the control do it."""
        future: Future[T] = Future()
        self._calls.put((act, future))
        while True:
            try:
                return future.result(timeout=CALL_SECONDS)
            except TimeoutError:
                if stopping.is_set():
                    raise VerifyStopped from None


def _settle(act: Callable[[], Any], future: Future[Any]) -> None:
    try:
        future.set_result(act())
    except Exception as failed:  # noqa: BLE001 - handed to the thread that asked
        future.set_exception(failed)


def _given_up() -> MillstreamError:
    return RequestFailed("the comparison was given up: the stream was changed, or the process ends", hint="ask again")


def _is_due(last: Json | None, every_ms: int) -> bool:
    if last is None:
        return True
    age = datetime.now(UTC) - datetime.fromisoformat(last["compared_at"])
    return age.total_seconds() * 1000 >= every_ms
