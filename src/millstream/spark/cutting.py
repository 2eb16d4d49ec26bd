"""Finding the rows that a user's function fails on: Spark says only that the job failed.

The images are cut in two by a hash of their events, and each half is tried, until single changes are left. A job
for each try: slow, and done only for a batch that has failed and whose SQL alone is not the cause.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from millstream.spark.analysis import quiet
from millstream.spark.expressions import packed_frame
from millstream.spark.images import NOTE, Binding
from millstream.targets.rejects import Unshapable
from millstream.transforms.sql import SqlStep

MOST = 20
"""So many are found at a time: each takes a dozen jobs or two."""
_HASH = "_ms_hash"


@dataclass(frozen=True)
class ShapedTable:
    """A table of a batch that Spark has a part in."""

    images: DataFrame
    binding: Binding
    relation_id: int

    def functions(self) -> list[str]:
        """The users' functions that it goes through."""
        parts = [part.step for part in self.binding.bound().parts if isinstance(part, SqlStep)]
        return [str(step.arguments[0][0]) for step in parts if step.verb == "python"]


def find_by_cutting(tables: Sequence[ShapedTable]) -> None:
    """Raise Unshapable for changes that users' functions fail on; return if there are none."""
    found: dict[str, str] = {}
    for table in tables:
        functions = table.functions()
        if functions and len(found) < MOST:
            why = f"{table.binding.relation.table}: python {', '.join(functions)} fails on it"
            found.update((event, why) for event in _failing(table, MOST - len(found)))
    if found:
        raise Unshapable(found)


def _failing(table: ShapedTable, most: int) -> list[str]:
    images = table.images.where(F.col("_ms_image") != NOTE).withColumn(_HASH, F.xxhash64("_ms_event_id"))
    if _fails(table, images.where(F.lit(False)).drop(_HASH)):
        # It is no row's fault.
        return []
    found: list[str] = []
    waiting = [(-(1 << 63), (1 << 63) - 1)]
    while waiting and len(found) < most:
        low, high = waiting.pop()
        part = images.where((F.col(_HASH) >= low) & (F.col(_HASH) <= high))
        if not _fails(table, part.drop(_HASH)):
            continue
        events = [row[0] for row in part.select("_ms_event_id").distinct().limit(2).collect()]
        if len(events) == 1 or low == high:
            found += events
            continue
        middle = (low + high) // 2
        waiting += [(low, middle), (middle + 1, high)]
    return found


def _fails(table: ShapedTable, images: DataFrame) -> bool:
    try:
        with quiet():
            packed_frame(images, table.binding, table.relation_id, isolate=True).write.format("noop").mode(
                "overwrite"
            ).save()
    except PySparkException:
        return True
    return False
