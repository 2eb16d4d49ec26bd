"""Where delivery waits: before what comes next may be delivered only when somebody has said so.

Of a version that is the first transaction with changes under it. What only the catalog told has no place among the
changes: delivery waits at the last one that was there when it was found, or where it is if that is further.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from millstream.engine.fit import open_target
from millstream.engine.receipts import receipt, receipts
from millstream.engine.reload import can_reload
from millstream.errors import MillstreamError, SchemaGated
from millstream.journal import JournalReader
from millstream.model import Relation, SeqRange, StreamSpec, TargetSpec
from millstream.registry.ddl import APPLIED, LEFT, DdlEvent, policy_at, policy_of
from millstream.registry.kinds import NOTICED, Decision, Policy
from millstream.registry.noticed import Noticed, noticed
from millstream.registry.structure import differences
from millstream.registry.versions import Registry, Version
from millstream.sources.postgres.patterns import parse_patterns
from millstream.spark.tables import OwnTables, belongs
from millstream.state.base import StateStore

_CLOSED = (Policy.GATE.value, Policy.HALT.value)
GATE_SECONDS = 0.5
"""How often a delivery that waits for a decision looks whether it was made: who decides may be another process."""

LOOK_SECONDS = 1.0
"""How often it is looked whether a gate has closed while no change came."""

CLOSES = (Policy.GATE, Policy.HALT)


class AtGate(Exception):
    """Raised inside a batch when what comes next may not be delivered yet: what comes before it was."""


@dataclass(frozen=True)
class Closed:
    """A gate that is closed: `seq` is the last that can be delivered."""

    seq: int
    version: Version | Noticed
    policy: Policy
    rejected: bool

    @property
    def waits(self) -> bool:
        """Whether delivery waits for a decision; else it has failed."""
        return self.policy is Policy.GATE and not self.rejected

    def error(self, stream: str) -> SchemaGated:
        what = "; ".join(change.in_words() for change in self.version.changes)
        said = "was rejected" if self.rejected else "waits for approval" if self.waits else "is not to be applied"
        if isinstance(self.version, Noticed):
            name, id = self.version.table, self.version.title
        else:
            name, id = f"version {self.version.version} of {self.version.table}", str(self.version.seq)
        return SchemaGated(
            f"{name} ({what}) {said}",
            hint=f"see `millstream ddl show {stream} {id}`; `millstream ddl approve` lets it pass",
        )


class Gate:
    """Of one stream and target: its policies, held against what its journal tells. One thread at a time."""

    def __init__(
        self,
        stream: StreamSpec,
        target: str,
        locations: Sequence[str],
        store: StateStore,
        tables: OwnTables | None,
        *,
        reloads: bool,
    ) -> None:
        """`reloads`: whether the target can get tables anew."""
        self._stream = stream
        self._target = target
        self._journal = JournalReader(locations)
        self._store = store
        self._tables = tables
        self._reloads = reloads
        self._seen = (-1, -1)
        self._not_applied: list[tuple[Version, Policy]] = []
        self._noticed: list[tuple[Noticed, Policy]] = []

    @property
    def closes_unseen(self) -> bool:
        """Whether it can close though no change comes: by what only the catalog tells."""
        chosen = dict(self._stream.ddl)
        return not self._reloads or any(chosen.get(kind.value) in _CLOSED for kind in NOTICED)

    def cut(self, span: SeqRange, after_position: int | None = None) -> Closed | None:
        """The first closed gate that a batch would pass; it may be delivered up to `seq` of it."""
        found = self.after(span.start, after_position)
        return found if found is not None and found.seq < span.end else None

    def after(self, seq: int, after_position: int | None = None) -> Closed | None:
        """The first closed gate behind a cursor. What a baseline had (`after_position`) has passed already."""
        self._look()
        ahead = [one for one in self._not_applied if one[0].seq > seq]
        if not ahead and not self._noticed:
            return None
        journal = self._journal.header().journal_id
        decided = self._store.ddl_decisions(self._stream.name, journal)
        found = [*self._closed_by_catalog(seq, journal, after_position)]
        for version, policy in ahead:
            if after_position is not None and version.checkpoint.position < after_position:
                continue
            said = decided.get(version.seq)
            if said is None or said.decision is Decision.REJECTED:
                found.append(Closed(version.checkpoint.seq, version, policy, said is not None))
                break
        return min(found, key=lambda one: one.seq, default=None)

    def _closed_by_catalog(self, seq: int, journal: str, after_position: int | None) -> list[Closed]:
        if not self._noticed:
            return []
        decided = self._store.ddl_decisions(self._stream.name, journal)
        done = receipts(self._store, self._stream.name, journal)
        return [
            Closed(max(one.seq, seq), one, policy, said is not None)
            for one, policy in self._noticed
            if ((said := decided.get(one.key)) is None or said.decision is Decision.REJECTED)
            and not (after_position is not None and one.is_before(after_position))
            and receipt(done, self._target, one.number) not in (APPLIED, LEFT)
        ]

    def _look(self) -> None:
        """Read schemas, and what the catalog told, again if there is more of it."""
        seen = len(self._journal.schemas()), len(self._journal.catalog_changes())
        if seen == self._seen:
            return
        self._seen = seen
        chosen = dict(self._stream.ddl)
        self._not_applied = [
            (version, policy)
            for version in own_versions(Registry(self._journal), self._journal, self._tables)
            if (policy := policy_of(version.changes, chosen)) in CLOSES
        ]
        self._noticed = [
            (one, policy)
            for one in own_noticed(self._journal, self._tables)
            if (policy := policy_at(one, chosen, reloads=self._reloads)) in CLOSES
        ]


@contextmanager
def closing(gate: Gate, stands: Callable[[], bool], end: Callable[[], None]) -> Iterator[None]:
    """Beside a query: `end` it when the gate closes where the target stands, also if no change comes.

    `stands` says whether it does; what keeps it from saying so the next batch will meet, too.
    """
    over = threading.Event()

    def watch() -> None:
        while not over.wait(LOOK_SECONDS):
            with suppress(MillstreamError):
                if stands():
                    end()
                    return

    watcher = threading.Thread(target=watch, name="gate", daemon=True)
    if gate.closes_unseen:
        watcher.start()
    try:
        yield
    finally:
        over.set()
        if gate.closes_unseen:
            watcher.join()


def withheld(
    stream: StreamSpec, journal: JournalReader, store: StateStore, relation: Relation, seq: int
) -> SchemaGated | None:
    """Why a table may not be copied as it is at this change: no target would get changes under that schema yet.

    A copy has the table as the catalog has it, which may be another one than any change so far. What the stream says of
    that itself counts; a copy of a table that was renamed or replaced is what the other gates wait for.
    """
    mine = [one for one in Registry(journal).all() if relation.oid == one.relation.oid or relation.table == one.table]
    before = next((one.relation for one in reversed(mine) if one.seq <= seq), None)
    if before is None:
        # So it is with changes: the first of them that comes is compared with nothing.
        return None
    policies = dict(stream.ddl)
    changes = [one for one in differences(before, relation) if policies.get(one.kind.value) in _CLOSED]
    if not changes:
        return None
    decided = store.ddl_decisions(stream.name, journal.header().journal_id)
    coming = next((one for one in mine if one.seq > seq and not differences(one.relation, relation)), None)
    said = decided.get(coming.seq) if coming is not None else None
    if said is not None and said.decision is Decision.APPROVED:
        return None
    what = "; ".join(change.in_words() for change in changes)
    name = stream.name
    hint = "nothing can be approved before there is a change of the table under it; reload it then"
    if coming is not None:
        hint = f"`millstream ddl show {name} {coming.seq}`; when it is approved, reload the table again"
    return SchemaGated(f"its schema has changed ({what}), and the stream does not apply that by itself", hint=hint)


def own_versions(registry: Registry, journal: JournalReader, tables: OwnTables | None) -> list[Version]:
    """The versions of a stream's tables, in order. None: all tables are its."""
    found = list(registry.all())
    if tables is None:
        return found
    journal_id = journal.header().journal_id
    return [one for one in found if belongs(journal.locations, journal_id, one.id, tables)]


def own_noticed(journal: JournalReader, tables: OwnTables | None) -> list[Noticed]:
    """What the catalog told of a stream's tables, in order. None: all tables are its."""
    found = noticed(journal)
    if tables is None or not found:
        return found
    journal_id, relations = journal.header().journal_id, journal.relations()
    patterns = parse_patterns(tables.patterns)

    def own(one: Noticed) -> bool:
        described = [id for id, relation in relations.items() if relation.oid == one.oid]
        if described:
            return belongs(journal.locations, journal_id, described[-1], tables)
        schema, _, name = one.table.partition(".")
        return any(pattern.matches(schema, name) for pattern in patterns)

    return [one for one in found if own(one)]


def reloads(spec: TargetSpec) -> bool:
    """Whether tables can be copied anew to a target. One that cannot even be made is told elsewhere."""
    with suppress(MillstreamError):
        return can_reload(open_target(spec))
    return True


def events(stream: StreamSpec, journal: JournalReader, tables: OwnTables | None, store: StateStore) -> list[DdlEvent]:
    """Every schema change of a stream's tables, with what was decided and which targets have it."""
    journal_id = journal.header().journal_id
    decided = store.ddl_decisions(stream.name, journal_id)
    cursors = {one.target: one.seq for one in store.cursors(stream.name) if one.journal_id == journal_id}
    chosen: Mapping[str, str] = dict(stream.ddl)
    found = [
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
    told = _noticed_events(stream, journal, tables, store)
    return sorted([*found, *told], key=lambda one: one.version.checkpoint.seq) if told else found


def _noticed_events(
    stream: StreamSpec, journal: JournalReader, tables: OwnTables | None, store: StateStore
) -> list[DdlEvent]:
    told = own_noticed(journal, tables)
    if not told:
        return []
    journal_id, chosen = journal.header().journal_id, dict(stream.ddl)
    decided, done = store.ddl_decisions(stream.name, journal_id), receipts(store, stream.name, journal_id)
    can = all(reloads(target) for target in stream.targets)
    return [
        DdlEvent(
            stream=stream.name,
            version=one,
            policy=policy,
            decided=decided.get(one.key),
            receipts={target.name: receipt(done, target.name, one.number) for target in stream.targets},
        )
        for one in told
        if (policy := policy_at(one, chosen, reloads=can)) is not Policy.IGNORE
    ]
