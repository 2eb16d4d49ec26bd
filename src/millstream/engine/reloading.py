"""Tables that are copied anew, or for the first time, beside the delivery of their target, on a thread of its own.

A snapshot of the source at a position; when the target has got all changes up to there, the rows of one table after
another, as versions of the last of these changes. Each step takes its turn with the batches, which go on in between:
no other table waits for more than a step, and nor does this one. What is newer in the target stays, what a newer batch
has removed stays away, and what is older goes in the end (`targets.base.Reloadable`).

Tables that are done are written down one by one, and of a table that is cut by its key, its ranges. Killed or refused
on the way, the one at hand goes on with the ranges that are left, under another snapshot and as versions of its
position; or begins again, if it is not cut, or is not the table that it was: that is exact, however far it was.

A mirror that begins with more than the source gives at once begins empty, and gets all tables in this way.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from datetime import UTC, datetime

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from millstream.engine.backoff import Backoff
from millstream.engine.batch import BatchResult
from millstream.engine.chunk_jobs import BaselineStopped, run_chunks, source_turn
from millstream.engine.copying import Begun, Copying, SnapshotOld, Speed
from millstream.engine.delivery_errors import is_transient, unexpected
from millstream.engine.filling import Filling
from millstream.engine.gate import withheld
from millstream.engine.letters import LetterBox
from millstream.engine.opening import Opened, Opening
from millstream.engine.reload import DONE, FAILED, RUNNING, UNFINISHED, can_reload, table_waiting
from millstream.engine.reload_notes import ReloadNotes
from millstream.engine.turns import Turns
from millstream.engine.watching import watched
from millstream.errors import ConfigError, MillstreamError, OutOfRange, SourceHalted, SourceUnavailable
from millstream.failpoint import failpoint
from millstream.keyrange import KeyRange
from millstream.model import Json, Relation, SeqRange, StreamSpec, TargetSpec
from millstream.observe import Level, counted
from millstream.sources import key_range, take_snapshot
from millstream.sources.base import SnapshotPlan, Wanted
from millstream.spark.baseline import BaselinePlan
from millstream.state.base import Letter, StateStore
from millstream.targets.base import Lane, Reloadable, ReloadStep, Target
from millstream.targets.lanes.tables import mirror_key

LOOK_SECONDS = 0.05

Tell = Callable[[str, str, Level, Json], None]


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
        self._notes = ReloadNotes(store, stream.name, spec.name)
        self._opening = opening
        self._turns = turns
        self._tell = tell
        # Its own: the batches' box is at work at the same time.
        self._letters = LetterBox(store, stream, spec, target, tell)
        self.filling = Filling(stream, spec, target, store)
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None
        self._opens: Callable[[Opened], None] = lambda _: None
        self._looked = 0
        """Up to which change the columns of the table at hand are known to be those of its copy."""

    def due(self) -> Json | None:
        """What is to be done, or to be gone on with."""
        return self._notes.due() if can_reload(self._target) else None

    def begins(self) -> bool:
        """Whether something is due. The target is open: if it says itself that it lacks first rows, that is due."""
        if self.due() is None:
            self.filling.ask_if_lacking()
        return self.due() is not None

    def take_in_loss(self) -> str | None:
        """Let a target go on that lacks changes which the journal does not have any more: all its tables come anew.

        Before it is opened. Returns why that is another epoch; None where nothing is lost.
        """
        record = self.due()
        if record is None or not record.get("lost") or not self._opening.is_overtaken():
            return None
        # What was copied before the loss is out of date again.
        self._notes.save({**record, "tables": {}, "resolved": False})
        self._letters.forget()
        self._store.set_needs_reload(self._stream.name, self._spec.name, None)
        gone = self._opening.skip()
        message = f"the changes from seq {gone.start + 1} to {gone.end} are left out: every table is copied anew"
        self._tell("reload.skipped", message, Level.WARNING, {"from": gone.start + 1, "until": gone.end})
        return "changes were lost, and its tables come anew"

    def remembering(self, opened: Opened, but: str | None = None) -> Opened:
        """The opened target for batches that go on beside copies; `but` this table will have its copy now."""
        assert isinstance(self._target, Reloadable)  # noqa: S101 - `due` has looked
        record = self._notes.record()
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
        while self._notes.is_left():
            try:
                self._copy_under_one(spark, opened)
                return
            except SnapshotOld:
                self._tell("reload.snapshot_ended", "what is left is read under another snapshot", Level.INFO, {})

    def _copy_under_one(self, spark: SparkSession, opened: Opened) -> None:
        """The same under one snapshot. Raises SnapshotOld when that must not be held any longer."""
        assert isinstance(self._target, Reloadable)  # noqa: S101 - `due` has looked
        with self._turn():
            self._target.settle_reload()
        within = self._ranges(self._notes.record())
        with closing(take_snapshot(self._stream.source, self._waits, wanted=self._wanted(within))) as snapshot:
            found = snapshot.plan
            seq = self._await_journal(found.position)
            for number, copying in enumerate(self._chosen(found, seq, within)):
                if number and _is_old(found):
                    raise SnapshotOld
                self._await_target(opened, seq)
                self._copy(spark, opened, copying)

    def _wanted(self, within: Mapping[str, KeyRange]) -> Wanted:
        """The tables that a snapshot is taken for, cut as they were before."""
        record, kept = self._notes.record(), self._notes.cut().get("plans", {})
        lists = (frozenset(record["names"]), tuple(record["patterns"]), tuple(record["excluded"]))
        return Wanted(*lists, all=record["all"], within=within, ranges=kept if self.filling.by_steps else None)

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
                self._notes.fail_table(name, where, wrong.message)
                self._tell_failed(name, wrong)
        return found

    def _chosen(self, found: SnapshotPlan, seq: int, ranges: Mapping[str, KeyRange]) -> list[Copying]:
        """The tables to copy, the smallest first; what they are is written down."""
        record = self._notes.record()
        tables: dict[Relation, list[int]] = {}
        for number, chunk in enumerate(found.chunks):
            tables.setdefault(chunk.relation, []).append(number)
        known: Json = {one.table: table_waiting(record.get("where", {}).get(one.table)) for one in tables}
        # Of those that were to come, what the source has no more.
        kept = {name: one for name, one in record["tables"].items() if name in known or one["state"] not in UNFINISHED}
        for name in record["names"]:
            if name not in known and name not in kept:
                gone = SourceHalted(
                    "the source has no such table", hint="it was dropped or renamed after it was asked for"
                )
                known[name] = {**table_waiting(), "state": FAILED, "error": gone.message}
                self._tell_failed(name, gone)
        self._notes.save({**record, "state": RUNNING, "resolved": True, "tables": {**known, **kept}})
        failpoint("reload.begun")
        left = [one for one in tables if self._notes.record()["tables"][one.table]["state"] in UNFINISHED]
        begun = self._notes.cut().get("table")
        left.sort(key=lambda one: (one.table != begun, sum(found.chunks[number].bytes for number in tables[one])))
        return [Copying(found, seq, one, tables[one][0], tables[one][-1] + 1, ranges.get(one.table)) for one in left]

    def _copy(self, spark: SparkSession, opened: Opened, copying: Copying) -> None:
        """All of one table. What can never be is the table's end, and not that of the others."""
        name = copying.relation.table
        begun = self._begin(copying)
        try:
            self._check_gate(copying)
            rows = self._steps(spark, opened, copying, begun)
        except MillstreamError as failed:
            if failed.transient:
                raise
            self._notes.save_table(name, state=FAILED, error=failed.message)
            self._tell_failed(name, failed)
            return
        self._forget(self._made_obsolete(copying, begun))
        self._notes.save_table(name, state=DONE, rows=rows, seconds_left=None)
        failpoint("reload.table_saved")
        fields = {"table": name, "rows": rows, "seq": copying.seq}
        self._tell("reload.table_finished", f"{name} is copied anew: {counted(rows, 'row')}", Level.INFO, fields)

    def _begin(self, copying: Copying) -> Begun:
        """Where the table's copy begins, or goes on; written down before anything is copied."""
        name = copying.relation.table
        table = self._notes.record()["tables"][name]
        known = Begun.known(copying, self._notes.cut(), table)
        if known is not None and self._columns_changed(copying, SeqRange(table["points"][-1]["seq"], copying.seq)):
            # They are the same again, but the mirror may have been made anew in between, without what it had.
            known = None
        begun = known or Begun.anew(copying)
        point: Json = {"from": begun.done, "seq": copying.seq, "position": copying.found.position}
        self._notes.save_table(
            name,
            state=RUNNING,
            seq=copying.seq,
            chunks=copying.end - copying.first,
            done=begun.done,
            rows=begun.rows,
            points=[*(table["points"] if known else ()), point],
            tries=table["tries"] + 1,
            error=None,
        )
        if known is None:
            # After the table is said to have nothing: else what is done of an older plan would count for this one.
            failpoint("reload.table_begun")
            self._notes.save_cut(begun.note(copying))
        failpoint("reload.ranges_saved")
        return begun

    def _steps(self, spark: SparkSession, opened: Opened, copying: Copying, begun: Begun) -> int:
        """The steps that are left. Returns the rows of all of them, also of those that were done before."""
        assert isinstance(self._target, Reloadable)  # noqa: S101 - the same
        name, total = copying.relation.table, begun.rows
        steps = copying.steps(begun.done, by_chunk=self.filling.by_steps and bool(mirror_key(copying.relation)))
        speed, self._looked = Speed(begun, copying.end - copying.first), copying.seq
        for number, chosen in enumerate(steps):
            if number and copying.ranges is not None and _is_old(copying.found):
                raise SnapshotOld
            last = number == len(steps) - 1
            if last:
                # What it cannot follow from here on would take rows that do not come again.
                with self._turn():
                    self._opens(self.remembering(opened, but=name))
            first, found = number == 0 and not begun.done, copying.found
            about = (found.position, found.taken_at, first, last, begun.since, copying.within)
            step = ReloadStep(begun.mark, copying.seq, *about)
            result = self._step(spark, opened, copying, chosen, step)
            total += result.rows
            self._store.add_totals(self._stream.name, self._spec.name, result.tallies)
            came = result.superseded
            self._forget([one for one in self._letters_there() if one.event_id in came])
            done = chosen.stop - copying.first
            self._notes.save_table(name, done=done, rows=total, **speed.at(done, total))
            failpoint("reload.step_saved")
        return total

    def _step(
        self, spark: SparkSession, opened: Opened, copying: Copying, chosen: range, step: ReloadStep
    ) -> BatchResult:
        assert isinstance(self._target, Reloadable)  # noqa: S101 - the same
        found = replace(copying.found, chunks=copying.found.chunks[chosen.start : chosen.stop], ranges={})
        if copying.ranges is not None:
            # Who begins a range in time may end it: the next one has another snapshot.
            found = replace(found, held_until=None)
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
            with source_turn(self._stream.source, self._ending), self._turn():
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

    def _check_gate(self, copying: Copying) -> None:
        """Raise SchemaGated if the stream would not deliver changes of the table as the copy has it."""
        gated = withheld(self._stream, self._opening.journal, self._store, copying.relation, copying.seq)
        if gated is not None:
            raise gated

    def _check_columns(self, opened: Opened, copying: Copying) -> None:
        """Raise SourceUnavailable if the target has the table with other columns by now: it is copied again then."""
        seq = self._opening.delivered_seq(opened)
        if self._columns_changed(copying, SeqRange(self._looked, seq)):
            raise SourceUnavailable(f"{copying.relation.table} may have got other columns while it was copied")
        self._looked = seq

    def _columns_changed(self, copying: Copying, span: SeqRange) -> bool:
        try:
            return self._opening.columns_changed(copying.relation, span)
        except OutOfRange:
            return True  # the journal does not tell any more

    def _letters_there(self) -> list[Letter]:
        return self._store.letters(self._stream.name, self._spec.name)

    def _made_obsolete(self, copying: Copying, begun: Begun) -> list[Letter]:
        """The letters of what is copied, from before it was: each row of it is newer."""
        name, within = copying.relation.table, copying.within
        old = [one for one in self._letters_there() if one.table == name and one.seq < begun.since]
        if within is not None:
            key = mirror_key(copying.relation)
            keys = {one.id: json.loads(f"[{one.key}]") for one in old if one.key is not None}
            old = [one for one in old if one.id in keys and within.holds(dict(zip(key, keys[one.id], strict=True)))]
        return old

    def _forget(self, letters: Sequence[Letter]) -> None:
        """The target has newer rows in their place: what it could not take before is of no interest any more."""
        if letters:
            self._store.remove_letters([one.id for one in letters])

    def _tell_failed(self, name: str, failed: MillstreamError) -> None:
        why: Json = {"table": name, "error": type(failed).__name__, "hint": failed.hint}
        self._tell("reload.table_failed", f"{name} is not copied: {failed.message}", Level.ERROR, why)

    def _give_up(self, failed: MillstreamError) -> None:
        """Nothing that is left can be copied."""
        self._notes.fail_rest(failed.message)
        fields = {"error": type(failed).__name__, "hint": failed.hint}
        self._tell("reload.failed", f"tables are not copied: {failed.message}", Level.ERROR, fields)

    def _finish(self) -> None:
        assert isinstance(self._target, Reloadable)  # noqa: S101 - the same
        record = self._notes.record()
        tables = record["tables"].values()
        state = FAILED if any(one["state"] == FAILED for one in tables) else DONE
        self.filling.end(record)
        self._notes.save({**record, "state": state, "finished_at": datetime.now(UTC).isoformat()})
        failpoint("reload.finished")
        self._notes.save_cut({})
        self._target.settle_reload()
        rows = sum(one["rows"] for one in tables)
        said, level = f"{counted(len(tables), 'table')}, {counted(rows, 'row')}: {state}", Level.INFO
        broken = {name: one["error"] for name, one in record["tables"].items() if one["state"] == FAILED}
        if broken:
            said, level = f"{said}; " + "; ".join(f"{name}: {why}" for name, why in broken.items()), Level.ERROR
        self._tell("reload.finished", said, level, {"state": state, "failed": sorted(broken)})


def _is_old(found: SnapshotPlan) -> bool:
    return found.held_until is not None and datetime.now(UTC) >= found.held_until
