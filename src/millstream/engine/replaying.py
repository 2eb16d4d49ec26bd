"""A replay that was written down, run by the delivery of its target before it goes on.

The target's cursor stays where it is. A mirror gets batches newest first and writes what it lacks; a changelog gets
them oldest first, once more, with the replay's epoch beside them. How far it is, is written down after each batch;
killed in between, that batch comes again, and changes nothing more.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime

from pyspark.sql import SparkSession

from millstream.config.kinds import keeps_history
from millstream.engine.batch import run_batch
from millstream.engine.doubts import remember_doubts
from millstream.engine.opening import Opened, Opening
from millstream.engine.repair import Repair, repair
from millstream.engine.replay import DONE, FAILED, RUNNING, UNFINISHED
from millstream.engine.witness import Witness
from millstream.errors import JournalError, MillstreamError, MissingBase, RowRefused, TargetUnavailable
from millstream.failpoint import failpoint
from millstream.model import Json, SeqRange, StreamSpec, TargetSpec
from millstream.observe import Level, counted
from millstream.spark.partition import share_out
from millstream.spark.stage import StagePlan
from millstream.spark.tables import OwnTables, belongs
from millstream.state.base import INCOMPLETE, UNSENT, UNSHAPED, StateStore
from millstream.targets.base import Rebatching, Replayable, Target
from millstream.targets.rejects import Held, Outstanding, Reject, RowsRejected, Unshapable

Tell = Callable[[str, str, Level, Json], None]


class ReplayStopped(Exception):
    """The delivery shall end: the replay goes on when it is started again."""


class Replaying:
    """The replay of one target, if one was asked for. Runs on the delivery's thread."""

    def __init__(self, stream: StreamSpec, spec: TargetSpec, target: Target, store: StateStore, tell: Tell) -> None:
        self._stream = stream
        self._spec = spec
        self._target = target
        self._store = store
        self._tell = tell

    def due(self) -> Json | None:
        """What is to be done, or to be gone on with."""
        record = self._store.replays(self._stream.name).get(self._spec.name)
        return record if record is not None and record["state"] in UNFINISHED else None

    def reason(self) -> str | None:
        """Why a new epoch begins: with a replay, once."""
        record = self.due()
        return f"replay from seq {record['from_seq'] + 1}" if record and record["epoch"] is None else None

    def run(self, spark: SparkSession, opening: Opening, opened: Opened, stopping: threading.Event) -> None:
        """Run what is due. What cannot be done ends the replay, and not the delivery; raises what can pass."""
        record = self.due()
        if record is None or not isinstance(self._target, Replayable):
            return
        if record["epoch"] is None:
            self._target.settle_replay()
            record = self._save(record, state=RUNNING, epoch=opened.epoch)
            failpoint("replay.begun")
        try:
            current = opening.current_relations(SeqRange(record["from_seq"], record["until_seq"]))
            plan = self._plan(opening, opened, record, current)
            for span in self._spans(opening, record):
                if stopping.is_set():
                    raise ReplayStopped
                record = self._deliver(spark, opening, plan, record, span)
        except MillstreamError as failed:
            if failed.transient:
                raise
            if type(failed) is JournalError:
                raise TargetUnavailable("a segment has changed its form, and the batch is planned again") from failed
            self._save(record, state=FAILED, error=failed.message, finished_at=_now())
            self._target.settle_replay()
            fields = {"error": type(failed).__name__, "hint": failed.hint}
            self._tell("replay.failed", f"the replay has ended: {failed.message}", Level.ERROR, fields)
            return
        self._save(record, state=DONE, finished_at=_now())
        failpoint("replay.finished")
        self._target.settle_replay()
        fields = {"from": record["from_seq"], "until": record["until_seq"], "events": record["events"]}
        self._tell("replay.finished", f"{counted(record['events'], 'change')} delivered once more", Level.INFO, fields)

    def _deliver(self, spark: SparkSession, opening: Opening, plan: StagePlan, record: Json, span: SeqRange) -> Json:
        assert isinstance(self._target, Replayable)  # noqa: S101 - looked at by who calls
        runs = share_out(opening.slices(span), 1)
        while True:
            try:
                result = run_batch(spark, plan, span, runs)
                break
            except Unshapable as lacking:
                known = plan.outstanding or Outstanding(self._target.mirrors)
                if set(lacking.reasons) <= set(known.unshapable):
                    raise
                # The next try tells them with their rows.
                plan = replace(plan, outstanding=replace(known, unshapable=lacking.reasons))
            except RowsRejected as found:
                plan = self._completed(plan, found)
        self._target.publish_replay(record["epoch"], span, result.receipts)
        failpoint("replay.delivered")
        done = span.start if self._target.mirrors else span.end
        record = self._save(record, done_seq=done, events=record["events"] + result.rows)
        failpoint("replay.saved")
        return record

    def _plan(self, opening: Opening, opened: Opened, record: Json, current: frozenset[int]) -> StagePlan:
        assert isinstance(self._target, Replayable)  # noqa: S101 - the same
        tables, chosen = opened.plan.tables, tuple(record["tables"])
        only: frozenset[int] | None = None
        if chosen:
            own = self._stream.source.tables
            tables = OwnTables(chosen, tuple(dict.fromkeys([*own, *(tables.captured if tables else ())])))
            about = (opened.plan.locations, opened.header.journal_id)
            only = frozenset(id for id in opening.journal.relations() if belongs(*about, id, tables))
        letters = self._store.letters(self._stream.name, self._spec.name)
        left_out = frozenset(letter.event_id for letter in letters)
        unshaped = frozenset(letter.event_id for letter in letters if letter.kind in UNSHAPED)
        return replace(
            opened.plan,
            stager=self._target.replayer(record["epoch"], only=only, current=current),
            tables=tables,
            outstanding=Outstanding(self._target.mirrors, left_out=left_out, unshaped=unshaped) if left_out else None,
        )

    def _completed(self, plan: StagePlan, found: RowsRejected) -> StagePlan:
        """The plan with changes that lack values completed at the source. Raises MissingBase for what cannot be, and
        RowRefused for a change that lacks nothing: a transform fails on it, and nobody keeps it as a letter.

        A mirror can do without a change of the source that its row has changed since: a later one has written it.
        """
        assert isinstance(self._target, Replayable)  # noqa: S101 - the same
        for one in found.rejects:
            if one.kind not in INCOMPLETE:
                raise _given_up(one)
        known = plan.outstanding or Outstanding(self._target.mirrors)
        tried = {*known.repaired, *known.completed}
        remembers = not self._target.mirrors or keeps_history(self._spec)
        witness = Witness(plan.locations, plan.source_kind) if remembers else None
        outcome = repair(self._stream, [one for one in found.rejects if one.event_id not in tried], witness)
        remember_doubts(self._store, self._stream.name, self._spec.name, outcome)
        passing: list[Reject] = []
        left = [one for one in found.rejects if one.event_id in tried]
        for one in outcome.left:
            passes = self._target.mirrors and one.kind == UNSENT and one.event_id not in outcome.unasked
            (passing if passes else left).append(one)
        if left:
            raise MissingBase(
                left[0].reason,
                hint="replay from further back, or let `millstream verify --repair` bring such rows",
                seqs=[one.seq for one in left],
            )
        return replace(plan, outstanding=_with(known, found, outcome, passing))

    def _spans(self, opening: Opening, record: Json) -> Iterator[SeqRange]:
        """The batches that are left."""
        assert isinstance(self._target, Replayable)  # noqa: S101 - the same
        start, end, done = record["from_seq"], record["until_seq"], record["done_seq"]
        if self._target.mirrors:
            spans = list(self._cut(opening, start, end if done is None else done))
            yield from reversed(spans)
        elif isinstance(self._target, Rebatching):
            left = SeqRange(start if done is None else done, end)
            yield from self._target.batches(self._stream.name, self._spec.name, left) if left.start < end else ()
        else:
            yield from self._cut(opening, start if done is None else done, end)

    def _cut(self, opening: Opening, start: int, end: int) -> Iterator[SeqRange]:
        limits = self._spec.limits
        while start < end:
            stop = opening.batch_end(start, min(limits.max_events, end - start), limits.max_bytes)
            if stop is None:
                return
            yield SeqRange(start, stop)
            start = stop

    def _save(self, record: Json, **changed: object) -> Json:
        """Write down how far it is. Another replay can only be asked for while this delivery stands still."""
        record = {**record, **changed}
        self._store.save_replay(self._stream.name, self._spec.name, record)
        return record


def _given_up(one: Reject) -> RowRefused:
    """A change that could not be taken when it came first, and was a letter then."""
    return RowRefused(
        f"{one.reason} (change {one.event_id} of {one.table}, seq {one.seq}, which is no dead letter any more)",
        hint=f"replay from behind it, --from-seq {one.seq + 1}, or let the stream take such rows",
        kind=one.kind,
    )


def _with(known: Outstanding, found: RowsRejected, outcome: Repair, passing: Sequence[Reject]) -> Outstanding:
    """What tasks must know after this round: what was completed, and what is left out."""
    unsent = {one.event_id for one in found.rejects if one.kind == UNSENT}
    events = frozenset(one.event_id for one in passing)
    return replace(
        known,
        held=(*known.held, *outcome.doubts, *(Held(one.event_id, one.seq, one.table, one.key) for one in passing)),
        left_out=known.left_out | events,
        unshaped=known.unshaped | events,
        unshapable={},
        repaired={**known.repaired, **{event: row for event, row in outcome.repaired.items() if event not in unsent}},
        completed={**known.completed, **{event: row for event, row in outcome.repaired.items() if event in unsent}},
    )


def _now() -> str:
    return datetime.now(UTC).isoformat()
