"""The snapshots in a process that runs streams: asked for or on a schedule, one after another, on their own thread.

Delivery goes on meanwhile. Where a target can only be read while nobody writes it, its batches wait; those of the
other targets do not.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from millstream.config.kinds import KEPT
from millstream.engine.answers import error_answer
from millstream.engine.home import Home
from millstream.engine.snapshots import take
from millstream.errors import MillstreamError, NotReady, RequestFailed, SnapshotError
from millstream.model import Json, StreamSpec, TargetSpec
from millstream.observe import Event, Level, Observer, counted
from millstream.snapshots import SNAPSHOT
from millstream.snapshots.taking import TakingStopped
from millstream.state.base import StateStore

if TYPE_CHECKING:
    from millstream.engine.delivery import DeliveryQuery
    from millstream.engine.members import Member
    from millstream.engine.running import RunningStreams

SCHEDULE_SECONDS = 1.0
"""How often it is looked whether a snapshot is due."""


@dataclass(frozen=True)
class Order:
    """Snapshots that are wanted. `done` hears the answer, as `requests` says it, on the thread or the control's."""

    stream: StreamSpec
    targets: tuple[TargetSpec, ...]
    done: Callable[[Json], None]
    path: str | None = None
    format: str | None = None
    scheduled: bool = False


def take_all(
    home: Home,
    store: StateStore,
    observer: Observer,
    order: Order,
    stopping: threading.Event,
    aside: Callable[[str], AbstractContextManager[None] | None] = lambda target: None,
) -> Json:
    """Take the snapshots that are wanted. Of several targets one that fails keeps no other from it; alone it raises."""
    found, failures = [], {}
    for target in order.targets:
        try:
            found.append(_take(home, store, observer, order, target, stopping, aside(target.name)))
        except MillstreamError as failed:
            if len(order.targets) == 1:
                raise
            failures[target.name] = str(failed)
    return {"snapshots": found, "failed": failures}


def _take(
    home: Home,
    store: StateStore,
    observer: Observer,
    order: Order,
    target: TargetSpec,
    stopping: threading.Event,
    aside: AbstractContextManager[None] | None,
) -> Json:
    stream, at = order.stream, datetime.now(UTC).isoformat()
    try:
        snapshot = take(
            home, store, stream, target, path=order.path, format=order.format, stopping=stopping, aside=aside
        )
    except MillstreamError as failed:
        # What a schedule wants in vain is wanted again when the next one is due, and not before.
        store.save_note(stream.name, target.name, SNAPSHOT, {"at": at, "error": failed.message})
        if not (order.scheduled and isinstance(failed, NotReady)):
            fields = {"error": type(failed).__name__, "hint": failed.hint}
            event = Event("target.snapshot_failed", failed.message, Level.ERROR, stream.name, target.name, fields)
            observer.on_event(event)
        raise
    told = {"id": snapshot.id, "seq": snapshot.seq, "position": snapshot.position_text, "rows": snapshot.rows}
    store.save_note(stream.name, target.name, SNAPSHOT, {**told, "at": at, "error": None})
    message = (
        f"snapshot {snapshot.id}: {counted(snapshot.rows, 'row')} at seq {snapshot.seq} in {snapshot.seconds:.1f} s"
    )
    observer.on_event(Event("target.snapshot_taken", message, Level.INFO, stream.name, target.name, told))
    return snapshot.to_json()


class Snapshotter:
    """All methods are the control's."""

    def __init__(self, home: Home, store: StateStore, running: RunningStreams, observer: Observer) -> None:
        self._home = home
        self._store = store
        self._running = running
        self._observer = observer
        self._waiting: deque[Order] = deque()
        self._thread: threading.Thread | None = None
        self._busy = ""
        self._stopping = threading.Event()
        self._looked_at = float("-inf")

    def submit(self, order: Order) -> None:
        """Take them when what was asked for before is over."""
        self._waiting.append(order)

    def serve(self) -> None:
        """Begin with what waits or is due."""
        if self._thread is not None and not self._thread.is_alive():
            self._thread, self._busy = None, ""
        self._look_at_schedule()
        if self._thread is None and self._waiting:
            order = self._waiting.popleft()
            self._busy = order.stream.name
            self._thread = threading.Thread(target=self._work, args=(order,), name="snapshots", daemon=True)
            self._thread.start()

    def interrupt(self) -> None:
        """Give up whatever there is; returns when it has ended. Nothing is taken any more."""
        self._stopping.set()
        for order in self._waiting:
            order.done(error_answer(_given_up()))
        self._waiting.clear()
        if self._thread is not None:
            self._thread.join()

    def _look_at_schedule(self) -> None:
        if time.monotonic() - self._looked_at < SCHEDULE_SECONDS:
            return
        self._looked_at = time.monotonic()
        known = {self._busy, *(order.stream.name for order in self._waiting)}
        for member in self._running.members:
            due = self._due(member) if member.name not in known else ()
            if due:
                self.submit(Order(member.spec, due, lambda _: None, scheduled=True))

    def _due(self, member: Member) -> tuple[TargetSpec, ...]:
        """The targets that deliver, and have something since the last snapshot, which was long enough ago."""
        rules = member.spec.snapshots
        if rules is None or rules.every_ms is None or not member.ready:
            return ()
        last = self._store.notes(member.name, SNAPSHOT)
        able = [one for one in member.spec.targets if one.kind in KEPT and one.name in member.deliveries]
        return tuple(one for one in able if self._is_due(member.name, one.name, last.get(one.name), rules.every_ms))

    def _is_due(self, stream: str, target: str, last: Json | None, every_ms: int) -> bool:
        cursor = self._store.get_cursor(stream, target)
        if cursor is None:
            return False
        if last is None:
            return True
        age = datetime.now(UTC) - datetime.fromisoformat(last["at"])
        return last.get("seq") != cursor.seq and age.total_seconds() * 1000 >= every_ms

    # The thread

    def _work(self, order: Order) -> None:
        def aside(target: str) -> AbstractContextManager[None] | None:
            member = next((one for one in self._running.members if one.name == order.stream.name), None)
            delivery = member.deliveries.get(target) if member is not None else None
            return self._turn(delivery.query) if delivery is not None else None

        try:
            taken = take_all(self._home, self._store, self._observer, order, self._stopping, aside)
            answer: Json = {"result": taken}
        except TakingStopped:
            answer = error_answer(_given_up())
        except MillstreamError as failed:
            answer = error_answer(failed)
        except Exception as defect:  # noqa: BLE001 - whoever asked must hear of it
            answer = error_answer(SnapshotError(f"the snapshot ended: {type(defect).__name__}"))
        order.done(answer)

    @contextmanager
    def _turn(self, query: DeliveryQuery) -> Iterator[None]:
        """Have the target for a while, as a batch of its delivery has."""
        with query.turns.taken(self._stopping) as mine:
            if not mine:
                raise TakingStopped
            yield


def _given_up() -> MillstreamError:
    return RequestFailed("the snapshot was given up: the process ends", hint="ask again")
