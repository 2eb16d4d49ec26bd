"""What a delivery task does: open its slices, decode them by column, hand them to the target.

Runs in Spark's Python workers. Only receipts leave a task; rows never pass the driver. A task never
sleeps and never retries: an error it can name goes to the driver inside a receipt, and the driver
decides. (A worker that is killed says nothing; Spark then tries the task again.)
"""

from __future__ import annotations

import errno
import json
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import pyarrow as pa
from pyspark import TaskContext

from millstream.changelog import assemble
from millstream.errors import MillstreamError, TargetRefused
from millstream.failpoint import failpoint
from millstream.model import Json, Relation
from millstream.spark.probe import Needed, check_myself
from millstream.spark.rows import Opener, Rows, described
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


@dataclass(frozen=True)
class StagePlan:
    """What every task of a query knows besides its slices. Constant for a query, small, picklable."""

    locations: tuple[str, ...]
    needed: Needed
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
    check_myself(plan.needed)
    slices = [piece for batch in batches for piece in from_rows(batch)]
    opener = Opener(plan.locations, slices)
    for (journal_id, relation_id), group in groupby(slices, key=lambda piece: (piece[0].journal_id, piece[0].relation)):
        relation = described(plan.locations, plan.source_kind, journal_id, relation_id)
        rows = Rows(opener, plan.after_position, group)
        changes = _decoded(relation, relation_id, plan.event_prefix, rows)
        receipts = plan.stager.stage(relation, relation_id, changes, attempt)
        # A stager that did not read to the end must not pass for one that did.
        if rows.taken != sum(receipt.rows for receipt in receipts):
            raise TargetRefused(f"{relation.table}: {rows.taken} rows were read but not all of them were staged")
        yield _receipt_rows(receipts, relation_id, rows.skipped)


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
