"""Target `delta`: a Delta table for each table of the source, as a mirror or as a changelog, exactly once.

    PATH/
      schema.table/            a Delta table, written by delta-rs in an executor's task; odd characters as +XX
      _millstream/             owner, lock and commits, as every directory of ours has them; in staging what tasks
                               have read ahead

A batch is one task, and one commit of each table. A commit carries how far the table is (Delta's application
transaction) and goes through only if the table is still the one whose transaction was looked at: so a batch
that comes again, whoever brings it, finds what is there already and adds the rest. When all tables have it,
the batch's commit file is written, which is the target's cursor; a reader that wants whole batches across
tables reads the versions that commits list.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import BaseModel, ConfigDict, Field

from millstream.changelog import BEFORE, schema
from millstream.errors import DependencyError, MissingBase, RowRefused, TargetRefused, TargetUnavailable
from millstream.failpoint import failpoint
from millstream.latest import SEQ, whole
from millstream.model import Json, Relation, SeqRange
from millstream.targets.base import (
    Capabilities,
    Correction,
    Delivery,
    LaneBatch,
    Reader,
    Receipt,
    TargetContext,
    TargetCursor,
)
from millstream.targets.changelogs import ChangelogReader
from millstream.targets.constants import constants
from millstream.targets.deltas.changes import DeltaChanges
from millstream.targets.deltas.evolving import refuse_other_names
from millstream.targets.deltas.marks import app_of, commit, forget_baselines, owner_of
from millstream.targets.deltas.mirror import has_newer, mirror_schema, mirrored, rows_to_write, write_mirror
from millstream.targets.deltas.misfits import misfits, row_error
from millstream.targets.deltas.partitions import refuse_homeless_keys
from millstream.targets.deltas.reading import MirrorReader, correct_mirror, table_path
from millstream.targets.deltas.replaying import Tombstones, restore_runs, write_marked
from millstream.targets.deltas.spool import Spooled, spool
from millstream.targets.deltas.tables import Handle, lake_schema, open_table
from millstream.targets.directory import OwnDirectory, as_target_errors, make_directory
from millstream.targets.lanes.changelog import as_json
from millstream.targets.lanes.runs import Run
from millstream.targets.lanes.tables import mirror_key
from millstream.targets.rejects import AT_ONCE, Reject, RowsRejected, reject

if TYPE_CHECKING:
    from deltalake import CommitProperties

TRIES = 10
"""How often a commit is tried again when somebody else (a compaction, a reader's repair) was faster."""


class DeltaOptions(BaseModel):
    """Options of a target of kind `delta`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: Path = Field(description="The directory of the tables. One stream and target per directory.")
    write: Literal["mirror", "changelog"] = Field(
        "mirror", description="`mirror`: a table equal to the source's; `changelog`: every change, in order."
    )
    deletes: Literal["hard", "soft"] = Field(
        "hard", description="In a mirror: `hard` removes the row, `soft` keeps it with `_ms_deleted` true."
    )
    partition_by: dict[str, list[str]] = Field(
        default_factory=dict,
        description="By table (`schema.table`) the columns by whose values its files are kept apart.",
    )
    compact_files: int = Field(
        100, gt=1, description="A table of more data files than this is compacted after a batch, and old ones removed."
    )


class DeltaTarget:
    """The driver side. See `targets.base.Target` for the contract."""

    kind = "delta"
    capabilities = Capabilities(
        delivery=Delivery.LANE,
        keeps_cursor=True,
        needs_key=False,
        writes_deletes=True,
        evolves_schema=True,
        parallel=False,
    )

    def __init__(self, options: DeltaOptions) -> None:
        self._options = options
        self._directory = OwnDirectory(options.path.absolute())
        self._context: TargetContext | None = None
        self._cursor: TargetCursor | None = None

    def open(self, context: TargetContext) -> None:
        _need_deltalake()
        with as_target_errors(self._directory.root):
            make_directory(self._directory.own / "staging")
            self._cursor = self._directory.open(context)
        self._context = context

    def cursor(self) -> TargetCursor | None:
        return self._cursor

    def recover(self, cursor: TargetCursor | None) -> None:
        """Remove what killed tasks have read ahead. What a batch left half done is completed when it comes again.

        A baseline that was never published does not come again as it was, or not at all: its rows go.
        """
        context = self._opened()
        with as_target_errors(self._directory.root), self._directory.locked():
            self._directory.check_owner(context)
            for left in list((self._directory.own / "staging").iterdir()):
                shutil.rmtree(left)
            if cursor is None:
                forget_baselines(self._directory.root, context)

    def stager(self) -> DeltaLane:
        return DeltaLane(str(self._directory.root), self._options, self._opened())

    def publish(self, range: SeqRange, end_position: int, receipts: Sequence[Receipt]) -> None:
        context = self._opened()
        if self._cursor is not None and range.end <= self._cursor.seq:
            return
        with as_target_errors(self._directory.root), self._directory.locked():
            self._directory.check_owner(context)
            self._cursor = self._directory.cursor()
        if self._cursor is None or self._cursor.seq < range.end:
            raise TargetRefused(f"{self._directory.root} does not have the batch up to seq {range.end}")

    @property
    def mirrors(self) -> bool:
        return self._options.write == "mirror"

    def redeliver(self, relation: Relation, relation_id: int, change: pa.Table) -> bool:
        return self.stager().redeliver(relation, relation_id, change)

    def replayer(self, mark: int, *, messages: bool, current: frozenset[int]) -> DeltaLane:
        return replace(self.stager(), replay=mark, messages=messages, current=current)

    def publish_replay(self, mark: int, range: SeqRange, receipts: Sequence[Receipt]) -> None:
        """Nothing: the task has committed it."""

    def settle_replay(self) -> None:
        with as_target_errors(self._directory.root):
            shutil.rmtree(self._directory.own / "tombstones", ignore_errors=True)

    def reader(self) -> Reader:
        root = str(self._directory.root)
        if self._options.write == "mirror":
            return MirrorReader(root, self._options.deletes == "soft")
        return ChangelogReader(DeltaChanges(root))

    @property
    def repairs(self) -> bool:
        return self.mirrors

    def repairer(self) -> DeltaRepairer:
        return DeltaRepairer(self.stager())

    def release(self, stream: str, target: str) -> None:
        """Leave the tables; no stream writes into this directory any more."""
        with as_target_errors(self._directory.root):
            self._directory.release(stream, target)

    def close(self) -> None:
        self._context = None

    def _opened(self) -> TargetContext:
        if self._context is None:
            raise TargetRefused(f"{self._directory.root} is not open")
        return self._context


@dataclass(frozen=True)
class DeltaLane:
    """The executor side. See `targets.base.Lane` for the contract."""

    root: str
    options: DeltaOptions
    context: TargetContext
    replay: int | None = None
    """The number of the replay that this is for; None: batches are the next ones."""
    messages: bool = True
    current: frozenset[int] = frozenset()
    """In a replay, the relations under which tables are as the mirror has them."""

    def deliver(self, batch: LaneBatch) -> bool:
        directory = OwnDirectory(Path(self.root))
        if self.replay is not None:
            return self._replay(batch, directory, self.replay)
        with as_target_errors(directory.root), tempfile.TemporaryDirectory(dir=directory.own / "staging") as scratch:
            if self._is_there(directory, batch.range):
                return False
            # A table's commit cannot be taken back: all changes are there before the first one.
            spooled = spool(batch, Path(scratch), messages=self.options.write == "changelog")
            batch.check_complete()
            failpoint("delta.read")
            written = [self._write(table, batch) for table in spooled]
            failpoint("delta.written")
            with directory.locked():
                directory.check_owner(self.context)
                directory.write_commit(self.context, batch.range, batch.end_position, written)
            failpoint("delta.committed")
        return True

    @property
    def soft(self) -> bool:
        return self.options.deletes == "soft"

    def _replay(self, batch: LaneBatch, directory: OwnDirectory, mark: int) -> bool:
        """Deliver a batch once more. Each table is committed by itself; the cursor stays where it is."""
        with as_target_errors(directory.root), tempfile.TemporaryDirectory(dir=directory.own / "staging") as scratch:
            with directory.locked():
                directory.check_owner(self.context)
            logs = self.options.write == "changelog"
            spooled = spool(batch, Path(scratch), messages=logs and self.messages)
            batch.check_complete()
            for table in spooled:
                writer = _Writer(self, table.relation)
                if logs:
                    write_marked(writer, table.runs, _logged, mark)
                elif mirror_key(table.relation):
                    stones = Tombstones(directory.own / "tombstones" / writer.name)
                    restore_runs(writer, table.runs, stones, batch.range, self)
                writer.finish()
            failpoint("replay.tables_committed")
        return True

    def _is_there(self, directory: OwnDirectory, range: SeqRange) -> bool:
        with directory.locked():
            directory.check_owner(self.context)
            cursor = directory.cursor()
        if cursor and cursor.journal_id == self.context.journal_id and range.end <= cursor.seq:
            return True
        directory.check_follows(self.context, cursor, range)
        return False

    def redeliver(self, relation: Relation, relation_id: int, change: pa.Table) -> bool:
        """See `targets.base.Rejecting`."""
        directory = OwnDirectory(Path(self.root))
        with as_target_errors(directory.root), directory.locked():
            directory.check_owner(self.context)
            return _Writer(self, relation).write_again(Run(relation, relation_id, change))

    def _write(self, table: Spooled, batch: LaneBatch) -> Json:
        """Bring one table to the end of the batch. Returns what the batch's commit says of it."""
        writer, range = _Writer(self, table.relation), batch.range
        if range.start == range.end:
            with self._isolating(writer, [run() for run in table.runs], batch, baseline=True) as found:
                writer.write_baseline(table.relation, found, range.end)
        else:
            for read in table.runs:
                with self._isolating(writer, [read()], batch, baseline=False) as (run,):
                    writer.write_changes(run)
        return {"table": table.relation.table, "path": writer.name, "version": writer.finish()}

    @contextmanager
    def _isolating(
        self, writer: _Writer, runs: Sequence[Run], batch: LaneBatch, *, baseline: bool
    ) -> Iterator[Sequence[Run]]:
        """While runs are written: find the rows that cannot be, if that is asked for."""
        try:
            yield runs
        except MissingBase as missing:
            if not batch.isolate:
                raise
            raise RowsRejected(_rejects(runs[0], missing)) from None
        except RowRefused:
            if not batch.isolate:
                raise
            staging = OwnDirectory(Path(self.root)).own / "staging"
            rejects: list[Reject] = []
            for number, run in enumerate(runs):
                with tempfile.TemporaryDirectory(dir=staging) as scratch:
                    rejects += writer.rejects(run, Path(scratch) / str(number), baseline=baseline)
            if not rejects:
                raise
            raise RowsRejected(rejects[:AT_ONCE]) from None


class _Writer:
    """Commits of one table."""

    def __init__(self, lane: DeltaLane, relation: Relation) -> None:
        self._options = lane.options
        self._mirrors = lane.options.write == "mirror"
        self._owner = owner_of(lane.context)
        self.app = app_of(lane.context)
        self._path = table_path(lane.root, relation)
        self.name = self._path.name
        self._partition_by = lane.options.partition_by.get(relation.table, [])

    def write_changes(self, run: Run) -> None:
        """The changes of a run that the table does not have yet, in one commit that says so."""
        wanted = self.schema_of(run.relation)
        existing = Handle.existing(self._path)
        known = existing.transaction_version(self.app) if existing else None
        if known is not None and run.changes[SEQ][-1].as_py() <= known:
            # Of a batch that comes again. The table's columns may be those of later changes.
            return

        def commit(table: Handle) -> None:
            changes = self._not_done(table, run.changes)
            if not changes.num_rows:
                return
            said = self.said(int(changes[SEQ][-1].as_py()))
            if self._mirrors:
                write_mirror(table, run.relation, changes, said, soft=self._options.deletes == "soft")
            else:
                table.append(_logged(changes).cast(wanted), said)

        self.attempt(wanted, run.relation, commit)
        failpoint("delta.table_committed")

    def rejects(self, run: Run, scratch: Path, *, baseline: bool) -> list[Reject]:
        """The changes of a run that the table does not take, of those that it does not have yet."""
        wanted = self.schema_of(run.relation)
        table = open_table(self._path, run.relation.table, wanted, self._owner, self._partition_by)
        changes, soft = run.changes if baseline else self._not_done(table, run.changes), self._options.deletes == "soft"
        if not self._mirrors:
            rows = _logged(changes).cast(wanted)
        elif baseline:
            rows = mirrored(changes, mirror_schema(run.relation, soft=soft)).cast(wanted)
        else:
            rows = rows_to_write(table, run.relation, changes, soft=soft)
        found = misfits(table, run.relation.table, rows, partial(self._check, run.relation, table), scratch)
        key = mirror_key(run.relation) if self._mirrors else ()
        folded = self._mirrors and not baseline
        rejects = []
        for place, refused in found:
            # A row of a mirror is what its last change left.
            at = pc.index(changes[SEQ], rows[SEQ][place]).as_py() if folded else place
            rejects.append(reject(run.relation, run.relation_id, changes.slice(at, 1), key, refused))
        return rejects

    def _check(self, relation: Relation, table: Handle, rows: pa.Table) -> None:
        if self._mirrors:
            refuse_homeless_keys(relation.table, rows, table.partitions(), mirror_key(relation))

    def _not_done(self, table: Handle, changes: pa.Table) -> pa.Table:
        done = table.transaction_version(self.app)
        return changes if done is None else changes.filter(pc.greater(changes[SEQ], done))

    def write_again(self, run: Run) -> bool:
        """One change that is not of the batch at hand. False if the table has it, or a newer row, already."""
        done = False
        existing = Handle.existing(self._path)
        if self._mirrors and existing is not None:
            refuse_other_names(run.relation, existing.schema(), self.schema_of(run.relation))

        def commit(table: Handle) -> None:
            nonlocal done
            if self._mirrors:
                done, soft = not has_newer(table, run.relation, run.changes), self._options.deletes == "soft"
                if done:
                    write_mirror(table, run.relation, run.changes, self.said(None), soft=soft)
                return
            events = table.read(["_ms_event_id"])["_ms_event_id"]
            done = not pc.any(pc.equal(events, run.changes["_ms_event_id"][0])).as_py()
            if done:
                table.append(_logged(run.changes).cast(self.schema_of(run.relation)), self.said(None))

        self.attempt(self.schema_of(run.relation), run.relation, commit)
        return done

    def write_baseline(self, relation: Relation, found: Sequence[Run], seq: int) -> None:
        """All rows of a table that has nothing yet, or what a try that was killed left in it.

        What is there is never kept: it is of another snapshot, even where that had the same seq.
        """
        if not found:
            self._clear(relation, seq)
        for number, run in enumerate(found):
            wanted = self.schema_of(run.relation)
            last = number == len(found) - 1

            def commit(table: Handle, run: Run = run, first: bool = number == 0, last: bool = last) -> None:
                soft = self._options.deletes == "soft"
                if self._mirrors:
                    rows = mirrored(run.changes, mirror_schema(run.relation, soft=soft))
                    self._check(run.relation, table, rows)
                else:
                    rows = _logged(run.changes)
                said = self.said(seq if last else None, baseline=True)
                table.append(rows.cast(lake_schema(rows.schema)), said, overwrite=first)

            self.attempt(wanted, run.relation, commit)
            failpoint("delta.baseline_part_committed")

    def _clear(self, relation: Relation, seq: int) -> None:
        if Handle.existing(self._path) is None:
            return
        wanted = self.schema_of(relation)
        self.attempt(wanted, relation, lambda table: table.append(wanted.empty_table(), self.said(seq), overwrite=True))

    def correct(self, wrong: Correction, seq: int) -> None:
        """Replace wrong rows. How far the table is stays as it is."""
        wanted = self.schema_of(wrong.relation)
        right = pa.Table.from_batches(list(wrong.rows), schema(wrong.relation))
        soft = self._options.deletes == "soft"
        said = self.said(None)
        self.attempt(wanted, wrong.relation, lambda table: correct_mirror(table, wrong, right, seq, said, soft=soft))

    def finish(self) -> int | None:
        """Keep the number of files small. Returns the table's version; None when there is no table."""
        table = Handle.existing(self._path)
        if table is None:
            return None
        if table.files() > self._options.compact_files:
            table.compact()
        return table.version()

    def schema_of(self, relation: Relation) -> pa.Schema:
        """The columns that the table has for a relation."""
        if self._mirrors:
            return lake_schema(mirror_schema(relation, soft=self._options.deletes == "soft"))
        return lake_schema(_logged(schema(relation).empty_table()).schema)

    def said(self, seq: int | None, app: str | None = None, *, baseline: bool = False) -> CommitProperties:
        """What a commit says: how far the table is then, in the words of an application."""
        return commit(app or self.app, seq, baseline=baseline)

    def attempt(self, wanted: pa.Schema, relation: Relation, commit: Callable[[Handle], None]) -> None:
        """Commit to the table, made or completed to have these columns; again if somebody else was faster."""
        from deltalake.exceptions import CommitFailedError, DeltaError

        constant = constants(relation) if self._mirrors else None
        for _ in range(TRIES):
            try:
                commit(open_table(self._path, relation.table, wanted, self._owner, self._partition_by, constant))
                return
            except CommitFailedError:
                continue
            except DeltaError as failed:
                # Its words may hold a row's value.
                raise row_error(relation.table, str(failed)) or TargetRefused(
                    f"{relation.table}: Delta does not take the batch ({type(failed).__name__})",
                    hint="see whether the table at this path was changed by somebody else",
                ) from None
        raise TargetUnavailable(f"{relation.table}: others commit to the table all the time")


@dataclass(frozen=True)
class DeltaRepairer:
    """See `targets.base.Repairer` for the contract: one commit of each table."""

    lane: DeltaLane

    def repair(self, seq: int, corrections: Sequence[Correction]) -> None:
        directory = OwnDirectory(Path(self.lane.root))
        with as_target_errors(directory.root):
            for wrong in corrections:
                with directory.locked():
                    directory.check_owner(self.lane.context)
                    cursor = directory.cursor()
                if cursor is None or (cursor.journal_id, cursor.seq) != (self.lane.context.journal_id, seq):
                    raise TargetRefused(f"{directory.root} does not stand at seq {seq}, so that nothing was repaired")
                _Writer(self.lane, wrong.relation).correct(wrong, seq)
                failpoint("repair.table_committed")


def _rejects(run: Run, missing: MissingBase) -> list[Reject]:
    rows = run.changes.filter(pc.is_in(run.changes[SEQ], pa.array(missing.seqs, pa.int64())))
    key = mirror_key(run.relation)
    each = (rows.slice(number, 1) for number in range(rows.num_rows))
    return [reject(run.relation, run.relation_id, row, key, missing) for row in each]


def _logged(changes: pa.Table) -> pa.Table:
    """Changes as a changelog has them: old rows as JSON text, since their columns come and go with the table's."""
    if BEFORE not in changes.column_names:
        return changes
    text = as_json(whole(changes[BEFORE]))
    return changes.set_column(changes.column_names.index(BEFORE), BEFORE, text)


def _need_deltalake() -> None:
    try:
        import deltalake  # noqa: F401 - only to see that it is there
    except ImportError as missing:
        raise DependencyError(
            "a delta target needs deltalake, which is not installed", hint="pip install 'millstream[delta]'"
        ) from missing
