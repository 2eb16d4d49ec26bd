"""Tables of a database copied anew while changes go on coming. See `targets.base.Reloadable` for the rules.

A step is one transaction. A mirror with a key gets its rows as a replay brings changes: one that it has in a newer
version is left alone, and so is one that a newer batch has removed, which a *tombstone* tells. The first step makes
rows that have the very version of the copy older by one: they may be of an earlier try, or of the change that was
the last one then. So everything that is still older after the last step is not in the source, and goes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pyarrow as pa

from millstream.failpoint import failpoint
from millstream.keyrange import KeyColumn, KeyRange, Operand
from millstream.latest import SEQ, Latest, latest, one_letter, whole
from millstream.model import Op
from millstream.targets.base import LaneBatch, Part, ReloadStep, TargetContext
from millstream.targets.lanes.changelog import write_changes
from millstream.targets.lanes.database import Database, LaneOptions, quoted
from millstream.targets.lanes.isolating import Isolating
from millstream.targets.lanes.mirror import clear, insert_rows
from millstream.targets.lanes.replaying import bury_newer, hold, restore, truncated_at
from millstream.targets.lanes.runs import Run, ahead, runs
from millstream.targets.lanes.tables import Prepared, prepare


def reload_name(target: str) -> str:
    """Under which name `cursors` says which copy of a table a changelog got last. No target has such a name."""
    return f"{target} reload"


def filling_name(target: str) -> str:
    """Under which name `cursors` says that the first rows of a target have not all come. No target has such a name."""
    return f"{target} filling"


def is_filling(db: Database, context: TargetContext) -> bool:
    """Whether the target says that it is not whole yet."""
    owner = (context.stream, filling_name(context.target))
    return bool(db.rows(f"SELECT 1 FROM {db.own('cursors')} WHERE stream = ? AND target = ?", owner))


def set_filling(db: Database, context: TargetContext, filling: bool) -> None:
    """Write that down, or take it back."""
    owner = (context.stream, filling_name(context.target))
    db.run(f"DELETE FROM {db.own('cursors')} WHERE stream = ? AND target = ?", owner)
    if filling:
        values = (*owner, context.epoch, context.run_id)
        db.run(f"INSERT INTO {db.own('cursors')} (stream, target, epoch, run) VALUES (?, ?, ?, ?)", values)


def remember_removed(db: Database, prepared: Prepared, run: Run, context: TargetContext) -> None:
    """Leave tombstones for what a run of the next batch removes, while tables are copied."""
    if prepared.key:
        found = run.latest or latest(run.changes, prepared.key)
    else:
        cut = np.flatnonzero(one_letter(whole(run.changes["_ms_op"])) == Op.TRUNCATE)
        truncated = int(run.changes[SEQ][int(cut[-1])].as_py()) if len(cut) else None
        found = Latest(truncated, run.changes.slice(0, 0), run.changes.slice(0, 0))
    bury_newer(db, prepared, found, context)


@dataclass(frozen=True)
class ReloadLane:
    """The executor side of one step. A `Lane`: the step is one task and one transaction."""

    database: type[Database]
    options: LaneOptions
    context: TargetContext
    step: ReloadStep

    def deliver(self, batch: LaneBatch) -> bool:
        opening = self.database(self.options)
        opening.takes_back = batch.isolate
        with opening as db:
            with db.transaction():
                hold(db, self.context)
                mirrors = self.options.write == "mirror"
                if not mirrors and not self._claim(db):
                    return False
                db.mark(self.context)
                for part in batch.parts:
                    self._write(db, part, mirrors=mirrors, isolate=batch.isolate)
                db.settle()
                batch.check_complete()
                failpoint("reload.lane_written")
            failpoint("reload.lane_committed")
        return True

    def _write(self, db: Database, part: Part, *, mirrors: bool, isolate: bool) -> None:
        about = (part.relation, part.relation_id, self.context, self.options)
        within = self.step.within
        prepared = prepare(db, *about, renewing=mirrors and self.step.first and within is None)
        only = "" if within is None else f" AND {range_condition(db, prepared, within)}"
        soft, isolating = self.options.deletes == "soft", Isolating(db) if isolate else None
        if mirrors and self.step.first:
            _make_older(db, prepared, self.step.seq, only)
        if mirrors and not prepared.key:
            # Its rows are all of the table's, and cannot be told apart: what is older goes before they come.
            clear(db, prepared, self.step.seq, soft=soft)
            if truncated_at(db, prepared, self.context) > self.step.seq:
                _read_on(part)
                return
        for run in ahead(runs([part])):
            write = self._writing(db, prepared, run, mirrors=mirrors, soft=soft)
            if isolating is None:
                write(run.changes)
            else:
                isolating.write(run, prepared.key, write)
        if isolating is not None:
            isolating.check()
        if mirrors and prepared.key and self.step.last:
            clear(db, prepared, self.step.since, soft=soft, only=only)

    def _writing(
        self, db: Database, prepared: Prepared, run: Run, *, mirrors: bool, soft: bool
    ) -> Callable[[pa.Table], None]:
        if not mirrors:
            return partial(write_changes, db, prepared)
        if not prepared.key:
            return partial(insert_rows, db, prepared, soft=soft)
        return lambda changes: restore(db, prepared, replace(run, changes=changes), self.context, soft=soft)

    def _claim(self, db: Database) -> bool:
        """Note that the changelog gets this copy. False: it has it already."""
        cursors, owner = db.own("cursors"), (self.context.stream, reload_name(self.context.target))
        known = db.rows(f"SELECT epoch FROM {cursors} WHERE stream = ? AND target = ?", owner)
        if known and known[0][0] == self.step.mark:
            return False
        db.run(f"DELETE FROM {cursors} WHERE stream = ? AND target = ?", owner)
        db.run(
            f"INSERT INTO {cursors} (stream, target, epoch, run, journal_id, seq, position) "
            "VALUES (?, ?, ?, ?, ?, ?, 0)",
            (*owner, self.step.mark, self.context.run_id, self.context.journal_id, self.step.seq),
        )
        return True


def _make_older(db: Database, prepared: Prepared, seq: int, only: str) -> None:
    db.run(f"UPDATE {prepared.table} SET _ms_seq = {seq - 1} WHERE _ms_seq = {seq}{only}")


def range_condition(db: Database, prepared: Prepared, within: KeyRange) -> str:
    """The range of a table's key as this database says it."""
    types = {column.name: column.type.lower() for column in prepared.columns}

    def operand(column: KeyColumn) -> Operand:
        own, textual = quoted(column.name), not types[column.name].startswith(("date", "timestamp", "uuid"))
        if db.kind != "postgres" or column.kind == "integer" or not textual:
            return Operand(own, textual)
        return Operand(f'{own} COLLATE "C"', indexed=own)

    return within.sql(operand)


def _read_on(part: Part) -> None:
    """The table was emptied since: its rows are counted, and are nothing any more."""
    for _ in part.batches:
        pass
