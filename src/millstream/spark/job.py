"""A batch's slices, or a baseline's chunks, as the tasks of one Spark job.

The job has no query plan: its tasks are known, and planning and optimising a DataFrame of a few rows, batch after
batch, would take longer than most batches do. Slices and numbers of chunks travel with the tasks; receipts come back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from millstream.journal.format import Slice
from millstream.model import Json, SeqRange
from millstream.spark.baseline import BaselinePlan, read_in_task
from millstream.spark.slices import to_rows
from millstream.spark.stage import StagePlan, stage

if TYPE_CHECKING:
    from pyspark import SparkContext

Run = Sequence[Slice]
"""The slices of one task."""


def run_slices(context: SparkContext, plan: StagePlan, runs: Sequence[Run], span: SeqRange) -> list[Json]:
    """Stage each run of slices in a task of its own. Returns the receipts of all (see `stage.RECEIPT`)."""

    def work(tasks: Iterable[Run]) -> Iterable[Json]:
        for receipts in stage(plan, (to_rows(run, span) for run in tasks)):
            yield from receipts.to_pylist()

    return context.parallelize(runs, max(1, len(runs))).mapPartitions(work).collect()


def run_numbered(context: SparkContext, plan: BaselinePlan, tasks: Sequence[Sequence[int]]) -> list[Json]:
    """Read the chunks with these numbers, each row of them in a task of its own. Returns the receipts of all."""

    def work(numbers: Iterable[Sequence[int]]) -> Iterable[Json]:
        for receipts in read_in_task(plan, [number for some in numbers for number in some]):
            yield from receipts.to_pylist()

    return context.parallelize(tasks, len(tasks)).mapPartitions(work).collect()
