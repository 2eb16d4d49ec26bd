"""One batch as one Spark job: run it, gather the receipts, and see that they are complete."""

from __future__ import annotations

import errno
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pyspark.sql import Row, SparkSession

import millstream.errors
from millstream.errors import MillstreamError, TargetRefused, TargetUnavailable
from millstream.model import Json, SeqRange
from millstream.observe import counted
from millstream.spark.job import Run, run_slices
from millstream.spark.shaped import run_shaped
from millstream.spark.stage import StagePlan
from millstream.state.base import Tally
from millstream.targets.base import Receipt
from millstream.targets.rejects import Reject, RowsRejected, Unshapable

Receipted = Row | Mapping[str, Any]
"""A row in the schema of receipts."""


@dataclass(frozen=True)
class BatchResult:
    """What the tasks of a batch staged."""

    receipts: tuple[Receipt, ...]
    skipped: int
    """Rows left out on purpose: of other streams' tables, or delivered in an earlier incarnation of the journal."""

    @property
    def rows(self) -> int:
        return sum(receipt.rows for receipt in self.receipts)

    @property
    def bytes(self) -> int:
        return sum(receipt.bytes for receipt in self.receipts)

    @property
    def tables(self) -> dict[str, int]:
        """Rows per table."""
        counts: Counter[str] = Counter()
        for receipt in self.receipts:
            counts[receipt.table] += receipt.rows
        return dict(counts)

    @property
    def superseded(self) -> dict[str, int]:
        """Letters that changes of the batch made obsolete: event ids, and the seq of what did it."""
        return {event: seq for receipt in self.receipts for event, seq in receipt.detail.get("superseded", {}).items()}

    @property
    def tallies(self) -> tuple[Tally, ...]:
        """What the batch adds to the target's totals."""
        tables: dict[str, list[Receipt]] = {}
        for receipt in self.receipts:
            tables.setdefault(receipt.table, []).append(receipt)
        return tuple(
            Tally(table, sum(r.rows for r in parts), sum(r.bytes for r in parts), max(r.last_seq for r in parts))
            for table, parts in sorted(tables.items())
        )


def run_batch(spark: SparkSession, plan: StagePlan, span: SeqRange, runs: Sequence[Run]) -> BatchResult:
    """Stage the slices of a batch in one Spark job, each run of them in a task. Only receipts come back.

    Seqs are dense, so a batch has exactly `end - start` rows: fewer or more receipts than that are
    an error here, before anything is published.
    """
    result = _run(spark, plan, span, runs)
    if result.rows + result.skipped != span.end - span.start:
        raise TargetRefused(
            f"{counted(result.rows, 'row')} staged and {result.skipped} left out of the {span.end - span.start} "
            f"from seq {span.start + 1} to {span.end}; nothing was published",
            hint="run `millstream journal verify`",
        )
    return result


def _run(spark: SparkSession, plan: StagePlan, span: SeqRange, runs: Sequence[Run]) -> BatchResult:
    if plan.shaping is not None and plan.shaping.shape.in_spark:
        found = run_shaped(spark, plan, span)
        if found is not None:
            rows, others = found
            result = collected(rows)
            return replace(result, skipped=result.skipped + others)
    return collected(run_slices(spark.sparkContext, plan, runs, span))


def collected(rows: Sequence[Receipted]) -> BatchResult:
    """Receipts from the rows of a job. Raises the error that a task named, the one that cannot be retried first."""
    errors = [named_error(json.loads(row["error"])) for row in rows if row["error"] is not None]
    if errors:
        raise min(errors, key=lambda error: error.transient)
    receipts = tuple(
        Receipt(
            row["relation"],
            row["table"],
            row["rows"],
            row["bytes"],
            row["first_seq"],
            row["last_seq"],
            json.loads(row["detail"]),
        )
        for row in rows
        if row["table"] is not None
    )
    return BatchResult(receipts, sum(row["skipped"] for row in rows))


def named_error(named: Json) -> MillstreamError:
    """An error as a task has named it."""
    if named["kind"] == "RowsRejected":
        return RowsRejected([Reject.from_json(one) for one in named["rejects"]])
    if named["kind"] == "Unshapable":
        return Unshapable(named["reasons"])
    kind = getattr(millstream.errors, named["kind"], None)
    if isinstance(kind, type) and issubclass(kind, MillstreamError):
        return kind(named["message"], hint=named["hint"])
    message = f"a task failed: {named['message']}"
    if named["kind"] in ("MemoryError", "ArrowMemoryError") or named.get("errno") in (errno.ENOSPC, errno.EDQUOT):
        return TargetUnavailable(message)
    return TargetRefused(message, hint="this is a defect in Millstream: please report it")
