"""The contract between a target and delivery.

A batch is one Spark job. `stage` runs in tasks on executors, `publish` on the driver. What a
target promises depends on its `delivery`:

*staged*  tasks write outputs that nobody can see yet; `publish` makes the winners visible. Exactly
          once: a second attempt of a task writes under another name, an unpublished output is
          removed by `recover`, a published range is never published again.
*lane*    the batch is one task whose transaction compares and sets the cursor kept in the target and
          ends with the data. Exactly once: a second attempt, or a process that no longer matters,
          finds the cursor moved, or the target taken over, and writes nothing. A source transaction
          is seen whole, across tables. `publish` finds everything done and writes nothing.
*keyed*   effects carry event id and version; at least once, receivers compare versions.

Order: for one stream and target, `publish(range)` is called in order of range, never twice at the
same time. `stage` may be called for several slices at once, twice for the same slice (a retried or
zombie task), and by a process that no longer matters.

Durability: when `publish` returns, the batch survives kill -9 of every process and of the machine,
and `cursor()` says so.

Shutdown: `close` is called once, from the thread that called `open`. Nothing may depend on it.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol, runtime_checkable

import pyarrow as pa

from millstream.keyrange import KeyRange
from millstream.model import Json, Relation, SeqRange


class Delivery(enum.StrEnum):
    """How a target is made exact. See the module's contract."""

    LANE = "lane"
    STAGED = "staged"
    KEYED = "keyed"


@dataclass(frozen=True)
class Capabilities:
    """How the engine delivers to a target, as data. What every target does (deletes, new columns) is the contract's."""

    delivery: Delivery
    keeps_cursor: bool
    """Whether the target itself says how far it is; else the state store's word counts."""
    parallel: bool
    """Whether several tasks may stage one batch; else the whole batch is one task."""


ASKING = 0
"""The epoch of a context that is opened only to ask for the cursor: it takes nothing over and fences nobody."""


@dataclass(frozen=True)
class TargetContext:
    """Where a target stands: which stream, which journal, which delivery epoch."""

    stream: str
    target: str
    journal_id: str
    event_prefix: str
    epoch: int
    run_id: str
    """Unique per start of the query: a part of every staged name, so that zombies never collide."""


@dataclass(frozen=True)
class TargetCursor:
    """The target's own word on how far it is. `epoch` is the highest that was ever opened on it."""

    journal_id: str
    epoch: int
    seq: int
    position: int
    """Up to here it has all changes: the journal's position at `seq`, or a later one that a baseline brought it to."""


@dataclass(frozen=True)
class Attempt:
    """Which try of which task stages: Spark's task attempt id is unique in a Spark application.

    In a baseline all rows have one seq, so outputs of a relation differ by `partition` alone.
    """

    partition: int
    task_attempt: int
    baseline: bool = False


@dataclass(frozen=True)
class Receipt:
    """What a task reports of one output. `detail` is the target's own, small, JSON."""

    relation: int
    table: str
    rows: int
    bytes: int
    first_seq: int
    last_seq: int
    detail: Json


class Stager(Protocol):
    """The executor side: picklable, no state between calls, one call per relation and task."""

    def stage(
        self, relation: Relation, relation_id: int, batches: Iterator[pa.RecordBatch], attempt: Attempt
    ) -> Sequence[Receipt]:
        """Write the batches (schema: `millstream.changelog.schema`) where nobody can see them yet.

        `batches` are in seq order, a few at a time: a relation's part of a batch may be larger than
        memory. When it returns, what it wrote is durable.
        """


@dataclass(frozen=True)
class Part:
    """One relation's changes of a batch. `batches` are in seq order and can be read once."""

    relation: Relation
    relation_id: int
    batches: Iterator[pa.RecordBatch]
    copied: Iterator[pa.LargeBinaryArray] | None = None
    """The same rows as a Postgres source copies them (`sources.postgres.copied`), where that is what they are: for a
    database that takes them as they are. Either this is read, or `batches`."""


@dataclass(frozen=True)
class LaneBatch:
    """A whole batch, as the one task of a lane has it. Parts may be read side by side."""

    range: SeqRange
    end_position: int
    parts: Sequence[Part]
    check_complete: Callable[[], None]
    """Raises unless every change of the range was read from `parts`. To be called before committing."""
    isolate: bool = False
    """A try before was refused for the sake of a row: find out which rows those are. If there are any, nothing is
    written, and RowsRejected tells them; else the batch is written."""


@runtime_checkable
class Lane(Protocol):
    """The executor side of a lane: picklable, no state that matters between calls, one call per batch."""

    def deliver(self, batch: LaneBatch) -> bool:
        """Write the batch and the cursor in one transaction; returns when it is durable.

        False: the target has it already, nothing was written. Raises TargetRefused when another
        epoch or run has taken over, or when the range does not follow the target's cursor.
        """


class Target(Protocol):
    """The driver side. One instance per (stream, target)."""

    kind: str
    capabilities: Capabilities

    def open(self, context: TargetContext) -> None:
        """Connect, create what is missing, fence lower epochs. Raises TargetUnavailable or TargetRefused.

        May be called again, with another epoch: first with `ASKING`, since the epoch to deliver in
        depends on what `cursor()` says, and again after every failure of the query.
        """

    def cursor(self) -> TargetCursor | None:
        """How far the target itself is; None when it has nothing or keeps no cursor."""

    def recover(self, cursor: TargetCursor | None) -> None:
        """Remove everything that was staged or half published beyond `cursor`. Before the first batch."""

    def stager(self) -> Stager | Lane:
        """The executor side for the open context; a `Lane` where delivery is that."""

    def publish(self, range: SeqRange, end_position: int, receipts: Sequence[Receipt]) -> None:
        """Make the batch visible. Idempotent for a range that is published already.

        A lane has written it already: this only looks, and raises if the target does not have it.
        """

    def close(self) -> None:
        """Let go of everything. Idempotent."""


@runtime_checkable
class Releasing(Protocol):
    """A target that can be told that its stream is deleted."""

    def release(self, stream: str, target: str) -> None:
        """Nobody will go on where this stream ended: note it, and let go of what was only for going on.

        What was delivered stays. Idempotent. A target that was never opened, or is another stream's, is left alone.
        """


@runtime_checkable
class Rewinding(Protocol):
    """A target that can take back its last batches, so that they are delivered once more."""

    def rewind(self, stream: str, target: str, seq: int, *, look_only: bool = False) -> TargetCursor | None:
        """Take back every batch that ends after `seq`, newest first: at each moment the cursor is a former one.

        Returns where the target then is: at the last batch that ends at or before `seq`, or None when it has
        none. `look_only`: only say where that would be. While nothing is delivered; the next `recover` removes
        the rows of what was taken back. Raises TargetRefused for a target that is another stream's.
        """


@runtime_checkable
class Replayable(Protocol):
    """A target to which changes that it has had can be delivered once more, while its cursor stays where it is.

    `mirrors` says what becomes of them. Where rows are kept by key (True), batches come newest first, and write only
    what the target lacks: nothing of an intact one is touched, and no row that a newer change has removed comes
    back, not even in between. Else batches come oldest first and are appended once more, marked with `mark`; at a
    `Rebatching` target they take the place of what they brought first.
    """

    @property
    def mirrors(self) -> bool: ...

    def replayer(self, mark: int, *, only: frozenset[int] | None, current: frozenset[int]) -> Stager | Lane:
        """The executor side for batches of the replay `mark`, for the open context.

        `only` are the relations whose changes come; None: all, and logical messages. `current` are those under which
        tables are as the target has them: a mirror gets no others.

        A batch that comes again, whoever brings it, changes nothing more. Raises TargetRefused when another run
        has taken over.
        """

    def publish_replay(self, mark: int, range: SeqRange, receipts: Sequence[Receipt]) -> None:
        """Make a batch visible; idempotent. A lane has written it already."""

    def settle_replay(self) -> None:
        """Forget what is remembered only while a replay runs. Before its first batch and after its last one."""


@runtime_checkable
class Rebatching(Protocol):
    """A target that has changes by the batches in which they came: replayed, each of these comes anew, whole."""

    def batches(self, stream: str, target: str, span: SeqRange) -> Sequence[SeqRange]:
        """The batches in which changes of the span are, oldest first. The target need not be open."""


@dataclass(frozen=True)
class ReloadStep:
    """A part of copying one table anew. All rows of it have the version `seq`, which the target has reached.

    Steps of one copy may be of different snapshots: each is not lower in `seq` than the one before.
    """

    mark: int
    """Unique for each try to copy the table."""
    seq: int
    position: int
    """The source's position at which the rows were read,"""
    taken_at: datetime
    """and when, by its clock."""
    first: bool
    last: bool
    since: int
    """The version of the first step: all rows of the copy have this one or a newer."""
    within: KeyRange | None = None
    """Only this range of the key is copied, at a mirror: what is outside of it stays as it is. None: all of it."""


@runtime_checkable
class Reloadable(Protocol):
    """A target whose tables can be copied anew, one by one, while changes go on coming to all of them.

    A changelog gets a truncate and then all rows of the table, in one step, both with the version at which they were
    read: whoever goes by versions finds them after every older change and before every newer one.

    A mirror gets rows, and has those that it does not have in a newer version, and that no newer change has removed.
    After the last step what is older than the first one is gone: so the table equals the source's, whatever it was.
    With a key it takes several steps, and batches of changes between them; without one all rows come in one step. A
    history of versions gets all in one step, too: what is current and is not in the copy ends, what differs begins.
    Begun again with a new mark and a version that is not lower, it ends the same, however far it was before.
    """

    @property
    def mirrors(self) -> bool: ...

    @property
    def reloads_by_steps(self) -> bool:
        """Whether a table with a key comes in several steps: where the rows themselves tell which of them came."""

    def remembering(self, renewed: frozenset[str] | None) -> Stager | Lane:
        """The executor side for batches while tables are copied: what they remove is remembered until `settle_reload`.

        To be used for every batch from before the snapshot is taken on. A mirror of one of the tables `renewed` (None:
        of any), that cannot follow what a change brings, is made anew: the rest of its rows comes with the copy.
        """

    def reloader(self, step: ReloadStep) -> Stager | Lane:
        """The executor side for the rows of a step, for the open context.

        A step that comes again changes nothing more. Raises TargetRefused when another run has taken over.
        """

    def publish_reload(self, step: ReloadStep, receipts: Sequence[Receipt]) -> None:
        """Make a step visible; idempotent. A lane has written it already."""

    def settle_reload(self) -> None:
        """Forget what is remembered only while tables are copied. Before the snapshot, and after the last table."""


@runtime_checkable
class Fillable(Protocol):
    """A target that can begin empty, get its first rows beside the changes, and itself knows that it is not whole yet.

    So nobody takes it for whole, if what else was known of it is lost.
    """

    def filling(self) -> bool:
        """Whether it began empty and its first rows have not all come. The target is open."""

    def set_filling(self, filling: bool) -> None:
        """Remember that, or that they have. Durable when it returns. Idempotent."""


@runtime_checkable
class Rejecting(Protocol):
    """A target that can tell which rows it cannot take, so that they hold up nobody else. Its stager is a `Lane`."""

    @property
    def mirrors(self) -> bool:
        """Whether it keeps the latest row per key, so that a change can come too late; else it appends all of them."""

    def redeliver(self, relation: Relation, relation_id: int, change: pa.Table) -> bool:
        """Write one change (schema: `millstream.changelog.schema`) that was rejected before. The target is open.

        False: the target has the row at this version or a newer one (or the very change, where it appends), and
        nothing was written. Durable when it returns. Raises RowRefused if it still cannot be taken.
        """


class Reader(Protocol):
    """What a target holds, for a comparison with the source. Picklable; runs in tasks; changes nothing.

    Rows are in the target's own *form*: a table with the relation's columns (`changelog.exposed`) under their names
    and, where the form needs it, `_ms_special`. Two rows are equal if their forms are.
    """

    @property
    def parallel(self) -> bool:
        """Whether several parts may be read at once; else one task reads all of them."""

    def parts(self, relation: Relation) -> Sequence[Json]:
        """The parts in which tasks read the relation's table; none when the target has no such table."""

    def read(self, relation: Relation, part: Json) -> Iterator[pa.Table]:
        """The rows of a part: of a changelog those that its changes leave, of a mirror those that are not deleted."""

    def expected(self, relation: Relation, rows: pa.RecordBatch) -> pa.Table:
        """Rows of the source (schema: `changelog.schema`, all of them read) as the target would hold them."""


@dataclass(frozen=True)
class Correction:
    """What is wrong with one table of a target, and what stands there instead. Keys are in the reader's form."""

    relation: Relation
    relation_id: int
    rows: Iterator[pa.RecordBatch]
    """Rows as the source has them, with the version that they get (schema: `changelog.schema`)."""
    stale: pa.Table
    """Keys that the target has other rows under: `rows` has theirs."""
    gone: pa.Table
    """Keys that the source does not have."""
    position: int
    """The source's position at which that is so,"""
    taken_at: datetime
    """and when that was, by its clock."""


class Repairer(Protocol):
    """The executor side of a repair: picklable."""

    def repair(self, seq: int, corrections: Sequence[Correction]) -> None:
        """Write the corrections, whatever versions the target has there; they get the version `seq`.

        Only while the target stands at `seq`, and is this run's: raises TargetRefused otherwise. All of a table is
        corrected or nothing, in a lane all of everything. Doing it again changes nothing.
        """


@runtime_checkable
class Verifiable(Protocol):
    """A target whose rows can be compared with the source's."""

    def reader(self) -> Reader:
        """To be used while nothing is delivered; the target need not be open yet.

        Raises NotSupported where the rows cannot be told.
        """


@runtime_checkable
class Repairable(Protocol):
    """A target whose differing rows can be written once more."""

    repairs: bool
    """False where rows cannot be replaced: a changelog is what has happened."""

    def repairer(self) -> Repairer:
        """For the open context."""


@dataclass(frozen=True)
class KeptTable:
    """A table of a target as it was at one moment."""

    name: str
    """As users write it."""
    place: str
    """As the target's statements write it."""
    schema: pa.Schema
    batches: Iterator[pa.RecordBatch]
    """All rows, in the target's own values. They can be read once, and before those of the next table."""
    make: tuple[str, ...]
    """Statements that make it, without rows,"""
    finish: tuple[str, ...] = ()
    """and those for when its rows are there: indexes, triggers."""


@dataclass(frozen=True)
class Kept:
    """The state of a target at one moment, between two batches: its tables, and how far they are."""

    cursor: TargetCursor
    own: Json
    """What the target has written down of its tables."""
    tables: Iterator[KeptTable]


@runtime_checkable
class Keepable(Protocol):
    """A target whose state can be kept aside, and brought back later. While it is read, it is delivered to."""

    @property
    def keeps_state(self) -> bool:
        """Whether this one can; another kind of the same family may not."""

    @property
    def read_alone(self) -> bool:
        """Whether no batch can be written while the state is read."""

    def keep(self, stream: str, target: str) -> AbstractContextManager[Kept]:
        """The state, to be read within the block. Raises NotReady when nothing was delivered to it yet."""

    def bring_back(self, stream: str, target: str, kept: Kept, token: str, *, overwrite: bool) -> bool:
        """Give the target that state, all of it or nothing; durable when it returns. While nothing is delivered.

        Raises TargetRefused when the target has something and it is not to be overwritten, or a table is another
        stream's. False: it was brought back under this token already, and nothing was written.
        """
