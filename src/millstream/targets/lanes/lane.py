"""Databases as targets: a batch is one transaction that begins with the cursor and ends with the data.

Our own tables, `cursors` and `tables`, stand in the target beside the user's. A batch first compares
and sets its stream's cursor: no match, and it writes nothing. So whoever comes late (a second try of
a task, a process that was given up) does no harm, and what is committed is the batch and its cursor.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, replace
from functools import partial

import pyarrow as pa

from millstream.errors import TargetRefused, TargetUnavailable
from millstream.failpoint import failpoint
from millstream.latest import latest
from millstream.model import Relation, SeqRange
from millstream.targets.base import (
    ASKING,
    Capabilities,
    Delivery,
    Kept,
    LaneBatch,
    Part,
    Reader,
    Receipt,
    ReloadStep,
    TargetContext,
    TargetCursor,
)
from millstream.targets.lanes.changelog import write_changes
from millstream.targets.lanes.database import OWN, Database, LaneOptions
from millstream.targets.lanes.evolving import refresh, refuse_other_names
from millstream.targets.lanes.isolating import Isolating
from millstream.targets.lanes.keeping import bring_back, keep
from millstream.targets.lanes.logged import LoggedReader
from millstream.targets.lanes.mirror import clear, has_newer, insert_rows, write_run
from millstream.targets.lanes.reading import LaneReader, SqlRepairer
from millstream.targets.lanes.reloading import (
    ReloadLane,
    filling_name,
    is_filling,
    reload_name,
    remember_removed,
    set_filling,
)
from millstream.targets.lanes.replaying import ReplayLane, forget_tombstones, replay_name
from millstream.targets.lanes.runs import Run, ahead, by_table, runs
from millstream.targets.lanes.tables import Prepared, mirror_key, prepare

MESSAGES = 0
"""The relation id of logical messages: no table of the source, so no mirror has them."""


@dataclass(frozen=True)
class SqlLane:
    """The executor side. See `targets.base.Lane` for the contract."""

    database: type[Database]
    options: LaneOptions
    context: TargetContext
    renewed: frozenset[str] | None = frozenset()
    """Tables that are made anew when they cannot follow their source's; None: all."""
    remembers: bool = False
    """Whether tables are being copied anew meanwhile: what is removed is remembered."""

    def deliver(self, batch: LaneBatch) -> bool:
        opening = self.database(self.options)
        if not opening.is_there():
            # Opening it would make another one, which nobody looks at.
            raise TargetUnavailable(
                f"the executor on {socket.gethostname()} does not see {opening.where}, which the driver has made",
                hint="a file must be on storage that the driver and every worker share",
            )
        opening.takes_back = batch.isolate
        # Which row it is that another one has the key of, only a table with a key can tell.
        opening.loads = _is_baseline(batch.range) and self.options.write == "mirror" and not batch.isolate
        with opening as db:
            with db.transaction():
                if not _claim(db, self.context, batch.range, batch.end_position):
                    return False
                failpoint("lane.claimed")
                db.mark(self.context)
                refresh(db, self.context)
                self._write(db, batch)
                db.settle()
                batch.check_complete()
                if db.loads:
                    failpoint("lane.loaded")
                    db.add_keys()
                failpoint("lane.written")
            failpoint("lane.committed")
        return True

    def redeliver(self, relation: Relation, relation_id: int, change: pa.Table) -> bool:
        """See `targets.base.Rejecting`."""
        with self.database(self.options) as db, db.transaction():
            if not _is_owner(db, self.context):
                raise _fenced(db, self.context, None)
            db.mark(self.context)
            refresh(db, self.context)
            if self.options.write == "mirror":
                refuse_other_names(db, relation, self.context)
            prepared = prepare(db, relation, relation_id, self.context, self.options)
            if self.options.write == "changelog":
                event = change["_ms_event_id"][0].as_py()
                if db.rows(f"SELECT 1 FROM {prepared.table} WHERE _ms_event_id = ? LIMIT 1", (event,)):
                    return False
                write_changes(db, prepared, change)
                return True
            if has_newer(db, prepared, change):
                return False
            write_run(db, prepared, change, soft=self.options.deletes == "soft")
            db.settle()
        return True

    def _write(self, db: Database, batch: LaneBatch) -> None:
        """Write the changes of all tables. While one run is written the next one is read, decoded and folded."""
        mirrors, soft = self.options.write == "mirror", self.options.deletes == "soft"
        isolating = Isolating(db) if batch.isolate else None
        baseline = _is_baseline(batch.range)
        tables = db.ordered(by_table(batch.parts))
        if mirrors and baseline:
            # Their rows are all of a table's: what is older goes, and rows for an empty table need no look at it.
            prepared = (self._prepared(db, one[0], renewing=True) for one in tables)
            empty = [clear(db, table, batch.range.end, soft=soft) for table in prepared]
        else:
            empty = [False] * len(tables)
        passing = [empty[at] and not batch.isolate and self._passes_on(db, one) for at, one in enumerate(tables)]
        folds = mirrors and not baseline and isolating is None
        with closing(ahead(_all_runs(tables, passing, folds=folds))) as coming:
            for number, run in coming:
                if run is None:
                    self._pass_on(db, tables[number][0], batch.range.end)
                    continue
                if mirrors and run.relation_id == MESSAGES:
                    continue
                into = self._prepared(db, run, renewing=self.renewed is None or run.relation.table in self.renewed)
                if not mirrors:
                    write: Callable[[pa.Table], None] = partial(write_changes, db, into)
                elif empty[number]:
                    write = partial(insert_rows, db, into, soft=soft)
                else:
                    write = partial(write_run, db, into, soft=soft, found=run.latest)
                if isolating is None:
                    write(run.changes)
                else:
                    isolating.write(run, into.key, write)
                if mirrors and self.remembers:
                    remember_removed(db, into, run, self.context)
        if isolating is not None:
            isolating.check()

    def _passes_on(self, db: Database, parts: Sequence[Part]) -> bool:
        """Whether the database takes the rows of a table as they come."""
        if len(parts) > 1 or parts[0].copied is None:
            return False
        prepared = self._prepared(db, parts[0])
        if any(column.tight for column in prepared.columns):
            return False
        return db.takes_copied(prepared.table, prepared.names, parts[0].relation)

    def _pass_on(self, db: Database, part: Part, seq: int) -> None:
        prepared = self._prepared(db, part)
        assert part.copied is not None  # noqa: S101 - just seen
        db.pass_on(prepared.table, prepared.names, part.copied, seq, soft=self.options.deletes == "soft")

    def _prepared(self, db: Database, of: Part | Run, *, renewing: bool = False) -> Prepared:
        return prepare(db, of.relation, of.relation_id, self.context, self.options, renewing=renewing)


def _all_runs(
    tables: Sequence[Sequence[Part]], passing: Sequence[bool], *, folds: bool
) -> Iterator[tuple[int, Run | None]]:
    """The runs of all tables, one after another, each with the number of its table; None for one to pass on."""
    for number, parts in enumerate(tables):
        if passing[number]:
            yield number, None
            continue
        for run in runs(parts):
            # A key that the description tells is the mirror's, or the mirror is refused (`tables.prepare`).
            key = mirror_key(run.relation) if folds and run.relation_id != MESSAGES else ()
            yield number, replace(run, latest=latest(run.changes, key)) if key else run


class LaneTarget:
    """The driver side. See `targets.base.Target` for the contract."""

    capabilities = Capabilities(delivery=Delivery.LANE, keeps_cursor=True, parallel=False)

    def __init__(self, database: type[Database], options: LaneOptions) -> None:
        self.kind = database.kind
        self._database = database
        self._options = options
        self._context: TargetContext | None = None
        self._cursor: TargetCursor | None = None

    def _asking(self) -> Database:
        database = self._database(self._options)
        database.asking = True
        return database

    def open(self, context: TargetContext) -> None:
        with self._asking() as db:
            with db.transaction():
                db.create_own()
                if context.epoch != ASKING:
                    _take_over(db, context)
                self._cursor = _read_cursor(db, context)
            failpoint("lane.opened")
        self._context = context

    def cursor(self) -> TargetCursor | None:
        return self._cursor

    def recover(self, cursor: TargetCursor | None) -> None:
        """Nothing: what was not committed was never there."""

    def stager(self) -> SqlLane:
        return SqlLane(self._database, self._options, self._opened())

    def publish(self, range: SeqRange, end_position: int, receipts: Sequence[Receipt]) -> None:
        context = self._opened()
        if self._cursor is not None and range.end <= self._cursor.seq:
            return
        with self._asking() as db:
            found = _read_cursor(db, context)
            if found is None or found.seq < range.end:
                raise _refusal(db, context, range)
            self._cursor = found

    @property
    def mirrors(self) -> bool:
        return self._options.write == "mirror"

    def redeliver(self, relation: Relation, relation_id: int, change: pa.Table) -> bool:
        return self.stager().redeliver(relation, relation_id, change)

    def reader(self) -> Reader:
        if self._options.write == "changelog":
            return LoggedReader(self._database, self._options)
        return LaneReader(self._database, self._options)

    @property
    def repairs(self) -> bool:
        return self.mirrors

    def repairer(self) -> SqlRepairer:
        return SqlRepairer(self._database, self._options, self._opened())

    def replayer(self, mark: int, *, only: frozenset[int] | None, current: frozenset[int]) -> ReplayLane:
        return ReplayLane(self._database, self._options, self._opened(), mark, only is None, current)

    def publish_replay(self, mark: int, range: SeqRange, receipts: Sequence[Receipt]) -> None:
        """Nothing: the task has committed it."""

    def settle_replay(self) -> None:
        with self._asking() as db, db.transaction():
            forget_tombstones(db, self._opened())

    @property
    def keeps_state(self) -> bool:
        return self._database.keeps_state

    @property
    def read_alone(self) -> bool:
        return not self._database.many_readers

    def keep(self, stream: str, target: str) -> AbstractContextManager[Kept]:
        return keep(self._database(self._options), stream, target)

    def bring_back(self, stream: str, target: str, kept: Kept, token: str, *, overwrite: bool) -> bool:
        return bring_back(self._database(self._options), stream, target, kept, token, overwrite=overwrite)

    @property
    def reloads_by_steps(self) -> bool:
        return self.mirrors

    def remembering(self, renewed: frozenset[str] | None) -> SqlLane:
        return replace(self.stager(), remembers=self.mirrors, renewed=renewed if self.mirrors else frozenset())

    def reloader(self, step: ReloadStep) -> ReloadLane:
        return ReloadLane(self._database, self._options, self._opened(), step)

    def publish_reload(self, step: ReloadStep, receipts: Sequence[Receipt]) -> None:
        """Nothing: the task has committed it."""

    def settle_reload(self) -> None:
        self.settle_replay()

    def filling(self) -> bool:
        with self._asking() as db:
            return is_filling(db, self._opened())

    def set_filling(self, filling: bool) -> None:
        with self._asking() as db, db.transaction():
            set_filling(db, self._opened(), filling)

    def release(self, stream: str, target: str) -> None:
        """The tables stay as they are, and belong to nobody; the next stream may take them over."""
        db = self._asking()
        if not db.is_there():
            return
        with db, db.transaction():
            if not db.has_own():
                return
            db.create_own()
            for name in OWN:
                db.run(f"DELETE FROM {db.own(name)} WHERE stream = ? AND target = ?", (stream, target))
            for ours in (replay_name(target), reload_name(target), filling_name(target)):
                db.run(f"DELETE FROM {db.own('cursors')} WHERE stream = ? AND target = ?", (stream, ours))
            db.unmark(stream, target)

    def close(self) -> None:
        self._context = None

    def _opened(self) -> TargetContext:
        if self._context is None:
            raise TargetRefused(f"the {self.kind} target is not open")
        return self._context


def _take_over(db: Database, context: TargetContext) -> None:
    """From here on only this run may write; lower epochs are refused, once there is something to protect."""
    cursors, owner = db.own("cursors"), (context.stream, context.target)
    taken = db.run(
        f"UPDATE {cursors} SET epoch = ?, run = ? WHERE stream = ? AND target = ? AND (epoch <= ? OR seq IS NULL)",
        (context.epoch, context.run_id, *owner, context.epoch),
    )
    if taken:
        return
    higher = db.rows(f"SELECT epoch FROM {cursors} WHERE stream = ? AND target = ?", owner)
    if higher:
        raise _fenced(db, context, higher[0][0])
    db.run(
        f"INSERT INTO {cursors} (stream, target, epoch, run) VALUES (?, ?, ?, ?)",
        (*owner, context.epoch, context.run_id),
    )


def _claim(db: Database, context: TargetContext, range: SeqRange, position: int) -> bool:
    """Compare and set the cursor. False: the target has the batch already."""
    # A baseline ends where it starts: a cursor that is there says that it was delivered.
    start = range.start - 1 if _is_baseline(range) else range.start
    claimed = db.run(
        f"UPDATE {db.own('cursors')} SET journal_id = ?, seq = ?, position = ? "
        "WHERE stream = ? AND target = ? AND run = ? "
        "AND (seq IS NULL OR (journal_id = ? AND seq = ?) OR (journal_id <> ? AND seq <= ?))",
        (
            *(context.journal_id, range.end, position),
            *(context.stream, context.target, context.run_id),
            *(context.journal_id, start, context.journal_id, range.start),
        ),
    )
    if claimed:
        return True
    cursor = _read_cursor(db, context)
    if cursor and _is_owner(db, context) and cursor.journal_id == context.journal_id and range.end <= cursor.seq:
        return False
    raise _refusal(db, context, range)


def _is_baseline(range: SeqRange) -> bool:
    return range.start == range.end


def _refusal(db: Database, context: TargetContext, range: SeqRange) -> TargetRefused:
    """Why a batch is not the target's next one."""
    if not _is_owner(db, context):
        rows = db.rows(f"SELECT epoch FROM {db.own('cursors')} WHERE stream = ? AND target = ?", _owner(context))
        return _fenced(db, context, rows[0][0] if rows else None)
    cursor = _read_cursor(db, context)
    seq = cursor.seq if cursor else None
    return TargetRefused(
        f"{db.where}: a batch that starts at seq {range.start} does not follow seq {seq}",
        hint="the stream's state and this database do not belong together",
    )


def _fenced(db: Database, context: TargetContext, epoch: int | None) -> TargetRefused:
    by = f"epoch {epoch} has taken over" if epoch is not None else "its cursor is gone"
    return TargetRefused(
        f"{db.where}: delivery epoch {context.epoch} may not write any more, {by}",
        hint="another process delivers this stream; let only one run",
    )


def _is_owner(db: Database, context: TargetContext) -> bool:
    runs = db.rows(f"SELECT run FROM {db.own('cursors')} WHERE stream = ? AND target = ?", _owner(context))
    return runs == [(context.run_id,)]


def _read_cursor(db: Database, context: TargetContext) -> TargetCursor | None:
    rows = db.rows(
        f"SELECT journal_id, epoch, seq, position FROM {db.own('cursors')} WHERE stream = ? AND target = ?",
        _owner(context),
    )
    return TargetCursor(*rows[0]) if rows and rows[0][2] is not None else None


def _owner(context: TargetContext) -> tuple[str, str]:
    return context.stream, context.target
