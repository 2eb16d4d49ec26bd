"""Changes that a database has had before, delivered once more.

A changelog gets them again, with the replay's number in `_ms_epoch`; a row of `cursors`, named after the target and
`replay`, says how far it is, in the transaction that brings them. A mirror gets only what it lacks: batches come
newest first, so that the first word on a key is the last one that the source had. What a newer batch has removed is
remembered as a *tombstone* until the replay is over: an older change of such a row must not bring it back, not even
for a moment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millstream.changelog import EPOCH
from millstream.errors import MissingBase, TargetRefused
from millstream.failpoint import failpoint
from millstream.latest import SEQ, Ints, Latest, latest, whole, whole_numbers
from millstream.model import SeqRange
from millstream.targets.base import LaneBatch, Part, TargetContext
from millstream.targets.lanes.changelog import write_changes
from millstream.targets.lanes.database import ColumnDef, Database, LaneOptions, Values, matches
from millstream.targets.lanes.mirror import Mirror
from millstream.targets.lanes.runs import Run, by_table, runs
from millstream.targets.lanes.tables import Prepared, prepare
from millstream.targets.rejects import RowsRejected, rejected
from millstream.wire.json_columns import json_text

ALL_KEYS = ""
"""The key of a tombstone that is a whole table's: it was truncated."""


def replay_name(target: str) -> str:
    """Under which name `cursors` says how far a replay is. No target has such a name."""
    return f"{target} replay"


@dataclass(frozen=True)
class ReplayLane:
    """The executor side of a replay. A `Lane`: one task and one transaction for each of its batches."""

    database: type[Database]
    options: LaneOptions
    context: TargetContext
    mark: int
    messages: bool
    current: frozenset[int]
    """The relations under which tables are as the mirror has them. What came before an ALTER is left out there."""

    def deliver(self, batch: LaneBatch) -> bool:
        with self.database(self.options) as db:
            with db.transaction():
                hold(db, self.context)
                mirrors = self.options.write == "mirror"
                if not mirrors and not self._claim(db, batch.range):
                    return False
                db.mark(self.context)
                for parts in db.ordered(by_table(batch.parts)):
                    self._write(db, parts, mirrors=mirrors)
                db.settle()
                batch.check_complete()
                failpoint("replay.lane_written")
            failpoint("replay.lane_committed")
        return True

    def _write(self, db: Database, parts: Sequence[Part], *, mirrors: bool) -> None:
        found = [run for run in runs(parts) if run.relation_id or self.messages]
        if not mirrors:
            for run in found:
                prepared = prepare(db, run.relation, run.relation_id, self.context, self.options)
                _add_epoch(db, run)
                epochs = pa.array(np.full(run.changes.num_rows, self.mark))
                write_changes(db, prepared, run.changes, [Values(ColumnDef(EPOCH, "bigint"), epochs)])
            return
        for run in reversed([run for run in found if run.relation_id in self.current]):
            prepared = prepare(db, run.relation, run.relation_id, self.context, self.options)
            if prepared.key:
                restore(db, prepared, run, self.context, soft=self.options.deletes == "soft")

    def _claim(self, db: Database, range: SeqRange) -> bool:
        """Note how far the replay is with this batch. False: it was that far already."""
        cursors, owner = db.own("cursors"), (self.context.stream, replay_name(self.context.target))
        known = db.rows(f"SELECT epoch, seq FROM {cursors} WHERE stream = ? AND target = ?", owner)
        if known and known[0][0] == self.mark and known[0][1] >= range.end:
            return False
        db.run(f"DELETE FROM {cursors} WHERE stream = ? AND target = ?", owner)
        db.run(
            f"INSERT INTO {cursors} (stream, target, epoch, run, journal_id, seq, position) "
            "VALUES (?, ?, ?, ?, ?, ?, 0)",
            (*owner, self.mark, self.context.run_id, self.context.journal_id, range.end),
        )
        return True


def forget_tombstones(db: Database, context: TargetContext) -> None:
    """Of a replay that is over, or begins: what is removed from now on is guarded by the cursor alone."""
    owner = (context.stream, context.target)
    db.run(f"DELETE FROM {db.own('tombstones')} WHERE stream = ? AND target = ?", owner)


def key_text(rows: pa.Table, key: Sequence[str]) -> pa.StringArray:
    """The keys of rows, each as one text."""
    return pc.binary_join_element_wise(*(json_text(whole(rows[name])) for name in key), ",")


def refuse_unknown(run: Run, found: Latest, lacking: Ints, key: Sequence[str]) -> None:
    """Raise RowsRejected for rows which the mirror lacks, and of which the changes do not tell every value.

    What the mirror has under a key that the row had before may be another row by now: it cannot help.
    """
    unknown = reduce(np.logical_or, found.kept.values(), np.zeros(found.rows.num_rows, bool))
    seqs = found.rows[SEQ].take(whole_numbers(lacking[unknown[lacking]])).to_pylist()
    lacked = set(found.rows[SEQ].take(whole_numbers(lacking)).to_pylist())
    seqs += [seq for seq in found.missing if seq in lacked]
    if seqs:
        changes = run.changes.filter(pc.is_in(run.changes[SEQ], pa.array(seqs, pa.int64())))
        why = MissingBase(f"{run.relation.table}: a row that the mirror lacks was changed without all of it being sent")
        raise RowsRejected(rejected(run.relation, run.relation_id, changes, key, why))


def hold(db: Database, context: TargetContext) -> None:
    """Raise TargetRefused unless the target is this run's; if so, nobody takes it over before the commit."""
    held = db.run(
        f"UPDATE {db.own('cursors')} SET run = run WHERE stream = ? AND target = ? AND run = ?",
        (context.stream, context.target, context.run_id),
    )
    if not held:
        raise TargetRefused(
            f"{db.where}: delivery epoch {context.epoch} may not write any more, another one has taken over",
            hint="another process delivers this stream; let only one run",
        )


def _add_epoch(db: Database, run: Run) -> None:
    """Give a changelog the column, when something comes to it once more for the first time."""
    if EPOCH not in (db.columns(run.relation) or {}):
        db.run(f"ALTER TABLE {db.table(run.relation)} ADD COLUMN {EPOCH} bigint")


def bury_newer(db: Database, prepared: Prepared, found: Latest, context: TargetContext) -> None:
    """Remember what the next batch in order removes: its word is newer than any that is remembered."""
    owner = (context.stream, context.target, prepared.table)
    keys, _ = _stones(prepared, found)
    if len(keys):
        stage = db.stage(f"unburied_{prepared.relation_id}", [Values(ColumnDef("k", "text"), keys)])
        mine = f"DELETE FROM {db.own('tombstones')} WHERE stream = ? AND target = ? AND name = ?"
        db.run(f"{mine} AND key IN (SELECT k FROM {stage})", owner)
        _bury(db, prepared, found, owner)


def restore(db: Database, prepared: Prepared, run: Run, context: TargetContext, *, soft: bool) -> None:
    """Write what the mirror lacks of these changes, and bury what they have removed."""
    found = latest(run.changes, prepared.key)
    mirror, owner = Mirror(db, prepared, soft), (context.stream, context.target, prepared.table)
    lacking = _lacking(db, mirror, prepared, found.rows, owner)
    refuse_unknown(run, found, lacking, prepared.key)
    rows = found.rows.take(whole_numbers(lacking))
    special = {name: texts.take(whole_numbers(lacking)) for name, texts in found.special.items()}
    mirror.write(Latest(found.truncated, found.gone, rows, special=special))
    _bury(db, prepared, found, owner)


def _lacking(db: Database, mirror: Mirror, prepared: Prepared, rows: pa.Table, owner: tuple[str, str, str]) -> Ints:
    """Which rows the mirror has in no version as new as theirs, though no newer change has removed them."""
    if not rows.num_rows:
        return np.zeros(0, np.int64)
    stones = f"{db.own('tombstones')} AS d WHERE d.stream = ? AND d.target = ? AND d.name = ?"
    truncated = _truncated_at(db, owner)
    stage = db.stage(
        f"again_{prepared.relation_id}",
        [
            *mirror.keys(rows),
            Values(ColumnDef("n", "bigint"), whole_numbers(np.arange(rows.num_rows))),
            Values(ColumnDef("k", "text"), key_text(rows, prepared.key)),
        ],
    )
    found = db.rows(
        f"SELECT s.n FROM {stage} AS s WHERE s.v >= ? "
        f"AND NOT EXISTS (SELECT 1 FROM {prepared.table} AS t WHERE {matches(prepared.key)} AND t._ms_seq >= s.v) "
        f"AND NOT EXISTS (SELECT 1 FROM {stones} AND d.key = s.k AND d.seq > s.v)",
        (truncated, *owner),
    )
    return np.array(sorted(number for (number,) in found), np.int64)


def truncated_at(db: Database, prepared: Prepared, context: TargetContext) -> int:
    """The seq of the last truncate of the table that is remembered; -1 if there was none."""
    return _truncated_at(db, (context.stream, context.target, prepared.table))


def _truncated_at(db: Database, owner: tuple[str, str, str]) -> int:
    stones = f"{db.own('tombstones')} AS d WHERE d.stream = ? AND d.target = ? AND d.name = ?"
    ((truncated,),) = db.rows(f"SELECT max(d.seq) FROM {stones} AND d.key = ?", (*owner, ALL_KEYS))
    return -1 if truncated is None else int(truncated)


def _stones(prepared: Prepared, found: Latest) -> tuple[pa.StringArray, pa.Int64Array]:
    """What is gone: keys, and since which change."""
    keys, seqs = pa.array([], pa.string()), pa.array([], pa.int64())
    if prepared.key:
        keys, seqs = key_text(found.gone, prepared.key).cast(pa.string()), whole(found.gone[SEQ])
    if found.truncated is not None:
        keys = pa.concat_arrays([keys, pa.array([ALL_KEYS])])
        seqs = pa.concat_arrays([seqs, pa.array([found.truncated], pa.int64())])
    return keys, seqs


def _bury(db: Database, prepared: Prepared, found: Latest, owner: tuple[str, str, str]) -> None:
    """Remember what is gone. Batches come newest first, so a tombstone that is there already is the newer one."""
    keys, seqs = _stones(prepared, found)
    if not len(keys):
        return
    values = [Values(ColumnDef("k", "text"), keys), Values(ColumnDef("v", "bigint"), seqs)]
    stage = db.stage(f"buried_{prepared.relation_id}", values)
    stones = db.own("tombstones")
    db.run(
        f"INSERT INTO {stones} (stream, target, name, key, seq) "
        f"SELECT CAST(? AS text), CAST(? AS text), CAST(? AS text), s.k, s.v FROM {stage} AS s "
        f"WHERE NOT EXISTS (SELECT 1 FROM {stones} AS d "
        "WHERE d.stream = ? AND d.target = ? AND d.name = ? AND d.key = s.k)",
        (*owner, *owner),
    )
