"""Delivery of one stream to one target: a query of its own, with its own cursor, retries and failure.

What one batch does is in `batches`; here is what comes before the first one (a baseline, a restore, a replay), between
two queries and at the end. Truth is the target's cursor, or the state store's for a target that keeps none; Spark's
logs only schedule.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from millstream.config.kinds import is_mirror
from millstream.engine.account import Account
from millstream.engine.backoff import Backoff
from millstream.engine.baseline import Baseline
from millstream.engine.batches import Batches, CursorCallback
from millstream.engine.chunk_jobs import BaselineStopped
from millstream.engine.delivery_errors import check_spark, ended_by, is_transient, unexpected
from millstream.engine.gate import GATE_SECONDS, Gate, closing
from millstream.engine.letters import LetterBox
from millstream.engine.opening import Opened, Opening
from millstream.engine.reload import can_reload
from millstream.engine.reloading import Reloading
from millstream.engine.replaying import Replaying, ReplayStopped
from millstream.engine.retrying import Retrying
from millstream.engine.startup import Startup
from millstream.engine.turns import Turns
from millstream.engine.uncaptured import NoJournal
from millstream.errors import MillstreamError, OutOfRange
from millstream.model import Cursor, Json, Mode, StreamSpec, StreamState, TargetSpec
from millstream.observe import Event, Level, Observer
from millstream.spark.partition import cores_of
from millstream.spark.query import SliceQuery
from millstream.spark.shelf import Shelf
from millstream.spark.slices import SliceOptions
from millstream.spark.tables import OwnTables
from millstream.state.base import StateStore
from millstream.targets.base import Target
from millstream.transforms.shape import Shaping

BROKEN = (StreamState.FAILED, StreamState.NEEDS_RELOAD)
"""States that a delivery does not leave by itself."""

SETTLE_SECONDS = 10.0


class DeliveryQuery:
    """Delivers a stream's journal to one of its targets until it is stopped, fails for good, or (once) is done.

    Threads: `start`, `stop` and `wait` may be called from any; batches run on Spark's; `on_cursor`
    and the observer are called from those. `state`, `error`, `cursor` and `status()` can be read at
    any time.
    """

    def __init__(
        self,
        spark: SparkSession,
        stream: StreamSpec,
        target_spec: TargetSpec,
        target: Target,
        locations: Sequence[str],
        store: StateStore,
        checkpoint_root: Path,
        observer: Observer,
        *,
        once: bool = False,
        until: int | None = None,
        on_cursor: CursorCallback | None = None,
        tables: OwnTables | None = None,
        shelf: Shelf | None = None,
        deliveries: int = 1,
    ) -> None:
        """`until`: with `once`, the seq to end at, where a transaction ends; else the end is what is visible then.

        `shelf`: see `StagePlan`. `deliveries`: how many there are beside each other, this one included.
        """
        self._spark = spark
        self._stream = stream
        self._spec = target_spec
        self._target = target
        self._observer = observer
        self._once = once
        self._until = until
        self._deliveries = deliveries
        self._on_cursor = on_cursor
        self._store = store
        self._letters = LetterBox(store, stream, target_spec, target, self._emit)
        self._opening = self._opens(tuple(locations), checkpoint_root, tables, shelf)
        self._startup = Startup(stream, target_spec, target, store, self._opening.journal, self._emit)
        self._gate = Gate(stream, target_spec.name, locations, store, tables, reloads=can_reload(target))
        self._replaying = Replaying(stream, target_spec, target, store, self._emit)
        self._turns = Turns()
        self._reloading = Reloading(stream, target_spec, target, store, self._opening, self._turns, self._emit)
        self._reloads = False
        self.stopping = threading.Event()
        """Set once `stop` was asked for; a batch that waits then gives up."""
        self._settled = threading.Event()
        self._account = Account()
        self._retrying = Retrying(self.stopping, self._emit, once=once)
        shared = (self._turns, self._account, self._retrying, self.stopping, self._emit)
        self._batches = Batches(spark, target, self._opening, self._letters, self._gate, *shared, on_cursor)
        self._query: SliceQuery | None = None
        self._distrust: str | None = None
        self._thread = threading.Thread(
            target=self._run, name=f"delivery-{stream.name}-{target_spec.name}", daemon=True
        )
        self.state = StreamState.CREATED
        self.error: MillstreamError | None = None
        self._baseline: Baseline | None = None

    def _opens(
        self, locations: tuple[str, ...], checkpoint_root: Path, tables: OwnTables | None, shelf: Shelf | None
    ) -> Opening:
        stream = self._stream
        return Opening(
            stream.name,
            self._spec.name,
            self._target,
            locations,
            self._store,
            checkpoint_root,
            tables,
            Shaping(stream.name, stream.shape, is_mirror(self._spec)) if stream.shape else None,
            self._letters.superseded,
            NoJournal(stream.source) if stream.mode is Mode.SNAPSHOT else None,
            shelf,
        )

    # For the engine

    @property
    def cursor(self) -> Cursor | None:
        """How far this target is."""
        return self._store.get_cursor(self._stream.name, self._spec.name)

    @property
    def done(self) -> bool:
        """Whether nothing more will come: stopped, failed, or (once) everything delivered."""
        return self.state in (StreamState.STOPPED, StreamState.COMPLETE, *BROKEN)

    @property
    def planning_since(self) -> float:
        """Unix time: no slice that was planned before is in use any more."""
        return self._batches.planning_since

    @property
    def turns(self) -> Turns:
        """Whose turn it is at the target: who must have it for himself takes one."""
        return self._turns

    def status(self) -> Json:
        """What `millstream status` shows of this target."""
        cursor, opened = self.cursor, self._batches.opened
        return {
            **self._account.counts,
            "epoch": opened.epoch if opened else None,
            "seq": cursor.seq if cursor else None,
            "last_event": cursor.commit_ts.isoformat() if cursor and cursor.commit_ts else None,
            "retrying": self._retrying.why,
            "snapshot": (self._baseline.progress or None) if self._baseline else self._reloading.filling.progress(),
            "startup": self._startup.said,
            "error": str(self.error) if self.error else None,
        }

    def start(self) -> None:
        """Start, and return when the query plans its batches, has failed, or has to wait for its target.

        A target that does not answer is not waited for any longer than `SETTLE_SECONDS`: others want to start too.
        """
        self._thread.start()
        self._settled.wait(SETTLE_SECONDS)

    def stop(self, *, drain: bool = True, timeout: float = 30.0) -> None:
        """End the query; returns when it has ended. With `drain` a running batch gets `timeout` seconds to finish."""
        self.stopping.set()
        self._reloading.end()
        if drain:
            self._batches.await_idle(timeout)
        while self._thread.is_alive():
            # A query that is just starting cannot be stopped yet: ask again until the thread is through.
            if self._query is not None:
                self._query.stop()
            self._thread.join(0.1)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the query is `done`; False when time ran out."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    # The life of the query

    def _run(self) -> None:
        backoff = Backoff()
        try:
            while not self.stopping.is_set() and self._run_query(backoff):
                pass
        except MillstreamError as failed:
            self._fail(failed)
        except Exception as defect:  # noqa: BLE001 - whatever it is, the target must not look healthy
            self._fail(ended_by(self._spark, defect))
        finally:
            if self.state not in (StreamState.COMPLETE, *BROKEN):
                self.state = StreamState.STOPPED
            self._target.close()
            self._settled.set()

    def _run_query(self, backoff: Backoff) -> bool:
        """Run one query to its end. Returns whether another one shall follow."""
        try:
            if self._stream.mode is Mode.SNAPSHOT:
                self._copy()
                return False
            query = self._open()
        except (BaselineStopped, ReplayStopped):
            return False
        except (MillstreamError, PySparkException, Py4JError) as failed:
            check_spark(self._spark, failed)
            if not is_transient(failed):
                raise
            return self._pause(backoff, failed)
        failure = self._ended(query)
        self._reloading.stop()
        if self.stopping.is_set():
            return False
        if self._once and failure is None:
            return self._reloads
        check_spark(self._spark, failure)
        if self._batches.fatal is not None:
            raise self._batches.fatal
        if self._batches.gated:
            return True
        if query.unusable is not None:
            self._distrust = query.unusable
            return True
        self._opening.probe(self._batches.current)
        if self._batches.progressed:
            backoff.reset()
        elif not query.reached_journal and backoff.attempts:
            # Twice in a row it did not even come to planning. A new epoch at the cursor is exact whatever it was.
            self._distrust = "Spark's checkpoint cannot be read"
        return self._pause(backoff, failure)

    def _ended(self, query: SliceQuery) -> Exception | None:
        """Wait for the end of a query, which a gate that closes by itself is, too."""
        if self._once:
            return query.wait()
        with closing(self._gate, self._batches.stands_at_gate, query.stop):
            return query.wait()

    def _open(self) -> SliceQuery:
        """Bring the target to where changes go on, and start the query that brings them."""
        restored = self._startup.restore(self._opening.is_new, self._begin_rows)
        if self._stream.mode is Mode.SNAPSHOT_THEN_CDC and self._opening.is_new():
            self._startup.baseline()
            self._run_baseline()
        reason = self._reloading.take_in_loss() or self._distrust or restored or self._replaying.reason()
        self._distrust = None
        opened = self._opening.open(reason)
        self._batches.begin(opened)
        self._note_opened(opened)
        self._replay(opened)
        self._await_gate(opened)
        return self._start_query(opened)

    def _note_opened(self, opened: Opened) -> None:
        self._startup.begun(opened.seq, opened.reason)
        if self._spec.name in self._store.needs_reload(self._stream.name):
            self._store.set_needs_reload(self._stream.name, self._spec.name, None)
        if opened.reason is not None:
            self._emit(
                "delivery.epoch",
                f"delivery epoch {opened.epoch} starts after seq {opened.start_seq}: {opened.reason}",
                Level.INFO if opened.reason == "first start" else Level.WARNING,
                {"epoch": opened.epoch, "start_seq": opened.start_seq, "reason": opened.reason},
            )

    def _start_query(self, opened: Opened) -> SliceQuery:
        # Beside a comparison with the source nothing is copied: the target is brought to a position, and no further.
        self._reloads = self._until is None and self._reloading.begins()
        if self._reloads:
            self._batches.go_on(self._reloading.remembering(opened))
        parallel = self._batches.parallel = cores_of(self._spark) if self._target.capabilities.parallel else 1
        options = SliceOptions(
            opened.plan.locations,
            opened.start_seq,
            self._spec.limits,
            parallel,
            ready="",
            until=self._until,
            halves=self._takes_halves(),
        )
        name = f"{self._stream.name}/{self._spec.name}"
        # A run with an end comes to it when the copies have.
        once = self._once and not self._reloads
        query = SliceQuery(self._spark, name, options, opened.checkpoint, self._batches.deliver, once=once)
        self._query = query
        query.start()
        if self._reloads:
            self._start_reload(query, opened)
        self._show_running()
        self._settled.set()
        return query

    def _takes_halves(self) -> bool:
        """Whether a processor is idle while a backlog is read, and two batches write no more than one does.

        Capture has one, and so has each delivery. A mirror writes a row once per batch.
        """
        return not is_mirror(self._spec) and self._deliveries + 1 < cores_of(self._spark)

    def _show_running(self) -> None:
        """Whether changes are all that comes, or the target's first rows come beside them."""
        if not self.stopping.is_set():
            self.state = StreamState.RUNNING if self._reloading.filling.progress() is None else StreamState.SNAPSHOT

    def _start_reload(self, query: SliceQuery, opened: Opened) -> None:
        """Copy tables beside the query. Afterwards batches go on as ever; a run with an end begins its last query."""

        def opens(now: Opened) -> None:
            self._batches.go_on(now)
            self._show_running()

        self._reloading.start(self._spark, opened, opens, query.stop if self._once else lambda: None)

    def _await_gate(self, opened: Opened) -> None:
        """Wait while the next change has a schema that somebody must approve. Raises SchemaGated where none waits."""
        while (closed := self._gate.after(opened.seq, opened.plan.after_position)) is not None:
            if closed.seq > opened.seq:
                break  # there is something before it
            if self._once or not closed.waits:
                raise closed.error(self._stream.name)
            if self.state is not StreamState.GATED:
                self.error, self.state = closed.error(self._stream.name), StreamState.GATED
                self._emit("delivery.gated", str(self.error), Level.WARNING, {"seq": closed.seq})
                self._settled.set()
            if self.stopping.wait(GATE_SECONDS):
                raise BaselineStopped
        if self.state is StreamState.GATED:
            self.error = None
            self._emit("delivery.gate_opened", "goes on: the schema change was approved", Level.INFO, {})

    def _replay(self, opened: Opened) -> None:
        """Deliver once more what was asked for; the query goes on where the target was before."""
        if self._replaying.due() is not None:
            self.state = StreamState.CATCHING_UP
            self._settled.set()
            self._replaying.run(self._spark, self._opening, opened, self.stopping)

    def _copy(self) -> None:
        """The baseline alone, for a target that has nothing. One that has something has all it will ever get."""
        if self._opening.is_new():
            self._run_baseline()
        cursor = self._opening.save_found()
        self.state = StreamState.COMPLETE
        self._retrying.why = None
        self._settled.set()
        if cursor is not None and self._on_cursor is not None:
            self._on_cursor(cursor)

    def _begin_rows(self) -> None:
        """All rows of the tables are brought, which may take long."""
        self.state = StreamState.SNAPSHOT
        self._settled.set()

    def _run_baseline(self) -> None:
        """Bring the source's tables as they are now; the changes that follow are the query's."""
        self._begin_rows()
        self._baseline = Baseline(
            self._spark,
            self._stream.source,
            self._target,
            self._opening,
            self._letters,
            self._emit,
            self.stopping,
            captured=self._stream.mode is not Mode.SNAPSHOT,
            beside=self._reloading.filling.takes_over,
        )
        self._account.add(self._baseline.run())
        self._baseline = None

    def _pause(self, backoff: Backoff, failure: Exception | None) -> bool:
        """Wait before the next try. False when the query was stopped meanwhile."""
        if self._retrying.is_enough(backoff):
            raise failure if isinstance(failure, MillstreamError) else unexpected(failure)
        self._settled.set()
        return self._retrying.wait(backoff, failure)

    def _fail(self, failed: MillstreamError) -> None:
        self.error = failed
        self.state = StreamState.FAILED
        if isinstance(failed, OutOfRange):
            # What it needs is gone from the journal: no try can help any more.
            self._store.set_needs_reload(self._stream.name, self._spec.name, failed.message)
            self.state = StreamState.NEEDS_RELOAD
        fields = {"error": type(failed).__name__, "hint": failed.hint}
        self._emit("delivery.failed", failed.message, Level.ERROR, fields)

    def _emit(self, kind: str, message: str, level: Level, fields: Json) -> None:
        self._observer.on_event(Event(kind, message, level, self._stream.name, self._spec.name, fields))
