"""Source and target side by side on Spark: rows to texts in tasks, hashes per range of keys, then the keys that differ.

Tasks read chunks of the source's snapshot and parts of the target, and tell each row as text in the target's own
form (`targets.forms`). Spark counts and hashes these per bucket of the key's hash, in any order. Where a bucket
differs its rows are compared by all of their text, and the keys of those that are not equal are left. Rows stay on
executors; only counts and keys reach the driver.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame, Row, SparkSession
from pyspark.sql import functions as f

from millstream.changelog import exposed
from millstream.engine.batch import named_error
from millstream.model import Json, Relation
from millstream.spark.baseline import BaselinePlan, ChunkRows
from millstream.spark.images import Binding
from millstream.spark.joining import Named
from millstream.spark.shaped_baseline import packed_chunks
from millstream.spark.stage import describe
from millstream.targets.base import Correction, Reader, Repairer
from millstream.targets.forms import told
from millstream.targets.lanes.tables import mirror_key

BUCKETS = 1024
"""Into so many ranges of their hash the keys of a table are divided."""
TASKS = 64
MOST_PAIRS = 20_000
"""More differing buckets than these are not looked for one by one."""

_SOURCE, _TARGET = 0, 1
_NO_TABLE = -1
_TEXT = "_ms_text"

_ROWS = pa.schema(
    [
        pa.field("side", pa.int32()),
        pa.field("tab", pa.int32()),
        pa.field("key", pa.string()),
        pa.field("row", pa.string()),
        pa.field("error", pa.string()),
    ]
)
_ROWS_DDL = "side int, tab int, key string, row string, error string"

Task = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]


@dataclass(frozen=True)
class Comparison:
    """What every task knows: the tables, by number, and where the rows of each are. Picklable."""

    snapshot: BaselinePlan
    reader: Reader
    relations: tuple[Relation, ...]
    """As the target gets them: filtered and transformed."""
    chunks: tuple[tuple[int, int], ...]
    """Number of the table, number of the snapshot's chunk."""
    parts: tuple[tuple[int, Json], ...]
    """Number of the table, part of the target."""
    by_spark: tuple[tuple[int, Binding], ...] = ()
    """The tables whose filters or transforms are in SQL or Python, with these: Spark does them."""
    sessions: int | None = None
    """So many tasks read the source at once, at most; None: as many as Spark runs."""

    def only(self, tables: Sequence[int]) -> Comparison:
        """The same of some tables alone."""
        wanted = set(tables)
        return replace(
            self,
            chunks=tuple(one for one in self.chunks if one[0] in wanted),
            parts=tuple(one for one in self.parts if one[0] in wanted),
        )

    def reread(self) -> Comparison:
        """The same with the target's parts as they are now."""
        tables = dict.fromkeys(table for table, _ in (*self.chunks, *self.parts))
        parts = [(table, part) for table in tables for part in self.reader.parts(self.relations[table])]
        return replace(self, parts=tuple(parts))


@dataclass(frozen=True)
class Counted:
    """One table on both sides. `buckets`: those that differ."""

    source: int
    target: int
    buckets: tuple[int, ...]


@dataclass(frozen=True)
class Differing:
    """A key whose rows are not equal. None: the table has no key, and the counts are of all its rows."""

    table: int
    key: str | None
    rows: int
    """How many rows the source has under it,"""
    missing: int
    """how many of these the target has not,"""
    extra: int
    """and how many it has that the source has not."""

    @property
    def kind(self) -> str:
        """A key that is there twice at the target is changed, too."""
        return "extra" if not self.rows else "changed" if self.extra else "missing"


class Comparing:
    """Runs the jobs of a comparison."""

    def __init__(self, spark: SparkSession, plan: Comparison) -> None:
        # Settings of its own: shuffles here are small, whatever the session's user has chosen for his.
        self._spark = spark.newSession()
        self._spark.conf.set("spark.sql.shuffle.partitions", str(spark.sparkContext.defaultParallelism))
        self._plan = plan

    def count(self) -> dict[int, Counted]:
        """Rows of both sides, and the buckets whose hashes differ, by table."""
        sign = f.when(f.col("side") == _SOURCE, 1).otherwise(-1)
        word = f.xxhash64("row")
        by_bucket = (
            self._rows(self._plan)
            .groupBy("tab", _bucket().alias("bucket"))
            .agg(
                _sum_of(_SOURCE).alias("source"),
                _sum_of(_TARGET).alias("target"),
                # In halves: sums of whole words would overflow.
                f.sum(sign * word.bitwiseAND(0xFFFFFFFF)).alias("low"),
                f.sum(sign * f.shiftright(word, 32)).alias("high"),
                f.max("error").alias("error"),
            )
        )
        differs = (f.col("source") != f.col("target")) | (f.col("low") != 0) | (f.col("high") != 0)
        found = (
            by_bucket.groupBy("tab")
            .agg(
                f.sum("source").alias("source"),
                f.sum("target").alias("target"),
                f.collect_list(f.when(differs, f.col("bucket"))).alias("buckets"),
                f.max("error").alias("error"),
            )
            .collect()
        )
        _raise_errors(found)
        counts = {row["tab"]: Counted(row["source"], row["target"], tuple(sorted(row["buckets"]))) for row in found}
        return {table: counts.get(table, Counted(0, 0, ())) for table in range(len(self._plan.relations))}

    def narrow(self, counted: dict[int, Counted], most: int) -> tuple[dict[int, tuple[int, int, int]], list[Differing]]:
        """By table how many keys are missing, changed and extra; and of these keys the first `most`."""
        tables = [table for table, one in counted.items() if one.buckets]
        pairs = [table * BUCKETS + bucket for table in tables for bucket in counted[table].buckets]
        rows = self._rows(self._plan.only(tables))
        if len(pairs) <= MOST_PAIRS:
            rows = rows.filter(f.col("error").isNotNull() | (f.col("tab") * BUCKETS + _bucket()).isin(pairs))
        keys = _differing_keys(rows).persist()
        try:
            totals = keys.groupBy("tab").agg(*_totals(), f.max("error").alias("error")).collect()
            _raise_errors(totals)
            first = keys.orderBy("tab", "key").limit(most).collect()
        finally:
            keys.unpersist()
        counts = {row["tab"]: (row["missing"], row["changed"], row["extra"]) for row in totals}
        return counts, [
            Differing(row["tab"], row["key"], row["source"], row["lacking"], row["surplus"]) for row in first
        ]

    def repair(self, repairer: Repairer, differing: Sequence[Differing]) -> None:
        """Write the source's rows of these keys to the target, in one task."""
        work = Repair(self._plan, repairer, tuple(differing))
        wrong = {one.table for one in differing}
        frames = [frame for table, frame in self._packed(self._plan) if table in wrong]
        given = reduce(DataFrame.union, frames).coalesce(1) if frames else self._spark.range(0, 1, 1, 1)
        _raise_errors(given.mapInArrow(work.run, _ROWS_DDL).collect())

    def _rows(self, plan: Comparison) -> DataFrame:
        def frame(count: int, tasks: int, task: Task) -> DataFrame:
            return self._spark.range(0, count, 1, max(1, min(count, tasks))).mapInArrow(task, _ROWS_DDL)

        by_spark = dict(plan.by_spark)
        plain = replace(plan, chunks=tuple(one for one in plan.chunks if one[0] not in by_spark))
        tasks = TASKS if plan.reader.parallel else 1
        rows = frame(len(plain.chunks), TASKS, partial(_tell_all, plain, _SOURCE))
        for table, packed in self._packed(plan):
            rows = rows.union(packed.mapInArrow(partial(_tell_packed, plan, table), _ROWS_DDL))
        if plan.sessions is not None:
            # Whoever has several of these partitions reads one after another.
            rows = rows.coalesce(plan.sessions)
        return rows.union(frame(len(plan.parts), tasks, partial(_tell_all, plan, _TARGET)))

    def _packed(self, plan: Comparison) -> Iterator[tuple[int, DataFrame]]:
        """The rows of the source that Spark has a part in, as it makes them, packed; by number of the table."""
        for table, binding in plan.by_spark:
            chunks = [chunk for number, chunk in plan.chunks if number == table]
            if chunks:
                yield table, packed_chunks(self._spark, plan.snapshot, binding, [[chunk] for chunk in chunks])


def _bucket() -> Column:
    return f.pmod(f.xxhash64(f.coalesce("key", "row")), f.lit(BUCKETS)).cast("int")


def _sum_of(side: int) -> Column:
    return f.sum(f.when((f.col("side") == side) & f.col("error").isNull(), 1).otherwise(0))


def _differing_keys(rows: DataFrame) -> DataFrame:
    """By table and key how many rows each side has that the other has not."""
    error = f.max("error").alias("error")
    by_row = rows.groupBy("tab", "key", "row").agg(
        _sum_of(_SOURCE).alias("source"), _sum_of(_TARGET).alias("target"), error
    )
    more = f.col("source") - f.col("target")
    by_key = by_row.groupBy("tab", "key").agg(
        f.sum("source").alias("source"),
        f.sum(f.greatest(more, f.lit(0))).alias("lacking"),
        f.sum(f.greatest(-more, f.lit(0))).alias("surplus"),
        error,
    )
    return by_key.filter((f.col("lacking") > 0) | (f.col("surplus") > 0) | f.col("error").isNotNull())


def _totals() -> list[Column]:
    source, lacking, surplus = f.col("source"), f.col("lacking"), f.col("surplus")
    # Of a table without a key rows are counted, since there is nothing to tell them by.
    keyless = f.col("key").isNull()
    missing = f.when(keyless, lacking).when(surplus == 0, 1).otherwise(0)
    changed = f.when(~keyless & (source > 0) & (surplus > 0), 1).otherwise(0)
    extra = f.when(keyless, surplus).when(source == 0, 1).otherwise(0)
    return [f.sum(missing).alias("missing"), f.sum(changed).alias("changed"), f.sum(extra).alias("extra")]


def _raise_errors(rows: Sequence[Row]) -> None:
    errors = [named_error(json.loads(row["error"])) for row in rows if row["error"] is not None]
    if errors:
        raise min(errors, key=lambda error: error.transient)


# In tasks


def _tell_all(plan: Comparison, side: int, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The function for `mapInArrow`: numbers of chunks or parts in, rows as texts out."""
    try:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                yield from _source(plan, number) if side == _SOURCE else _target(plan, number)
    except Exception as failed:  # noqa: BLE001 - named to the driver, which raises it there
        yield _error(describe(failed))


def _source(plan: Comparison, number: int) -> Iterator[pa.RecordBatch]:
    table, chunk = plan.chunks[number]
    for rows in ChunkRows(plan.snapshot, [chunk]).changes:
        yield _told(plan, table, _SOURCE, plan.reader.expected(plan.relations[table], rows))


def _tell_packed(plan: Comparison, table: int, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The function for `mapInArrow`: what Spark made of the source's rows in, the same as texts out."""
    relation = plan.relations[table]
    try:
        for packed in batches:
            for _, rows in _unpacked(packed):
                yield _told(plan, table, _SOURCE, plan.reader.expected(relation, rows))
    except Named as failed:
        yield _error(failed.error)
    except Exception as failed:  # noqa: BLE001 - named to the driver, which raises it there
        yield _error(describe(failed))


def _unpacked(packed: pa.RecordBatch) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Rows that Spark has made, with the id of their relation. Raises Named for an error of who made them."""
    for number, changes, error in zip(packed["relation"], packed["changes"], packed["error"], strict=True):
        if error.is_valid:
            raise Named(json.loads(error.as_py()))
        if changes.is_valid:
            for rows in pa.ipc.open_stream(changes.as_buffer()):
                yield number.as_py(), rows


def _target(plan: Comparison, number: int) -> Iterator[pa.RecordBatch]:
    table, part = plan.parts[number]
    for rows in plan.reader.read(plan.relations[table], part):
        yield _told(plan, table, _TARGET, rows)


def _told(plan: Comparison, table: int, side: int, rows: pa.Table) -> pa.RecordBatch:
    keys, texts = _texts(plan.relations[table], rows)
    count = rows.num_rows
    columns = [pa.repeat(pa.scalar(value, pa.int32()), count) for value in (side, table)]
    return pa.RecordBatch.from_arrays([*columns, keys, texts, pa.nulls(count, pa.string())], schema=_ROWS)


def _texts(relation: Relation, rows: pa.Table) -> tuple[pa.StringArray, pa.StringArray]:
    return told(rows, [column.name for column in exposed(relation).columns], mirror_key(relation))


def _error(error: Json) -> pa.RecordBatch:
    row = {"side": _SOURCE, "tab": _NO_TABLE, "error": json.dumps(error)}
    return pa.RecordBatch.from_pylist([row], schema=_ROWS)


@dataclass(frozen=True)
class Repair:
    """What the one task of a repair does."""

    plan: Comparison
    repairer: Repairer
    differing: tuple[Differing, ...]

    def run(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        try:
            shaped = self._shaped(batches)
            tables = sorted({one.table for one in self.differing})
            self.repairer.repair(self.plan.snapshot.seq, [self._correction(table, shaped) for table in tables])
        except Named as failed:
            yield _error(failed.error)
        except Exception as failed:  # noqa: BLE001 - named to the driver, which raises it there
            yield _error(describe(failed))

    def _shaped(self, batches: Iterator[pa.RecordBatch]) -> dict[int, list[pa.RecordBatch]]:
        """Of the tables that Spark has a part in the rows that are wanted, by number of the table."""
        ids = self.plan.snapshot.relation_ids
        numbers = {ids[binding.relation]: table for table, binding in self.plan.by_spark}
        found: dict[int, list[pa.RecordBatch]] = {table: [] for table, _ in self.plan.by_spark}
        for batch in batches:
            for number, rows in _unpacked(batch) if "changes" in batch.schema.names else ():
                found[numbers[number]].append(self._chosen(numbers[number], rows))
        return found

    def _chosen(self, table: int, rows: pa.RecordBatch) -> pa.RecordBatch:
        relation, wanted = self.plan.relations[table], pa.array(self._wanted(table), pa.string())
        texts, _ = _texts(relation, self.plan.reader.expected(relation, rows))
        return rows.filter(pc.is_in(texts, wanted))

    def _wanted(self, table: int) -> list[str | None]:
        """The keys under which the target should have a row."""
        return [one.key for one in self.differing if one.table == table and one.kind != "extra"]

    def _correction(self, table: int, shaped: Mapping[int, list[pa.RecordBatch]]) -> Correction:
        relation = self.plan.relations[table]
        mine = [one for one in self.differing if one.table == table]
        wanted = self._wanted(table)
        # Also of those that were missing: this may be a second try of a task that has written them.
        stale = self._held(table, wanted)
        gone = self._held(table, [one.key for one in mine if one.kind == "extra"])
        source = next(self.plan.snapshot.snapshot.chunks[chunk] for of, chunk in self.plan.chunks if of == table)
        relation_id = self.plan.snapshot.relation_ids[source.relation]
        right = iter(shaped[table]) if table in shaped else self._right(table) if wanted else iter(())
        found = self.plan.snapshot.snapshot
        return Correction(relation, relation_id, right, stale, gone, found.position, found.taken_at)

    def _right(self, table: int) -> Iterator[pa.RecordBatch]:
        """The source's rows under the keys that are wanted."""
        for number, chunk in self.plan.chunks:
            for rows in ChunkRows(self.plan.snapshot, [chunk]).changes if number == table else ():
                yield self._chosen(table, rows)

    def _held(self, table: int, keys: list[str | None]) -> pa.Table:
        """These keys as the target has them, each once."""
        relation, wanted = self.plan.relations[table], pa.array(keys, pa.string())
        found = [pa.table({name: pa.array([], pa.string()) for name in mirror_key(relation)})] if not keys else []
        for part in self.plan.reader.parts(relation) if keys else ():
            for rows in self.plan.reader.read(relation, part):
                texts, _ = _texts(relation, rows)
                found.append(
                    rows.select(mirror_key(relation)).append_column(_TEXT, texts).filter(pc.is_in(texts, wanted))
                )
        held = pa.concat_tables(found)
        if not keys:
            return held
        first = {text: at for at, text in reversed(list(enumerate(held[_TEXT].to_pylist())))}
        return held.take(pa.array(sorted(first.values()), pa.int64())).drop_columns([_TEXT])
