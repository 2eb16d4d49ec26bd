"""The versions of each table that a journal knows, and which one was in force where.

There is one truth: the descriptions that the journal stores, and the lines that say since when each of them
was in force. Versions are counted from these; nothing is stored here, so nothing can differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from millstream.errors import OutOfRange, UnknownName
from millstream.journal import InForce, JournalReader
from millstream.journal.places import position_text, time_text
from millstream.model import Checkpoint, Json, Relation
from millstream.names import instead
from millstream.registry.structure import Change, differences, fingerprint, structure


@dataclass(frozen=True)
class Version:
    """A table as it was from one change on."""

    tenant: str
    source: str
    table: str
    version: int
    """Counts from 1 for each table. The same structure again is the same version as long as nothing was between."""
    id: int
    """The number of its description in the journal, over all tables: `_ms_schema` of its changes."""
    fingerprint: str
    seq: int
    """Its first change."""
    checkpoint: Checkpoint
    """The last seq before the transaction of that change, and that transaction's commit position and time: who goes
    on from here reads this version's changes, and everything before is of earlier ones."""
    changes: tuple[Change, ...]
    """What is different from the version before."""
    relation: Relation
    source_kind: str

    def to_json(self) -> Json:
        return {
            "tenant": self.tenant,
            "source": self.source,
            "table": self.table,
            "version": self.version,
            "id": self.id,
            "fingerprint": self.fingerprint,
            "seq": self.seq,
            "checkpoint": {
                "seq": self.checkpoint.seq,
                "position": position_text(self.source_kind, self.checkpoint.position),
                "at": self.checkpoint.wall.isoformat(),
            },
            "enriched": self.relation.enriched,
            "changes": [one.to_json() for one in self.changes],
            "structure": structure(self.relation),
        }


class Registry:
    """The schemas of one journal, as they are when it is made. Cheap: it reads two small files."""

    def __init__(self, reader: JournalReader) -> None:
        header = reader.header()
        self.source = header.source
        self.kind = header.source_kind
        self._versions: dict[str, list[Version]] = {}
        self._by_id: dict[int, Version] = {}
        self._described: dict[str, Relation] = {}
        self._names: dict[int, str] = {}
        """By number of the source's table the name that it last had."""
        history = reader.schemas()
        # After them: what was described while they were read is not missed.
        self._relations = reader.relations()
        for one in history:
            self._count(one)

    def tables(self) -> list[str]:
        """The tables that have changes, by name."""
        return sorted(self._versions)

    def versions(self, table: str) -> list[Version]:
        """All versions of a table, in order. Raises UnknownName."""
        if table not in self._versions:
            there = instead(table, self.tables(), none="it has none yet")
            raise UnknownName(f"the journal of {self.source} has no table {table}: {there}")
        return list(self._versions[table])

    def all(self) -> Iterator[Version]:
        """The versions of all tables in the order in which they came."""
        return iter(sorted((one for found in self._versions.values() for one in found), key=lambda one: one.seq))

    def version(self, table: str, number: int) -> Version:
        """A version by its number."""
        found = self.versions(table)
        if not 1 <= number <= len(found):
            raise UnknownName(f"{table} has no version {number}", hint=f"it has 1 to {len(found)}")
        return found[number - 1]

    def at_seq(self, table: str, seq: int) -> Version:
        """The version that was in force at a change, of whatever table."""
        return self._last(table, [one for one in self.versions(table) if one.seq <= seq], f"seq {seq}")

    def at_position(self, table: str, position: int) -> Version:
        """The version that was in force after all that had committed at or before a position."""
        found = [one for one in self.versions(table) if one.checkpoint.position <= position]
        return self._last(table, found, f"position {position_text(self.kind, position)}")

    def at_time(self, table: str, ts_us: int) -> Version:
        """The version that was in force at a time: the last that a transaction committed by then had brought.

        Times are not in order of commit; what counts is the latest one so far.
        """
        found: list[Version] = []
        latest = 0
        for one in self.versions(table):
            latest = max(latest, int(one.checkpoint.wall.timestamp() * 1_000_000))
            if latest <= ts_us:
                found.append(one)
        return self._last(table, found, time_text(ts_us))

    def by_id(self, number: int) -> Version:
        """The version to which `_ms_schema` of a change refers; where it was in force more than once, the last."""
        if number not in self._by_id:
            raise UnknownName(
                f"no change of {self.source} has the schema {number}",
                hint="numbers from 1073741824 on are of rows that a baseline brought before the first change",
            )
        return self._by_id[number]

    def _last(self, table: str, found: Sequence[Version], where: str) -> Version:
        if not found:
            first = self._versions[table][0]
            raise OutOfRange(
                f"no schema of {table} is known at {where}: its first change is seq {first.seq}, "
                f"{first.checkpoint.wall.isoformat()}"
            )
        return found[-1]

    def _count(self, one: InForce) -> None:
        relation = self._relations[one.relation]
        table, known = relation.table, self._versions.setdefault(relation.table, [])
        # A table that was known by another name is not a new one: its rows are where that name was.
        before = self._described.get(table, self._described.get(self._names.get(relation.oid, table)))
        self._names[relation.oid] = table
        changes = differences(before, relation)
        # What the catalog could not complete says less of the same: the next one is compared with what says more.
        if changes or relation.enriched:
            self._described[table] = relation
        if not changes:
            self._by_id[one.relation] = known[-1]
            return
        wall = datetime.fromtimestamp(one.commit_ts_us / 1_000_000, UTC)
        known.append(
            Version(
                tenant=one.tenant,
                source=self.source,
                table=relation.table,
                version=len(known) + 1,
                id=one.relation,
                fingerprint=fingerprint(relation),
                seq=one.seq,
                checkpoint=Checkpoint(one.after, one.commit_position, wall),
                changes=tuple(changes),
                relation=relation,
                source_kind=self.kind,
            )
        )
        self._by_id[one.relation] = known[-1]
