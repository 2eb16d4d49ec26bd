"""What a baseline task does: read its chunks of the source's snapshot, decode them, hand them to the target.

Runs in Spark's Python workers. A staged target gets a chunk a task; a lane gets all of them in one task and
one transaction. Only receipts leave a task, as in `stage`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import pyarrow as pa
from pyspark import TaskContext

from millstream.changelog import assemble, pieces
from millstream.errors import TargetRefused
from millstream.failpoint import failpoint
from millstream.journal.format import JOURNAL
from millstream.model import Op, Relation, SeqRange, SourceSpec
from millstream.sources import read_chunk
from millstream.sources.base import Chunk, SnapshotPlan
from millstream.sources.postgres.cells import integers
from millstream.spark.changes import Shaped
from millstream.spark.rows import CHUNK_BYTES, CHUNK_ROWS
from millstream.spark.stage import describe, error_row, receipt_rows
from millstream.targets.base import Attempt, Lane, LaneBatch, Part, Receipt, Stager
from millstream.targets.rejects import Guard, Outstanding
from millstream.transforms.shape import Shaping

_LONG_BYTES = 2 << 20
"""So many bytes of rows are a long run, however few rows they are."""


@dataclass(frozen=True)
class BaselinePlan:
    """What every task of a baseline knows besides the numbers of its chunks. Picklable."""

    source: SourceSpec
    snapshot: SnapshotPlan
    event_prefix: str
    seq: int
    """The version of every row: whatever the journal has beyond it is newer."""
    end_position: int
    """The position up to which the target has all changes with it."""
    relation_ids: dict[Relation, int] = field(hash=False)
    stager: Stager | Lane | None
    """None: the rows are only read."""
    shaping: Shaping | None = None
    """The stream's filters and transforms; None: every row goes on as it is."""
    outstanding: Outstanding | None = None
    isolate: bool = False
    """As in a `StagePlan`."""
    first_chunk: int = 0
    """The number of the first chunk in the snapshot, if these are not all of it: event ids are made with it."""
    truncates: bool = False
    """Whether a truncate comes first: a changelog gets a table anew, and all chunks are of that."""


def chunk_staged() -> None:
    """A chunk is staged, by this way or the one through Spark's SQL: a place to be killed at."""
    failpoint("snapshot.chunk_staged")


def read_in_task(plan: BaselinePlan, numbers: Sequence[int]) -> Iterator[pa.RecordBatch]:
    """What a task does with the numbers of its chunks. Yields receipts."""
    context = TaskContext.get()
    attempt = context.taskAttemptId() if context else 0
    try:
        yield from read_chunks(plan, numbers, attempt)
    except Exception as failed:  # noqa: BLE001 - named to the driver, which raises it there
        yield error_row(describe(failed))


def read_chunks(
    plan: BaselinePlan, numbers: Sequence[int], attempt: int, ready: Sequence[Ready] = ()
) -> Iterator[pa.RecordBatch]:
    """Deliver chunks, to a lane with tables that are `ready`. Yields receipts."""
    if isinstance(plan.stager, Lane):
        yield from _deliver(plan, plan.stager, numbers, ready)
        return
    assert plan.stager is not None  # noqa: S101 - who only reads does not come here
    for number in numbers:
        reading = ChunkRows(plan, [number])
        where = Attempt(plan.first_chunk + number, attempt, baseline=True)
        receipts = plan.stager.stage(reading.changes.relation, reading.relation_id, iter(reading.changes), where)
        if reading.rows != reading.changes.left_out + sum(receipt.rows for receipt in receipts):
            raise TargetRefused(f"{reading.relation.table}: rows were read but not all of them were staged")
        chunk_staged()
        yield receipt_rows(receipts, reading.relation_id, reading.changes.left_out)


class Ready(Protocol):
    """A table whose rows are read, filtered and transformed already."""

    relation_id: int
    left_out: int

    @property
    def shaped(self) -> Relation: ...

    def batches(self) -> Iterator[pa.RecordBatch]: ...

    def receipts(self) -> Sequence[Receipt]: ...


def _deliver(
    plan: BaselinePlan, lane: Lane, numbers: Sequence[int], ready: Sequence[Ready]
) -> Iterator[pa.RecordBatch]:
    """All chunks in one transaction, table by table."""
    tables: dict[Relation, list[int]] = {}
    for number in numbers:
        tables.setdefault(plan.snapshot.chunks[number].relation, []).append(number)
    readings = [ChunkRows(plan, group) for group in tables.values()]
    guard = Guard(plan.outstanding or Outstanding())
    parts = []
    for one in readings:
        passed = guard.passed(one.changes.relation, one.relation_id, iter(one.changes))
        copied = one.copied() if _as_they_are(plan) else None
        parts.append(Part(one.changes.relation, one.relation_id, passed, copied))
    for table in ready:
        passed = guard.passed(table.shaped, table.relation_id, table.batches())
        parts.append(Part(table.shaped, table.relation_id, passed))

    def check_complete() -> None:
        unread = [reading.relation.table for reading in readings if not reading.ended]
        if unread:
            raise TargetRefused(f"{', '.join(unread)}: not all rows were read; nothing was written")

    batch = LaneBatch(SeqRange(plan.seq, plan.seq), plan.end_position, parts, check_complete, plan.isolate)
    if not lane.deliver(batch):
        # An earlier try of this task wrote them and could not say so: what it would have said is counted.
        for part in parts:
            for _ in part.batches:
                pass
    for reading in readings:
        receipts = reading.receipts()
        if guard.superseded:
            # Letters of rows that have come now: each receipt says it, whichever of them it is of.
            receipts = [replace(one, detail={"superseded": guard.superseded}) for one in receipts]
        yield receipt_rows(receipts, reading.relation_id, reading.changes.left_out)
    for table in ready:
        yield receipt_rows(table.receipts(), table.relation_id, table.left_out)


def _as_they_are(plan: BaselinePlan) -> bool:
    """Whether the target gets the source's rows, all of them, and nothing has to be known of a single one."""
    return plan.source.kind == "postgres" and not (plan.shaping or plan.outstanding or plan.isolate)


class ChunkRows:
    """Chunks of one relation as its changelog, with a count of what was read. To be iterated once.

    Iterated itself it has the source's rows; `changes` is what filters and transforms make of them, unless they are
    to be `plain`.
    """

    def __init__(self, plan: BaselinePlan, numbers: Sequence[int], *, plain: bool = False) -> None:
        self._plan = plan
        self._numbers = numbers
        self.relation = plan.snapshot.chunks[numbers[0]].relation
        self.relation_id = plan.relation_ids[self.relation]
        self.rows = self.bytes = 0
        self.ended = False
        shaping = None if plain else plan.shaping
        # Who only reads has no use for what nobody can get.
        skip = plan.stager is None
        self.changes = Shaped(shaping, self.relation, self.relation_id, self, plan.outstanding, skip=skip)

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        for number in self._numbers:
            chunk = self._plan.snapshot.chunks[number]
            if self._plan.truncates and number == 0:
                yield self._truncate(number)
            yield from self._chunk(number, chunk)
        self.ended = True

    def copied(self) -> Iterator[pa.LargeBinaryArray]:
        """The rows as the source copies them, instead of iterating."""
        for number in self._numbers:
            for rows in read_chunk(self._plan.source, self._plan.snapshot, self._plan.snapshot.chunks[number]):
                self.rows += len(rows)
                self.bytes += rows.nbytes
                yield rows
        self.ended = True

    def receipts(self) -> Sequence[Receipt]:
        written = self.rows - self.changes.left_out
        if not written:
            return ()
        seq = self._plan.seq
        return (Receipt(self.relation_id, self.relation.table, written, self.bytes, seq, seq, {}),)

    def _chunk(self, number: int, chunk: Chunk) -> Iterator[pa.RecordBatch]:
        # The chunks of a plan are numbered, and a chunk's rows come in the order of their places: the same row has
        # the same id in every try.
        prefix = f"{self._plan.event_prefix}-r{self._plan.first_chunk + number}"
        index = 0
        for payload in _gathered(read_chunk(self._plan.source, self._plan.snapshot, chunk)):
            for raw in pieces(self._journal_rows(payload, index), CHUNK_BYTES):
                self.rows += raw.num_rows
                self.bytes += raw.nbytes
                yield assemble(raw, self.relation, self.relation_id, prefix)
                failpoint("snapshot.rows_decoded")
            index += len(payload)

    def _truncate(self, number: int) -> pa.RecordBatch:
        """What says that everything older is not the table's any more."""
        raw = self._journal_rows(pa.array([b"T"], pa.large_binary()), 0, Op.TRUNCATE)
        self.rows += 1
        prefix = f"{self._plan.event_prefix}-t{self._plan.first_chunk + number}"
        return assemble(raw, self.relation, self.relation_id, prefix)

    def _journal_rows(self, payload: pa.LargeBinaryArray, index: int, op: Op = Op.READ) -> pa.RecordBatch:
        """The rows in the form that the journal would have them in."""
        rows, plan = len(payload), self._plan
        taken_at = int(plan.snapshot.taken_at.timestamp() * 1_000_000)

        def same(value: int, kind: type[np.int64 | np.int32 | np.uint8]) -> pa.Array:
            return integers(np.full(rows, value, kind))

        columns = [
            same(plan.seq, np.int64),
            integers(np.arange(index, index + rows, dtype=np.int32)),
            same(op, np.uint8),
            same(plan.snapshot.position, np.int64),
            same(plan.snapshot.position, np.int64),
            same(taken_at, np.int64).view(pa.timestamp("us", "UTC")),
            same(0, np.int64),
            same(self.relation_id, np.int32),
            payload,
        ]
        return pa.RecordBatch.from_arrays(columns, schema=JOURNAL)


def _gathered(arrays: Iterable[pa.LargeBinaryArray]) -> Iterator[pa.LargeBinaryArray]:
    """Small pieces of a copy put together, since long runs decode fast."""
    waiting: list[pa.LargeBinaryArray] = []
    rows = size = 0
    for array in arrays:
        waiting.append(array)
        rows, size = rows + len(array), size + array.nbytes
        if rows >= CHUNK_ROWS or size >= _LONG_BYTES:
            yield waiting[0] if len(waiting) == 1 else pa.concat_arrays(waiting)
            waiting, rows, size = [], 0, 0
    if waiting:
        yield pa.concat_arrays(waiting)
