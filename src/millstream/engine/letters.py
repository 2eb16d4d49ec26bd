"""Batches with rows that their target cannot take: those become dead letters, the rest is delivered.

A batch is first tried as it is. Only when the target refuses a row of it, it is tried again so that the target
finds out which, and writes nothing. What can be completed from the source is; the others are written down as
letters, durably, and only then the batch is delivered without them and the cursor moves. A crash in between
finds them by their event ids. What is remembered of open letters goes with every batch: see `targets.rejects`. So
does what is in doubt of changes that were completed, which is written down before these are delivered.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import TypeVar

from millstream.config.kinds import keeps_history
from millstream.engine.batch import BatchResult
from millstream.engine.doubts import doubts, few, remember_doubts
from millstream.engine.passing import Passing
from millstream.engine.reload import RELOAD, UNFINISHED
from millstream.engine.repair import LACKS, repair
from millstream.engine.witness import Witness
from millstream.errors import RowRefused, RowUnshaped, TargetError, TargetRefused, TargetUnavailable
from millstream.failpoint import failpoint
from millstream.journal import JournalReader
from millstream.model import Json, OnOverflow, OnReject, Relation, SeqRange, StreamSpec, TargetSpec
from millstream.observe import Level, counted
from millstream.spark.baseline import BaselinePlan
from millstream.spark.stage import StagePlan, decoded_slices
from millstream.state.base import INCOMPLETE, MISSING_BASE, UNSENT, UNSHAPED, Letter, LetterState, StateStore
from millstream.targets.base import Rejecting, Target
from millstream.targets.rejects import Guard, Held, Outstanding, Reject, RowsRejected, Unshapable
from millstream.transforms.compiled import chosen

Plan = TypeVar("Plan", StagePlan, BaselinePlan)
Tell = Callable[[str, str, Level, Json], None]
"""kind, message, level, fields"""


class LetterBox:
    """The letters of one target of a stream."""

    def __init__(self, store: StateStore, stream: StreamSpec, spec: TargetSpec, target: Target, tell: Tell) -> None:
        self._store = store
        self._stream = stream
        self._spec = spec
        self._target = target
        self._tell = tell
        self._recorded: dict[str, str] = {}
        """Event ids of the letters of the batch at hand, with their kinds: left out of it even if they were dropped."""
        self._completed: dict[str, bytes] = {}
        """By event id the source's changes of the batch at hand that lacked what is needed, with all values."""
        self._wanted: dict[str, str] = {}
        """Event ids of shaped changes that the target lacks values for, with the reason: the source's are asked for."""
        self._passing: Passing | None = None
        self._lacking = False
        """Whether the last batch lacked values: most likely this one does, and which rows is looked for at once."""
        self._doubts: dict[str, Held] = {}
        """By event id what is in doubt of the changes of the batch at hand that were completed."""
        self._witness: Witness | None = None

    def forget(self) -> None:
        """The target begins anew: what it could not take before is of no interest any more."""
        self._store.remove_letters([one.id for one in self._store.letters(self._stream.name, self._spec.name)])
        self._store.set_doubts(self._stream.name, self._spec.name, [])

    def deliver(self, plan: Plan, attempt: Callable[[Plan], BatchResult]) -> BatchResult:
        """Run a batch until the target has all that it can take of it. Raises what the target refuses as a whole."""
        self._recorded.clear()
        self._completed.clear()
        self._wanted.clear()
        self._passing = None
        self._doubts.clear()
        self._witness = None
        if isinstance(plan, StagePlan) and not self._passes:
            self._witness = Witness(plan.locations, plan.source_kind)
        repaired: dict[str, bytes] = {}
        unshapable: dict[str, str] = {}
        isolate, self._lacking = self._lacking, False
        while True:
            try:
                return attempt(replace(self._informed(plan, repaired, unshapable), isolate=isolate))
            except Unshapable as known:
                if set(known.reasons) <= set(unshapable):
                    raise
                # The next try tells them with their rows.
                unshapable = known.reasons
            except RowsRejected as found:
                # Changes that rely on a row whose change is a letter, that cannot be transformed, or that were found.
                repaired, unshapable = self._take(found.rejects, repaired), {}
            except RowRefused as refused:
                # What a transform fails on is looked for in any case: the error shall say which change it was.
                halts = self._spec.dead_letters.on_reject is OnReject.HALT and not isinstance(refused, RowUnshaped)
                if isolate or halts:
                    raise
                isolate = True

    def superseded(self, plan: StagePlan, span: SeqRange) -> dict[str, int]:
        """What a batch made obsolete, found from the journal: who delivered it did not live to say."""
        held = self.held()
        if not held or not self._mirrors:
            return {}
        plan = self._informed(plan, {})
        guard = Guard(Outstanding(True, held, frozenset(one.event_id for one in held if one.until is None)))
        planned = [(piece, span) for piece in JournalReader(plan.locations).slices(span)]
        tables = {letter.table for letter in held}
        for relation, number, changes in decoded_slices(plan, planned):
            if relation.table in tables:
                for _ in guard.passed(relation, number, changes):
                    pass
        return guard.superseded

    def held(self) -> tuple[Held, ...]:
        """The letters that are open, and what is in doubt, as tasks must know them."""
        mine = self._store.letters(self._stream.name, self._spec.name)
        waiting = (one for one in mine if one.state is LetterState.WAITING)
        letters = (Held(one.event_id, one.seq, one.table, one.key) for one in waiting)
        return (*letters, *doubts(self._store, self._stream.name, self._spec.name))

    @property
    def _mirrors(self) -> bool:
        return isinstance(self._target, Rejecting) and self._target.mirrors

    @property
    def _passes(self) -> bool:
        """Whether a change may go by that a later one has written over: in a history each has its place."""
        return self._mirrors and not keeps_history(self._spec)

    def _informed(self, plan: Plan, repaired: dict[str, bytes], unshapable: Mapping[str, str] | None = None) -> Plan:
        """The plan with what a task must know of letters; nothing where there are none."""
        letters = self._store.letters(self._stream.name, self._spec.name)
        passing: tuple[Held, ...] = self._passing.held if self._passing is not None else ()
        held = (*self.held(), *passing, *few(list(self._doubts.values())))
        if not (letters or held or repaired or self._recorded or unshapable or self._completed or self._wanted):
            return plan
        kinds = {**{letter.event_id: letter.kind for letter in letters}, **self._recorded}
        kinds.update((one.event_id, UNSENT) for one in passing)
        unshaped = frozenset(event for event, kind in kinds.items() if kind in UNSHAPED)
        outstanding = Outstanding(
            self._mirrors,
            held,
            frozenset(kinds),
            repaired,
            unshaped,
            {**self._wanted, **(unshapable or {})},
            frozenset(self._wanted),
            dict(self._completed),
            frozenset(event for event, kind in self._recorded.items() if kind == MISSING_BASE),
        )
        return replace(plan, outstanding=outstanding)

    def _take(self, rejects: Sequence[Reject], repaired: dict[str, bytes]) -> dict[str, bytes]:
        """Complete or write down what was rejected. Returns all that was completed of this batch."""
        policy = self._spec.dead_letters
        tried = {*repaired, *self._completed}
        shaped = {one.event_id for one in rejects if one.kind == MISSING_BASE and self._shapes(one)} - tried
        self._wanted = {one.event_id: f"{one.table}: {LACKS}" for one in rejects if one.event_id in shaped}
        rejects = [one for one in rejects if one.event_id not in shaped]
        lacking = [one for one in rejects if one.event_id not in tried and one.kind in INCOMPLETE]
        self._lacking |= policy.on_reject is OnReject.LETTER and any(one.kind == MISSING_BASE for one in lacking)
        outcome = repair(self._stream, lacking, self._witness)
        self._doubts.update((one.event_id, one) for one in outcome.doubts)
        remember_doubts(self._store, self._stream.name, self._spec.name, outcome)
        unshaped = {one.event_id for one in lacking if one.kind in UNSHAPED}
        self._completed.update((event, row) for event, row in outcome.repaired.items() if event in unshaped)
        done = {**repaired, **{event: row for event, row in outcome.repaired.items() if event not in unshaped}}
        if outcome.repaired:
            found = counted(len(outcome.repaired), "change")
            message = f"{found} lacked a value that was not sent; it was read at the source"
            self._tell("letters.repaired", message, Level.INFO, {"changes": len(outcome.repaired)})
        letters = [*self._lasting(lacking, outcome.left), *(one for one in rejects if one not in lacking)]
        if not letters:
            return done
        if policy.on_reject is OnReject.HALT:
            first = letters[0]
            raise RowRefused(
                f"{first.reason} (change {first.event_id} of {first.table})",
                hint="on_reject: letter keeps such rows aside and goes on without",
            )
        self._record([self._letter(one) for one in letters])
        return {event: row for event, row in done.items() if event not in {one.event_id for one in letters}}

    def _lasting(self, lacking: Sequence[Reject], left: Sequence[Reject]) -> Sequence[Reject]:
        """Which of the changes that are left of those that lacked values shall be letters."""
        if not self._passes:
            return left
        if self._passing is None:
            self._passing = Passing(self._store.letters(self._stream.name, self._spec.name))
        return self._passing.sifted(lacking, left)

    def _shapes(self, one: Reject) -> bool:
        """Whether filters or transforms made this change: then the source's row is to be compared with the source's."""
        return bool(chosen(self._stream.shape, Relation.from_json(one.relation)))

    def _letter(self, one: Reject) -> Letter:
        return Letter(
            stream=self._stream.name,
            target=self._spec.name,
            table=one.table,
            event_id=one.event_id,
            seq=one.seq,
            op=one.op,
            kind=one.kind,
            reason=one.reason,
            at=datetime.now(UTC),
            key=one.key,
            relation_id=one.relation_id,
            relation=one.relation,
            payload=one.row,
        )

    def _record(self, letters: Sequence[Letter]) -> None:
        """Write letters down, if there is room. Raises by the policy for overflow if there is none."""
        policy = self._spec.dead_letters
        known = {letter.event_id for letter in self._store.letters(self._stream.name, self._spec.name)}
        new = [letter for letter in letters if letter.event_id not in known.union(self._recorded)]
        if not new:
            raise TargetRefused("a row was rejected that was left out", hint="this is a defect in Millstream")
        limited, drops = not self._comes_with_a_copy(new), policy.on_overflow is OnOverflow.DROP_OLDEST
        if limited and not drops and len(known) + len(new) > policy.max:
            raise self._overflow(len(known), new)
        gone = self._store.add_letters(new, keep=policy.max if limited and drops else None)
        self._recorded.update((letter.event_id, letter.kind) for letter in new)
        failpoint("letters.recorded")
        tables = dict(Counter(letter.table for letter in new))
        kinds = dict(Counter(letter.kind for letter in new))
        message = (
            f"{counted(len(new), 'change')} could not be taken and went to the dead letters, the first: {new[0].reason}"
        )
        fields = {"letters": len(new), "tables": tables, "kinds": kinds, "first_seq": new[0].seq}
        self._tell("letters.added", message, Level.WARNING, fields)
        if gone:
            message = f"{counted(len(gone), 'dead letter')} dropped: there may be {policy.max}"
            self._tell("letters.dropped", message, Level.WARNING, {"letters": len(gone), "max": policy.max})

    def _comes_with_a_copy(self, letters: Sequence[Letter]) -> bool:
        """Whether all that is wrong with these is that the target's tables are not whole yet.

        A table that is filled beside its changes lacks the rows of the ranges that are to come. Such letters go by
        themselves, with later changes and with the ranges, but only if the delivery goes on: a copy waits for it.
        """
        note = self._store.notes(self._stream.name, RELOAD).get(self._spec.name)
        return note is not None and note["state"] in UNFINISHED and all(one.kind == MISSING_BASE for one in letters)

    def _overflow(self, there: int, new: Sequence[Letter]) -> TargetError:
        name, policy = f"{self._stream.name}", self._spec.dead_letters
        many = f"{counted(there, 'dead letter')} there, and {counted(len(new), 'more change')} refused"
        message = f"{many}; there may be {policy.max}. The first: {new[0].reason}"
        hint = f"see `millstream dlq list {name}`; retry or purge them"
        if policy.on_overflow is OnOverflow.BLOCK:
            return TargetUnavailable(message, hint=f"{hint}: delivery then goes on by itself")
        return TargetRefused(message, hint=f"{hint}, then `millstream resume {name}`")
