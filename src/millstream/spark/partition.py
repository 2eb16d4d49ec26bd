"""How the slices of a batch are shared out over the tasks of its one Spark job.

Pure: the same slices always give the same partitions, which Spark relies on when it plans twice.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from millstream.journal.format import Slice
from millstream.spark.probe import is_local

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TASK_BYTES = 8 << 20
"""Up to here one task is faster than two: starting a task costs more than the work it takes over."""


def cores_of(spark: SparkSession) -> int:
    """How many tasks of a batch can work at the same time.

    A local master has more task slots than there are processors, for tasks that wait. Those of one batch do not.
    """
    context = spark.sparkContext
    if is_local(spark):
        return min(context.defaultParallelism, os.cpu_count() or 1)
    return context.defaultParallelism


def share_out(slices: Sequence[Slice], parallelism: int) -> list[list[Slice]]:
    """Slices in order of relation and seq, cut into at most `parallelism` runs of about equal bytes.

    A small batch is one run. A relation's slices are in seq order and contiguous, within a run and
    from run to run, so that a large relation is spread over tasks in pieces that follow each other.
    """
    ordered = sorted(slices, key=lambda s: (s.relation, s.first_seq))
    if not ordered:
        return []
    weights = _bytes_of(ordered)
    total = sum(weights)
    count = max(1, min(parallelism, round(total / TASK_BYTES)))
    runs: list[list[Slice]] = [[] for _ in range(count)]
    before = 0.0
    for piece, weight in zip(ordered, weights, strict=True):
        # A piece belongs to the run in which its middle falls.
        runs[min(count - 1, int((before + weight / 2) * count / total))].append(piece)
        before += weight
    return [run for run in runs if run]


def _bytes_of(slices: Sequence[Slice]) -> list[float]:
    """What each slice has to read. Slices of several relations may share the same bytes: each counts its rows' part."""
    rows: dict[tuple[str, int], int] = defaultdict(int)
    for piece in slices:
        rows[piece.segment, piece.offset] += max(1, piece.rows)
    return [max(1.0, s.length * max(1, s.rows) / rows[s.segment, s.offset]) for s in slices]
