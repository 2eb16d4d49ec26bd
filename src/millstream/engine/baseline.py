"""The baseline of a target: all captured tables at one exact position, before any change.

One snapshot of the source, many tasks, one publication: the target has all of it or nothing. Killed on the
way, the next start removes what was staged and takes another snapshot. Where changes go on is written down
before the target can have the rows: those that the snapshot has are left out, whatever happens in between.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from datetime import UTC, datetime

from pyspark.sql import SparkSession

from millstream.engine.batch import BatchResult
from millstream.engine.chunk_jobs import BaselineStopped, run_chunks, source_turn
from millstream.engine.letters import LetterBox
from millstream.engine.opening import Beginning, Opening
from millstream.engine.watching import watched
from millstream.errors import SourceHalted
from millstream.failpoint import failpoint
from millstream.model import Json, SeqRange, SourceSpec
from millstream.observe import Level, counted
from millstream.sources import take_snapshot
from millstream.sources.base import Snapshot, SnapshotPlan
from millstream.spark.baseline import BaselinePlan
from millstream.state.base import Tally
from millstream.targets.base import Fillable, Target

Tell = Callable[[str, str, Level, Json], None]
"""kind, message, level, fields"""


class Baseline:
    """Brings all rows of the source's tables to a target that has nothing. Runs on the delivery's thread."""

    def __init__(
        self,
        spark: SparkSession,
        source: SourceSpec,
        target: Target,
        opening: Opening,
        letters: LetterBox,
        tell: Tell,
        stopping: threading.Event,
        *,
        captured: bool = True,
        beside: Callable[[], bool] = lambda: False,
    ) -> None:
        """`captured`: changes follow. Else the snapshot is all there will ever be, and takes no publication.

        `beside` is asked, and makes sure, whether the rows come beside the changes: the target begins empty then.
        """
        self._captured = captured
        self._beside = beside
        self._spark = spark
        self._source = source
        self._target = target
        self._opening = opening
        self._letters = letters
        self._tell = tell
        self._stopping = stopping
        self.progress: Json = {}
        """How far it is, for `status`: chunks, rows by the server's estimate, their rate, and how long it may take."""

    def _begin_empty(self) -> BatchResult:
        """Let the target begin at the journal's end, without a row: these come beside the changes (`filling`)."""
        begun = self._opening.begin()
        self._letters.forget()
        if isinstance(self._target, Fillable):
            self._target.set_filling(True)
        self._opening.record_baseline(begun, begun.position)
        nothing = SnapshotPlan(begun.position, datetime.now(UTC), "", (), 0)
        result = self._read(begun, nothing, time.monotonic())
        self._target.publish(SeqRange(begun.seq, begun.seq), begun.position, result.receipts)
        failpoint("reload.target_begun")
        self._opening.save_baseline(begun, [])
        return result

    def run(self) -> BatchResult:
        """Raises BaselineStopped, or what went wrong; transient errors mean that it can be run again."""
        if self._captured and self._beside():
            return self._begin_empty()
        started = time.monotonic()
        begun = self._opening.begin()
        self._letters.forget()
        with closing(self._snapshot()) as snapshot:
            found = snapshot.plan
            self._opening.record_baseline(begun, found.position)
            tables = sorted({chunk.relation.table for chunk in found.chunks})
            self._tell(
                "snapshot.started",
                # A table that was never analyzed has no estimate.
                f"reading {counted(len(tables), 'table')} in {counted(len(found.chunks), 'chunk')}"
                + (f", about {counted(found.estimated_rows, 'row')}" if found.estimated_rows else ""),
                Level.INFO,
                {"tables": tables, "chunks": len(found.chunks), "rows": found.estimated_rows, "epoch": begun.epoch},
            )
            result = self._read(begun, found, started)
            failpoint("snapshot.staged")
            self._target.publish(SeqRange(begun.seq, begun.seq), _reached(begun, found), result.receipts)
            failpoint("snapshot.published")
            self._opening.save_baseline(begun, [*result.tallies, *_empty(tables, result, begun.seq)])
        seconds = time.monotonic() - started
        self._tell(
            "snapshot.finished",
            f"{counted(result.rows, 'row')} of {counted(len(tables), 'table')} in {seconds:.1f} s",
            Level.INFO,
            {"rows": result.rows, "bytes": result.bytes, "seconds": round(seconds, 3), "tables": result.tables},
        )
        return result

    def _snapshot(self) -> Snapshot:
        if self._captured:
            return take_snapshot(self._source, self._waits)
        snapshot = take_snapshot(self._source, self._waits, captured=False)
        if not snapshot.plan.chunks:
            snapshot.close()
            raise SourceHalted(
                f"the patterns of source {self._source.name} name no table that can be copied",
                hint="correct `tables`; `millstream check --connect` lists what they name",
            )
        return snapshot

    def _waits(self, message: str) -> None:
        if self._stopping.is_set():
            raise BaselineStopped
        self._tell("snapshot.waiting", message, Level.INFO, {})

    def _read(self, begun: Beginning, found: SnapshotPlan, started: float) -> BatchResult:
        plan = BaselinePlan(
            self._source,
            found,
            begun.header.event_prefix,
            begun.seq,
            _reached(begun, found),
            self._opening.relation_ids(chunk.relation for chunk in found.chunks),
            begun.stager,
            self._opening.shaping,
        )
        began = time.monotonic() - started

        def say(done: int, seconds: float) -> None:
            self._say(done, found, began + seconds)

        with watched(self._spark, "baseline", self._stopping, say):
            return self._letters.deliver(plan, self._try)

    def _try(self, plan: BaselinePlan) -> BatchResult:
        if self._target.capabilities.parallel:
            return run_chunks(self._spark, plan, self._stopping, parallel=True)
        with source_turn(self._source, self._stopping):
            return run_chunks(self._spark, plan, self._stopping, parallel=False)

    def _say(self, done: int, found: SnapshotPlan, seconds: float) -> None:
        count = len(found.chunks)
        rows = found.estimated_rows * done // max(1, count)
        left = round(seconds / done * (count - done), 1) if done else None
        self.progress = {
            "chunks": count,
            "done": done,
            "rows": rows,
            "rows_per_second": round(rows / seconds) if seconds else 0,
            "seconds_left": left,
        }
        eta = f", about {left:.0f} s left" if left is not None else ""
        self._tell("snapshot.progress", f"{done} of {counted(count, 'chunk')}{eta}", Level.DEBUG, self.progress)


def _empty(tables: Sequence[str], result: BatchResult, seq: int) -> list[Tally]:
    """Tables of which there was no row: they are copied as well, and status names them."""
    return [Tally(table, 0, 0, seq) for table in tables if table not in result.tables]


def _reached(begun: Beginning, found: SnapshotPlan) -> int:
    """What the target's own cursor says: up to here it has all changes, though its seq is the journal's before them.

    So the changes in between are left out even if nobody else remembers the baseline.
    """
    return max(begun.position, found.position)
