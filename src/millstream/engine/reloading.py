"""Tables that are copied anew, or for the first time, beside the delivery of their target, on a thread of its own.

A snapshot of the source at a position; when the target has got all changes up to there, the rows of one table after
another, as versions of the last of these changes. Each step takes its turn with the batches, which go on in between:
no other table waits for more than a step, and nor does this one. What is newer in the target stays, what a newer batch
has removed stays away, and what is older goes in the end (`targets.base.Reloadable`).

Tables that are done are written down one by one. Killed or refused on the way, the one at hand begins again with
another snapshot: that is exact, however far it was.
"""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from millstream.engine.backoff import Backoff
from millstream.engine.baseline import BaselineStopped, run_chunks
from millstream.engine.batch import BatchResult
from millstream.engine.delivery_errors import is_transient, unexpected
from millstream.engine.letters import LetterBox
from millstream.engine.opening import Opened, Opening
from millstream.engine.reload import DONE, FAILED, RELOAD, RUNNING, UNFINISHED, can_reload, table_waiting
from millstream.engine.turns import Turns
from millstream.engine.watching import watched
from millstream.errors import ConfigError, MillstreamError, OutOfRange, SourceHalted, SourceUnavailable
from millstream.failpoint import failpoint
from millstream.keyrange import KeyRange
from millstream.model import Json, Relation, SeqRange, StreamSpec, TargetSpec
from millstream.observe import Level
from millstream.sources import key_range, take_snapshot
from millstream.sources.base import SnapshotPlan, Wanted
from millstream.spark.baseline import BaselinePlan
from millstream.state.base import StateStore
from millstream.targets.base import Lane, Reloadable, ReloadStep, Target
from millstream.targets.lanes.tables import mirror_key

LOOK_SECONDS = 0.05

Tell = Callable[[str, str, Level, Json], None]


@dataclass(frozen=True)
class Copying:
    """One table under one snapshot."""

    found: SnapshotPlan
    seq: int
    relation: Relation
    first: int
    """Its chunks are those with numbers from here on"""
    end: int
    """up to this one, which is not its."""
    within: KeyRange | None = None
    """Only this range of its key is read; None: all of it."""

    def steps(self, *, by_chunk: bool) -> list[range]:
        """The chunks of each step."""
        whole = range(self.first, self.end)
        return [range(number, number + 1) for number in whole] if by_chunk else [whole]


class Reloading:
    """The copies that were asked for of one target. `start` and `stop` are the delivery's thread's."""

    def __init__(
        self,
        stream: StreamSpec,
        spec: TargetSpec,
        target: Target,
        store: StateStore,
        opening: Opening,
        turns: Turns,
        tell: Tell,
    ) -> None:
        self._stream = stream
        self._spec = spec
        self._target = target
        self._store = store
        self._opening = opening
        self._turns = turns
        self._tell = tell
        # Its own: the batches' box is at work at the same time.
        self._letters = LetterBox(store, stream, spec, target, tell)
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None
        self._opens: Callable[[Opened], None] = lambda _: None
        self._looked = 0
        """Up to which change the columns of the table at hand are known to be those of its copy."""

    def due(self) -> Json | None:
        """What is to be done, or to be gone on with."""
        record = self._store.notes(self._stream.name, RELOAD).get(self._spec.name)
        due = record is not None and record["state"] in UNFINISHED
        return record if due and can_reload(self._target) else None

    def take_in_loss(self) -> str | None:
        """Let a target go on that lacks changes which the journal does not have any more: all its tables come anew.

        Before it is opened. Returns why that is another epoch; None where nothing is lost.
        """
        record = self.due()
        if record is None or not record.get("lost") or not self._opening.is_overtaken():
            return None
        # What was copied before the loss is out of date again.
        self._save({**record, "tables": {}, "resolved": False})
        self._letters.forget()
        self._store.set_needs_reload(self._stream.name, self._spec.name, None)
        gone = self._opening.skip()
        message = f"the changes from seq {gone.start + 1} to {gone.end} are left out: every table is copied anew"
        self._tell("reload.skipped", message, Level.WARNING, {"from": gone.start + 1, "until": gone.end})
        return "changes were lost, and its tables come anew"

    def remembering(self, opened: Opened, but: str | None = None) -> Opened:
        """The opened target for batches that go on beside copies; `but` this table will have its copy now."""
        assert isinstance(self._target, Reloadable)  # noqa: S101 - `due` has looked
        record = self._record()
        left = {name for name, one in record["tables"].items() if one["state"] in UNFINISHED} - {but}
        everything = record["all"] and not record["resolved"]
        # A table of which only a range comes has nothing to be made anew from.
        whole = {*left, *(() if record["resolved"] else record["names"])} - {*record.get("where", {})}
        renewed = None if everything else frozenset(whole)
        return replace(opened, plan=replace(opened.plan, stager=self._target.remembering(renewed)))

    def start(
        self,
        spark: SparkSession,
        opened: Opened,
        opens: Callable[[Opened], None],
        ended: Callable[[], None],
    ) -> None:
        """Copy what is due while batches are delivered to the opened target.

        `opens` is told, in a turn, how batches go on: when a table has its copy, or all have; `ended` is called then.
        """
        self._ending = threading.Event()
        name, given = f"reload-{self._stream.name}-{self._spec.name}", (spark, opened, opens, ended)
        self._thread = threading.Thread(target=self._run, args=given, name=name, daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Let it end soon. From any thread."""
        self._ending.set()

    def stop(self) -> None:
        """End it, and wait for that: no step runs any more. What is not done is gone on with at the next start."""
        self.end()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    # The thread

    def _run(
        self, spark: SparkSession, opened: Opened, opens: Callable[[Opened], None], ended: Callable[[], None]
    ) -> None:
        backoff, self._opens = Backoff(), opens
        while not self._ending.is_set():
            try:
                self._copy_due(spark, opened)
                with self._turn():
                    self._finish()
                    opens(opened)
                ended()
                return
            except BaselineStopped:
                return
            except (MillstreamError, PySparkException, Py4JError) as failed:
                if not is_transient(failed):
                    self._give_up(failed if isinstance(failed, MillstreamError) else unexpected(failed))
                    continue
                delay = backoff.next()
                why = failed.message if isinstance(failed, MillstreamError) else unexpected(failed).message
                fields: Json = {
                    "error": type(failed).__name__,
                    "delay_ms": round(delay * 1000),
                    "failures": backoff.attempts,
                }
                self._tell("reload.retry", f"{why}; copying again in {delay:.1f} s", Level.WARNING, fields)
                self._ending.wait(delay)
            except Exception as defect:  # noqa: BLE001 - whatever it is, the copy must not look healthy
                self._give_up(unexpected(defect))

    def _copy_due(self, spark: SparkSession, opened: Opened) -> None:
        """Copy every table that is left. Raises what keeps it from that; tables that cannot be are marked so."""
        assert isinstance(self._target, Reloadable)  # noqa: S101 - `due` has looked
        if not self._left():
            return
        with self._turn():
            self._target.settle_reload()
        record = self._record()
        source, ranges = self._stream.source, self._ranges(record)
        lists = (frozenset(record["names"]), tuple(record["patterns"]), tuple(record["excluded"]))
        wanted = Wanted(*lists, all=record["all"], within=ranges)
        with closing(take_snapshot(source, self._waits, wanted=wanted)) as snapshot:
            found = snapshot.plan
            seq = self._await_journal(found.position)
            for copying in self._chosen(found, seq, ranges):
                self._await_target(opened, seq)
                self._copy(spark, opened, copying)

    def _ranges(self, record: Json) -> dict[str, KeyRange]:
        """By name the tables of which only a range of the key is copied. One that has no such key fails by itself."""
        found: dict[str, KeyRange] = {}
        ended = {name for name, one in record["tables"].items() if one["state"] not in UNFINISHED}
        for name, where in record.get("where", {}).items():
            if name in ended:
                continue
            try:
                found[name] = key_range(self._stream.source, name, where)
            except (ConfigError, SourceHalted) as wrong:
                failed = {**table_waiting(where), "state": FAILED, "error": wrong.message}
                self._save({**self._record(), "tables": {**self._record()["tables"], name: failed}})
        return found

    def _left(self) -> bool:
        """Whether something is still to be found or copied."""
        record = self._record()
        return not record["resolved"] or any(one["state"] in UNFINISHED for one in record["tables"].values())

    def _chosen(self, found: SnapshotPlan, seq: int, ranges: Mapping[str, KeyRange]) -> list[Copying]:
        """The tables to copy, the smallest first; what they are is written down."""
        record = self._record()
        tables: dict[Relation, list[int]] = {}
        for number, chunk in enumerate(found.chunks):
            tables.setdefault(chunk.relation, []).append(number)
        known: Json = {one.table: table_waiting(record.get("where", {}).get(one.table)) for one in tables}
        for name in record["names"]:
            if name not in known:
                known[name] = {**table_waiting(), "state": FAILED, "error": "the source has no such table"}
        self._save({**record, "state": RUNNING, "resolved": True, "tables": {**known, **record["tables"]}})
        failpoint("reload.begun")
        left = [one for one in tables if self._record()["tables"][one.table]["state"] in UNFINISHED]
        left.sort(key=lambda one: sum(found.chunks[number].bytes for number in tables[one]))
        return [Copying(found, seq, one, tables[one][0], tables[one][-1] + 1, ranges.get(one.table)) for one in left]

    def _copy(self, spark: SparkSession, opened: Opened, copying: Copying) -> None:
        """All of one table. What can never be is the table's end, and not that of the others."""
        name = copying.relation.table
        tries = self._record()["tables"][name]["tries"] + 1
        try:
            rows = self._steps(spark, opened, copying, tries)
        except MillstreamError as failed:
            if failed.transient:
                raise
            self._save_table(name, state=FAILED, error=failed.message)
            why: Json = {"table": name, "error": type(failed).__name__, "hint": failed.hint}
            self._tell("reload.table_failed", f"{name} is not copied: {failed.message}", Level.ERROR, why)
            return
        self._forget_letters(copying)
        self._save_table(name, state=DONE, rows=rows)
        failpoint("reload.table_saved")
        fields = {"table": name, "rows": rows, "seq": copying.seq}
        self._tell("reload.table_finished", f"{name} is copied anew: {rows:,} rows", Level.INFO, fields)

    def _steps(self, spark: SparkSession, opened: Opened, copying: Copying, tries: int) -> int:
        assert isinstance(self._target, Reloadable)  # noqa: S101 - the same
        mark, name, total = secrets.randbits(48), copying.relation.table, 0
        steps = copying.steps(by_chunk=self._target.reloads_by_steps and self._has_key(copying.relation))
        chunks, self._looked = copying.end - copying.first, copying.seq
        self._save_table(name, state=RUNNING, seq=copying.seq, chunks=chunks, done=0, rows=0, tries=tries, error=None)
        for number, chosen in enumerate(steps):
            last = number == len(steps) - 1
            if last:
                # What it cannot follow from here on would take rows that do not come again.
                with self._turn():
                    self._opens(self.remembering(opened, but=name))
            found = copying.found
            about = (found.position, found.taken_at, number == 0, last, copying.within)
            step = ReloadStep(mark, copying.seq, *about)
            result = self._step(spark, opened, copying, chosen, step)
            total += result.rows
            self._store.add_totals(self._stream.name, self._spec.name, result.tallies)
            self._save_table(name, done=chosen.stop - copying.first, rows=total)
            failpoint("reload.step_saved")
        return total

    def _step(
        self, spark: SparkSession, opened: Opened, copying: Copying, chosen: range, step: ReloadStep
    ) -> BatchResult:
        assert isinstance(self._target, Reloadable)  # noqa: S101 - the same
        found = replace(copying.found, chunks=copying.found.chunks[chosen.start : chosen.stop])
        plan = BaselinePlan(
            self._stream.source,
            found,
            opened.header.event_prefix,
            copying.seq,
            found.position,
            self._opening.relation_ids(chunk.relation for chunk in copying.found.chunks),
            self._target.reloader(step),
            self._opening.shaping,
            first_chunk=chosen.start,
            truncates=not self._target.mirrors,
        )
        if isinstance(plan.stager, Lane):
            with self._turn():
                self._check_columns(opened, copying)
                return self._read(spark, plan)
        result = self._read(spark, plan)
        with self._turn():
            self._check_columns(opened, copying)
            self._target.publish_reload(step, result.receipts)
        return result

    def _read(self, spark: SparkSession, plan: BaselinePlan) -> BatchResult:
        parallel = self._target.capabilities.parallel
        with watched(spark, "reload", self._ending, lambda done, seconds: None):
            return self._letters.deliver(plan, lambda one: run_chunks(spark, one, self._ending, parallel=parallel))

    def _has_key(self, relation: Relation) -> bool:
        return bool(mirror_key(relation))

    # What it waits for

    @contextmanager
    def _turn(self) -> Iterator[None]:
        with self._turns.taken(self._ending) as mine:
            if not mine:
                raise BaselineStopped
            yield

    def _waits(self, message: str) -> None:
        self._check_end()
        self._tell("reload.waiting", message, Level.INFO, {})

    def _check_end(self) -> None:
        if self._ending.is_set():
            raise BaselineStopped

    def _await_journal(self, position: int) -> int:
        """The last change that the snapshot has."""
        while (seq := self._opening.seq_at(position)) is None:
            self._check_end()
            self._ending.wait(LOOK_SECONDS)
        return seq

    def _await_target(self, opened: Opened, seq: int) -> None:
        """Until the target has that change: the rows are its versions then."""
        while self._opening.delivered_seq(opened) < seq:
            self._check_end()
            self._ending.wait(LOOK_SECONDS)

    def _check_columns(self, opened: Opened, copying: Copying) -> None:
        """Raise SourceUnavailable if the target has the table with other columns by now: it is copied again then."""
        seq = self._opening.delivered_seq(opened)
        try:
            changed = self._opening.columns_changed(copying.relation, SeqRange(self._looked, seq))
        except OutOfRange:
            changed = True  # the journal does not tell any more
        if changed:
            raise SourceUnavailable(f"{copying.relation.table} may have got other columns while it was copied")
        self._looked = seq

    # What is written down

    def _record(self) -> Json:
        return self._store.notes(self._stream.name, RELOAD)[self._spec.name]

    def _save(self, record: Json) -> None:
        self._store.save_note(self._stream.name, self._spec.name, RELOAD, record)

    def _save_table(self, name: str, **changed: object) -> None:
        record = self._record()
        self._save({**record, "tables": {**record["tables"], name: {**record["tables"][name], **changed}}})

    def _forget_letters(self, copying: Copying) -> None:
        """The table has everything up to there: changes that it could not take before are of no interest any more."""
        name, within = copying.relation.table, copying.within
        mine = self._store.letters(self._stream.name, self._spec.name)
        old = [one for one in mine if one.table == name and one.seq < copying.seq]
        if within is not None:
            key = mirror_key(copying.relation)
            keys = {one.id: json.loads(f"[{one.key}]") for one in old if one.key is not None}
            old = [one for one in old if one.id in keys and within.holds(dict(zip(key, keys[one.id], strict=True)))]
        self._store.remove_letters([one.id for one in old])

    def _give_up(self, failed: MillstreamError) -> None:
        """Nothing that is left can be copied."""
        record = self._record()
        left = {name: one for name, one in record["tables"].items() if one["state"] in UNFINISHED}
        names = left or {name: table_waiting() for name in record["names"] or ["*"]}
        broken = {name: {**one, "state": FAILED, "error": failed.message} for name, one in names.items()}
        self._save({**record, "resolved": True, "tables": {**record["tables"], **broken}})
        fields = {"error": type(failed).__name__, "hint": failed.hint}
        self._tell("reload.failed", f"tables are not copied: {failed.message}", Level.ERROR, fields)

    def _finish(self) -> None:
        assert isinstance(self._target, Reloadable)  # noqa: S101 - the same
        record = self._record()
        tables = record["tables"].values()
        state = FAILED if any(one["state"] == FAILED for one in tables) else DONE
        self._save({**record, "state": state, "finished_at": datetime.now(UTC).isoformat()})
        failpoint("reload.finished")
        self._target.settle_reload()
        rows = sum(one["rows"] for one in tables)
        level = Level.INFO if state == DONE else Level.ERROR
        self._tell(
            "reload.finished", f"{len(record['tables'])} tables, {rows:,} rows: {state}", level, {"state": state}
        )
