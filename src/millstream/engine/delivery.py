"""Delivery of one stream to one target: a query of its own, with its own cursor, retries and failure.

The batch function delivers everything and saves the cursor, or raises. It never swallows an
interruption: Spark takes a return for success and would commit a batch that was not delivered.
Retries live inside it and wait on an event that `stop` sets. Truth is the target's cursor, or the
state store's for a target that keeps none; Spark's logs only schedule.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from millstream.config.kinds import is_mirror
from millstream.engine.account import Account
from millstream.engine.backoff import Backoff
from millstream.engine.baseline import Baseline
from millstream.engine.batch import run_batch
from millstream.engine.chunk_jobs import BaselineStopped
from millstream.engine.delivery_errors import check_spark, ended_by, is_transient, kind_of, unexpected
from millstream.engine.gate import GATE_SECONDS, AtGate, Gate
from millstream.engine.letters import LetterBox
from millstream.engine.opening import Opened, Opening, from_micros
from millstream.engine.reload import can_reload
from millstream.engine.reloading import Reloading
from millstream.engine.replaying import Replaying, ReplayStopped
from millstream.engine.startup import Startup
from millstream.engine.turns import Turns
from millstream.engine.uncaptured import NoJournal
from millstream.errors import JournalError, MillstreamError, OutOfRange
from millstream.failpoint import failpoint
from millstream.model import Cursor, Json, Mode, SeqRange, StreamSpec, StreamState, TargetSpec
from millstream.observe import Event, Level, Observer
from millstream.spark.partition import cores_of, share_out
from millstream.spark.query import CheckpointUnusable, SliceQuery
from millstream.spark.slices import SliceOptions
from millstream.spark.stage import reached
from millstream.spark.tables import OwnTables
from millstream.state.base import StateStore
from millstream.targets.base import Target
from millstream.transforms.shape import Shaping

ONCE_TRIES = 8
"""How often a run with an end tries in vain (for about a minute) before it fails; one without an end never gives up."""

BROKEN = (StreamState.FAILED, StreamState.NEEDS_RELOAD)
"""States that a delivery does not leave by itself."""

SETTLE_SECONDS = 10.0

CursorCallback = Callable[[Cursor], None]


class DeliveryStopped(Exception):
    """Raised inside a batch when the query is asked to end: the batch is not delivered and comes again."""


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
    ) -> None:
        """`until`: with `once`, the seq to end at, where a transaction ends; else the end is what is visible then."""
        self._spark = spark
        self._stream = stream
        self._spec = target_spec
        self._target = target
        self._observer = observer
        self._once = once
        self._until = until
        self._on_cursor = on_cursor
        self._store = store
        self._letters = LetterBox(store, stream, target_spec, target, self._emit)
        shaping = Shaping(stream.name, stream.shape, is_mirror(target_spec)) if stream.shape else None
        self._opening = Opening(
            stream.name,
            target_spec.name,
            target,
            tuple(locations),
            store,
            checkpoint_root,
            tables,
            shaping,
            self._letters.superseded,
            NoJournal(stream.source) if stream.mode is Mode.SNAPSHOT else None,
        )
        self._startup = Startup(stream, target_spec, target, store, self._opening.journal, self._emit)
        self._gate = Gate(stream, target_spec.name, locations, store, tables, reloads=can_reload(target))
        self._gated = False
        self._replaying = Replaying(stream, target_spec, target, store, self._emit)
        self._turns = Turns()
        self._reloading = Reloading(stream, target_spec, target, store, self._opening, self._turns, self._emit)
        self._reloads = False
        self.stopping = threading.Event()
        """Set once `stop` was asked for; a batch that waits then gives up."""
        self._settled = threading.Event()
        self._idle = threading.Condition()
        self._in_batch = False
        self._query: SliceQuery | None = None
        self._opened: Opened | None = None
        self._parallel = 1
        self._fatal: MillstreamError | None = None
        self._distrust: str | None = None
        self._progressed = False
        self._thread = threading.Thread(
            target=self._run, name=f"delivery-{stream.name}-{target_spec.name}", daemon=True
        )
        self.state = StreamState.CREATED
        self.error: MillstreamError | None = None
        self.planning_since = time.time()
        """Unix time: no slice that was planned before is in use any more."""
        self._retrying: str | None = None
        self._baseline: Baseline | None = None
        self._account = Account()

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
    def turns(self) -> Turns:
        """Whose turn it is at the target: who must have it for himself takes one."""
        return self._turns

    def status(self) -> Json:
        """What `millstream status` shows of this target."""
        cursor = self.cursor
        return {
            **self._account.counts,
            "epoch": self._opened.epoch if self._opened else None,
            "seq": cursor.seq if cursor else None,
            "last_event": cursor.commit_ts.isoformat() if cursor and cursor.commit_ts else None,
            "retrying": self._retrying,
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
            with self._idle:
                self._idle.wait_for(lambda: not self._in_batch, timeout)
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
        failure = query.wait()
        self._reloading.stop()
        if self.stopping.is_set():
            return False
        if self._once and failure is None:
            return self._reloads
        check_spark(self._spark, failure)
        if self._fatal is not None:
            raise self._fatal
        if self._gated:
            self._gated = False
            return True
        if query.unusable is not None:
            self._distrust = query.unusable
            return True
        self._opening.probe(self._current())
        if self._progressed:
            backoff.reset()
        elif not query.reached_journal and backoff.attempts:
            # Twice in a row it did not even come to planning. A new epoch at the cursor is exact whatever it was.
            self._distrust = "Spark's checkpoint cannot be read"
        return self._pause(backoff, failure)

    def _open(self) -> SliceQuery:
        restored = self._startup.restore(self._opening.is_new, self._begin_rows)
        if self._stream.mode is Mode.SNAPSHOT_THEN_CDC and self._opening.is_new():
            self._startup.baseline()
            self._run_baseline()
        reason = self._reloading.take_in_loss() or self._distrust or restored or self._replaying.reason()
        self._distrust = None
        self._progressed = False
        opened = self._opening.open(reason)
        self._opened = opened
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
        self._replay(opened)
        self._await_gate(opened)
        # Beside a comparison with the source nothing is copied: the target is brought to a position, and no further.
        self._reloads = self._until is None and self._reloading.begins()
        if self._reloads:
            self._opened = self._reloading.remembering(opened)
        self._parallel = cores_of(self._spark) if self._target.capabilities.parallel else 1
        options = SliceOptions(
            opened.plan.locations, opened.start_seq, self._spec.limits, self._parallel, ready="", until=self._until
        )
        name = f"{self._stream.name}/{self._spec.name}"
        # A run with an end comes to it when the copies have.
        once = self._once and not self._reloads
        query = SliceQuery(self._spark, name, options, opened.checkpoint, self._on_batch, once=once)
        self._query = query
        query.start()
        if self._reloads:
            self._start_reload(query, opened)
        self._show_running()
        self._settled.set()
        return query

    def _show_running(self) -> None:
        """Whether changes are all that comes, or the target's first rows come beside them."""
        if not self.stopping.is_set():
            self.state = StreamState.RUNNING if self._reloading.filling.progress() is None else StreamState.SNAPSHOT

    def _start_reload(self, query: SliceQuery, opened: Opened) -> None:
        """Copy tables beside the query. Afterwards batches go on as ever; a run with an end begins its last query."""

        def opens(now: Opened) -> None:
            self._opened = now
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
        self._retrying = None
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
        if self._once and backoff.attempts >= ONCE_TRIES:
            raise failure if isinstance(failure, MillstreamError) else unexpected(failure)
        self._settled.set()
        delay = backoff.next()
        self._retry_event(failure, delay, backoff.attempts)
        return not self.stopping.wait(delay)

    def _fail(self, failed: MillstreamError) -> None:
        self.error = failed
        self.state = StreamState.FAILED
        if isinstance(failed, OutOfRange):
            # What it needs is gone from the journal: no try can help any more.
            self._store.set_needs_reload(self._stream.name, self._spec.name, failed.message)
            self.state = StreamState.NEEDS_RELOAD
        fields = {"error": type(failed).__name__, "hint": failed.hint}
        self._emit("delivery.failed", failed.message, Level.ERROR, fields)

    # A batch, on Spark's thread

    def _on_batch(self, span: SeqRange) -> None:
        with self._idle:
            if self.stopping.is_set():
                raise DeliveryStopped
            self._in_batch = True
        try:
            failpoint("delivery.batch_started")
            self._deliver_in_turn(span)
            self.planning_since = time.time()
        except MillstreamError as failed:
            # A plain JournalError says that a segment has changed its form: the range is planned again.
            if type(failed) is not JournalError:
                self._fatal = failed
            raise
        except (AtGate, DeliveryStopped, CheckpointUnusable):
            raise
        except Exception as defect:
            self._fatal = unexpected(defect)
            raise
        finally:
            with self._idle:
                self._in_batch = False
                self._idle.notify_all()

    def _deliver_in_turn(self, span: SeqRange) -> None:
        """Deliver when no step of a copy is at work on the target, up to a gate if there is one."""
        with self._turns.taken(self.stopping) as mine:
            if not mine:
                raise DeliveryStopped
            opened = self._current()
            ahead = SeqRange(max(span.start, self._opening.delivered_seq(opened)), span.end)
            closed = self._gate.cut(ahead, opened.plan.after_position)
            if closed is None:
                self._deliver(span)
            else:
                self._deliver_before(span, closed.seq)

    def _deliver_before(self, span: SeqRange, seq: int) -> None:
        """Deliver of a batch what comes before a gate, and end the query: it is planned anew when the gate opens."""
        if seq > span.start:
            self._deliver(SeqRange(span.start, seq))
        failpoint("delivery.gate_reached")
        self._gated = True
        raise AtGate

    def _deliver(self, span: SeqRange) -> None:
        backoff = Backoff()
        while True:
            try:
                if self._opening.is_delivered(self._current(), span):
                    self._catch_up(span)
                else:
                    self._try(span)
                break
            except (MillstreamError, PySparkException, Py4JError) as failed:
                if self.stopping.is_set():
                    # Not an error of ours: Spark cancelled the job because we asked it to.
                    raise DeliveryStopped from failed
                check_spark(self._spark, failed)
                if not is_transient(failed) or (self._once and backoff.attempts >= ONCE_TRIES):
                    raise
                delay = backoff.next()
                self._retry_event(failed, delay, backoff.attempts)
                if self.stopping.wait(delay):
                    raise DeliveryStopped from failed
        if self._retrying is not None:
            fields = {"failures": backoff.attempts}
            self._emit("delivery.recovered", f"delivers again, up to seq {span.end}", Level.INFO, fields)
        self._retrying = None

    def _catch_up(self, span: SeqRange) -> None:
        """Save the cursor of a batch that was published by a try, or a process, that came no further."""
        cursor = self.cursor
        if cursor is None or cursor.seq < span.end:
            cut = self._opening.cut(span.end)
            opened = self._current()
            tallies = self._opening.tallies(opened, span)
            done = self._opening.superseded(opened, span)
            self._opening.save(opened, span.end, cut.resume_position, from_micros(cut.commit_ts_us), tallies, done)

    def _try(self, span: SeqRange) -> None:
        started = time.monotonic()
        opened = self._current()
        runs = share_out(self._opening.slices(span), self._parallel)
        result = self._letters.deliver(opened.plan, lambda plan: run_batch(self._spark, plan, span, runs))
        failpoint("delivery.staged")
        cut = self._opening.cut(span.end)
        self._target.publish(span, reached(cut, opened.plan), result.receipts)
        failpoint("delivery.published")
        at = from_micros(cut.commit_ts_us)
        cursor = self._opening.save(opened, span.end, cut.resume_position, at, result.tallies, result.superseded)
        failpoint("delivery.cursor_saved")
        self._note(self._account.batch(span, result, cursor, time.monotonic() - started), cursor)

    def _note(self, fields: Json, cursor: Cursor) -> None:
        self._progressed = True
        self._emit("delivery.batch", f"{fields['rows']} rows up to seq {fields['end']}", Level.DEBUG, fields)
        if self._on_cursor is not None:
            self._on_cursor(cursor)

    def _current(self) -> Opened:
        assert self._opened is not None  # noqa: S101 - a batch runs only in an opened query
        return self._opened

    # What others see

    def _retry_event(self, failure: Exception | None, delay: float, failures: int) -> None:
        why = failure.message if isinstance(failure, MillstreamError) else kind_of(failure)
        self._retrying = why
        fields = {"error": type(failure).__name__, "delay_ms": round(delay * 1000), "failures": failures}
        self._emit("delivery.retry", f"{why}; trying again in {delay:.1f} s", Level.WARNING, fields)

    def _emit(self, kind: str, message: str, level: Level, fields: Json) -> None:
        self._observer.on_event(Event(kind, message, level, self._stream.name, self._spec.name, fields))
