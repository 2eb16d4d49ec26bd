"""The plain values that the rooms of Millstream hand to each other.

Nothing here reads a file, opens a connection or knows Spark. All values are immutable and
picklable; those that are stored have `to_json` and `from_json`.
"""

from __future__ import annotations

import enum
import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any

from millstream.transforms.shape import Shape

Json = dict[str, Any]


class Op(enum.IntEnum):
    """What a change did. The value is the ASCII code of the letter users see in `_ms_op`."""

    CREATE = ord("c")
    UPDATE = ord("u")
    DELETE = ord("d")
    READ = ord("r")
    TRUNCATE = ord("t")
    MESSAGE = ord("m")


class Mode(enum.StrEnum):
    """What a stream does: changes only, a copy only, or a copy followed by changes."""

    CDC = "cdc"
    SNAPSHOT = "snapshot"
    SNAPSHOT_THEN_CDC = "snapshot_then_cdc"


class AckPolicy(enum.StrEnum):
    """Which position is acknowledged to the source: what targets have, or what the journal has."""

    DELIVERED = "delivered"
    JOURNALED = "journaled"


class OnLimit(enum.StrEnum):
    """What happens when targets hold back more log on the source than `max_source_wal`."""

    RELEASE = "release"
    HOLD = "hold"
    STOP = "stop"


class OnFull(enum.StrEnum):
    """What happens when a journal has reached its limit, and targets still need what is in it."""

    BLOCK = "block"
    DROP_OLDEST = "drop_oldest"
    ERROR = "error"


class OnReject(enum.StrEnum):
    """What becomes of a row that a target cannot take: a dead letter, or the target's halt."""

    LETTER = "letter"
    HALT = "halt"


class OnOverflow(enum.StrEnum):
    """What happens when a target has as many dead letters as it may have."""

    HALT = "halt"
    BLOCK = "block"
    DROP_OLDEST = "drop_oldest"


class StreamState(enum.StrEnum):
    """Where a stream (or one of its targets) stands in its life."""

    CREATED = "created"
    SNAPSHOT = "snapshot"
    """Its tables are being copied."""
    CATCHING_UP = "catching_up"
    RUNNING = "running"
    GATED = "gated"
    """Its next change has a schema that somebody must approve first."""
    PAUSED = "paused"
    FAILED = "failed"
    NEEDS_RELOAD = "needs_reload"
    """Changes that it did not have are gone from the journal: it must begin anew."""
    STOPPED = "stopped"
    COMPLETE = "complete"
    """Of a stream with `mode: snapshot`: every row was copied, and nothing more will come."""


@dataclass(frozen=True)
class Checkpoint:
    """A point in a journal: the last seq that counts, the source's position after it, and when."""

    seq: int
    position: int
    wall: datetime

    def to_json(self) -> Json:
        return {"seq": self.seq, "position": self.position, "wall": self.wall.isoformat()}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Checkpoint:
        return cls(int(value["seq"]), int(value["position"]), datetime.fromisoformat(value["wall"]))


@dataclass(frozen=True)
class Cursor:
    """How far one target of one stream is: everything up to and including `seq` is delivered.

    It names its journal, so that a journal that was rebuilt or restored from an older copy is
    noticed before a row is written. `epoch` is the delivery epoch (a new Spark checkpoint
    directory each), not the journal writer's.
    """

    stream: str
    target: str
    journal_id: str
    epoch: int
    seq: int
    position: int
    commit_ts: datetime | None = None
    updated_at: datetime = field(default_factory=lambda: datetime.now(UTC))


@dataclass(frozen=True)
class Column:
    """One column of a relation: what the log says, then what the catalog added (None: unknown)."""

    name: str
    type_oid: int
    type_mod: int = -1
    key: bool = False
    """True when the column belongs to the replica identity, as the log itself says."""
    type_name: str | None = None
    attnum: int | None = None
    nullable: bool | None = None
    default: str | None = None
    generated: bool | None = None
    type_kind: str | None = None
    """pg_type.typtype: b base, c composite, d domain, e enum, r range, m multirange."""
    base_type_oid: int | None = None
    """For a domain the OID (and `base_type_mod`) of the type beneath all domains."""
    base_type_mod: int | None = None
    element_type_oid: int | None = None
    """For an array, also one beneath a domain, the OID of its elements' type."""
    element_delimiter: str | None = None
    """What stands between the elements in the array's text."""
    enum_labels: tuple[str, ...] | None = None
    missing: str | None = None
    """The value, as text, of rows that are older than the column: a constant default that it was added with."""


@dataclass(frozen=True)
class Relation:
    """A table at one schema version: enough to decode its rows without the database.

    `key` holds the names of the columns that identify a row, by the source's own rules; it is
    empty for a table without identity. `enriched` is False when the live catalog no longer
    matched what the log said, so that only the log's own facts are known.
    """

    oid: int
    schema: str
    name: str
    identity: str
    columns: tuple[Column, ...]
    key: tuple[str, ...] = ()
    primary_key: tuple[str, ...] = ()
    enriched: bool = False
    source_kind: str = "postgres"
    encoding: str = "UTF8"
    """How the text of its values is encoded. SQL_ASCII: any bytes, since its database never looks at them."""
    types: tuple[tuple[str, str], ...] = ()
    """What the source was asked to make of some types, instead of the usual: pairs of type and choice, sorted."""
    told_at: int | None = None
    """Where the source's trigger has told it, the position at which that was committed; None: the catalog was asked."""

    @property
    def table(self) -> str:
        """`schema.name`, as users write it in patterns and see it in paths."""
        return f"{self.schema}.{self.name}"

    def to_json(self) -> Json:
        value = asdict(self)
        # Descriptions in older journals lack these: left out where they say nothing, fingerprints stay the same.
        if self.encoding == "UTF8":
            del value["encoding"]
        value["types"] = dict(self.types)
        if not self.types:
            del value["types"]
        if self.told_at is None:
            del value["told_at"]
        for column in value["columns"]:
            for later in ("element_delimiter", "missing"):
                if column[later] is None:
                    del column[later]
        return value

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Relation:
        columns = tuple(
            Column(**{**c, "enum_labels": tuple(c["enum_labels"]) if c["enum_labels"] is not None else None})
            for c in value["columns"]
        )
        lists = {"key": tuple(value["key"]), "primary_key": tuple(value["primary_key"])}
        return cls(**{**value, **lists, "columns": columns, "types": tuple(sorted(value.get("types", {}).items()))})

    def fingerprint(self) -> str:
        """SHA-256 over the whole content: equal descriptions are stored once."""
        text = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class SeqRange:
    """A batch's range, open below: the seqs with `start < seq <= end`.

    `start` is the cursor before the batch and `end` the cursor after it, so a batch with
    `end <= cursor` was delivered already and one with `start > cursor` would leave a gap.
    """

    start: int
    end: int


@dataclass(frozen=True)
class BatchLimits:
    """When a target's batch is cut. All limits are soft: a source transaction is never split."""

    max_ms: int
    max_bytes: int
    max_events: int


@dataclass(frozen=True)
class Retention:
    """How much of a journal is kept: changes younger than `age_ms`, and at most `bytes`. None: no limit."""

    age_ms: int | None = None
    bytes: int | None = None


@dataclass(frozen=True)
class JournalLimit:
    """How large a journal may become while targets are behind, and what happens then."""

    max_bytes: int
    on_full: OnFull = OnFull.BLOCK


@dataclass(frozen=True)
class SourceSpec:
    """A source as the stream file describes it. `options` are checked by the source's own schema."""

    name: str
    kind: str
    uri: str = field(repr=False)
    """May hold a password, so it does not show itself."""
    auth_ref: str | None
    tables: tuple[str, ...]
    ack: AckPolicy = AckPolicy.DELIVERED
    max_source_wal: int = 4 << 30
    on_limit: OnLimit = OnLimit.RELEASE
    options: Mapping[str, Any] = field(default_factory=dict)
    retention: Retention | None = None
    """None: the journal keeps everything."""
    journal: JournalLimit | None = None
    """None: the journal grows as long as its disk has room."""
    tenant: str = "default"
    """Whose the source is; its schemas are registered under this name."""


@dataclass(frozen=True)
class DeadLetters:
    """What becomes of rows that a target cannot take, and how many of them it may have."""

    on_reject: OnReject = OnReject.LETTER
    max: int = 1000
    on_overflow: OnOverflow = OnOverflow.HALT


@dataclass(frozen=True)
class TargetSpec:
    """A target as the stream file describes it. `options` are checked by the target's own schema."""

    name: str
    kind: str
    limits: BatchLimits
    required: bool = True
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """May hold a uri with a password, so they do not show themselves."""
    dead_letters: DeadLetters = DeadLetters()


@dataclass(frozen=True)
class SnapshotRules:
    """Where the states of a stream's targets are kept, and what is kept by itself."""

    path: str
    """A directory, or a URL."""
    every_ms: int | None = None
    """How often; None: only when somebody asks."""
    keep: int | None = None
    """How many of each target; None: all."""
    format: str = "arrow"
    """arrow | jsonl"""


@dataclass(frozen=True)
class StreamSpec:
    """One source, its tables, a mode and the targets that get the changes."""

    name: str
    source: SourceSpec
    mode: Mode
    targets: tuple[TargetSpec, ...]
    commit: str = "all"
    """all | required | quorum:N"""
    checkpoint_interval_ms: int = 1000
    shape: Shape = field(default_factory=Shape)
    """What becomes of rows on the way to the targets: filters and transforms."""
    verify_every_ms: int | None = None
    """How often the targets are compared with the source; None: only when somebody asks."""
    ddl: tuple[tuple[str, str], ...] = ()
    """What is done about schema changes (`registry.ddl.Policy`), by kind, sorted; those left out have their default."""
    snapshots: SnapshotRules | None = None
    """What is kept of the targets' states; None: only what somebody asks for, where he says."""
