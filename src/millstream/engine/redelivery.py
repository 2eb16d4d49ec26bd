"""Dead letters delivered once more, while nothing else is delivered to their target.

A letter whose row was written by a later change is removed: delivering it would take the row back. Everything
can be repeated: who is killed between the target and the state store finds the target newer the next time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from uuid import uuid4

import pyarrow as pa

from millstream.config.kinds import keeps_history
from millstream.engine.doubts import remember_doubts
from millstream.engine.fit import open_target
from millstream.engine.home import Home
from millstream.engine.repair import Repair, repair
from millstream.engine.uncaptured import NoJournal
from millstream.engine.witness import Witness
from millstream.errors import ConfigError, NotSupported, RowRefused
from millstream.failpoint import failpoint
from millstream.journal import JournalReader
from millstream.model import Json, Mode, Op, Relation, StreamSpec
from millstream.state.base import INCOMPLETE, MISSING_BASE, UNSENT, UNSHAPED, Letter, LetterState, StateStore
from millstream.targets.base import Rejecting, Target, TargetContext
from millstream.targets.lanes.tables import mirror_key
from millstream.targets.rejects import Reject, key_texts, relies_on_its_row, unpacked
from millstream.transforms.shape import Shaping


@dataclass(frozen=True)
class Outcome:
    """What became of a letter that was retried."""

    id: int
    outcome: str
    """delivered | superseded | rejected"""
    detail: str

    def to_json(self) -> Json:
        return dict(vars(self))


class Redelivery:
    """Of letters of one target. May only be used while nothing is delivered to it."""

    def __init__(self, home: Home, store: StateStore, stream: StreamSpec, target: str) -> None:
        self._store = store
        self._stream = stream
        self._name = target
        copied = stream.mode is Mode.SNAPSHOT
        journal = str(home.journal_path(stream.source.name))
        self._reader = NoJournal(stream.source) if copied else JournalReader([journal])

    def run(self, ids: Sequence[int]) -> list[Outcome]:
        """Retry these letters in the order of their changes. Raises as opening the target does."""
        spec = next(one for one in self._stream.targets if one.name == self._name)
        target = open_target(spec)
        if not isinstance(target, Rejecting):
            raise NotSupported(
                f"a target of kind {target.kind} cannot be given single changes",
                hint=f"`millstream replay {self._stream.name}` delivers them again, with the others since then",
            )
        letters = [letter for letter in map(self._store.get_letter, ids) if letter is not None]
        waiting = [letter for letter in letters if letter.state is LetterState.WAITING]
        if waiting:
            self._open(target)
        try:
            return [self._retry(target, letter) for letter in sorted(letters, key=lambda letter: letter.seq)]
        finally:
            target.close()

    def _open(self, target: Target) -> None:
        """Take the target over, in the epoch that delivers to it."""
        epoch = self._store.current_epoch(self._stream.name, self._name)
        if epoch is None:
            raise ConfigError(f"nothing was ever delivered to target {self._name} of stream {self._stream.name}")
        header = self._reader.header()
        prefix, run = header.event_prefix, uuid4().hex
        target.open(TargetContext(self._stream.name, self._name, header.journal_id, prefix, epoch.epoch, run))

    def _retry(self, target: Rejecting, letter: Letter) -> Outcome:
        # A letter before it in this very run may have made it obsolete, or what it relies on.
        letter = self._store.get_letter(letter.id) or letter
        if letter.state is LetterState.SUPERSEDED:
            self._store.remove_letters([letter.id])
            by = f"the change with seq {letter.superseded_by} has written its row later; removed"
            return Outcome(letter.id, "superseded", by)
        try:
            done = self._redeliver(target, letter)
        except RowRefused as refused:
            self._store.mark_letter(letter.id, reason=refused.message)
            return Outcome(letter.id, "rejected", refused.message)
        failpoint("letters.redelivered")
        if target.mirrors:
            for other in self._of_its_row(letter):
                if other.seq < letter.seq and other.kind in INCOMPLETE:
                    self._store.remove_letters([other.id])
                elif other.seq < letter.seq:
                    self._store.mark_letter(other.id, superseded_by=letter.seq)
        self._store.remove_letters([letter.id])
        if done:
            return Outcome(letter.id, "delivered", f"seq {letter.seq} of {letter.table}")
        return Outcome(letter.id, "superseded", "the target has this change or a newer row; removed")

    def _redeliver(self, target: Rejecting, letter: Letter) -> bool:
        """Deliver the change, with the values that it relies on if the target does not have them."""
        relation, change = Relation.from_json(letter.relation), unpacked(letter.payload)
        if letter.kind in UNSHAPED:
            # Spark is not loaded for letters that can do without it.
            from millstream.engine.reshaping import reshaped

            if letter.kind == UNSENT:
                completed = self._repaired(target, _as_reject(letter))
                if completed.left:
                    raise RowRefused(completed.left[0].reason)
                change = unpacked(completed.repaired[letter.event_id])
            shaping = Shaping(self._stream.name, self._stream.shape, target.mirrors)
            relation, change = reshaped(shaping, relation, letter.relation_id, change)
            if not change.num_rows:
                # By now it is outside the filters.
                return False
        older = [other for other in self._of_its_row(letter) if other.seq < letter.seq]
        # What the target has under a key that the row had before may be another row by now.
        stale = target.mirrors and bool(older or _moves(change, relation))
        stale = stale and relies_on_its_row(change.to_batches()[0], 0)
        if letter.kind != MISSING_BASE and not stale:
            return target.redeliver(relation, letter.relation_id, change)
        outcome = self._repaired(target, replace(_as_reject(letter), kind=MISSING_BASE))
        if outcome.repaired:
            return target.redeliver(relation, letter.relation_id, unpacked(outcome.repaired[letter.event_id]))
        if letter.kind == MISSING_BASE and not stale:
            # The target may have got the row by other means.
            return target.redeliver(relation, letter.relation_id, change)
        raise RowRefused(outcome.left[0].reason, hint=f"retry letter {older[0].id} first" if older else None)

    def _repaired(self, target: Rejecting, lacking: Reject) -> Repair:
        """Complete a change from the source. What will be in doubt of it is written down before it is delivered."""
        spec = next(one for one in self._stream.targets if one.name == self._name)
        remembers = not target.mirrors or keeps_history(spec)
        witness = Witness(self._reader.locations, self._stream.source.kind) if remembers else None
        outcome = repair(self._stream, [lacking], witness)
        remember_doubts(self._store, self._stream.name, self._name, outcome)
        return outcome

    def _of_its_row(self, letter: Letter) -> list[Letter]:
        mine = self._store.letters(letter.stream, letter.target)
        return [
            other
            for other in mine
            if (other.table, other.key) == (letter.table, letter.key)
            and other.id != letter.id
            and other.key is not None
            and other.state is LetterState.WAITING
        ]


def _moves(change: pa.Table, relation: Relation) -> bool:
    """Whether the change gives its row another key."""
    key = mirror_key(relation)
    if not key or change["_ms_op"][0].as_py() != chr(Op.UPDATE):
        return False
    new, old = (text[0].as_py() for text in key_texts(change, key))
    return old is not None and new != old


def _as_reject(letter: Letter) -> Reject:
    return Reject(
        letter.table,
        letter.event_id,
        letter.seq,
        letter.op,
        letter.kind,
        letter.reason,
        letter.key,
        letter.relation_id,
        letter.relation,
        letter.payload,
    )
