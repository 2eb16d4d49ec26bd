"""Batches with tables whose filters or transforms are in SQL or Python: Spark's part of the way.

For such a table the changes of a batch become a DataFrame of images (`images`), SQL does its part of the work on
it, and what comes out is packed (`packed`) for the task that delivers. Tables without SQL go to that task as they
would without it. All of it is one job, without a shuffle: a lane still gets its batch in one task.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import reduce
from pathlib import Path

import pyarrow as pa
from pyspark import TaskContext
from pyspark.errors import PySparkException, PythonException
from pyspark.sql import DataFrame, Row, SparkSession

from millstream.errors import RowUnshaped, TargetRefused
from millstream.journal import JournalReader
from millstream.journal.format import Slice
from millstream.model import Json, Relation, SeqRange
from millstream.spark.analysis import SparkAnalyst, quiet
from millstream.spark.baseline import BaselinePlan
from millstream.spark.cutting import ShapedTable, find_by_cutting
from millstream.spark.expressions import first_schema, packed_frame
from millstream.spark.images import Binding, image_schema, noting_errors, source_columns, split
from millstream.spark.packed import PACKED_DDL, packed_work, unpack
from millstream.spark.partition import share_out
from millstream.spark.probe import check_myself
from millstream.spark.rows import MESSAGES, Opener, described
from millstream.spark.stage import (
    RECEIPT_DDL,
    StagePlan,
    deliver,
    describe,
    error_row,
    receipt_rows,
    slice_readings,
    stage_slices,
)
from millstream.spark.tables import share
from millstream.targets.base import Attempt, Lane
from millstream.transforms.compiled import compiled_by, wants_spark
from millstream.transforms.shape import Shaping

ArrowFunction = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]


_known: dict[tuple[str, Relation], Binding] = {}
"""What Spark has said of tables. It says the same in every session, of which each batch brings a new one."""
MOST_KNOWN = 1024


def binding_of(spark: SparkSession, shaping: Shaping | None, relation: Relation, relation_id: int) -> Binding | None:
    """The table's filters and transforms if Spark has a part in them. Raises ConfigError for what does not compile."""
    if shaping is None or relation_id == MESSAGES or not wants_spark(shaping, relation):
        return None
    about = shaping.key(), relation
    binding = _known.get(about)
    if binding is None:
        bound = compiled_by(SparkAnalyst(lambda: spark), shaping, relation)
        assert bound is not None  # noqa: S101 - something is for this table
        if len(_known) >= MOST_KNOWN:
            _known.clear()
        binding = _known[about] = Binding(shaping, relation, bound.outputs)
    return binding


def run_shaped(spark: SparkSession, plan: StagePlan, span: SeqRange) -> tuple[Sequence[Row], int] | None:
    """Stage a batch in one job: the receipts, and how many rows are other streams'. None if Spark has no part in it."""
    planned = [(piece, span) for piece in JournalReader(plan.locations).slices(span)]
    own, others = share(plan.locations, plan.tables, planned)
    tables: dict[int, list[Slice]] = {}
    for piece, _ in own:
        tables.setdefault(piece.relation, []).append(piece)
    bindings = {}
    for number, pieces in tables.items():
        relation = described(plan.locations, plan.source_kind, pieces[0].journal_id, number)
        binding = binding_of(spark, plan.shaping, relation, number)
        if binding is not None:
            bindings[number] = binding
    if not bindings:
        return None
    lane = isinstance(plan.stager, Lane)
    tasks = 1 if lane else spark.sparkContext.defaultParallelism
    shaped = []
    for number, binding in bindings.items():
        runs = share_out(tables[number], tasks)
        images = numbers(spark, len(runs)).mapInArrow(_split(plan, binding, number, runs, span), first_schema(binding))
        shaped.append(ShapedTable(images, binding, number))
    plain = [piece for number, pieces in tables.items() if number not in bindings for piece in pieces]
    work = [[asdict(piece) for piece in run] for run in share_out(plain, tasks)] if plain else []
    relations = {number: binding.bound().relation for number, binding in bindings.items()}
    stage = _stage(plan, span, relations, others.total())
    return run_tables(spark, plan, shaped, work, stage), others.total()


def run_tables(
    spark: SparkSession,
    plan: StagePlan | BaselinePlan,
    tables: Sequence[ShapedTable],
    work: list[list[Json]],
    stage: ArrowFunction,
) -> Sequence[Row]:
    """Shape tables, and deliver them and the other work of a batch, in one job. Returns the rows of receipts.

    Raises RowUnshaped if something fails on a row; Unshapable, which says on which ones, if that is asked for.
    """
    stream = plan.shaping.stream if plan.shaping is not None else ""
    frames = [packed_frame(one.images, one.binding, one.relation_id, isolate=plan.isolate) for one in tables]
    if work:
        frames.append(numbers(spark, len(work)).mapInArrow(packed_work(work), PACKED_DDL))
    try:
        functions = any(one.functions() for one in tables)
        return gathered(frames, stage, one_task=isinstance(plan.stager, Lane), stream=stream, functions=functions)
    except RowUnshaped:
        if plan.isolate:
            find_by_cutting(tables)
        raise


def numbers(spark: SparkSession, count: int) -> DataFrame:
    """The numbers of tasks, one each."""
    return spark.range(0, count, 1, max(1, count))


def gathered(
    frames: Sequence[DataFrame], stage: ArrowFunction, *, one_task: bool, stream: str, functions: bool = False
) -> Sequence[Row]:
    """Bring packed tables to the tasks that deliver them, and run the job. Returns the rows of receipts."""
    packed = reduce(DataFrame.union, frames)
    if one_task:
        packed = packed.coalesce(1)
    with in_our_words(stream, functions=functions):
        return packed.mapInArrow(stage, RECEIPT_DDL).collect()


@contextmanager
def in_our_words(stream: str, *, functions: bool) -> Iterator[None]:
    """Raise RowUnshaped, without a row's values, for what Spark says of a row. `functions`: users' are among it."""
    try:
        with quiet():
            yield
    except PySparkException as failed:
        raise _row_error(failed, stream, functions) or failed from None


_IN_SQL = re.compile(
    r"\[((?:ARITHMETIC_OVERFLOW|CAST_INVALID_INPUT|CAST_OVERFLOW|DIVIDE_BY_ZERO|REMAINDER_BY_ZERO|INVALID_ARRAY_INDEX"
    r"|NUMERIC_VALUE_OUT_OF_RANGE|DATETIME_OVERFLOW|USER_RAISED_EXCEPTION|MALFORMED_RECORD|INVALID_[A-Z_]+"
    r"|CANNOT_PARSE_[A-Z_]+|CONVERSION_INVALID_INPUT|BINARY_ARITHMETIC_OVERFLOW|INTERVAL_[A-Z_]+)(?:\.[A-Z0-9_]+)?)\]"
)
"""What SQL says of a row that it cannot work on; the rest of the sentence may hold the row's values."""


def _row_error(failed: PySparkException, stream: str, functions: bool) -> RowUnshaped | None:
    found = _IN_SQL.search(str(failed))
    if found is None and functions and isinstance(failed, PythonException):
        return RowUnshaped(
            f"stream {stream}: a function of the stream fails on a row",
            hint="let it leave such rows as they are, or out; a new target begins with that",
        )
    if found is None:
        return None
    return RowUnshaped(
        f"stream {stream}: a filter or transform in SQL fails on a row: {found[1]}",
        hint="let it give NULL there: try_cast, try_divide, try_add and the like; a new target begins with that",
    )


def _split(
    plan: StagePlan, binding: Binding, relation_id: int, runs: list[list[Slice]], span: SeqRange
) -> ArrowFunction:
    """The function for `mapInArrow`: numbers of runs of slices in, images out."""

    def images(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        check_myself(plan.needed)
        asked = [number for batch in batches for number in batch.column(0).to_pylist()]
        slices = [(piece, span) for number in asked for piece in runs[number]]
        rows = plan.decoding(binding.relation, relation_id, Opener(plan.locations, slices), slices)
        yield from split(binding, rows, lambda: rows.skipped, relation_id, plan.outstanding)

    return lambda batches: noting_errors(image_schema(source_columns(binding.bound())), images(batches))


def _stage(plan: StagePlan, span: SeqRange, relations: dict[int, Relation], others: int) -> ArrowFunction:
    """The function for `mapInArrow`: packed rows in, receipts out. `relations` as targets get them."""

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        attempt = Attempt(context.partitionId(), context.taskAttemptId()) if context else Attempt(0, 0)
        try:
            with tempfile.TemporaryDirectory(prefix="millstream-") as scratch:
                yield from _staged(plan, span, relations, others, batches, attempt, Path(scratch))
        except Exception as failed:  # noqa: BLE001 - named to the driver, which raises it there
            yield error_row(describe(failed))

    return run


def _staged(
    plan: StagePlan,
    span: SeqRange,
    relations: dict[int, Relation],
    others: int,
    batches: Iterator[pa.RecordBatch],
    attempt: Attempt,
    scratch: Path,
) -> Iterator[pa.RecordBatch]:
    check_myself(plan.needed)
    given = unpack(batches, relations, scratch)
    if given.error is not None:
        yield error_row(given.error)
        return
    slices = [(Slice(**piece), span) for piece in given.work]
    opener = Opener(plan.locations, slices)
    if isinstance(plan.stager, Lane):
        readings = [*slice_readings(plan, slices, opener), *given.tables.values()]
        yield from deliver(plan, plan.stager, span, readings, others)
        return
    yield from stage_slices(plan, plan.stager, slices, opener, attempt)
    for number, table in given.tables.items():
        receipts = plan.stager.stage(table.relation, number, table.batches(), attempt)
        if table.rows != sum(receipt.rows for receipt in receipts):
            raise TargetRefused(f"{table.relation.table}: rows were shaped but not all of them were staged")
        yield receipt_rows(receipts, number, table.left_out)
