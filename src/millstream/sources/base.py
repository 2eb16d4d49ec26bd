"""The contract between a source database and the engine.

A source owns its semantics: positions, types, keys, preflight. The engine sees 64-bit positions
that only ever grow within one incarnation, blocks of raw messages, and relation descriptions.

Two sides never meet: the **capture side** (`Source`) runs in the capture process, without Spark;
the **decode side** (`Decoder`) is pure and runs in Spark's Python workers.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millstream.keyrange import KeyRange
from millstream.model import Json, Relation

CAPTURED = pa.schema(
    [
        pa.field("tx_index", pa.int32(), nullable=False),
        pa.field("op", pa.uint8(), nullable=False),
        pa.field("commit_position", pa.int64(), nullable=False),
        pa.field("resume_position", pa.int64(), nullable=False),
        pa.field("commit_ts", pa.timestamp("us", "UTC"), nullable=False),
        pa.field("txid", pa.int64(), nullable=False),
        pa.field("relation", pa.int32(), nullable=False),
        pa.field("payload", pa.large_binary(), nullable=False),
    ]
)
"""What capture hands to the journal. The journal puts `seq` in front.

`op` holds the ASCII code of `model.Op`. `relation` is the id that `Registrar` gave for the
description in force (0 for logical messages, which belong to no table). `payload` is the raw
message, untouched.
"""


class Severity(enum.StrEnum):
    """ERROR: capture will not start. WARNING: it starts, and this may hurt later. OK: looked at, fine."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True)
class Finding:
    """One thing preflight looked at. `fix` is SQL or one sentence, ready to be pasted."""

    check: str
    severity: Severity
    message: str
    fix: str | None = None
    table: str | None = None

    def to_json(self) -> Json:
        return {
            "check": self.check,
            "severity": self.severity.value,
            "message": self.message,
            "fix": self.fix,
            "table": self.table,
        }


@dataclass(frozen=True)
class SourceIdentity:
    """What a journal is bound to: stands in its header, is compared on every connect."""

    kind: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    start: int = 0
    """The position from which the source has everything: where a new journal begins."""


@dataclass(frozen=True)
class Found:
    """Something that happened to a table without a word in the log. `kind` is one of `registry.kinds.Kind`."""

    kind: str
    table: str
    oid: int
    part: str | None = None
    """The partition that it is about, if it is."""
    copies: bool = False
    """Whether rows came, went or changed by it: only a copy of the table brings that to targets."""
    reason: str | None = None
    """By what, in a few words, if the source says it."""


@dataclass(frozen=True)
class Told:
    """What the log itself told of tables, in a transaction: it stands in the journal before that transaction."""

    position: int
    """The transaction's commit position,"""
    at: datetime
    """and when it was committed."""
    event: Json
    """The source's own, with the same `position`: a look that is older is brought up to it by that."""
    found: tuple[Found, ...] = ()


@dataclass(frozen=True)
class Look:
    """What the source's catalog is like, and what has happened since the look before that the log does not tell."""

    state: Json
    """The source's own: the next look is compared with it."""
    since: int
    """The log's end at the look before,"""
    position: int
    """and after this one: what was found was committed between them."""
    at: datetime
    found: tuple[Found, ...] = ()
    told: tuple[Json, ...] = ()
    """Events of what the log has told already, and this look may not have seen."""


@dataclass(frozen=True)
class Block:
    """A piece of the log, ready to be appended.

    `rows` has the schema CAPTURED and is in commit order, whole transactions one after another.
    `open_transaction` is True when the last transaction of the block goes on in the next block:
    the journal must not commit after such a block. Only a transaction too large for memory is
    spread like this, and then its blocks follow each other with nothing between.
    `progress` is a position that is covered once this block and all before it are durable, though
    no row stands for it; it is never inside a transaction.
    `behind` says that much more is there already: its rows need not be visible at once.
    `left` is how many bytes of the source's log are being read beyond this block; 0 when nothing is known of them.
    `look` is made durable once this block and all before it are; it comes between transactions, and everything that
    was committed before its position has come by then.
    `told` is durable before the block is visible; the transactions that told it end with this block, or in it.
    """

    rows: pa.RecordBatch | None = None
    open_transaction: bool = False
    progress: int | None = None
    behind: bool = False
    left: int = 0
    look: Look | None = None
    told: tuple[Told, ...] = ()


@dataclass(frozen=True)
class Chunk:
    """A part of a table that one task reads. `what` is the source's own, small, JSON; `bytes` an estimate.

    `rows` are those of a small table that were read with the plan; None: they are to be read.
    """

    relation: Relation
    what: Json
    bytes: int
    rows: tuple[pa.LargeBinaryArray, ...] | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True)
class SnapshotPlan:
    """All captured tables at one exact position, in chunks that tasks can read in parallel. Picklable.

    A change is in the snapshot if and only if its transaction ends at or before `position`. `token` is how the
    source's readers find the snapshot, which lives as long as its holder keeps it.
    """

    position: int
    taken_at: datetime
    """By the source's clock: not later than any change that is not in the snapshot."""
    token: str
    chunks: tuple[Chunk, ...]
    estimated_rows: int
    ranges: Mapping[str, Json] = field(default_factory=dict, hash=False, repr=False)
    """By table (`schema.table`) how it is cut by its key: the source's own, with values of the key. Given back in
    `Wanted`, a later snapshot cuts the table into the same chunks, as long as it is the same table in the same file."""
    held_until: datetime | None = None
    """No chunk is begun after this."""
    rate: int | None = None
    """How many bytes of a chunk are read a second, at most."""


@dataclass(frozen=True)
class Wanted:
    """Which of a source's tables a snapshot is for. `all`: those that are captured by now; the others are left out."""

    names: frozenset[str] = frozenset()
    """`schema.table`"""
    patterns: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()
    """Patterns of tables that are not meant, though one of `patterns` names them."""
    all: bool = False
    within: Mapping[str, KeyRange] = field(default_factory=dict)
    """By name the tables of which only a range of the key is read."""
    ranges: Mapping[str, Json] | None = field(default=None, hash=False, repr=False)
    """Cut tables by their keys, where these are in an order that never changes: as an earlier plan said (its `ranges`),
    where it still holds. None: each snapshot is for itself."""


@dataclass(frozen=True)
class CopyLimits:
    """What copies of tables may take of a source, all tasks together. None: no limit."""

    connections: int | None = None
    rate: int | None = None
    """Bytes a second."""
    at_once: int | None = None
    """So many bytes are copied at one moment; of more than that, each range of a key has its own."""


@dataclass(frozen=True)
class KeyRows:
    """Rows of a table that were asked for by their keys, as they were at one moment."""

    payload: pa.LargeBinaryArray
    """For the relation's decoder."""
    writers: Sequence[int]
    """Of each row the transaction that left it so, as changes name theirs (`txid`).

    A part of a transaction that could have been taken back alone (a savepoint) may have another name: so a row
    of another writer may be of the same transaction all the same.
    """
    until: int
    """A position: whatever the rows show was committed before it."""


class Snapshot(Protocol):
    """The driver's side of a baseline: whoever has it keeps the snapshot alive."""

    plan: SnapshotPlan

    def close(self) -> None:
        """Let go of it. Idempotent."""


Registrar = Callable[[Relation], int]
"""Gives the journal's id for a description; the same content always gets the same id."""


class Source(Protocol):
    """The capture side. One instance, one thread, one process."""

    kind: str

    def preflight(self) -> list[Finding]:
        """Look at the database without changing it. Never raises for something it can report."""

    def relations(self, patterns: Sequence[str]) -> list[Relation]:
        """The tables that the patterns name now, described from the catalog."""

    def prepare(self) -> SourceIdentity:
        """Create or sync what capture needs on the source (publication, then slot). Idempotent.

        Refuses, with SourceHalted or PreflightError, whatever would break the application's writes.
        """

    def check(self, identity: SourceIdentity, end: int) -> SourceIdentity:
        """Raise SourceHalted unless going on from journal end `end` is exact. Runs on each connect.

        Returns what the journal is bound to from here on. Where that is another identity, another server has taken
        the place of the one before, and the caller makes it durable before the first row.
        """

    def recall(self, descriptions: Sequence[Relation], end: int, look: Json | None = None) -> None:
        """All descriptions that the journal has, in the order in which they came, and its end: before each `check`.

        `look`: the last one that is durable (`state`, `position`, `at`), and what was `told` since, in order; None if
        there was none.
        """

    def capture(self, start: int, register: Registrar) -> Iterator[Block]:
        """Yield everything committed after `start`, in commit order, for ever.

        Yields at least every 100 ms, an empty block if need be, so that the caller can commit and
        acknowledge. Keepalives are answered inside. Transactions that end at or before `start` are
        dropped. Raises SourceUnavailable when the connection is lost (the caller opens a new one at
        the journal's end) and SourceHalted when going on would not be exact.
        """

    def ack(self, position: int) -> None:
        """Tell the source that everything up to `position` need not be sent again. Never goes back."""

    def status(self) -> Json:
        """What the source says of itself now: log end, slot state, retained bytes."""

    def format_position(self, position: int) -> str:
        """The position as the database's own people write it."""

    def close(self) -> None:
        """Let go of every connection. Idempotent."""


@dataclass(frozen=True)
class Decoded:
    """The values of a run of changes of one relation, by column, row for row with the input.

    `after` has one column per column of the relation, in its order: the new row, or for a delete
    what is known of the old one, or NULLs for a truncate. `before` has the same columns and
    `has_before` says where an old tuple was sent. `unchanged` lists, per row, the names of columns
    the log left out because they did not change (they are NULL in `after`, and NULL is not their
    value). `special` maps, per row, a column's name to its exact text where its type has no home
    for the value (the column is NULL there).
    """

    after: pa.RecordBatch
    before: pa.RecordBatch
    has_before: npt.NDArray[np.bool_]
    unchanged: pa.ListArray
    special: pa.MapArray


class Decoder(Protocol):
    """The decode side for one relation: pure, picklable, total. No database, no state."""

    relation: Relation

    def decode(self, op: npt.NDArray[np.uint8], payload: pa.LargeBinaryArray) -> Decoded:
        """Decode a run of changes. Raises JournalCorrupt for bytes that are no message of this source."""
