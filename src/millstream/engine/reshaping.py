"""A change that could not be transformed, tried once more: when its letter is retried."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
from pyspark.sql import SparkSession

from millstream.engine.batch import named_error
from millstream.errors import RowUnshaped
from millstream.model import Relation
from millstream.spark.analysis import borrowed_session
from millstream.spark.changes import Shaped
from millstream.spark.expressions import first_schema, packed_frame
from millstream.spark.images import Binding, split
from millstream.spark.packed import unpack
from millstream.spark.shaped import binding_of, in_our_words, numbers
from millstream.targets.rejects import RowsRejected, Unshapable
from millstream.transforms.compiled import wants_spark
from millstream.transforms.shape import Shaping


def reshaped(shaping: Shaping, relation: Relation, relation_id: int, change: pa.Table) -> tuple[Relation, pa.Table]:
    """The table and the change as a target gets them; no row where the change is none to it.

    Raises RowUnshaped if it still cannot be transformed.
    """
    batches = change.combine_chunks().to_batches()
    if wants_spark(shaping, relation):
        with borrowed_session() as session:
            return _by_spark(session(), shaping, relation, relation_id, batches)
    shaped = Shaped(shaping, relation, relation_id, batches)
    try:
        made = list(shaped)
    except RowsRejected as refused:
        raise RowUnshaped(refused.rejects[0].reason) from None
    return shaped.relation, _table(made)


def _by_spark(
    spark: SparkSession, shaping: Shaping, relation: Relation, relation_id: int, batches: list[pa.RecordBatch]
) -> tuple[Relation, pa.Table]:
    binding = binding_of(spark, shaping, relation, relation_id)
    assert binding is not None  # noqa: S101 - it wants Spark
    images = numbers(spark, 1).mapInArrow(_given(binding, batches), first_schema(binding))
    with in_our_words(shaping.stream, functions=True):
        rows = packed_frame(images, binding, relation_id).toArrow()
    as_target = binding.bound().relation
    with tempfile.TemporaryDirectory(prefix="millstream-") as scratch:
        found = unpack(rows.to_batches(), {relation_id: as_target}, Path(scratch))
        if found.error is not None:
            failed = named_error(found.error)
            if isinstance(failed, RowsRejected):
                raise RowUnshaped(failed.rejects[0].reason) from None
            if isinstance(failed, Unshapable):
                raise RowUnshaped(next(iter(failed.reasons.values()))) from None
            raise failed
        return as_target, _table(list(found.tables[relation_id].batches()))


def _given(
    binding: Binding, batches: list[pa.RecordBatch]
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    return lambda _: split(binding, batches, lambda: 0)


def _table(made: list[pa.RecordBatch]) -> pa.Table:
    return pa.Table.from_batches(made) if made else pa.table({})
