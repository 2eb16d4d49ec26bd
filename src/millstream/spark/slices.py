"""The streaming source of a delivery query: its rows are slices of the journal.

Spark asks three things of it, in a planning process of its own on the driver's host: where the
epoch starts, how far the next batch goes, and which slices lie in between. All three are answered
from the journal's durable files, so that a batch that is planned again after a crash is the same.

A delivery asks only the first two of it: it gives its tasks their slices itself (`spark.job`), since to plan
a DataFrame of them takes longer than most batches. Who reads the query's rows finds the same slices.

Offsets are cursors, `{"seq": n}`: everything up to and including n. `commit` and `stop` are ignored
on purpose: Spark calls them late or never, and the cursor is kept elsewhere.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from millstream.journal import JournalReader
from millstream.journal.format import Slice
from millstream.model import BatchLimits, SeqRange
from millstream.spark.partition import share_out

FORMAT = "millstream_slices"

SLICES = pa.schema(
    [
        pa.field("relation", pa.int32()),
        pa.field("schema_version", pa.int32()),
        pa.field("segment", pa.string()),
        pa.field("offset", pa.int64()),
        pa.field("length", pa.int64()),
        pa.field("rows", pa.int64()),
        pa.field("first_seq", pa.int64()),
        pa.field("last_seq", pa.int64()),
        pa.field("batch_start", pa.int64()),
        pa.field("batch_end", pa.int64()),
        pa.field("journal_id", pa.string()),
        pa.field("epoch", pa.int64()),
        pa.field("crc", pa.int64()),
    ]
)
"""One row per slice. `relation` is the id of a description, and a description is a table at one
schema version: `schema_version` is the same number, for readers that look for it by that name."""

_DDL = ", ".join(
    f"{field.name} {'string' if field.type == pa.string() else 'int' if field.type == pa.int32() else 'bigint'}"
    for field in SLICES
)

POLL = 0.02
"""Seconds between two looks at the journal's head,"""
QUIET_POLL = 0.1
"""and when nothing has come for a while (`QUIET`, in seconds): a stream to which nothing happens shall cost nothing."""
QUIET = 5.0

BACKLOG = 4
"""Who is behind by more than a batch gets so many at once: a batch has a price, whatever it holds;"""
BACKLOG_BYTES = 128 << 20
"""and twice as many where they are not more than this."""
GATHERING, GATHERING_SECONDS = 5, 1.0
"""Many changes may wait for more, while these keep coming, so many times `max_ms`, and so long at most: see `Pacer`."""
MANY = 64
"""Many are as much as this part of a full batch."""
HALF_BYTES = 32 << 20
"""Half of a backlog may go while capture is still reading the other half, if that is so much: see `half_is_there`."""
STILL = 0.3
"""Seconds after which no more are taken to come: capture makes visible what it has more often than that,"""
STILL_COVERED = 0.03
"""and when it has read the source's log beyond the last change, which may be the log's end."""
LONGEST_POLL = 1.0
"""Seconds after which `latestOffset` answers even if nothing is due, so that Spark can stop the query. A quiet one
takes twice as long: each answer has Spark plan."""


@dataclass(frozen=True)
class SliceOptions:
    """Everything the planning process must know, carried in one option of the source."""

    locations: tuple[str, ...]
    start_seq: int
    limits: BatchLimits
    parallelism: int
    ready: str
    """A file that is made once the planning process answers: before that no other query may start."""
    until: int | None = None
    """Where a query with an end ends, if that is before the journal does."""
    halves: bool = False
    """Whether a backlog that fits into one batch may come in two."""

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> SliceOptions:
        value = json.loads(text)
        return cls(
            **{**value, "locations": tuple(value["locations"]), "limits": BatchLimits(**value["limits"])},
        )


def to_rows(slices: Sequence[Slice], span: SeqRange) -> pa.RecordBatch:
    """The slices as rows of the query."""
    extra = {"batch_start": span.start, "batch_end": span.end}
    rows = [{**asdict(s), **extra, "schema_version": s.relation} for s in slices]
    return pa.RecordBatch.from_pylist(rows, schema=SLICES)


def from_rows(rows: pa.RecordBatch) -> Iterator[tuple[Slice, SeqRange]]:
    """The slices back from rows of the query, each with the range of its batch."""
    for row in rows.to_pylist():
        span = SeqRange(row.pop("batch_start"), row.pop("batch_end"))
        row.pop("schema_version")
        yield Slice(**row), span


def backlog_bytes(max_bytes: int) -> int:
    """The most that a batch holds of a backlog."""
    return max(BACKLOG * max_bytes, min(2 * BACKLOG * max_bytes, BACKLOG_BYTES))


def half_is_there(size: int, left: int) -> bool:
    """Whether so many bytes of a backlog are worth a batch of their own, of which so many are left in the source's log.

    Two batches cost more than one. But while capture reads, and waits for its source, processors have little to do, and
    who begins with the second half when the log is read has everything sooner.
    """
    return HALF_BYTES <= left <= size


class Pacer:
    """Decides when what is pending becomes a batch.

    `max_ms` counts from the moment after which rows may have been pending, so rows that came while
    the last batch ran have waited for its length already. Pure but for the clock it is handed.
    """

    def __init__(self, max_ms: int) -> None:
        self._max = max_ms / 1000
        self._gathering = min(GATHERING * self._max, GATHERING_SECONDS)
        self._waiting_since = float("-inf")
        self._moved_at = float("-inf")
        self._visible = -1
        self._still = STILL
        self._left = 0
        self._read_to_its_end = False

    def clear(self, now: float) -> None:
        """Nothing is pending at this moment."""
        self._waiting_since = now
        self._read_to_its_end = False

    def look(self, now: float, visible: int, *, covered: bool = False, age: float = 0.0, left: int = 0) -> None:
        """The journal's visible end is there now, and was published `age` seconds ago, perhaps during a batch.

        `covered`: capture has read the source's log beyond it, and is at work on the next `left` bytes of it.
        """
        # Of a backlog something was left, and now nothing is: these are its last changes.
        self._read_to_its_end = not left and (self._read_to_its_end or self._left > 0)
        self._left = left
        self._still = STILL_COVERED if covered else STILL
        if visible != self._visible:
            self._visible, self._moved_at = visible, now - age

    def due(self, now: float, *, full: bool, many: bool = False) -> bool:
        """Whether pending rows must go now. `many`: they are so many that more of them are worth a longer wait.

        So it is while capture hands over a backlog, stretch by stretch: two batches cost more than one, whenever there
        would be time for them. The wait ends when capture has read everything, or is not heard of any more.
        """
        waited = now - self._waiting_since
        growing = now - self._moved_at < self._still and not self._read_to_its_end
        if not many or not (growing or self._left):
            return full or waited >= self._max
        longest = self._gathering * (2 if self._left else 1)
        return waited >= (longest if full else max(self._max, longest))


class SlicePartition(InputPartition):
    """The slices of one task."""

    def __init__(self, slices: list[Slice], span: SeqRange) -> None:
        super().__init__(None)
        self.slices = slices
        self.span = span


class SliceReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The planning side (one process per query) and, pickled, the reading side (tasks)."""

    def __init__(self, options: SliceOptions) -> None:
        self._options = options
        self._journal = JournalReader(options.locations)
        self._pacer = Pacer(options.limits.max_ms)
        self._until: int | None = None
        self._told = False
        self._moved_at = time.monotonic()

    def initialOffset(self) -> dict[str, int]:
        """The epoch's start: constant, whenever and however often Spark asks."""
        return {"seq": self._options.start_seq}

    def getDefaultReadLimit(self) -> ReadLimit:
        """The limits are ours, not Spark's."""
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:
        """Deliver what is visible now and no more, without waiting for a batch to fill."""
        head = self._journal.head()
        self._until = head.seq if head else self._options.start_seq
        if self._options.until is not None:
            self._until = min(self._until, self._options.until)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, int]:
        """The end of the next batch, or `start` when none is due for a while."""
        first = int(start["seq"])
        quiet = time.monotonic() - self._moved_at >= QUIET
        deadline = time.monotonic() + LONGEST_POLL * (2 if quiet else 1)
        while (end := self._next_end(first)) is None:
            self._answered()
            if self._until is not None or time.monotonic() >= deadline:
                return {"seq": first}
            time.sleep(POLL if time.monotonic() - self._moved_at < QUIET else QUIET_POLL)
        self._answered()
        self._moved_at = time.monotonic()
        return {"seq": end}

    def _next_end(self, start: int) -> int | None:
        now = time.monotonic()
        head = self._journal.head()
        visible = head.seq if head else start
        if self._until is not None:
            visible = min(visible, self._until)
        if head is not None:
            # A clock that was set back meanwhile makes it young: then it is waited for once more.
            age = max(0.0, time.time() - head.published_us / 1e6)
            covered = head.covered > head.resume_position
            self._pacer.look(now, visible, covered=covered, age=age, left=head.left)
        if visible <= start:
            self._pacer.clear(now)
            return None
        limits = self._options.limits
        planned = self._journal.plan_end(start, max_events=limits.max_events, max_bytes=limits.max_bytes)
        if planned is None:
            return None
        full = planned.full
        if planned.end < visible:
            more = backlog_bytes(limits.max_bytes)
            planned = self._journal.plan_end(start, max_events=limits.max_events, max_bytes=more) or planned
        has_room = planned.end >= visible
        many = has_room and planned.bytes >= limits.max_bytes // MANY
        if self._options.halves and head is not None and half_is_there(planned.bytes, head.left):
            many = False
        if self._until is None and not self._pacer.due(now, full=full, many=many):
            return None
        end = planned.end if self._until is None else min(planned.end, self._until)
        if end >= visible:
            self._pacer.clear(now)
        return end

    def _answered(self) -> None:
        if not self._told:
            Path(self._options.ready).touch()
            self._told = True

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """The tasks of the batch. Pure: a batch that comes again after a crash gets the same rows."""
        self._answered()
        span = SeqRange(int(start["seq"]), int(end["seq"]))
        runs = share_out(self._journal.slices(span), self._options.parallelism)
        return [SlicePartition(run, span) for run in runs]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The slices of one task, as they were planned."""
        assert isinstance(partition, SlicePartition)  # noqa: S101 - for the type checker
        yield to_rows(partition.slices, partition.span)

    def commit(self, end: dict[str, Any]) -> None:
        """Nothing: Spark says this only while it plans the batch after next."""

    def stop(self) -> None:
        """Nothing to let go of."""


class SliceSource(DataSource):
    """Spark's entry to the slices of a journal. Option `plan`: an encoded `SliceOptions`."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> str:
        return _DDL

    def streamReader(self, schema: StructType) -> SliceReader:
        return SliceReader(SliceOptions.decode(self.options["plan"]))
