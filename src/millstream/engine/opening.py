"""Opening a target for delivery: compare cursors and journal, choose the epoch, clean up, be ready."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from uuid import uuid4

import pyarrow as pa

from millstream.changelog import assemble, pieces
from millstream.engine.epochs import BASELINE, Decision, Situation, decide
from millstream.errors import JournalMismatch, TargetUnavailable
from millstream.failpoint import failpoint
from millstream.journal import Cut, JournalReader, check_cursor, open_slice
from millstream.journal.format import Header, Slice
from millstream.model import Cursor, Relation, SeqRange
from millstream.spark.changes import Shaped
from millstream.spark.probe import Needed
from millstream.spark.query import CheckpointUnusable
from millstream.spark.rows import MESSAGES, described
from millstream.spark.shelf import Shelf
from millstream.spark.stage import StagePlan
from millstream.spark.tables import OwnTables, share
from millstream.state.base import EpochRecord, StateStore, Tally
from millstream.targets.base import ASKING, Lane, LaneBatch, Stager, Target, TargetContext, TargetCursor
from millstream.transforms.compiled import wants_spark
from millstream.transforms.shape import Shaping

UNSEEN = 1 << 30
"""From here on `_ms_schema` numbers descriptions that only a baseline has seen."""


@dataclass(frozen=True)
class Opened:
    """A target that is ready for batches of one epoch."""

    header: Header
    epoch: int
    start_seq: int
    """Where the epoch began: the start of Spark's batch 0."""
    seq: int
    """How far the target was when it was opened."""
    reason: str | None
    """Why this is a new epoch; None when the current one goes on."""
    checkpoint: Path
    plan: StagePlan


@dataclass(frozen=True)
class Beginning:
    """A target that has nothing yet, opened for a baseline."""

    header: Header
    epoch: int
    seq: int
    """The journal's end: what a snapshot that is taken now does not have lies beyond it."""
    position: int
    """The journal's position there."""
    stager: Stager | Lane


class Opening:
    """What a delivery knows of its target's cursor and epochs."""

    def __init__(
        self,
        stream: str,
        target_name: str,
        target: Target,
        locations: tuple[str, ...],
        store: StateStore,
        checkpoint_root: Path,
        tables: OwnTables | None = None,
        shaping: Shaping | None = None,
        superseded: Callable[[StagePlan, SeqRange], dict[str, int]] | None = None,
        journal: JournalReader | None = None,
        shelf: Shelf | None = None,
    ) -> None:
        """`superseded` tells which dead letters a range of changes made obsolete.

        `journal` stands in for the one at `locations`. `shelf`: see `StagePlan`.
        """
        self._superseded = superseded
        self._stream = stream
        self._name = target_name
        self._target = target
        self._locations = locations
        self._store = store
        self._root = checkpoint_root
        self._tables = tables
        self.shaping = shaping
        self._shelf = shelf
        self._journal = journal if journal is not None else JournalReader(locations)

    @property
    def journal(self) -> JournalReader:
        """The journal that the target is delivered from."""
        return self._journal

    def open(self, distrust: str | None) -> Opened:
        """Make the target ready. `distrust`: why the current epoch cannot go on, if so.

        Raises JournalMismatch or OutOfRange before a row is written if cursor and journal do not
        belong together; TargetUnavailable and TargetRefused as the target does.
        """
        header = self._journal.header()
        current = self._store.current_epoch(self._stream, self._name)
        decision = self._decide(header, current, distrust)
        if decision.reason is not None:
            self._open_epoch(header, decision)
            current = self._store.current_epoch(self._stream, self._name)
        assert current is not None  # noqa: S101 - it was there or has just been opened
        context = self._open_target(header, decision.epoch)
        self._target.recover(self._target.cursor())
        plan = StagePlan(
            self._locations,
            Needed.here({self._locations: header.journal_id}),
            header.source_kind,
            context.event_prefix,
            decision.after_position,
            self._target.stager(),
            self._tables,
            self.shaping,
            shelf=self._shelf,
        )
        checkpoint = self._root / str(decision.epoch)
        opened = Opened(header, decision.epoch, current.start_seq, decision.seq, decision.reason, checkpoint, plan)
        self._save_opening(opened)
        return opened

    def slices(self, span: SeqRange) -> list[Slice]:
        """Where the rows of a batch are. A batch that comes again may find them elsewhere, but the same."""
        return self._journal.slices(span)

    def current_relations(self, span: SeqRange) -> frozenset[int]:
        """The relations of a range under which each table has the columns that it has at the range's end."""
        relations, last = self._journal.relations(), dict[int, tuple[int, int]]()
        for piece in self._journal.slices(span) if span.start < span.end else ():
            if piece.relation in relations:
                oid = relations[piece.relation].oid
                last[oid] = max(last.get(oid, (0, 0)), (min(piece.last_seq, span.end), piece.relation))
        now = {oid: _columns(relations[number]) for oid, (_, number) in last.items()}
        return frozenset(number for number, one in relations.items() if now.get(one.oid) == _columns(one))

    def seq_at(self, position: int) -> int | None:
        """The last change that a snapshot at this position has; None while the journal is not there yet."""
        head = self._journal.head()
        return None if head is None or head.covered < position else self._journal.seq_at_position(position)

    def columns_changed(self, relation: Relation, span: SeqRange) -> bool:
        """Whether changes of this range have the relation's table with other columns than it says."""
        known = self._journal.relations()
        pieces = self._journal.slices(span) if span.start < span.end else ()
        found = {known[piece.relation] for piece in pieces if piece.relation in known}
        mine = [one for one in found if one.oid == relation.oid]
        # What the catalog could not complete can only be held against the log's own words.
        told = [(one, _columns if one.enriched else _sent) for one in mine]
        return any(said(one) != said(relation) for one, said in told)

    def batch_end(self, start: int, max_events: int, max_bytes: int) -> int | None:
        """Where a batch that starts there ends; None when the journal has nothing after it."""
        planned = self._journal.plan_end(start, max_events=max_events, max_bytes=max_bytes)
        return planned.end if planned else None

    def is_new(self) -> bool:
        """Whether the target itself has nothing. Raises as the target does."""
        self._open_target(self._journal.header(), ASKING)
        return self._target.capabilities.keeps_cursor and self._target.cursor() is None

    def is_overtaken(self) -> bool:
        """Whether the target lacks changes that the journal does not have any more. Raises as the target does."""
        header = self._journal.header()
        self._open_target(header, ASKING)
        last = self._target.cursor() or self.saved()
        return last is not None and last.journal_id == header.journal_id and last.seq + 1 < self._journal.first_seq()

    def skip(self) -> SeqRange:
        """Bring a target that is overtaken to the journal's end without what is in between. Returns what it lacks."""
        header, head, own, saved = self._journal.header(), self._journal.head(), self._target.cursor(), self.saved()
        current, last = self._store.current_epoch(self._stream, self._name), own or saved
        if head is None or last is None:
            raise JournalMismatch("there is nothing that the target could lack")
        epoch = max(last.epoch, current.epoch if current else 0)
        self._open_target(header, epoch)
        self._target.recover(own)
        span, position = SeqRange(last.seq, head.seq), self.cut(head.seq).resume_position
        stager = self._target.stager()
        if isinstance(stager, Lane):
            stager.deliver(LaneBatch(span, position, (), lambda: None))
        self._target.publish(span, position, ())
        failpoint("reload.skipped")
        self._store.save_cursor(Cursor(self._stream, self._name, header.journal_id, epoch, span.end, position))
        return span

    def begin(self) -> Beginning:
        """Open a target that has nothing in a new epoch, and remove what an earlier try of a baseline left there.

        Raises TargetUnavailable when it turns out to have something: it is opened as it is then.
        """
        header, head = self._journal.header(), self._journal.head()
        current, saved = self._store.current_epoch(self._stream, self._name), self.saved()
        epoch = max(current.epoch if current else 0, saved.epoch if saved else 0) + 1
        self._open_target(header, epoch)
        if self._target.cursor() is not None:
            # Only now nobody else can write: a task of a process that was killed may have been at its commit.
            raise TargetUnavailable("the target got a baseline from an earlier run just now")
        self._target.recover(None)
        seq = header.first_seq - 1 if head is None else head.seq
        position = self.cut(seq).resume_position if seq >= header.first_seq else header.start_position
        return Beginning(header, epoch, seq, position, self._target.stager())

    def reopen(self, epoch: int) -> None:
        """Open the target between two deliveries: with `ASKING` to look at it, with its epoch to write to it."""
        self._open_target(self._journal.header(), epoch)

    def record_baseline(self, begun: Beginning, snapshot_position: int) -> None:
        """Write down where changes go on after the baseline, before the target can have it: no change comes twice."""
        self._open_epoch(begun.header, Decision(begun.epoch, begun.seq, snapshot_position, BASELINE))

    def save_baseline(self, begun: Beginning, tallies: Sequence[Tally]) -> None:
        """The target has the baseline: its cursor, and what came with it."""
        journal = begun.header.journal_id
        cursor = Cursor(self._stream, self._name, journal, begun.epoch, begun.seq, begun.position)
        self._store.save_cursor(cursor, tallies)

    def save_found(self) -> Cursor | None:
        """The cursor of a target that has something, saved if that was not: its process did not live to do it."""
        own, saved = self._target.cursor(), self.saved()
        if own is not None and (saved is None or (saved.journal_id, saved.epoch) != (own.journal_id, own.epoch)):
            saved = Cursor(self._stream, self._name, own.journal_id, own.epoch, own.seq, own.position)
            self._store.save_cursor(saved)
        return saved

    def relation_ids(self, relations: Iterable[Relation]) -> dict[Relation, int]:
        """The journal's numbers of these descriptions; those it has never seen get numbers it never gives."""
        known = {relation: number for number, relation in self._journal.relations().items()}
        return {relation: known.get(relation, UNSEEN + at) for at, relation in enumerate(dict.fromkeys(relations))}

    def delivered_seq(self, opened: Opened) -> int:
        """The truth: how far the target is."""
        own = self._target.cursor() if self._target.capabilities.keeps_cursor else self.saved()
        return opened.seq if own is None or own.journal_id != opened.header.journal_id else own.seq

    def is_delivered(self, opened: Opened, span: SeqRange) -> bool:
        """Whether a batch is behind the cursor already. Raises if it does not start at the cursor."""
        seq = self.delivered_seq(opened)
        if span.end <= seq:
            return True
        if span.start > seq:
            raise JournalMismatch(
                f"the next batch starts after seq {span.start}, but the target has only seq {seq}: rows would be lost",
                hint="the target or the state store was replaced while the stream ran; restart the stream",
            )
        if span.start < seq:
            raise CheckpointUnusable(f"a batch from {span.start} to {span.end} lies across the cursor at {seq}")
        return False

    def probe(self, opened: Opened) -> None:
        """Plan the next batch here, to learn from the journal itself what Spark's planning process ran into."""
        seq = self.delivered_seq(opened)
        planned = self._journal.plan_end(seq, max_events=1, max_bytes=1)
        if planned is not None:
            self._journal.slices(SeqRange(seq, planned.end))

    def cut(self, seq: int) -> Cut:
        """The transaction end at `seq`."""
        cut = self._journal.cut_at(seq)
        if cut is None:
            raise JournalMismatch(f"seq {seq} is not the end of a transaction in this journal")
        return cut

    def save(
        self,
        opened: Opened,
        seq: int,
        position: int,
        commit_ts: datetime | None,
        tallies: Sequence[Tally] = (),
        superseded: Mapping[str, int] | None = None,
    ) -> Cursor:
        """Move the saved cursor, and with it the target's totals and letters."""
        cursor = Cursor(self._stream, self._name, opened.header.journal_id, opened.epoch, seq, position, commit_ts)
        self._store.save_cursor(cursor, tallies, superseded)
        return cursor

    def superseded(self, opened: Opened, span: SeqRange) -> dict[str, int]:
        """The same for dead letters that the batch made obsolete."""
        return self._superseded(opened.plan, span) if self._superseded is not None else {}

    def tallies(self, opened: Opened, span: SeqRange) -> list[Tally]:
        """What a published batch brought, counted from the journal: who staged it did not live to say.

        How many bytes that were nobody can know any more.
        """
        slices = [(piece, span) for piece in self._journal.slices(span)]
        own, _ = share(self._locations, self._tables, slices)
        tables: dict[str, Tally] = {}
        for piece, _ in own:
            rows = open_slice(piece, self._locations, span, opened.plan.after_position)
            relation = described(self._locations, opened.header.source_kind, piece.journal_id, piece.relation)
            count = self._count(rows, relation, piece.relation)
            if count:
                name = relation.table
                before = tables.get(name, Tally(name, 0, 0, 0))
                last = max(before.last_seq, rows.column("seq")[-1].as_py())
                tables[name] = Tally(name, before.events + count, 0, last)
        return list(tables.values())

    def _count(self, rows: pa.RecordBatch, relation: Relation, relation_id: int) -> int:
        """How many of these changes filters let through; all of them where only Spark could say it."""
        if self.shaping is None or relation_id == MESSAGES or wants_spark(self.shaping, relation):
            return int(rows.num_rows)
        decoded = (assemble(part, relation, relation_id, "") for part in pieces(rows))
        return sum(batch.num_rows for batch in Shaped(self.shaping, relation, relation_id, decoded, skip=True))

    def saved(self) -> Cursor | None:
        """How far the target is, as the state store has it."""
        return self._store.get_cursor(self._stream, self._name)

    def _decide(self, header: Header, current: EpochRecord | None, distrust: str | None) -> Decision:
        saved = self.saved()
        self._open_target(header, ASKING)
        own = self._target.cursor()
        decision = decide(
            Situation(
                header=header,
                first_seq=self._journal.first_seq(),
                saved=saved,
                target=own,
                keeps_cursor=self._target.capabilities.keeps_cursor,
                epoch=current,
                checkpoint_exists=current is not None and (self._root / str(current.epoch) / "offsets").is_dir(),
                last_batch=self._last_batch(header),
                beyond=self._beyond(header, own),
            ),
            distrust,
        )
        if saved is not None:
            self._check(header, saved)
        if own is not None:
            position = min(own.position, self._position_at(header, own))
            self._check(header, Cursor(self._stream, self._name, own.journal_id, own.epoch, own.seq, position))
        return decision

    def _beyond(self, header: Header, own: TargetCursor | None) -> int | None:
        """Up to where the target has all changes, if that is beyond the seq it names: a baseline brought them."""
        if own is None or own.journal_id != header.journal_id or own.position <= self._position_at(header, own):
            return None
        return own.position

    def _position_at(self, header: Header, own: TargetCursor) -> int:
        """The journal's position at a cursor's seq; the cursor's own where the journal does not have it."""
        if own.journal_id != header.journal_id or own.seq < self._journal.first_seq() - 1:
            return own.position
        if own.seq < header.first_seq:
            return header.start_position
        cut = self._journal.cut_at(own.seq)
        return cut.resume_position if cut else own.position

    def _last_batch(self, header: Header) -> int | None:
        history = self._store.cursor_history(self._stream, self._name, 2)
        return min((cursor.seq for cursor in history if cursor.journal_id == header.journal_id), default=None)

    def _check(self, header: Header, cursor: Cursor) -> None:
        """Compare a cursor with this journal. One before its first row has nothing from it to compare."""
        if cursor.journal_id == header.journal_id and cursor.seq >= header.first_seq:
            check_cursor(self._journal, cursor)

    def _open_target(self, header: Header, epoch: int) -> TargetContext:
        context = TargetContext(
            self._stream, self._name, header.journal_id, header.event_prefix, epoch, run_id=uuid4().hex
        )
        self._target.open(context)
        return context

    def _open_epoch(self, header: Header, decision: Decision) -> None:
        """Record the new epoch. Its checkpoint directory must not hold anything that an earlier life left there."""
        self._root.mkdir(parents=True, exist_ok=True)
        for old in list(self._root.iterdir()):
            if old.name.isdigit():
                shutil.rmtree(old)
        self._store.open_epoch(
            EpochRecord(
                stream=self._stream,
                target=self._name,
                epoch=decision.epoch,
                journal_id=header.journal_id,
                start_seq=decision.seq,
                after_position=decision.after_position,
                reason=decision.reason or "",
                opened_at=datetime.now(UTC),
            )
        )
        failpoint("delivery.epoch_opened")

    def _save_opening(self, opened: Opened) -> None:
        """Bring the saved cursor to the truth: it may be a batch behind, or belong to an epoch that is over."""
        saved = self.saved()
        journal = opened.header.journal_id
        if saved is not None and (saved.journal_id, saved.epoch, saved.seq) == (journal, opened.epoch, opened.seq):
            return
        cut = self._journal.cut_at(opened.seq) if opened.seq >= opened.header.first_seq else None
        if cut is not None:
            behind = saved is not None and saved.journal_id == journal and saved.seq < opened.seq
            done = self.superseded(opened, SeqRange(saved.seq, opened.seq)) if saved and behind else {}
            self.save(opened, opened.seq, cut.resume_position, from_micros(cut.commit_ts_us), superseded=done)
        else:
            after = opened.plan.after_position
            self.save(opened, opened.seq, opened.header.start_position if after is None else after, None)


def _columns(relation: Relation) -> tuple[object, ...]:
    """What must be the same of two descriptions for a row under one to be a row under the other."""
    columns = ((column.name, column.attnum, column.type_oid, column.type_mod) for column in relation.columns)
    return relation.schema, relation.name, relation.identity, relation.key, *columns


def _sent(relation: Relation) -> tuple[object, ...]:
    """The same as far as the log itself tells it."""
    return tuple((column.name, column.type_oid, column.type_mod) for column in relation.columns)


def from_micros(micros: int) -> datetime:
    """A commit time of the journal as Python's."""
    return datetime.fromtimestamp(micros / 1_000_000, UTC)
