"""What Spark asks of a DataFrame of changes: the tasks of a batch, and how far a stream goes next.

Offsets of a streaming query are `{"journal": id, "start": s, "seq": n}`: everything after s, the
query's own start, up to and including n is read. The start stands in every offset because Spark keeps
none of its own: when its first batch comes again after a crash it asks anew where the query starts,
and what `earliest` or a time means may have changed since.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from millstream.errors import JournalMismatch
from millstream.journal import JournalReader
from millstream.journal.format import Slice
from millstream.model import SeqRange
from millstream.spark.fitting import check_schema, check_versions
from millstream.spark.frames import FramePlan, frames
from millstream.spark.partition import share_out
from millstream.spark.reading import Reading
from millstream.spark.slices import LONGEST_POLL, POLL, SlicePartition

MOST_TASKS = 1024
"""A batch has no more tasks than this, however large; a task streams, so a large one needs no more memory."""

NO_LIMIT = 1 << 62

HOLD_SECONDS = 10.0
"""While only other tables change a stream stands still, but it moves on after this long: its start must
not become so old that the journal has dropped what lies behind it."""


class _Planner:
    """What both readers do on the driver's host: from a range to tasks."""

    def __init__(self, reading: Reading, plan: FramePlan) -> None:
        self._reading = reading
        self._plan = plan
        self.journal: JournalReader = reading.journal()

    def slices(self, span: SeqRange) -> list[Slice]:
        """The slices of the range that hold rows of the table."""
        if span.end <= span.start:
            return []
        found = self.journal.slices(span)
        if self._reading.options.table is None:
            return found
        versions = self._reading.versions(self.journal)
        return [piece for piece in found if piece.relation in versions]

    def partitions(self, span: SeqRange) -> list[InputPartition]:
        """Pure: the same range gives the same rows, whenever it is asked for."""
        slices = self.slices(span)
        if self._reading.options.table is not None:
            check_versions(self._plan, self._reading.versions(self.journal), slices, span)
        return [SlicePartition(run, span) for run in share_out(slices, MOST_TASKS)]


def _plan(reading: Reading, schema: StructType) -> FramePlan:
    return FramePlan(
        locations=reading.locations,
        source_kind=reading.header.source_kind,
        event_prefix=reading.header.event_prefix,
        table=reading.options.table,
        schema_change=reading.options.schema_change,
        derived=reading.derived,
        columns=check_schema(schema, reading.options.table),
    )


def _read(plan: FramePlan, partition: InputPartition | None) -> Iterator[pa.RecordBatch]:
    # A batch without tasks is read as one without a partition.
    if isinstance(partition, SlicePartition):
        yield from frames(plan, partition.slices, partition.span)


class ChangesReader(DataSourceReader):
    """A batch read: from the start up to `endingSeq`, or up to where the journal ended at `load()`."""

    def __init__(self, reading: Reading, schema: StructType) -> None:
        self._reading = reading
        self._plan = _plan(reading, schema)

    def partitions(self) -> list[InputPartition]:
        return _Planner(self._reading, self._plan).partitions(self._reading.batch())

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The changes of one task, in order of table, schema version and seq."""
        return _read(self._plan, partition)


class ChangesStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A streaming read. One instance plans, for as long as the query runs; pickled ones read, in tasks.

    `commit` and `stop` stay as they are: Spark calls them late or never, and nothing depends on them.
    """

    def __init__(self, reading: Reading, schema: StructType) -> None:
        self._reading = reading
        self._plan = _plan(reading, schema)
        self._planner: _Planner | None = None
        self._until: int | None = None
        self._seen = 0
        """Nothing of the table lies between the query's start and here."""
        self._moved_at = time.monotonic()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_planner": None}

    def initialOffset(self) -> dict[str, Any]:
        """The query's start: settled at `load()`, so it is the same however often Spark asks."""
        begin = self._reading.begin()
        return self._offset(begin, begin)

    def getDefaultReadLimit(self) -> ReadLimit:
        most = self._reading.options.max_events
        return ReadAllAvailable() if most is None else ReadMaxRows(most)

    def prepareForTriggerAvailableNow(self) -> None:
        """Read what is visible now and no more."""
        head = self._journal().head()
        self._until = self._reading.head if head is None else head.seq

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """The end of the next batch, or `start` when nothing has come for `LONGEST_POLL` seconds.

        It waits here because Spark, given `start`, asks again after ten milliseconds.
        """
        seq = self._checked(start)
        most = limit.max_rows if isinstance(limit, ReadMaxRows) else NO_LIMIT
        deadline = time.monotonic() + LONGEST_POLL
        while (end := self._next_end(seq, most)) is None:
            if self._until is not None or time.monotonic() >= deadline:
                return self._offset(int(start["start"]), seq)
            time.sleep(POLL)
        self._moved_at = time.monotonic()
        return self._offset(int(start["start"]), end)

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """The tasks of a batch."""
        first = self._checked(start)
        if start["seq"] == start["start"]:
            # The first batch, perhaps once more: it starts where it started when its end was written down.
            first = int(end["start"])
        return self._current().partitions(SeqRange(first, self._checked(end)))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The changes of one task, in order of table, schema version and seq."""
        return _read(self._plan, partition)

    def _next_end(self, start: int, most: int) -> int | None:
        journal = self._journal()
        head = journal.head()
        if head is None:
            return None
        if head.seq < start:
            raise JournalMismatch(
                f"the checkpoint is at seq {start}, but the journal ends at {head.seq}",
                hint="the journal was restored from an older copy: put the right one back, or use a new checkpoint",
            )
        ends = [end for end in (self._until, self._reading.options.ending_seq) if end is not None]
        end = min(head.seq, *ends) if ends else head.seq
        if end <= start or not self._due(start, end):
            return None
        if end - start > most:
            planned = journal.plan_end(start, max_events=most, max_bytes=NO_LIMIT)
            end = end if planned is None else min(end, planned.end)
        return end

    def _due(self, start: int, end: int) -> bool:
        """Whether a batch up to `end` is worth it: it has changes of the table, or it was long ago."""
        if self._reading.options.table is None or self._until is not None:
            return True
        if time.monotonic() - self._moved_at >= HOLD_SECONDS:
            return True
        seen = max(start, self._seen)
        if self._current().slices(SeqRange(seen, end)):
            return True
        self._seen = end
        return False

    def _checked(self, offset: dict[str, Any]) -> int:
        """The seq of an offset, which must belong to this journal."""
        if offset.get("journal") != self._reading.header.journal_id:
            raise JournalMismatch(
                f"the checkpoint belongs to journal {offset.get('journal')}, "
                f"{self._reading.options.journal} holds {self._reading.header.journal_id}",
                hint="put the right journal back, or begin with a new checkpoint and a start of your choice",
            )
        return int(offset["seq"])

    def _offset(self, start: int, seq: int) -> dict[str, Any]:
        return {"journal": self._reading.header.journal_id, "start": start, "seq": seq}

    def _current(self) -> _Planner:
        if self._planner is None:
            self._planner = _Planner(self._reading, self._plan)
        return self._planner

    def _journal(self) -> JournalReader:
        return self._current().journal
