"""What happened to a table without a row in the log, as `ddl list` has it beside the versions of tables."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from millstream.journal import CatalogChange, JournalReader
from millstream.journal.places import position_text
from millstream.model import Checkpoint, Json
from millstream.registry.kinds import Kind
from millstream.registry.structure import Change

PREFIX = "c"
"""Before the number of such a change, which is no seq."""


@dataclass(frozen=True)
class Noticed:
    """Something that a look at the source's catalog found: committed after `since`, by the checkpoint's position.

    Or what the log itself told (`since` is None): then the checkpoint is the same as of a version of a table.
    """

    number: int
    table: str
    oid: int
    copies: bool
    """Whether rows came, went or changed by it: targets get a copy of the table."""
    since: int | None
    checkpoint: Checkpoint
    """The journal's last change when it was found, the log's end then, and when that was. Of what was told: the last
    change before its transaction, and that transaction's commit position and time."""
    changes: tuple[Change, ...]
    source_kind: str
    version: None = None
    fingerprint: None = None

    @property
    def seq(self) -> int:
        """The last change that may be older than it."""
        return self.checkpoint.seq

    @property
    def kind(self) -> Kind:
        return self.changes[0].kind

    @property
    def title(self) -> str:
        """What it is called."""
        return f"{PREFIX}{self.number}"

    @property
    def key(self) -> int:
        """Under which a decision is kept: no seq is below 1."""
        return -self.number

    def is_before(self, position: int) -> bool:
        """Whether rows that were read at a position have it."""
        at = self.checkpoint.position
        return at <= position if self.since is not None else at < position

    def to_json(self) -> Json:
        return {
            "checkpoint": {
                "seq": self.checkpoint.seq,
                "position": position_text(self.source_kind, self.checkpoint.position),
                "at": self.checkpoint.wall.isoformat(),
            },
            "since": position_text(self.source_kind, self.since) if self.since is not None else None,
            "changes": [one.to_json() for one in self.changes],
        }


def noticed(reader: JournalReader) -> list[Noticed]:
    """Everything that looks at the catalog have found, or that the log told, in order."""
    found = reader.catalog_changes()
    kind = reader.header().source_kind if found else ""
    return [_noticed(one, kind) for one in found]


def _noticed(one: CatalogChange, source_kind: str) -> Noticed:
    kind = Kind(one.kind)
    gone = kind in (Kind.PARTITION_DETACHED, Kind.PARTITION_DROPPED, Kind.PARTITION_TRUNCATED, Kind.DROP_TABLE)
    what = one.part or (one.table if kind is not Kind.REWRITE else one.reason)
    change = Change(kind, None, what if gone else None, None if gone else what)
    at = Checkpoint(one.seq, one.position, datetime.fromisoformat(one.at))
    since = None if one.told else one.since
    return Noticed(one.number, one.table, one.oid, one.copies, since, at, (change,), source_kind)
