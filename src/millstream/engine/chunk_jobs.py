"""Spark jobs that read chunks of a source's tables, within what the source allows.

A source may limit how many sessions read it at once (`max_connections`) and how much they read a second (`max_rate`).
Both hold for all tasks, streams and targets of this process together, copies and comparisons alike: under a limit one
job at a time reads a source, of no more tasks than may have a session, and each task has its share of the rate.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from millstream.engine.batch import BatchResult, Receipted, collected
from millstream.engine.turns import Turns
from millstream.model import SourceSpec
from millstream.sources import copy_limits
from millstream.spark.baseline import BaselinePlan
from millstream.spark.job import run_numbered
from millstream.spark.shaped_baseline import run_shaped_baseline

_lines: dict[str, Turns] = {}
"""Who reads a source that is limited, by the source's address."""
_lines_lock = threading.Lock()


class BaselineStopped(Exception):
    """A copy was given up because the delivery shall end: what is not visible of it by now never will be."""


@contextmanager
def source_turn(source: SourceSpec, stopping: threading.Event) -> Iterator[None]:
    """Have the source for oneself, where it is limited. Raises BaselineStopped when it shall end before that.

    Who also needs the target for himself takes this first: one waits long for it, and nobody waits for us meanwhile.
    """
    limits = copy_limits(source)
    if limits.connections is None and limits.rate is None:
        yield
        return
    with _lines_lock:
        line = _lines.setdefault(source.uri, Turns())
    with line.taken(stopping) as mine:
        if not mine:
            raise BaselineStopped
        yield


def run_chunks(spark: SparkSession, plan: BaselinePlan, stopping: threading.Event, *, parallel: bool) -> BatchResult:
    """Read the chunks of a plan and hand them to its stager; `parallel`: each in a task of its own.

    Else all in one task, and it is the source's turn for that (`source_turn`).
    """
    limits = copy_limits(plan.source)
    if not parallel:
        return _run(spark, paced(plan, limits.rate, 1), stopping, parallel=False)
    results = []
    for part in waves(plan, limits.connections):
        width = min(spark.sparkContext.defaultParallelism, sum(chunk.rows is None for chunk in part.snapshot.chunks))
        with source_turn(plan.source, stopping):
            results.append(_run(spark, paced(part, limits.rate, width), stopping, parallel=True))
    receipts = tuple(receipt for result in results for receipt in result.receipts)
    return BatchResult(receipts, sum(result.skipped for result in results))


def paced(plan: BaselinePlan, rate: int | None, width: int) -> BaselinePlan:
    """The plan for so many tasks at once, with their share of the rate."""
    if rate is None:
        return plan
    return replace(plan, snapshot=replace(plan.snapshot, rate=rate // max(1, width)))


def waves(plan: BaselinePlan, most: int | None) -> Iterator[BaselinePlan]:
    """A plan in parts, one after another, of each of which no more than `most` chunks are still to be read."""
    chunks, begin, reading = plan.snapshot.chunks, 0, 0
    for number, chunk in enumerate(chunks):
        reads = chunk.rows is None
        if most is not None and reads and reading == most:
            yield _part(plan, begin, number)
            begin, reading = number, 0
        reading += reads
    yield _part(plan, begin, len(chunks))


def _part(plan: BaselinePlan, begin: int, end: int) -> BaselinePlan:
    return replace(
        plan,
        snapshot=replace(plan.snapshot, chunks=plan.snapshot.chunks[begin:end]),
        first_chunk=plan.first_chunk + begin,
        # A truncate stands before everything else of its table, and comes once.
        truncates=plan.truncates and begin == 0,
    )


def _run(spark: SparkSession, plan: BaselinePlan, stopping: threading.Event, *, parallel: bool) -> BatchResult:
    """In one job."""
    numbers = range(len(plan.snapshot.chunks))
    # Where there is nothing to read, a lane still gets its cursor.
    tasks = [[number] for number in numbers] if parallel and numbers else [list(numbers)]
    try:
        rows: Sequence[Receipted] | None = None
        if plan.shaping is not None and plan.shaping.shape.in_spark:
            rows = run_shaped_baseline(spark, plan)
        if rows is None:
            rows = run_numbered(spark.sparkContext, plan, tasks)
    except (PySparkException, Py4JError):
        if stopping.is_set():
            # Not an error: the job was cancelled because we asked for it.
            raise BaselineStopped from None
        raise
    return collected(rows)
