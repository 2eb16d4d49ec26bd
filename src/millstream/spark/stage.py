"""What a delivery task does: open its slices, decode them by column, hand them to the target.

Runs in Spark's Python workers. Only receipts leave a task; rows never pass the driver. A task never
sleeps and never retries: an error it can name goes to the driver inside a receipt, and the driver
decides. (A worker that is killed says nothing; Spark then tries the task again.)
"""

from __future__ import annotations

import errno
import json
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby

import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext

from millstream.changelog import assemble, pieces
from millstream.errors import MillstreamError, TargetRefused
from millstream.failpoint import failpoint
from millstream.journal import JournalReader, open_slice
from millstream.journal.format import Slice
from millstream.model import Json, Relation, SeqRange
from millstream.sources.decoders import messages
from millstream.spark.slices import from_rows
from millstream.targets.base import Attempt, Receipt, Stager

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

CHUNK_ROWS = 16_384
CHUNK_BYTES = 16 << 20
"""Raw rows are gathered up to here before they are decoded: long runs decode fast, and memory stays bounded."""

SHARED_BYTES = 64 << 20
"""How much of the bytes that several relations share a task keeps open."""

MESSAGES = 0
"""The relation id of logical messages, which belong to no table of the source."""


@dataclass(frozen=True)
class StagePlan:
    """What every task of a query knows besides its slices. Constant for a query, small, picklable."""

    locations: tuple[str, ...]
    source_kind: str
    event_prefix: str
    after_position: int | None
    """Changes up to here were delivered from an earlier incarnation of the journal and are left out."""
    stager: Stager


def stage_function(plan: StagePlan) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """The function for `mapInArrow`: slices in, receipts out."""

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return stage(plan, batches)

    return run


def stage(plan: StagePlan, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Stage one task's slices relation by relation; yields one batch of receipts per relation."""
    context = TaskContext.get()
    attempt = Attempt(context.partitionId(), context.taskAttemptId()) if context else Attempt(0, 0)
    try:
        yield from _stage(plan, batches, attempt)
    except Exception as failed:  # noqa: BLE001 - named to the driver, which raises it there
        yield _error_row(describe(failed))


def _stage(plan: StagePlan, batches: Iterable[pa.RecordBatch], attempt: Attempt) -> Iterator[pa.RecordBatch]:
    slices = [piece for batch in batches for piece in from_rows(batch)]
    opener = _Opener(plan.locations, slices)
    for (journal_id, relation_id), group in groupby(slices, key=lambda piece: (piece[0].journal_id, piece[0].relation)):
        relation = _relation(plan.locations, plan.source_kind, journal_id, relation_id)
        rows = _Rows(opener, plan.after_position, group)
        changes = _decoded(relation, relation_id, plan.event_prefix, rows)
        receipts = plan.stager.stage(relation, relation_id, changes, attempt)
        # A stager that did not read to the end must not pass for one that did.
        if rows.taken != sum(receipt.rows for receipt in receipts):
            raise TargetRefused(f"{relation.table}: {rows.taken} rows were read but not all of them were staged")
        yield _receipt_rows(receipts, relation_id, rows.skipped)


@lru_cache(maxsize=4096)
def _relation(locations: tuple[str, ...], source_kind: str, journal_id: str, relation_id: int) -> Relation:
    """A description, read once per worker: one id of one journal never means anything else."""
    if relation_id == MESSAGES:
        return messages(source_kind)
    return _journal(locations, journal_id).relation(relation_id)


@lru_cache(maxsize=16)
def _journal(locations: tuple[str, ...], journal_id: str) -> JournalReader:
    return JournalReader(locations)


class _Opener:
    """Opens slices, those that share their bytes one after another, as long as what they hold fits into memory.

    A stretch of an open segment holds rows of many relations. A task works relation by relation, so
    it would read, check and parse the same bytes for each: more work than all the rest.
    """

    def __init__(self, locations: tuple[str, ...], slices: Sequence[tuple[Slice, SeqRange]]) -> None:
        self._locations = locations
        self._held: dict[Slice, pa.RecordBatch] = {}
        stretches: dict[tuple[str, int, int], list[tuple[Slice, SeqRange]]] = defaultdict(list)
        for piece, span in slices:
            stretches[piece.segment, piece.offset, piece.length].append((piece, span))
        room = SHARED_BYTES
        for (_, _, length), sharing in stretches.items():
            room -= length
            if len(sharing) > 1 and room >= 0:
                self._held.update((piece, open_slice(piece, locations, span)) for piece, span in sharing)

    def open(self, piece: Slice, span: SeqRange) -> pa.RecordBatch:
        """The rows of a slice that lie in the batch. Once per slice."""
        held = self._held.pop(piece, None)
        return open_slice(piece, self._locations, span) if held is None else held


class _Rows:
    """The raw rows of one relation in seq order, in chunks, with a count of what was taken and left out."""

    def __init__(self, opener: _Opener, after_position: int | None, pieces: Iterable[tuple[Slice, SeqRange]]) -> None:
        self._opener = opener
        self._after = after_position
        self._pieces = pieces
        self.taken = 0
        self.skipped = 0

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        waiting: list[pa.RecordBatch] = []
        rows = size = 0
        for piece, span in self._pieces:
            for part in _split(self._kept(self._opener.open(piece, span))):
                if waiting and (rows + part.num_rows > CHUNK_ROWS or size + part.nbytes > CHUNK_BYTES):
                    yield pa.concat_batches(waiting)
                    waiting, rows, size = [], 0, 0
                waiting.append(part)
                rows += part.num_rows
                size += part.nbytes
        if waiting:
            yield pa.concat_batches(waiting)

    def _kept(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        opened = batch.num_rows
        if self._after is not None:
            batch = batch.filter(pc.greater(batch.column("resume_position"), self._after))
        self.taken += batch.num_rows
        self.skipped += opened - batch.num_rows
        return batch


def _split(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    for offset in range(0, batch.num_rows, CHUNK_ROWS):
        yield from pieces(batch.slice(offset, CHUNK_ROWS), CHUNK_BYTES)


def _decoded(
    relation: Relation, relation_id: int, event_prefix: str, rows: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    for batch in rows:
        yield assemble(batch, relation, relation_id, event_prefix)
        failpoint("stage.slice_decoded")


def _receipt_rows(receipts: Sequence[Receipt], relation_id: int, skipped: int) -> pa.RecordBatch:
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


def _error_row(error: Json) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([{"rows": 0, "skipped": 0, "error": json.dumps(error)}], schema=RECEIPT)


def describe(failed: Exception) -> Json:
    """The error as the driver may see it. The words of a stranger's error may hold a user's value: only ours go out."""
    if isinstance(failed, MillstreamError):
        return {"kind": type(failed).__name__, "message": failed.message, "hint": failed.hint}
    where = traceback.extract_tb(failed.__traceback__)[-1]
    place = f"{where.filename.rsplit('/', 1)[-1]}:{where.lineno}"
    if isinstance(failed, OSError):
        reason = errno.errorcode.get(failed.errno or 0, "unknown")
        return {"kind": "OSError", "errno": failed.errno, "message": f"{reason} at {place}", "hint": None}
    return {"kind": type(failed).__name__, "message": f"{type(failed).__name__} at {place}", "hint": None}
