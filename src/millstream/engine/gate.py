"""Where delivery waits: before the first transaction with changes under a schema that is not simply applied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from millstream.errors import SchemaGated
from millstream.journal import JournalReader
from millstream.model import SeqRange, StreamSpec
from millstream.registry.ddl import DdlEvent, policy_of
from millstream.registry.kinds import Decision, Policy
from millstream.registry.versions import Registry, Version
from millstream.spark.tables import OwnTables, belongs
from millstream.state.base import StateStore

GATE_SECONDS = 0.5
"""How often a delivery that waits for a decision looks whether it was made: who decides may be another process."""


class AtGate(Exception):
    """Raised inside a batch when what comes next may not be delivered yet: what comes before it was."""


@dataclass(frozen=True)
class Closed:
    """A gate that is closed: `seq` is the last that can be delivered."""

    seq: int
    version: Version
    policy: Policy
    rejected: bool

    @property
    def waits(self) -> bool:
        """Whether delivery waits for a decision; else it has failed."""
        return self.policy is Policy.GATE and not self.rejected

    def error(self, stream: str) -> SchemaGated:
        what = "; ".join(change.in_words() for change in self.version.changes)
        said = "was rejected" if self.rejected else "waits for approval" if self.waits else "is not to be applied"
        return SchemaGated(
            f"version {self.version.version} of {self.version.table} ({what}) {said}",
            hint=f"see `millstream ddl show {stream} {self.version.seq}`; `millstream ddl approve` lets it pass",
        )


class Gate:
    """Of one stream: its policies, held against the schemas of its journal. One thread at a time."""

    def __init__(
        self, stream: StreamSpec, locations: Sequence[str], store: StateStore, tables: OwnTables | None
    ) -> None:
        self._stream = stream
        self._journal = JournalReader(locations)
        self._store = store
        self._tables = tables
        self._lines = -1
        self._not_applied: list[tuple[Version, Policy]] = []

    def cut(self, span: SeqRange, after_position: int | None = None) -> Closed | None:
        """The first closed gate that a batch would pass; it may be delivered up to `seq` of it."""
        found = self.after(span.start, after_position)
        return found if found is not None and found.seq < span.end else None

    def after(self, seq: int, after_position: int | None = None) -> Closed | None:
        """The first closed gate behind a cursor. What a baseline had (`after_position`) has passed already."""
        self._look()
        ahead = [one for one in self._not_applied if one[0].seq > seq]
        if not ahead:
            return None
        journal = self._journal.header().journal_id
        decided = self._store.ddl_decisions(self._stream.name, journal)
        for version, policy in ahead:
            if after_position is not None and version.checkpoint.position < after_position:
                continue
            said = decided.get(version.seq)
            if said is None or said.decision is Decision.REJECTED:
                return Closed(version.checkpoint.seq, version, policy, said is not None)
        return None

    def _look(self) -> None:
        """Read the schemas again if there are more of them."""
        lines = len(self._journal.schemas())
        if lines == self._lines:
            return
        self._lines = lines
        self._not_applied = [
            (version, policy)
            for version in own_versions(Registry(self._journal), self._journal, self._tables)
            if (policy := policy_of(version.changes, dict(self._stream.ddl))) in (Policy.GATE, Policy.HALT)
        ]


def own_versions(registry: Registry, journal: JournalReader, tables: OwnTables | None) -> list[Version]:
    """The versions of a stream's tables, in order. None: all tables are its."""
    found = list(registry.all())
    if tables is None:
        return found
    journal_id = journal.header().journal_id
    return [one for one in found if belongs(journal.locations, journal_id, one.id, tables)]


def events(stream: StreamSpec, journal: JournalReader, tables: OwnTables | None, store: StateStore) -> list[DdlEvent]:
    """Every schema change of a stream's tables, with what was decided and which targets have it."""
    journal_id = journal.header().journal_id
    decided = store.ddl_decisions(stream.name, journal_id)
    cursors = {one.target: one.seq for one in store.cursors(stream.name) if one.journal_id == journal_id}
    chosen: Mapping[str, str] = dict(stream.ddl)
    return [
        DdlEvent(
            stream=stream.name,
            version=version,
            policy=policy,
            decided=decided.get(version.seq),
            receipts={
                target.name: "applied" if cursors.get(target.name, -1) >= version.seq else "waiting"
                for target in stream.targets
            },
        )
        for version in own_versions(Registry(journal), journal, tables)
        if (policy := policy_of(version.changes, chosen)) is not Policy.IGNORE
    ]
