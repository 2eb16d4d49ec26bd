"""What a delivery task does: open its slices, decode them by column, hand them to the target.

Runs in Spark's Python workers. Only receipts leave a task; rows never pass the driver. A task never
sleeps and never retries: an error it can name goes to the driver inside a receipt, and the driver
decides. (A worker that is killed says nothing; Spark then tries the task again.)
"""

from __future__ import annotations

import errno
import json
import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Protocol

import pyarrow as pa
from pyspark import TaskContext

from millstream.errors import JournalMismatch, MillstreamError, TargetRefused
from millstream.journal import Cut, JournalReader
from millstream.journal.format import Slice
from millstream.model import Json, Relation, SeqRange
from millstream.spark.changes import Shaped
from millstream.spark.decoding import Decoding
from millstream.spark.probe import Needed, check_myself
from millstream.spark.rows import Opener, described
from millstream.spark.shelf import Shelf
from millstream.spark.slices import from_rows
from millstream.spark.tables import OwnTables, share
from millstream.targets.base import Attempt, Lane, LaneBatch, Part, Receipt, Stager
from millstream.targets.rejects import Guard, Outstanding, RowsRejected, Unshapable
from millstream.transforms.compiled import wants_spark
from millstream.transforms.shape import Shaping

RECEIPT = pa.schema(
    [
        pa.field("relation", pa.int32()),
        pa.field("table", pa.string()),
        pa.field("rows", pa.int64()),
        pa.field("skipped", pa.int64()),
        pa.field("bytes", pa.int64()),
        pa.field("first_seq", pa.int64()),
        pa.field("last_seq", pa.int64()),
        pa.field("detail", pa.string()),
        pa.field("error", pa.string()),
    ]
)
RECEIPT_DDL = (
    "relation int, table string, rows bigint, skipped bigint, bytes bigint, first_seq bigint, last_seq bigint, "
    "detail string, error string"
)


@dataclass(frozen=True)
class StagePlan:
    """What every task of a query knows besides its slices. Constant for a query, small, picklable."""

    locations: tuple[str, ...]
    needed: Needed
    source_kind: str
    event_prefix: str
    after_position: int | None
    """Changes up to here were delivered from an earlier incarnation of the journal and are left out."""
    stager: Stager | Lane
    tables: OwnTables | None = None
    """Which tables of the journal are the stream's; the rows of the others are left out. None: all are."""
    shaping: Shaping | None = None
    """The stream's filters and transforms; None: every change goes on as it is."""
    outstanding: Outstanding | None = None
    """What tasks must know of changes that could not be taken; None: there are none."""
    isolate: bool = False
    """It shall be found out which changes cannot be taken, by SQL or by a lane."""
    shelf: Shelf | None = None
    """Where tasks find what those of other targets have decoded; None: there are no others."""

    def decoding(
        self, relation: Relation, relation_id: int, opener: Opener, pieces: Iterable[tuple[Slice, SeqRange]]
    ) -> Decoding:
        """The changes of a relation's slices, decoded when they are read."""
        return Decoding(relation, relation_id, self.event_prefix, self.after_position, opener, pieces, self.shelf)


def stage(plan: StagePlan, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Stage one task's slices relation by relation; yields one batch of receipts per relation."""
    context = TaskContext.get()
    attempt = Attempt(context.partitionId(), context.taskAttemptId()) if context else Attempt(0, 0)
    try:
        yield from _stage(plan, batches, attempt)
    except Exception as failed:  # noqa: BLE001 - named to the driver, which raises it there
        yield error_row(describe(failed))


def _stage(plan: StagePlan, batches: Iterable[pa.RecordBatch], attempt: Attempt) -> Iterator[pa.RecordBatch]:
    check_myself(plan.needed)
    pieces = [piece for batch in batches for piece in from_rows(batch)]
    slices, others = share(plan.locations, plan.tables, pieces)
    for relation_id, rows_of_others in others.items():
        yield receipt_rows((), relation_id, rows_of_others)
    opener = Opener(plan.locations, slices)
    if isinstance(plan.stager, Lane):
        yield from _deliver(plan, plan.stager, slices, opener, {span for _, span in pieces}, others.total())
        return
    yield from stage_slices(plan, plan.stager, slices, opener, attempt)


def stage_slices(
    plan: StagePlan, stager: Stager, slices: Sequence[tuple[Slice, SeqRange]], opener: Opener, attempt: Attempt
) -> Iterator[pa.RecordBatch]:
    """Stage slices relation by relation. Yields receipts."""
    for (journal_id, relation_id), group in groupby(slices, key=lambda piece: (piece[0].journal_id, piece[0].relation)):
        relation = described(plan.locations, plan.source_kind, journal_id, relation_id)
        rows = plan.decoding(relation, relation_id, opener, group)
        changes = Shaped(plan.shaping, relation, relation_id, rows, plan.outstanding)
        receipts = stager.stage(changes.relation, relation_id, iter(changes), attempt)
        # A stager that did not read to the end must not pass for one that did.
        if rows.taken != changes.left_out + sum(receipt.rows for receipt in receipts):
            raise TargetRefused(f"{relation.table}: {rows.taken} rows were read but not all of them were staged")
        yield receipt_rows(receipts, relation_id, rows.skipped + changes.left_out)


def decoded_slices(
    plan: StagePlan, planned: Sequence[tuple[Slice, SeqRange]]
) -> Iterator[tuple[Relation, int, Iterator[pa.RecordBatch]]]:
    """The changes of a batch that the target has, decoded and shaped when they are read, by relation."""
    slices, _ = share(plan.locations, plan.tables, planned)
    opener = Opener(plan.locations, slices)
    for (journal_id, relation_id), group in groupby(slices, key=lambda piece: (piece[0].journal_id, piece[0].relation)):
        relation = described(plan.locations, plan.source_kind, journal_id, relation_id)
        if plan.shaping is not None and wants_spark(plan.shaping, relation):
            # Nobody but Spark can say what becomes of these; who asks can do without them.
            continue
        rows = plan.decoding(relation, relation_id, opener, list(group))
        changes = Shaped(plan.shaping, relation, relation_id, rows, plan.outstanding, bygone=True)
        yield changes.relation, relation_id, iter(changes)


class Reading(Protocol):
    """One relation's changes in a lane's task, and a count of what was read of them."""

    relation_id: int
    detail: Json

    @property
    def shaped(self) -> Relation:
        """The table as the target sees it."""

    @property
    def read(self) -> int:
        """How many changes of the source were read so far,"""

    @property
    def skipped(self) -> int:
        """and how many of them are nothing to the target."""

    def batches(self) -> Iterator[pa.RecordBatch]: ...

    def receipts(self) -> Sequence[Receipt]: ...


@dataclass
class _Reading:
    """See `Reading`: straight from the journal."""

    relation: Relation
    relation_id: int
    rows: Decoding
    plan: StagePlan
    detail: Json = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.changes = Shaped(self.plan.shaping, self.relation, self.relation_id, self.rows, self.plan.outstanding)

    @property
    def shaped(self) -> Relation:
        return self.changes.relation

    @property
    def read(self) -> int:
        return self.rows.taken + self.rows.skipped

    @property
    def skipped(self) -> int:
        return self.rows.skipped + self.changes.left_out

    def batches(self) -> Iterator[pa.RecordBatch]:
        return iter(self.changes)

    def receipts(self) -> Sequence[Receipt]:
        written = self.rows.taken - self.changes.left_out
        if not written:
            return ()
        first, last = self.rows.seqs[0], self.rows.seqs[-1]
        return (Receipt(self.relation_id, self.relation.table, written, self.rows.bytes, first, last, self.detail),)


def _deliver(
    plan: StagePlan,
    lane: Lane,
    slices: Sequence[tuple[Slice, SeqRange]],
    opener: Opener,
    spans: set[SeqRange],
    left_out: int,
) -> Iterator[pa.RecordBatch]:
    """Hand a whole batch to a lane. It must be in this one task. `left_out`: its rows of other streams' tables.

    A batch without a row for this stream is handed over too: the lane's cursor moves with it.
    """
    if not spans:
        return
    if len(spans) > 1:
        raise TargetRefused("a task was given more than one batch", hint="this is a defect in Millstream")
    (span,) = spans
    yield from deliver(plan, lane, span, slice_readings(plan, slices, opener), left_out)


def slice_readings(plan: StagePlan, slices: Sequence[tuple[Slice, SeqRange]], opener: Opener) -> list[Reading]:
    """The slices of a lane's task, by relation."""
    readings: list[Reading] = []
    for (journal_id, relation_id), group in groupby(slices, key=lambda piece: (piece[0].journal_id, piece[0].relation)):
        relation = described(plan.locations, plan.source_kind, journal_id, relation_id)
        rows = plan.decoding(relation, relation_id, opener, list(group))
        readings.append(_Reading(relation, relation_id, rows, plan))
    return readings


def deliver(
    plan: StagePlan, lane: Lane, span: SeqRange, readings: Sequence[Reading], left_out: int
) -> Iterator[pa.RecordBatch]:
    """Hand a whole batch to a lane. `left_out`: its rows of other streams' tables. Yields receipts."""

    def check_complete() -> None:
        read = left_out + sum(reading.read for reading in readings)
        if read != span.end - span.start:
            raise TargetRefused(
                f"{read} rows were read of the {span.end - span.start} from seq {span.start + 1} to {span.end}; "
                "nothing was written",
                hint="run `millstream journal verify`",
            )
        guard.check()

    guard = Guard(plan.outstanding or Outstanding())
    parts = []
    for one in readings:
        passed = guard.passed(one.shaped, one.relation_id, one.batches())
        parts.append(Part(one.shaped, one.relation_id, passed))
    if not lane.deliver(LaneBatch(span, _end_position(plan, span), parts, check_complete, plan.isolate)):
        # An earlier try of this task wrote it and could not say so: what it would have said is counted.
        for part in parts:
            for _ in part.batches:
                pass
    first = next((reading for reading in readings if reading.receipts()), None)
    if first is not None and guard.superseded:
        first.detail["superseded"] = guard.superseded
    for reading in readings:
        yield receipt_rows(reading.receipts(), reading.relation_id, reading.skipped)


def _end_position(plan: StagePlan, span: SeqRange) -> int:
    cut = JournalReader(plan.locations).cut_at(span.end)
    if cut is None:
        raise JournalMismatch(f"seq {span.end} is not the end of a transaction in this journal")
    return reached(cut, plan)


def reached(cut: Cut, plan: StagePlan) -> int:
    """The position up to which a target has all changes after a batch that ends here: also those it had before."""
    return max(cut.resume_position, plan.after_position or 0)


def receipt_rows(receipts: Sequence[Receipt], relation_id: int, skipped: int) -> pa.RecordBatch:
    """Receipts as a task says them, in the schema RECEIPT."""
    rows: list[Json] = [
        {
            "relation": receipt.relation,
            "table": receipt.table,
            "rows": receipt.rows,
            "skipped": 0,
            "bytes": receipt.bytes,
            "first_seq": receipt.first_seq,
            "last_seq": receipt.last_seq,
            "detail": json.dumps(receipt.detail),
        }
        for receipt in receipts
    ]
    if skipped:
        rows.append({"relation": relation_id, "rows": 0, "skipped": skipped})
    return pa.RecordBatch.from_pylist(rows, schema=RECEIPT)


def error_row(error: Json) -> pa.RecordBatch:
    """The same for what went wrong instead."""
    return pa.RecordBatch.from_pylist([{"rows": 0, "skipped": 0, "error": json.dumps(error)}], schema=RECEIPT)


def describe(failed: Exception) -> Json:
    """The error as the driver may see it. The words of a stranger's error may hold a user's value: only ours go out."""
    if isinstance(failed, RowsRejected):
        return {"kind": "RowsRejected", "rejects": [one.to_json() for one in failed.rejects]}
    if isinstance(failed, Unshapable):
        return {"kind": "Unshapable", "reasons": failed.reasons}
    if isinstance(failed, MillstreamError):
        return {"kind": type(failed).__name__, "message": failed.message, "hint": failed.hint}
    where = traceback.extract_tb(failed.__traceback__)[-1]
    place = f"{where.filename.rsplit('/', 1)[-1]}:{where.lineno}"
    if isinstance(failed, OSError):
        reason = errno.errorcode.get(failed.errno or 0, "unknown")
        return {"kind": "OSError", "errno": failed.errno, "message": f"{reason} at {place}", "hint": None}
    return {"kind": type(failed).__name__, "message": f"{type(failed).__name__} at {place}", "hint": None}
