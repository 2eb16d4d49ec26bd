"""One target compared with its source, at one exact position of both.

The target's delivery has been stopped, so it can only be behind. Then the source is asked for a snapshot, the
journal is awaited up to its position, and what lies before that is delivered: now the target has to hold what the
snapshot shows, and nothing else. Nothing changes there until the comparison is over; other targets flow on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol, TypeVar, cast

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from millstream.config.kinds import is_mirror
from millstream.engine.chunk_jobs import BaselineStopped, paced, source_turn
from millstream.engine.compare import Comparing, Comparison, Counted, Differing
from millstream.engine.delivery import DeliveryQuery
from millstream.engine.fit import open_target
from millstream.engine.opening import Opening
from millstream.engine.verify_report import TableVerdict, TargetVerdict
from millstream.engine.watching import Progress, watched
from millstream.errors import NotSupported, UnknownName, VerifyFailed
from millstream.journal import JournalReader
from millstream.journal.places import position_text
from millstream.model import Relation, StreamSpec, TargetSpec
from millstream.observe import Event, Level, Observer, counted
from millstream.sources import captured_tables, copy_limits, take_snapshot
from millstream.sources.base import SnapshotPlan, Wanted
from millstream.spark.baseline import BaselinePlan
from millstream.spark.shaped import binding_of
from millstream.spark.tables import OwnTables
from millstream.state.base import StateStore
from millstream.targets.base import ASKING, Reader, Repairable, Repairer, Target, Verifiable
from millstream.targets.lanes.tables import mirror_key
from millstream.transforms.compiled import compiled
from millstream.transforms.shape import Shaping

T = TypeVar("T")

SHOWN_KEYS = 20
"""So many differing keys are told."""
MOST_REPAIRED = 100_000
"""So many rows a repair writes: where more differ, the target wants a new beginning."""
LOOK_SECONDS = 0.05
JOURNAL_SECONDS = 120.0
"""How long the journal may take to come to the snapshot's position."""


class VerifyStopped(Exception):
    """The comparison was given up because something else is wanted of its stream, or the process ends."""


@dataclass(frozen=True)
class Asked:
    """What is to be compared, and whether it is to be repaired."""

    tables: tuple[str, ...] = ()
    """Names as `schema.table`; none: all."""
    repair: bool = False


@dataclass(frozen=True)
class Place:
    """Where a delivery's parts are."""

    locations: Sequence[str]
    checkpoints: Path
    tables: OwnTables | None


class ComparableTarget(Target, Verifiable, Protocol):
    """A target that can be compared with its source."""


class TargetVerification:
    """Compares one target, whose delivery does not run. On a thread of its own; `run` is called once."""

    def __init__(
        self,
        spark: SparkSession,
        stream: StreamSpec,
        spec: TargetSpec,
        place: Place,
        store: StateStore,
        observer: Observer,
        stopping: threading.Event,
        say: Callable[[str], None],
    ) -> None:
        """`say` hears how far it is."""
        self._spark = spark
        self._stream = stream
        self._spec = spec
        self._place = place
        self._store = store
        self._observer = observer
        self._stopping = stopping
        self._say = say
        self._journal = JournalReader(place.locations)

    def run(self, asked: Asked) -> TargetVerdict:
        """Raises VerifyStopped, or what keeps it from an answer."""
        started = time.monotonic()
        target = check_asked(self._spec, asked)
        opening = self._opening(target)
        try:
            self._say("waiting for a snapshot of the source")
            # A table that came just now is not captured before the next look at the catalog: the others are compared.
            wanted = Wanted(all=True)
            with closing(take_snapshot(self._stream.source, self._waits, wanted=wanted)) as snapshot:
                uncaptured = self._uncaptured(snapshot.plan, asked.tables)
                seq = self._await_journal(snapshot.plan.position)
                self._deliver(seq)
                self._open(opening, target, seq, write=asked.repair)
                plan = self._plan(opening, target.reader(), snapshot.plan, seq, asked.tables)
                repairer = target.repairer() if asked.repair and isinstance(target, Repairable) else None
                with self._turn():
                    tables = self._compare(plan, snapshot.plan, repairer)
        finally:
            target.close()
        kind = self._journal.header().source_kind
        verdict = TargetVerdict(
            self._spec.name,
            self._spec.kind,
            seq,
            position_text(kind, snapshot.plan.position),
            tables,
            datetime.now(UTC),
            round(time.monotonic() - started, 3),
            uncaptured,
        )
        self._tell(verdict)
        return verdict

    def _uncaptured(self, found: SnapshotPlan, asked: Sequence[str]) -> tuple[str, ...]:
        """The tables that are left out because nothing captures them yet. Raises UnknownName for one that was named."""
        captured = {chunk.relation.table for chunk in found.chunks}
        left = tuple(name for name in captured_tables(self._stream.source) if name not in captured)
        for name in asked:
            if name in left:
                raise UnknownName(
                    f"the stream does not have {name} yet: nothing captures it",
                    hint="a new table is found within watch_interval; see: millstream ddl list",
                )
        return () if asked else left

    # The position

    def _cursor(self) -> int | None:
        cursor = self._store.get_cursor(self._stream.name, self._spec.name)
        return cursor.seq if cursor else None

    def _waits(self, message: str) -> None:
        self._check_stop()
        self._say(message)

    def _await_journal(self, position: int) -> int:
        """The seq up to which the snapshot has everything. Waits until the journal is there."""
        self._say("waiting for the journal")
        deadline = time.monotonic() + JOURNAL_SECONDS
        while (head := self._journal.head()) is None or head.covered < position:
            self._check_stop()
            if time.monotonic() > deadline:
                raise VerifyFailed(
                    f"the journal did not come to the snapshot's position within {JOURNAL_SECONDS:g} s",
                    hint="see whether capture runs: millstream status",
                )
            self._stopping.wait(LOOK_SECONDS)
        return self._journal.seq_at_position(position)

    def _deliver(self, seq: int) -> None:
        """Bring the target exactly there."""
        at = self._cursor()
        if at is not None and at > seq:
            raise VerifyFailed(f"the target is at seq {at} already, beyond the snapshot at seq {seq}")
        if at == seq:
            return
        self._say(f"delivering up to seq {seq}")
        query = DeliveryQuery(
            self._spark,
            self._stream,
            self._spec,
            open_target(self._spec),
            self._place.locations,
            self._store,
            self._place.checkpoints,
            self._observer,
            once=True,
            until=seq,
            tables=self._place.tables,
        )
        query.start()
        while not query.wait(LOOK_SECONDS):
            if self._stopping.is_set():
                query.stop()
        self._check_stop()
        if query.error is not None:
            raise query.error

    def _opening(self, target: Target) -> Opening:
        place = self._place
        return Opening(
            self._stream.name,
            self._spec.name,
            target,
            tuple(place.locations),
            self._store,
            place.checkpoints,
            place.tables,
        )

    def _open(self, opening: Opening, target: Target, seq: int, *, write: bool) -> None:
        current = self._store.current_epoch(self._stream.name, self._spec.name)
        opening.reopen(current.epoch if current and write else ASKING)
        cursor = target.cursor()
        if target.capabilities.keeps_cursor and (cursor is None or cursor.seq != seq):
            there = "nothing" if cursor is None else f"seq {cursor.seq}"
            raise VerifyFailed(
                f"the target has {there}, and not seq {seq}, to which everything was delivered",
                hint="it was restored, or another process delivers to it; restart the stream",
            )

    # The comparison

    def _plan(
        self, opening: Opening, reader: Reader, found: SnapshotPlan, seq: int, names: Sequence[str]
    ) -> Comparison:
        relations = _chosen(found, names)
        header = self._journal.header()
        ids = opening.relation_ids(chunk.relation for chunk in found.chunks)
        shape = self._stream.shape
        shaping = Shaping(self._stream.name, shape, is_mirror(self._spec)) if shape else None
        rows = BaselinePlan(self._stream.source, found, header.event_prefix, seq, found.position, ids, None, shaping)
        numbers = {relation: number for number, relation in enumerate(relations)}
        chunks = [(numbers[c.relation], at) for at, c in enumerate(found.chunks) if c.relation in numbers]
        by_spark = {
            number: binding
            for number, relation in enumerate(relations)
            if (binding := binding_of(self._spark, shaping, relation, ids[relation])) is not None
        }
        delivered = tuple(
            by_spark[number].bound().relation if number in by_spark else _shaped(shaping, relation)
            for number, relation in enumerate(relations)
        )
        parts = [(number, part) for number, relation in enumerate(delivered) for part in reader.parts(relation)]
        limits = copy_limits(self._stream.source)
        at_once = [self._spark.sparkContext.defaultParallelism, len(chunks), limits.connections or len(chunks)]
        rows = paced(rows, limits.rate, min(at_once))
        by_number = tuple(by_spark.items())
        return Comparison(rows, reader, delivered, tuple(chunks), tuple(parts), by_number, limits.connections)

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Have the source for oneself, where it is limited: nobody else may read tables of it meanwhile."""
        self._say("waiting for its turn to read the source")
        try:
            with source_turn(self._stream.source, self._stopping):
                yield
        except BaselineStopped:
            raise VerifyStopped from None

    def _compare(self, plan: Comparison, found: SnapshotPlan, repairer: Repairer | None) -> tuple[TableVerdict, ...]:
        comparing = Comparing(self._spark, plan)
        counted = self._job("comparing", plan, found, comparing.count)
        wrong = {number for number, one in counted.items() if one.buckets}
        counts: dict[int, tuple[int, int, int]] = {}
        keys: list[Differing] = []
        if wrong:
            most = MOST_REPAIRED if repairer else SHOWN_KEYS * len(wrong)
            counts, keys = self._job("narrowing", plan, found, lambda: comparing.narrow(counted, most + 1))
        repaired: set[int] = set()
        if wrong and repairer is not None:
            _refuse_repair(counts, keys)
            repaired = self._repair(comparing, plan, found, repairer, [one for one in keys if one.key is not None])
        return tuple(
            _verdict(relation, counted[number], counts.get(number, (0, 0, 0)), _shown(keys, number), number in repaired)
            for number, relation in enumerate(plan.relations)
        )

    def _repair(
        self,
        comparing: Comparing,
        plan: Comparison,
        found: SnapshotPlan,
        repairer: Repairer,
        keys: Sequence[Differing],
    ) -> set[int]:
        """Write the rows under these keys once more. Returns the tables that are equal then."""
        if not keys:
            return set()
        self._job("repairing", plan, found, lambda: comparing.repair(repairer, keys))
        wrong = sorted({one.table for one in keys})
        again = Comparing(self._spark, plan.only(wrong).reread())
        after = self._job("comparing again", plan, found, again.count)
        return {number for number in wrong if not after[number].buckets}

    def _job(self, what: str, plan: Comparison, found: SnapshotPlan, job: Callable[[], T]) -> T:
        self._check_stop()
        progress = Progress(what, len(plan.chunks) + len(plan.parts), found.estimated_rows)

        def say(done: int, seconds: float) -> None:
            self._say(progress.text(done, seconds))

        self._say(what)
        try:
            with watched(self._spark, "verify", self._stopping, say):
                return job()
        except (PySparkException, Py4JError):
            self._check_stop()
            raise VerifyFailed(
                f"Spark ended while it was {what}", hint="see spark.log in the home's spark directory"
            ) from None

    def _check_stop(self) -> None:
        if self._stopping.is_set():
            raise VerifyStopped

    def _tell(self, verdict: TargetVerdict) -> None:
        wrong = [table for table in verdict.tables if table.differences]
        repaired = sum(table.differences for table in wrong if table.repaired)
        left = sum(table.differences for table in wrong if not table.repaired)
        said = f"equal at {verdict.position}: {counted(verdict.rows, 'row')} of {counted(len(verdict.tables), 'table')}"
        if wrong:
            rows, tables = counted(left + repaired, "row"), counted(len(wrong), "table")
            said = f"different at {verdict.position}: {rows} of {tables}, of which {repaired:,} repaired"
        kind = "verify.equal" if not wrong else "verify.repaired" if not left else "verify.different"
        level = Level.INFO if not wrong else Level.WARNING if not left else Level.ERROR
        fields = {name: value for name, value in verdict.to_json().items() if name != "tables"}
        fields["tables"] = {table.table: table.differences for table in wrong}
        self._observer.on_event(Event(kind, said, level, self._stream.name, self._spec.name, fields))


def can_repair(spec: TargetSpec) -> bool:
    """Whether differing rows can be written once more; connects to nothing."""
    target = open_target(spec)
    return isinstance(target, Repairable) and target.repairs


def check_asked(spec: TargetSpec, asked: Asked) -> ComparableTarget:
    """The target, if it can do what is asked. Raises NotSupported; connects to nothing."""
    target = open_target(spec)
    if not isinstance(target, Verifiable):
        raise NotSupported(f"a target of kind {target.kind} cannot be compared with its source")
    target.reader()
    if asked.repair and not can_repair(spec):
        form = spec.options.get("write", "changelog")
        raise NotSupported(
            f"target {spec.name} keeps what has happened (write: {form}), which cannot be repaired row by row",
            hint="verify it without --repair; deliver it once more with a replay, or begin a new target",
        )
    return cast(ComparableTarget, target)


def _chosen(found: SnapshotPlan, names: Sequence[str]) -> list[Relation]:
    relations = list(dict.fromkeys(chunk.relation for chunk in found.chunks))
    if not names:
        return relations
    known = {relation.table: relation for relation in relations}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise UnknownName(f"the stream has no table {unknown[0]}", hint=f"it has {', '.join(sorted(known))}")
    return [known[name] for name in names]


def _shaped(shaping: Shaping | None, relation: Relation) -> Relation:
    """The table as the target gets it."""
    bound = compiled(shaping, relation) if shaping is not None else None
    return relation if bound is None else bound.relation


def _refuse_repair(counts: dict[int, tuple[int, int, int]], keys: Sequence[Differing]) -> None:
    if len(keys) > MOST_REPAIRED:
        total = sum(map(sum, counts.values()))
        raise NotSupported(
            f"{total:,} rows differ, and a repair writes at most {MOST_REPAIRED:,}",
            hint="begin a new target, which gets all rows; or verify tables one by one with --table",
        )


def _shown(keys: Sequence[Differing], table: int) -> tuple[str, ...]:
    return tuple(one.key for one in keys if one.table == table and one.key is not None)[:SHOWN_KEYS]


def _verdict(
    relation: Relation, counted: Counted, counts: tuple[int, int, int], keys: tuple[str, ...], repaired: bool
) -> TableVerdict:
    keyed = bool(mirror_key(relation))
    return TableVerdict(relation.table, counted.source, counted.target, *counts, keys, repaired, keyed)
