"""Baselines with tables whose filters or transforms are in SQL or Python. See `shaped`, which does it for changes."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import DataFrame, Row, SparkSession

from millstream.errors import TargetRefused
from millstream.model import Json, Relation
from millstream.spark.baseline import BaselinePlan, ChunkRows, chunk_staged, read_chunks
from millstream.spark.cutting import ShapedTable
from millstream.spark.expressions import first_schema, packed_frame
from millstream.spark.images import Binding, image_schema, noting_errors, source_columns, split
from millstream.spark.packed import Unpacked, unpack
from millstream.spark.shaped import ArrowFunction, binding_of, numbers, run_tables
from millstream.spark.stage import describe, error_row, receipt_rows
from millstream.targets.base import Attempt, Lane


def run_shaped_baseline(spark: SparkSession, plan: BaselinePlan) -> Sequence[Row] | None:
    """Stage all chunks in one job; its receipts. None if Spark has no part in any of the tables."""
    tables: dict[Relation, list[int]] = {}
    for number, chunk in enumerate(plan.snapshot.chunks):
        tables.setdefault(chunk.relation, []).append(number)
    bindings = {}
    for relation in tables:
        binding = binding_of(spark, plan.shaping, relation, plan.relation_ids[relation])
        if binding is not None:
            bindings[relation] = binding
    if not bindings:
        return None
    lane = isinstance(plan.stager, Lane)
    shaped = []
    for relation, binding in bindings.items():
        chunks = tables[relation]
        tasks = [chunks] if lane else [[number] for number in chunks]
        shaped.append(ShapedTable(chunk_images(spark, plan, binding, tasks), binding, plan.relation_ids[relation]))
    plain = [number for relation, chunks in tables.items() if relation not in bindings for number in chunks]
    work: list[list[Json]] = [[{"chunk": number}] for number in plain]
    if lane and plain:
        work = [[{"chunk": number} for number in plain]]
    relations = {plan.relation_ids[relation]: binding.bound().relation for relation, binding in bindings.items()}
    return run_tables(spark, plan, shaped, work, _stage(plan, relations))


def packed_chunks(spark: SparkSession, plan: BaselinePlan, binding: Binding, tasks: list[list[int]]) -> DataFrame:
    """What filters and transforms make of chunks of one table, packed; `tasks` has their numbers, task by task.

    Rows that cannot be transformed are left out.
    """
    images, number = chunk_images(spark, plan, binding, tasks), plan.relation_ids[binding.relation]
    return packed_frame(images, binding, number, isolate=True, skip=True)


def chunk_images(spark: SparkSession, plan: BaselinePlan, binding: Binding, tasks: list[list[int]]) -> DataFrame:
    """The images of chunks of one table."""
    return numbers(spark, len(tasks)).mapInArrow(_split(plan, binding, tasks), first_schema(binding))


def _split(plan: BaselinePlan, binding: Binding, tasks: list[list[int]]) -> ArrowFunction:
    """The function for `mapInArrow`: numbers of tasks in, images of their chunks' rows out."""

    def images(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        chunks = [chunk for batch in batches for number in batch.column(0).to_pylist() for chunk in tasks[number]]
        rows = ChunkRows(plan, chunks, plain=True)
        yield from split(binding, rows, lambda: 0, rows.relation_id, plan.outstanding)

    return lambda batches: noting_errors(image_schema(source_columns(binding.bound())), images(batches))


def _stage(plan: BaselinePlan, relations: dict[int, Relation]) -> ArrowFunction:
    """The function for `mapInArrow`: packed rows in, receipts out."""

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        partition, attempt = (context.partitionId(), context.taskAttemptId()) if context else (0, 0)
        try:
            with tempfile.TemporaryDirectory(prefix="millstream-") as scratch:
                where = Attempt(plan.first_chunk + partition, attempt, baseline=True)
                yield from _staged(plan, relations, batches, where, Path(scratch))
        except Exception as failed:  # noqa: BLE001 - named to the driver, which raises it there
            yield error_row(describe(failed))

    return run


def _staged(
    plan: BaselinePlan,
    relations: dict[int, Relation],
    batches: Iterator[pa.RecordBatch],
    attempt: Attempt,
    scratch: Path,
) -> Iterator[pa.RecordBatch]:
    given = unpack(batches, relations, scratch)
    if given.error is not None:
        yield error_row(given.error)
        return
    chunks = [int(work["chunk"]) for work in given.work]
    if isinstance(plan.stager, Lane):
        # It hears of tables without a row as well: what it has of them is not in the source.
        none = (Unpacked(one, number, scratch / "none") for number, one in relations.items())
        ready = [given.tables.get(table.relation_id, table) for table in none]
        yield from read_chunks(plan, chunks, attempt.task_attempt, ready)
        return
    yield from read_chunks(plan, chunks, attempt.task_attempt)
    assert plan.stager is not None  # noqa: S101 - somebody is to get them
    for number, table in given.tables.items():
        # Another name than any chunk has: its table's alone.
        receipts = plan.stager.stage(table.relation, number, table.batches(), attempt)
        if table.rows != sum(receipt.rows for receipt in receipts):
            raise TargetRefused(f"{table.relation.table}: rows were shaped but not all of them were staged")
        chunk_staged()
        yield receipt_rows(receipts, number, table.left_out)
