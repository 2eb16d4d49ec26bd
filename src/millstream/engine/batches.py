"""The batches of one delivery, on Spark's thread.

A batch is delivered wholly and its cursor saved, or `deliver` raises. It never swallows an interruption: Spark takes a
return for success and would commit a batch that was not delivered. Retries live inside it and end when `stopping` is
set. A batch that comes again, after a crash or a cancelled try, is delivered once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from millstream.engine.account import Account
from millstream.engine.backoff import Backoff
from millstream.engine.batch import run_batch
from millstream.engine.delivery_errors import check_spark, is_transient, unexpected
from millstream.engine.gate import AtGate, Gate
from millstream.engine.letters import LetterBox, Tell
from millstream.engine.opening import Opened, Opening, from_micros
from millstream.engine.retrying import Retrying
from millstream.engine.turns import Turns
from millstream.errors import JournalError, MillstreamError
from millstream.failpoint import failpoint
from millstream.model import Cursor, Json, SeqRange
from millstream.observe import Level, counted
from millstream.spark.partition import share_out
from millstream.spark.query import CheckpointUnusable
from millstream.spark.stage import reached
from millstream.targets.base import Target

CursorCallback = Callable[[Cursor], None]


class DeliveryStopped(Exception):
    """Raised inside a batch when the query is asked to end: the batch is not delivered and comes again."""


class Batches:
    """Delivers batch after batch of one target's query.

    Threads: `deliver` is called on Spark's, by one at a time, between `begin` and the end of the query; everything else
    from any. What a batch left behind (`fatal`, `gated`, `progressed`) is for whoever has seen the query end.
    """

    def __init__(
        self,
        spark: SparkSession,
        target: Target,
        opening: Opening,
        letters: LetterBox,
        gate: Gate,
        turns: Turns,
        account: Account,
        retrying: Retrying,
        stopping: threading.Event,
        tell: Tell,
        on_cursor: CursorCallback | None,
    ) -> None:
        """`on_cursor` hears of every cursor that is saved, on Spark's thread."""
        self._spark = spark
        self._target = target
        self._opening = opening
        self._letters = letters
        self._gate = gate
        self._turns = turns
        self._account = account
        self._retrying = retrying
        self._stopping = stopping
        self._tell = tell
        self._on_cursor = on_cursor
        self._idle = threading.Condition()
        self._in_batch = False
        self._opened: Opened | None = None
        self.parallel = 1
        """How many tasks a batch may be shared out to."""
        self.fatal: MillstreamError | None = None
        """What no other try can mend."""
        self.gated = False
        """A batch came to a gate, and ended the query there."""
        self.progressed = False
        """Whether the query has delivered anything."""
        self.planning_since = time.time()
        """Unix time: no slice that was planned before is in use any more."""

    @property
    def opened(self) -> Opened | None:
        """The delivery epoch that batches belong to; none before the first `begin`."""
        return self._opened

    @property
    def current(self) -> Opened:
        """The same where there must be one: a batch runs only in an opened query."""
        assert self._opened is not None  # noqa: S101 - see above
        return self._opened

    def begin(self, opened: Opened) -> None:
        """A query begins, in this epoch."""
        self.gated = self.progressed = False
        self._opened = opened

    def go_on(self, opened: Opened) -> None:
        """The epoch of the query that runs is described anew: batches from now on follow that."""
        self._opened = opened

    def await_idle(self, timeout: float) -> None:
        """Give a batch that runs so many seconds to end."""
        with self._idle:
            self._idle.wait_for(lambda: not self._in_batch, timeout)

    def deliver(self, span: SeqRange) -> None:
        """The batch function. Returns when the target has the batch and its cursor is saved."""
        with self._idle:
            if self._stopping.is_set():
                raise DeliveryStopped
            self._in_batch = True
        try:
            failpoint("delivery.batch_started")
            self._deliver_in_turn(span)
            self.planning_since = time.time()
        except MillstreamError as failed:
            # A plain JournalError says that a segment has changed its form: the range is planned again.
            if type(failed) is not JournalError:
                self.fatal = failed
            raise
        except (AtGate, DeliveryStopped, CheckpointUnusable):
            raise
        except Exception as defect:
            self.fatal = unexpected(defect)
            raise
        finally:
            with self._idle:
                self._in_batch = False
                self._idle.notify_all()

    def stands_at_gate(self) -> bool:
        """Whether a gate has closed where the target stands: then the query shall end, as if a batch had met it."""
        with self._turns.taken(self._stopping) as mine:
            if not mine:
                return False
            opened = self.current
            seq = self._opening.delivered_seq(opened)
            closed = self._gate.after(seq, opened.plan.after_position)
            if closed is not None and closed.seq <= seq:
                self.gated = True
            return self.gated

    def _deliver_in_turn(self, span: SeqRange) -> None:
        """Deliver when no step of a copy is at work on the target, up to a gate if there is one."""
        with self._turns.taken(self._stopping) as mine:
            if not mine:
                raise DeliveryStopped
            opened = self.current
            ahead = SeqRange(max(span.start, self._opening.delivered_seq(opened)), span.end)
            closed = self._gate.cut(ahead, opened.plan.after_position)
            if closed is None:
                self._deliver_whole(span)
            else:
                self._deliver_before(span, closed.seq)

    def _deliver_before(self, span: SeqRange, seq: int) -> None:
        """Deliver of a batch what comes before a gate, and end the query: it is planned anew when the gate opens."""
        if seq > span.start:
            self._deliver_whole(SeqRange(span.start, seq))
        failpoint("delivery.gate_reached")
        self.gated = True
        raise AtGate

    def _deliver_whole(self, span: SeqRange) -> None:
        """Try until the target has it."""
        backoff = Backoff()
        while True:
            try:
                if self._opening.is_delivered(self.current, span):
                    self._catch_up(span)
                else:
                    self._try(span)
                break
            except (MillstreamError, PySparkException, Py4JError) as failed:
                if self._stopping.is_set():
                    # Not an error of ours: Spark cancelled the job because we asked it to.
                    raise DeliveryStopped from failed
                check_spark(self._spark, failed)
                if not is_transient(failed) or self._retrying.is_enough(backoff):
                    raise
                if not self._retrying.wait(backoff, failed):
                    raise DeliveryStopped from failed
        self._retrying.recovered(backoff, span.end)

    def _catch_up(self, span: SeqRange) -> None:
        """Save the cursor of a batch that was published by a try, or a process, that came no further."""
        cursor = self._opening.saved()
        if cursor is None or cursor.seq < span.end:
            cut = self._opening.cut(span.end)
            opened = self.current
            tallies = self._opening.tallies(opened, span)
            done = self._opening.superseded(opened, span)
            self._opening.save(opened, span.end, cut.resume_position, from_micros(cut.commit_ts_us), tallies, done)

    def _try(self, span: SeqRange) -> None:
        started = time.monotonic()
        opened = self.current
        runs = share_out(self._opening.slices(span), self.parallel)
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
        self.progressed = True
        self._tell("delivery.batch", f"{counted(fields['rows'], 'row')} up to seq {fields['end']}", Level.DEBUG, fields)
        if self._on_cursor is not None:
            self._on_cursor(cursor)
