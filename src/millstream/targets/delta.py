"""Target `delta`: a Delta table for each table of the source, as a mirror, a changelog or a history, exactly once.

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
from pathlib import Path
from typing import Literal, Self

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from millstream.errors import DependencyError, MissingBase, RowRefused, TargetRefused
from millstream.failpoint import failpoint
from millstream.latest import SEQ
from millstream.model import Relation, SeqRange
from millstream.targets.base import (
    Capabilities,
    Correction,
    Delivery,
    LaneBatch,
    Reader,
    Receipt,
    ReloadStep,
    TargetContext,
    TargetCursor,
)
from millstream.targets.changelogs import ChangelogReader
from millstream.targets.deltas.changes import DeltaChanges
from millstream.targets.deltas.correcting import copy_history
from millstream.targets.deltas.forms import Form, Write, form_of, logged
from millstream.targets.deltas.history import CURRENT
from millstream.targets.deltas.marks import forget_baselines
from millstream.targets.deltas.reading import LIVING, MirrorReader
from millstream.targets.deltas.reloading import copy_mirror, log_copy, remember_removed
from millstream.targets.deltas.replaying import Tombstones, check_versions, restore_runs, write_marked
from millstream.targets.deltas.spool import Spooled, spool
from millstream.targets.deltas.writer import Writer
from millstream.targets.directory import OwnDirectory, as_target_errors, make_directory, sync_directory
from millstream.targets.lanes.runs import Run
from millstream.targets.lanes.tables import mirror_key
from millstream.targets.rejects import AT_ONCE, Reject, RowsRejected, rejected

COMPACTED_SHARE = 10
"""Of so many tables of a batch one is compacted after it: those that are written alike come to it at the same time, and
the batch that would compact them all would be late."""


class DeltaOptions(BaseModel):
    """Options of a target of kind `delta`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: Path = Field(description="The directory of the tables. One stream and target per directory.")
    write: Write = Field(
        "mirror",
        description="`mirror`: a table equal to the source's; `changelog`: every change, in order; `scd2`: every "
        "version that a row has had, with `valid_from`, `valid_to` and `is_current`.",
    )
    deletes: Literal["hard", "soft"] = Field(
        "hard", description="In a mirror: `hard` removes the row, `soft` keeps it with `_ms_deleted` true."
    )
    dropped: Literal["keep", "drop"] = Field(
        "keep",
        description="In a mirror: a column that the source has no more stays with what it had (`keep`), or goes "
        "(`drop`).",
    )
    partition_by: dict[str, list[str]] = Field(
        default_factory=dict,
        description="By table (`schema.table`) the columns by whose values its files are kept apart.",
    )
    compact_files: int = Field(
        20,
        gt=1,
        description="A table is compacted after a batch when that saves so many small data files, and as many came "
        "since the last time.",
    )

    @model_validator(mode="after")
    def _refuse_what_means_nothing(self) -> Self:
        if self.deletes == "soft" and self.write == "scd2":
            raise PydanticCustomError(
                "deletes_of_scd2",
                "deletes: soft is for mirrors; write: scd2 keeps the last version of a row that is gone in any case, "
                "with its valid_to",
            )
        if self.dropped == "drop" and self.write != "mirror":
            raise PydanticCustomError("dropped_of_others", "dropped: drop is for mirrors")
        return self


class DeltaTarget:
    """The driver side. See `targets.base.Target` for the contract."""

    kind = "delta"
    capabilities = Capabilities(delivery=Delivery.LANE, keeps_cursor=True, parallel=False)

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
        return self._options.write != "changelog"

    def redeliver(self, relation: Relation, relation_id: int, change: pa.Table) -> bool:
        return self.stager().redeliver(relation, relation_id, change)

    def replayer(self, mark: int, *, only: frozenset[int] | None, current: frozenset[int]) -> DeltaLane:
        return replace(self.stager(), replay=mark, messages=only is None, current=current)

    def publish_replay(self, mark: int, range: SeqRange, receipts: Sequence[Receipt]) -> None:
        """Nothing: the task has committed it."""

    def settle_replay(self) -> None:
        with as_target_errors(self._directory.root):
            shutil.rmtree(self._directory.own / "tombstones", ignore_errors=True)

    @property
    def reloads_by_steps(self) -> bool:
        return self._options.write == "mirror"

    def remembering(self, renewed: frozenset[str] | None) -> DeltaLane:
        # A history is not made anew: what it has would be gone.
        renewed = renewed if self._options.write == "mirror" else frozenset()
        return replace(self.stager(), remembers=self.mirrors, renewed=renewed)

    def reloader(self, step: ReloadStep) -> DeltaLane:
        return replace(self.stager(), step=step)

    def publish_reload(self, step: ReloadStep, receipts: Sequence[Receipt]) -> None:
        """Nothing: the task has committed it."""

    def settle_reload(self) -> None:
        self.settle_replay()

    def filling(self) -> bool:
        return self._filling.is_dir()

    def set_filling(self, filling: bool) -> None:
        with as_target_errors(self._directory.root):
            if filling:
                make_directory(self._filling)
            elif self._filling.is_dir():
                self._filling.rmdir()
                sync_directory(self._filling.parent)

    @property
    def _filling(self) -> Path:
        return self._directory.own / "filling"

    def reader(self) -> Reader:
        root = str(self._directory.root)
        if self._options.write == "mirror":
            return MirrorReader(root, LIVING if self._options.deletes == "soft" else None)
        if self._options.write == "scd2":
            return MirrorReader(root, CURRENT)
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
        self.set_filling(False)

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
    step: ReloadStep | None = None
    """The step of a table's copy that this is for; None: batches are changes."""
    renewed: frozenset[str] | None = frozenset()
    """Tables that are made anew when they cannot follow their source's; None: all."""
    remembers: bool = False
    """Whether tables are being copied anew meanwhile: what is removed is remembered."""

    def deliver(self, batch: LaneBatch) -> bool:
        directory = OwnDirectory(Path(self.root))
        if self.replay is not None:
            return self._replay(batch, directory, self.replay)
        if self.step is not None:
            return self._reload(batch, directory, self.step)
        with as_target_errors(directory.root), tempfile.TemporaryDirectory(dir=directory.own / "staging") as scratch:
            if self._is_there(directory, batch.range):
                return False
            # A table's commit cannot be taken back: all changes are there before the first one.
            spooled = spool(batch, Path(scratch), messages=self.options.write == "changelog")
            batch.check_complete()
            failpoint("delta.read")
            written, room = [], -(-len(spooled) // COMPACTED_SHARE)
            for table in spooled:
                writer = Writer(self, table.relation)
                self._write(writer, table, batch)
                version = writer.finish(compacts=room > 0)
                room -= writer.compacted
                written.append({"table": table.relation.table, "path": writer.name, "version": version})
            failpoint("delta.written")
            with directory.locked():
                directory.check_owner(self.context)
                directory.write_commit(self.context, batch.range, batch.end_position, written)
            failpoint("delta.committed")
        return True

    @property
    def soft(self) -> bool:
        return self.options.deletes == "soft"

    @property
    def form(self) -> Form:
        return form_of(self.write, soft=self.soft)

    @property
    def write(self) -> Write:
        return self.options.write

    @property
    def compact_files(self) -> int:
        return self.options.compact_files

    @property
    def drops(self) -> bool:
        return self.options.dropped == "drop"

    def partitions(self, relation: Relation) -> list[str]:
        return self.options.partition_by.get(relation.table, [])

    def _replay(self, batch: LaneBatch, directory: OwnDirectory, mark: int) -> bool:
        """Deliver a batch once more. Each table is committed by itself; the cursor stays where it is."""
        with as_target_errors(directory.root), tempfile.TemporaryDirectory(dir=directory.own / "staging") as scratch:
            with directory.locked():
                directory.check_owner(self.context)
            logs = self.options.write == "changelog"
            spooled = spool(batch, Path(scratch), messages=logs and self.messages)
            batch.check_complete()
            for table in spooled:
                writer = Writer(self, table.relation)
                if logs:
                    write_marked(writer, table.runs, logged, mark)
                elif self.options.write == "scd2":
                    check_versions(writer, table.runs)
                elif mirror_key(table.relation):
                    restore_runs(writer, table.runs, self._stones(writer), batch.range, self)
                writer.finish()
            failpoint("replay.tables_committed")
        return True

    def _reload(self, batch: LaneBatch, directory: OwnDirectory, step: ReloadStep) -> bool:
        """Copy a part of a table anew. The cursor stays where it is."""
        with as_target_errors(directory.root), tempfile.TemporaryDirectory(dir=directory.own / "staging") as scratch:
            with directory.locked():
                directory.check_owner(self.context)
            spooled = spool(batch, Path(scratch), messages=False)
            batch.check_complete()
            for table in spooled:
                writer = Writer(self, table.relation)
                with self._isolating(writer, table.runs, batch, baseline=True):
                    if self.options.write == "changelog":
                        log_copy(writer, table.runs, self.form, step)
                    elif self.options.write == "scd2":
                        copy_history(writer, table, self._stones(writer), step)
                    else:
                        copy_mirror(writer, table, self._stones(writer), self.form, step, soft=self.soft)
                writer.finish()
        return True

    def _stones(self, writer: Writer) -> Tombstones:
        return Tombstones(OwnDirectory(Path(self.root)).own / "tombstones" / writer.name)

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
            writer = Writer(self, relation)
            return writer.write_again(writer.keyed(Run(relation, relation_id, change)))

    def _write(self, writer: Writer, table: Spooled, batch: LaneBatch) -> None:
        """Bring one table to the end of the batch."""
        range = batch.range
        if range.start == range.end:
            with self._isolating(writer, table.runs, batch, baseline=True):
                writer.write_baseline(table.relation, [run() for run in table.runs], range.end)
        else:
            for number, read in enumerate(table.runs):
                run = writer.keyed(read())
                if self.remembers:
                    # Before the commit: who was killed after it would find the change done.
                    remember_removed(self._stones(writer), run, f"{range.end:020d}-{number:06d}")
                with self._isolating(writer, [read], batch, baseline=False):
                    name = table.relation.table
                    writer.write_changes(run, renewing=self.renewed is None or name in self.renewed)

    @contextmanager
    def _isolating(
        self, writer: Writer, runs: Sequence[Callable[[], Run]], batch: LaneBatch, *, baseline: bool
    ) -> Iterator[None]:
        """While runs are written: find the rows that cannot be, if that is asked for."""
        try:
            yield
        except MissingBase as missing:
            if not batch.isolate:
                raise
            raise RowsRejected(_rejects(runs[0](), missing)) from None
        except RowRefused:
            if not batch.isolate:
                raise
            staging = OwnDirectory(Path(self.root)).own / "staging"
            rejects: list[Reject] = []
            for number, read in enumerate(runs):
                with tempfile.TemporaryDirectory(dir=staging) as scratch:
                    rejects += writer.rejects(read(), Path(scratch) / str(number), baseline=baseline)
            if not rejects:
                raise
            raise RowsRejected(rejects[:AT_ONCE]) from None


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
                Writer(self.lane, wrong.relation).correct(wrong, seq, soft=self.lane.soft)
                failpoint("repair.table_committed")


def _rejects(run: Run, missing: MissingBase) -> list[Reject]:
    rows = run.changes.filter(pc.is_in(run.changes[SEQ], pa.array(missing.seqs, pa.int64())))
    return rejected(run.relation, run.relation_id, rows, mirror_key(run.relation), missing)


def _need_deltalake() -> None:
    try:
        import deltalake  # noqa: F401 - only to see that it is there
    except ImportError as missing:
        raise DependencyError(
            "a delta target needs deltalake, which is not installed", hint="pip install 'millstream[delta]'"
        ) from missing
