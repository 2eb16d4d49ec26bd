"""Users' functions from DataFrame to DataFrame, held to what a transform must be: one row of each row, or none.

The function gets whole rows inside the filters, new and old ones alike. What it does not get (keys of old rows,
truncates, notes) and what it leaves out is known from the *skeleton*: the same images without what the function is
to make. Both are sorted together, so that each row that was made comes right after the one it was made of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema, from_arrow_type

from millstream.errors import ConfigError, TargetRefused
from millstream.latest import Bools, booleans, whole_numbers
from millstream.spark.analysis import IDENTITY, quoted, user_function
from millstream.spark.images import NEW, OLD, OWN, Binding, Images, eligible, image_schema, noting_errors, written
from millstream.transforms.block import Block, Ints
from millstream.transforms.compiled import Compiled
from millstream.transforms.sql import SqlStep

_MADE = "_ms_made"


def applied(images: DataFrame, binding: Binding, part: int) -> DataFrame:
    """The images after the user's function, which is this part of the transforms."""
    bound = binding.bound()
    step = _step(bound, part)
    (place, _), *_ = step.step.arguments
    given = images.where(whole_rows(bound.rule.whole)).select(*_columns([n for n, _ in step.before]), *IDENTITY)
    try:
        result = user_function(place)(given)
    except ConfigError:
        raise
    except Exception as failed:  # noqa: BLE001 - whatever it is, it is the user's
        # Its words may hold anything.
        raise TargetRefused(f"{step.table}: {place} raised {type(failed).__name__}") from None
    made = result.select(
        *_columns([name for name, _ in step.after]),
        *[F.col(f.name) if f.name in IDENTITY else _nothing(f.name, f.type) for f in OWN],
        F.lit(True).alias(_MADE),
    )
    before = {after: name for name, after in step.key}
    skeleton = images.select(
        *[F.col(quoted(before[n])).alias(n) if n in before else _nothing(n, kind) for n, kind in step.after],
        *OWN.names,
        F.lit(False).alias(_MADE),
    )
    # One task, since nobody knows what the function did to the partitions.
    both = skeleton.union(made).coalesce(1).sortWithinPartitions(*IDENTITY, _MADE)
    return both.mapInArrow(_merged(binding, part), from_arrow_schema(image_schema(step.after)))


def whole_rows(whole: bool) -> Column:
    """Which images are rows that are there, inside the filters. `whole`: old rows are sent whole."""
    there = (F.col("_ms_image") == NEW) & F.col("_ms_op").isin("c", "r", "u") & F.col("_ms_lacks").isNull()
    return (there | ((F.col("_ms_image") == OLD) & F.lit(whole))) & F.col("_ms_in")


def _columns(names: list[str]) -> list[Column]:
    return [F.col(quoted(name)) for name in names]


def _nothing(name: str, kind: pa.DataType) -> Column:
    return F.lit(None).cast(from_arrow_type(kind)).alias(name)


def _step(bound: Compiled, part: int) -> SqlStep:
    step = bound.parts[part]
    assert isinstance(step, SqlStep)  # noqa: S101 - for the type checker
    return step


def _merged(binding: Binding, part: int) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        bound = binding.bound()
        merging = _Merging(bound, _step(bound, part))
        return noting_errors(merging.schema, merging.run(batches))

    return run


class _Merging:
    """Made rows put in the places of those they were made of."""

    def __init__(self, bound: Compiled, step: SqlStep) -> None:
        self._whole = bound.rule.whole
        self._step = step
        self.schema = image_schema(step.after)

    def run(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """A row that was made may come in the batch after the one it was made of: the last one waits."""
        waiting: pa.RecordBatch | None = None
        for batch in batches:
            if not batch.num_rows:
                continue
            rows = batch if waiting is None else pa.concat_batches([waiting, batch])
            first = np.flatnonzero(~booleans(rows[_MADE]))
            last = int(first[-1]) if len(first) else 0
            if last:
                yield self._merge(rows.slice(0, last))
            waiting = rows.slice(last)
        if waiting is not None:
            yield self._merge(waiting)

    def _merge(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        made = booleans(rows[_MADE])
        of = np.cumsum(~made) - 1
        first, place = np.flatnonzero(~made), np.full(int((~made).sum()), -1, np.int64)
        at = np.flatnonzero(made)
        self._check_one_each(rows, first, of[at], at)
        place[of[at]] = at
        has = place >= 0
        columns = list(self._step.after)
        images = Images.read(rows.take(whole_numbers(first)), columns, [name for name, _ in self._step.before])
        asked = eligible(images, self._whole)
        values = {
            name: rows[name].cast(kind).take(whole_numbers(np.where(has, place, first))) for name, kind in columns
        }
        self._check_key(images.block, values, has)
        block = Block(images.block.size, values, self._texts(images.block, values))
        return written(block, images.batch, images.image, images.meets & (has | ~asked), self.schema)

    def _texts(self, was: Block, values: dict[str, pa.Array]) -> dict[str, pa.StringArray]:
        """A function sees NULL where a value has only an exact text; where it left that, the text is still right."""
        same = [one.name for one in self._step.outputs if one.source is not None and one.name in was.special]
        return {name: pc.if_else(values[name].is_null(), was.special[name], None) for name in same}

    def _check_one_each(self, rows: pa.RecordBatch, first: Ints, of: Ints, made: Ints) -> None:
        wrong = len(set(of.tolist())) < len(of) or (len(of) and int(of.min()) < 0)
        if not wrong and len(of):
            its = rows.take(whole_numbers(first[of])), rows.take(whole_numbers(made))
            wrong = any(not booleans(pc.equal(its[0][name], its[1][name])).all() for name in IDENTITY)
        if wrong:
            raise self._refusal("makes rows that are of no row it got, or several of one")

    def _check_key(self, was: Block, values: dict[str, pa.Array], has: Bools) -> None:
        rows = whole_numbers(np.flatnonzero(has))
        for _, name in self._step.key:
            same = pc.equal(was.values[name].take(rows), values[name].take(rows))
            if not booleans(pc.fill_null(same, False)).all():
                raise self._refusal(f"changes {name}, which is part of the key")

    def _refusal(self, what: str) -> TargetRefused:
        (place, _), *_ = self._step.step.arguments
        return TargetRefused(f"{self._step.table}: {place} {what}", hint="a function makes one row of each, or none")
