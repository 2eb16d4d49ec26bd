"""`Engine`: streams managed from Python. No stream file and no server is needed."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from datetime import datetime
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

from millstream.config.definition import from_definition
from millstream.engine.answers import unpacked
from millstream.engine.engine_letters import EngineLetters
from millstream.engine.engine_snapshots import EngineSnapshots
from millstream.engine.faults import FaultLog
from millstream.engine.home import Home
from millstream.engine.operations import Operations
from millstream.engine.reload import AskedTables
from millstream.engine.replay import Asked, Place
from millstream.engine.requests import RequestDesk, as_arguments, ask, verify_order
from millstream.engine.status import home_status
from millstream.engine.stream_status import StreamStatus
from millstream.engine.verify_report import VerifyReport
from millstream.errors import MillstreamError, NotReady, RequestFailed
from millstream.model import Json, StreamSpec, StreamState
from millstream.observe import Event, Level, Observer, Observers

if TYPE_CHECKING:
    # These bring Spark with them, which an engine that is not started does not need.
    from millstream.engine.running import RunningStreams
    from millstream.engine.snapshotter import Snapshotter
    from millstream.engine.spark_use import SparkUse
    from millstream.engine.verifier import Verifier
    from millstream.registry.ddl import DdlEvent

READY = (StreamState.CATCHING_UP, StreamState.RUNNING)
LOOK_SECONDS = 0.05
TICK = 0.1

Job = tuple[Callable[[], Any], "Future[Any]"]
T = TypeVar("T")


class Engine(EngineLetters, EngineSnapshots):
    """The streams of a home. Implements `Replicator`; a context manager that starts and stops.

    Started, it runs every stream of the home, in this process. Not started, it manages them all the
    same: through the process that runs the home, or by changing the home's state if none does.

    Every method may be called from any thread; from an observer only those that read.
    """

    kind = "millstream"

    def __init__(
        self,
        home: Home | Path | str,
        *,
        observer: Observer | None = None,
        master: str | None = None,
        conf: Mapping[str, str] | None = None,
    ) -> None:
        """`master` and `conf` are Spark's, for the session that is started if the process has none."""
        self._home = home if isinstance(home, Home) else Home(home)
        self._observers = Observers([observer] if observer is not None else [])
        self._master = master
        self._conf = dict(conf or {})
        self._jobs: queue.Queue[Job] = queue.Queue()
        self._stopping = threading.Event()
        self._held: ExitStack | None = None
        self._thread: threading.Thread | None = None
        self._operations: Operations | None = None
        self._verifier: Verifier | None = None
        self._snapshotter: Snapshotter | None = None
        self.failure: Exception | None = None
        """Why the engine stopped by itself, if it did."""

    # Life

    @property
    def home(self) -> Home:
        return self._home

    @property
    def is_running(self) -> bool:
        """Whether this process runs the streams of the home."""
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        """Run the streams of the home from now on. Raises HomeLocked, which names the process that does already."""
        from millstream.engine.running import RunningStreams
        from millstream.engine.snapshotter import Snapshotter
        from millstream.engine.spark_use import SparkUse
        from millstream.engine.verifier import Verifier

        if self.is_running:
            return
        self._held, self._thread, self.failure = ExitStack(), None, None
        try:
            self._held.enter_context(self._home.lock())
            store = self._home.open_state()
            self._held.callback(store.close)
            faults = FaultLog(store, self._observers)
            spark = SparkUse(self._home, self._master, self._conf, self._observers)
            running = RunningStreams(self._home, store, spark.session, faults, stopping=self._stopping)
            operations = Operations(self._home, store, faults, running)
            verifier = Verifier(store, running, faults)
            snapshotter = Snapshotter(self._home, store, running, faults)
        except BaseException:
            self._held.close()
            raise
        self._stopping.clear()
        self._operations, self._verifier, self._snapshotter = operations, verifier, snapshotter
        arguments = (
            running,
            operations,
            spark,
            verifier,
            snapshotter,
            RequestDesk(store, operations, verifier, snapshotter),
        )
        self._thread = threading.Thread(target=self._control, args=arguments, name="engine", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Finish the batches at hand, save and acknowledge them, and let go of the home. Idempotent."""
        thread = self._thread
        if thread is not None:
            self._stopping.set()
            thread.join()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    # Replicator

    def upsert_stream(self, stream: StreamSpec) -> None:
        """Create the stream, or replace the one of its name: then it goes on from its checkpoints.

        Raises ConfigError. A password in the URI stays in this process: a started engine only.
        """
        self.upsert_streams([stream])

    def upsert_streams(self, streams: Sequence[StreamSpec]) -> None:
        """As `upsert_stream`, for several at once: all are checked before the first is written."""
        if self.is_running:
            self._do(lambda operations: operations.upsert(streams))
        else:
            self._ask("upsert", as_arguments(streams))

    def delete_stream(self, name: str, *, keep_slot: bool = False, keep_target: bool = False) -> Json:
        """Remove a stream: its deliveries, checkpoints and state and, unless another stream is on its source, the
        slot, the publications and the journal. What was delivered stays.

        `keep_slot` leaves what captures the source. `keep_target` does not tell the targets, so that a
        stream of the same name may go on there. Returns what became of `source` and `targets`.
        """
        if self.is_running:
            keep = {"keep_slot": keep_slot, "keep_target": keep_target}
            return self._do_later(lambda operations: operations.delete(name, **keep))
        return self._ask("delete", {"name": name, "keep_slot": keep_slot, "keep_target": keep_target})

    def list_streams(self) -> list[StreamSpec]:
        """Every stream of the home, by name; one that is being deleted too. No password is in them."""
        with self._reading() as store:
            names = store.list_streams() if store is not None else []
            return [from_definition(store.get_stream(name) or {}) for name in names] if store is not None else []

    def get_status(self, name: str) -> StreamStatus:
        """How one stream is. It asks no process, so a dead one cannot give a wrong answer."""
        (status,) = home_status(self._home, name).streams
        return status

    def pause(self, name: str, target: str | None = None) -> None:
        """Deliver no more to the stream's targets, or to one of them. Idempotent, and kept over restarts.

        Returns when the batch at hand has ended. The source is captured on: nothing is lost.
        """
        if self.is_running:
            self._do_later(lambda operations: operations.pause(name, target))
        else:
            self._ask("pause", {"name": name, "target": target})

    def resume(self, name: str, target: str | None = None) -> None:
        """Go on from the checkpoints. What has failed for good is given another try. Idempotent."""
        if self.is_running:
            self._do(lambda operations: operations.resume(name, target))
        else:
            self._ask("resume", {"name": name, "target": target})

    def replay(
        self,
        name: str,
        start: Place,
        target: str | None = None,
        *,
        tables: Sequence[str] = (),
        until: datetime | int | str | None = None,
    ) -> None:
        """Deliver once more, out of the journal, what a target, or each of them, has had from `start` on.

        `start` is a checkpoint, a commit time, the seq of a change or a position of the source (text); transactions
        come whole. A mirror gets what it lacks; a changelog gets the changes again, marked with the new epoch; `files`
        get their batches anew, in the place of the old ones. `until` and `tables` (as `schema.table`) leave the rest
        out. Returns when it is written down: status tells how far it is. Raises NotSupported (`until` at a mirror),
        ConfigError, NotReady, and OutOfRange, which names the earliest change there is.
        """
        asked = Asked(start, until, tuple(tables))
        if self.is_running:
            self._do_later(lambda operations: operations.replay(name, asked, target))
        else:
            self._ask("replay", {"name": name, "asked": asked.to_json(), "target": target})

    # Beyond it

    def reload(
        self, name: str, target: str | None = None, *, tables: Sequence[str] = (), where: str | None = None
    ) -> None:
        """Copy tables of the source anew to a target, or to each of them, while changes go on coming to all tables.

        `tables` are names as `schema.table`; none means all. Mirrors end equal to the source: rows that it does not
        have go. Changelogs get a truncate and then all rows. `where` is a condition on the key of one table: mirrors
        get that range of it anew, and nothing else of it is touched. Returns when it is written down: status tells how
        far it is. Raises NotReady for a target that has nothing yet, or that has lost changes of more tables than
        these, NotSupported and ConfigError.
        """
        asked = AskedTables(tuple(tables), where=where)
        if self.is_running:
            self._do_later(lambda operations: operations.reload(name, asked, target))
        else:
            self._ask("reload", {"name": name, "asked": asked.to_json(), "target": target})

    def verify(
        self, name: str, target: str | None = None, *, tables: Sequence[str] = (), repair: bool = False
    ) -> VerifyReport:
        """Compare what the stream's targets, or one of them, hold with the source, at an exact position of both.

        A target that is compared gets nothing meanwhile, the others flow on. `tables` are names as `schema.table`;
        none means all. `repair` writes the rows that differ once more. Raises NotReady for a paused target,
        NotSupported for one whose rows cannot be told, VerifyFailed when there is no answer.
        """
        from millstream.engine.verifying import verify

        arguments = {"name": name, "target": target, "tables": list(tables), "repair": repair}
        if not self.is_running:
            return verify(
                self._home,
                name,
                target=target,
                tables=tuple(tables),
                repair=repair,
                observers=self._observers,
                master=self._master,
                conf=self._conf,
            )
        answers: queue.Queue[Json] = queue.Queue()
        verifier = self._verifier

        def begin(operations: Operations) -> None:
            if verifier is not None:
                verifier.submit(verify_order(operations, arguments, answers.put))

        self._do(begin)
        while True:
            try:
                return VerifyReport.from_json(unpacked(answers.get(timeout=1.0)))
            except queue.Empty:
                if not self.is_running:
                    raise RequestFailed("the engine has stopped") from None

    def await_ready(self, name: str, timeout: float = 60.0) -> StreamStatus:
        """Wait until what is committed from now on will be delivered to every target that is not paused.

        Of a stream with mode snapshot: until every target has its copy.

        Raises NotReady when time runs out, and at once when the stream, or a target of it, has failed.
        """
        deadline, pause = time.monotonic() + timeout, threading.Event()
        while True:
            if self.failure is not None:
                raise self.failure
            (status,) = home_status(self._home, name, table_lags=False).streams
            delivers = all(target.state in (*READY, StreamState.PAUSED) for target in status.targets)
            if status.state in READY and delivers and status.source.state == "running":
                return status
            if status.state is StreamState.COMPLETE:
                return status
            failed = [(f"target {t.name}", t.error, t.hint) for t in status.targets]
            failed += [(f"source {status.source.name}", status.source.error, status.source.hint)]
            if status.state is StreamState.FAILED or any(t.state is StreamState.NEEDS_RELOAD for t in status.targets):
                who, error, hint = next((one for one in failed if one[1]), ("stream", "failed", None))
                raise NotReady(f"stream {name} has failed: {who}: {error}", hint=hint)
            if status.state is StreamState.PAUSED:
                raise NotReady(f"stream {name} is paused", hint=f"resume it: millstream resume {name}")
            if time.monotonic() >= deadline:
                waits = "; ".join(f"{who}: {error}" for who, error, _ in failed if error)
                waits = waits or f"capture is {status.source.state}"
                raise NotReady(f"stream {name} is {status.state.value} after {timeout:g} s: {waits}")
            pause.wait(LOOK_SECONDS)

    def ddl_events(self, name: str) -> list[DdlEvent]:
        """The schema changes of a stream's tables, oldest first, with what was decided. Raises UnknownStream."""
        from millstream.engine.ddl import events_of

        self.get_status(name)
        with self._reading() as store:
            if store is None:
                return []
            return events_of(self._home, store, from_definition(store.get_stream(name) or {}))

    def ddl_event(self, name: str, id: int | str) -> DdlEvent:
        """One of them. Raises UnknownName if there is none."""
        from millstream.engine.ddl import one_of

        return one_of(self.ddl_events(name), name, id)

    def decide_ddl(self, name: str, id: int | str, *, approved: bool) -> DdlEvent:
        """Approve a schema change, so that it is delivered, or reject it. May be said again, and otherwise."""
        if self.is_running:
            self._do(lambda operations: operations.decide_ddl(name, id, approved=approved))
        else:
            self._ask("decide_ddl", {"name": name, "id": id, "approved": approved})
        return self.ddl_event(name, id)

    # The control thread

    def _control(
        self,
        running: RunningStreams,
        operations: Operations,
        spark: SparkUse,
        verifier: Verifier,
        snapshotter: Snapshotter,
        desk: RequestDesk,
    ) -> None:
        held = self._held
        try:
            operations.finish_deletions()
            running.put(operations.streams())
            running.start_ticker()
            while not self._stopping.is_set():
                running.raise_failure()
                running.advance()
                desk.serve()
                self._take_job()
        except Exception as failed:  # noqa: BLE001 - kept for whoever asks, and told
            self.failure = failed
            what = failed.message if isinstance(failed, MillstreamError) else type(failed).__name__
            self._observers.on_event(Event("engine.failed", f"the engine stops: {what}", Level.ERROR))
        finally:
            running.attempt(verifier.interrupt)
            running.attempt(snapshotter.interrupt)
            running.stop()
            running.attempt(spark.stop)
            if held is not None:
                running.attempt(held.close)
            self._refuse_jobs()

    def _take_job(self) -> None:
        try:
            act, future = self._jobs.get(timeout=TICK)
        except queue.Empty:
            return
        try:
            result = act()
        except Exception as failed:  # noqa: BLE001 - handed to whoever asked
            future.set_exception(failed)
            return
        if isinstance(result, Future):
            result.add_done_callback(partial(_hand_on, future))
        else:
            future.set_result(result)

    def _refuse_jobs(self) -> None:
        while not self._jobs.empty():
            self._jobs.get()[1].set_exception(RequestFailed("the engine has stopped"))

    def _do_later(self, act: Callable[[Operations], Future[T]]) -> T:
        """Have the control begin something, and wait for its end."""
        # Who takes it up waits for such a result, and hands it on.
        return cast(T, self._do(act))

    def _do(self, act: Callable[[Operations], T]) -> T:
        """Have the control do something, and wait for it."""
        operations, thread = self._operations, self._thread
        if operations is None or thread is None:
            raise RequestFailed("the engine was not started")
        future: Future[T] = Future()
        self._jobs.put((lambda: act(operations), future))
        while thread.is_alive() or future.done():
            try:
                return future.result(timeout=1.0)
            except TimeoutError:
                continue
        raise RequestFailed("the engine has stopped")

    def _ask(self, verb: str, arguments: Json) -> Json:
        return ask(self._home, verb, arguments, self._observers)


def _hand_on(future: Future[Any], done: Future[Any]) -> None:
    """Give what came of something to whoever waits for it."""
    failed = done.exception()
    if failed is None:
        future.set_result(done.result())
    else:
        future.set_exception(failed)
