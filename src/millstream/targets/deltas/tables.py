"""One Delta table: made, completed, appended to, merged into. All that we use of delta-rs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from millstream.changelog import END_POSITION
from millstream.errors import CannotFollow, TargetRefused
from millstream.failpoint import failpoint
from millstream.targets.constants import Constant
from millstream.targets.deltas.evolving import ANOTHER_TARGET, fits, outdated, rewriting
from millstream.targets.deltas.partitions import check_partitions, housed

if TYPE_CHECKING:
    import pyarrow.dataset as ds
    from deltalake import CommitProperties, DeltaTable

SPILL_BYTES = 512 << 20
"""What a merge may hold in memory before it works on disk."""
READ_ROWS = 16_384
"""So many rows are read at a time,"""
PART_BYTES = 64 << 20
"""and put together until they are so many bytes, where long runs are worked on faster."""
SMALL_BYTES = 50_000_000
"""Of files below this any two fit into one: a compaction aims at twice as much."""
CHECKPOINT_COMMITS = 10
"""After so many commits the table's log is summed up. Who opens the table reads every commit since then, one by one."""
KEEP_HOURS = 24 * 7
"""Files that no version needs any more stay so long for readers of older versions."""

BASELINE = {"millstream": "baseline"}
"""What commits of a baseline say of themselves."""
_ASIDE = ("OPTIMIZE", "VACUUM START", "VACUUM END", "ADD COLUMN", "UPDATE FIELD METADATA")
"""Commits that change no row."""

_NOT_IN_NAMES = re.compile(r"[ ,;{}()\n\t=]")


def lake_schema(schema: pa.Schema) -> pa.Schema:
    """The schema in types that Delta has, every column nullable: a time of day is text there."""
    return pa.schema([pa.field(field.name, _lake_type(field.type), metadata=field.metadata) for field in schema])


def _lake_type(kind: pa.DataType) -> pa.DataType:
    if types.is_time(kind):
        return pa.string()
    if types.is_list(kind):
        return pa.list_(_lake_type(kind.value_type))
    if types.is_struct(kind):
        return pa.struct([pa.field(inner.name, _lake_type(inner.type)) for inner in kind])
    if types.is_map(kind):
        return pa.map_(kind.key_type, _lake_type(kind.item_type))
    return kind


def open_table(
    path: Path,
    table: str,
    wanted: pa.Schema,
    owner: str,
    partition_by: Sequence[str] = (),
    following: Following | None = None,
    *,
    write: str,
    there: Handle | None = None,
) -> Handle:
    """The table, with at least these columns. Raises TargetRefused when it cannot hold them, or is not `owner`'s.

    `following` says how it follows the source's; None: it only gets the columns that it lacks. `write` is the form that
    the table has. `there` is the table, where it has been opened already.
    """
    from deltalake import DeltaTable

    check_partitions(table, wanted, partition_by)
    _check_names(table, wanted)
    handle = there or Handle.existing(path)
    if handle is None:
        path.mkdir(parents=True, exist_ok=True)
        made = DeltaTable.create(
            str(path),
            wanted,
            mode="ignore",
            description=owner,
            partition_by=list(partition_by) or None,
            configuration={"delta.checkpointInterval": str(CHECKPOINT_COMMITS)},
        )
        return Handle(made)
    if handle.owner() != owner:
        raise TargetRefused(
            f"{path} is a Delta table that this target did not make",
            hint="give the target an empty directory",
        )
    _check_form(table, handle, write, partition_by)
    if following is not None and handle.follow(table, wanted, following):
        handle = Handle(DeltaTable(str(path)))
    handle.complete(table, wanted)
    return handle


def _check_names(table: str, wanted: pa.Schema) -> None:
    bad = [name for name in wanted.names if _NOT_IN_NAMES.search(name)]
    if bad:
        raise TargetRefused(
            f"{table}: Delta has no columns named like {bad[0]!r}",
            hint="rename it at the source, or leave the table out of this stream",
        )


def _check_form(table: str, handle: Handle, write: str, partition_by: Sequence[str]) -> None:
    """What a table keeps for as long as it is there."""
    if handle.form() != write:
        raise TargetRefused(
            f"{table}: the Delta table was made with write: {handle.form()}, and this target says {write}",
            hint=f"write: {handle.form()}, or give the stream a new target",
        )
    if handle.partitions() != list(partition_by):
        there = ", ".join(handle.partitions()) or "nothing"
        raise TargetRefused(
            f"{table}: the Delta table is partitioned by {there}, and partition_by says "
            f"{', '.join(partition_by) or 'nothing'}",
            hint="a table keeps its partitions: write partition_by as it was, or give the stream a new target",
        )


@dataclass(frozen=True)
class Following:
    """How a table follows the source's columns."""

    stream: str
    constant: Mapping[str, Constant] | None
    """What rows that are there have in columns that come new; None: columns follow no names, either."""
    drops: bool = False
    """Whether columns go that the source has no more."""
    renewing: bool = False
    """Whether all rows are about to be replaced: then columns may become what they like."""


class Handle:
    """A table at the version it was opened at: a commit goes through only if nobody committed since."""

    def __init__(self, table: DeltaTable) -> None:
        self._table = table

    @classmethod
    def existing(cls, path: Path, version: int | None = None) -> Handle | None:
        """The table's newest version, or another one; None when there is none."""
        from deltalake import DeltaTable

        return cls(DeltaTable(str(path), version=version)) if DeltaTable.is_deltatable(str(path)) else None

    def renewed(self) -> Handle:
        """The table as it is now."""
        from deltalake import DeltaTable

        return Handle(DeltaTable(self._table.table_uri))

    def owner(self) -> str | None:
        """Who made the table, by its description."""
        description: str | None = self._table.metadata().description
        return description

    def partitions(self) -> list[str]:
        """The columns by whose values the files are kept apart."""
        return list(self._table.metadata().partition_columns)

    def form(self) -> str:
        """What was written to it, by its columns: no column of a source has these names."""
        names = self.schema().names
        return "scd2" if END_POSITION in names else "changelog" if "_ms_op" in names else "mirror"

    def version(self) -> int:
        return int(self._table.version())

    def transaction_version(self, app: str) -> int | None:
        """How far the table is, by its own word."""
        return self._table.transaction_version(app)

    def ends_with_baseline(self) -> bool:
        """Whether the rows are those of a baseline, and no change has come since."""
        found = (commit for commit in self._table.history(20) if commit.get("operation") not in _ASIDE)
        return next(found, {}).get("millstream") == BASELINE["millstream"]

    def files(self) -> int:
        return len(self._table.file_uris())

    def schema(self) -> pa.Schema:
        return pa.schema(self._table.schema().to_arrow())

    def complete(self, table: str, wanted: pa.Schema) -> None:
        """Add the columns that are missing. Raises TargetRefused for one of another type."""
        from deltalake import Schema

        there = self.schema()
        missing = [field for field in wanted if field.name not in there.names]
        for field in wanted:
            if field.name in there.names and not fits(field.type, there.field(field.name).type):
                raise CannotFollow(
                    f"{table}: column {field.name} is {there.field(field.name).type} in the Delta table, and "
                    f"{field.type} now",
                    hint=ANOTHER_TARGET,
                )
        if missing:
            self._table.alter.add_columns(Schema.from_arrow(pa.schema(missing)).fields)
        for name, said in outdated(there, wanted).items():
            self._table.alter.set_column_metadata(name, said)

    def twin(self, path: Path) -> Handle:
        """An empty table with the columns, partitions and constraints of this one."""
        from deltalake import DeltaTable

        made = DeltaTable.create(str(path), self._table.schema(), partition_by=self.partitions() or None)
        prefix = "delta.constraints."
        found = {name: text for name, text in self._table.metadata().configuration.items() if name.startswith(prefix)}
        for name, text in found.items():
            made.alter.add_constraint({name.removeprefix(prefix): text or ""})
        return Handle(DeltaTable(str(path)))

    def follow(self, table: str, wanted: pa.Schema, how: Following) -> bool:
        """Bring the columns to the names and types, and the rows to the constants of the source, if need be."""
        there = self.schema()
        try:
            plan = rewriting(how.stream, table, there, wanted, how.constant, drops=how.drops)
            misfit = any(
                not fits(field.type, there.field(field.name).type)
                for field in wanted
                if field.name in there.names and (plan is None or field.name not in plan.converted)
            )
        except CannotFollow:
            if not how.renewing:
                raise
            misfit, plan = True, None
        if misfit and how.renewing:
            self._write_anew(pa.RecordBatchReader.from_batches(wanted, []))
            return True
        if plan is None:
            return False
        schema, found = plan.schema(there), self._table.to_pyarrow_dataset().to_batches()
        self._write_anew(pa.RecordBatchReader.from_batches(schema, (plan.rewritten(batch, schema) for batch in found)))
        return True

    def _write_anew(self, rows: pa.RecordBatchReader) -> None:
        """One commit with these columns and rows in the place of all that there are."""
        from deltalake import CommitProperties, write_deltalake

        write_deltalake(
            self._table,
            rows,
            mode="overwrite",
            schema_mode="overwrite",
            partition_by=self.partitions() or None,
            commit_properties=CommitProperties(max_commit_retries=0),
        )
        failpoint("delta.columns_rewritten")

    def append(self, rows: pa.Table, said: CommitProperties, *, overwrite: bool = False) -> None:
        """Add rows, or put them in place of all that there are."""
        from deltalake import write_deltalake

        there, rows = self.schema(), housed(rows, self.partitions())
        # Columns that came later stand last; those that the source no longer has are NULL.
        columns = {
            field.name: rows[field.name].cast(field.type)
            if field.name in rows.column_names
            else pa.nulls(rows.num_rows, field.type)
            for field in there
        }
        write_deltalake(
            self._table, pa.table(columns), mode="overwrite" if overwrite else "append", commit_properties=said
        )

    def merge(
        self,
        rows: pa.Table,
        on: str,
        changes: Mapping[str, tuple[Mapping[str, str], str]],
        delete: str | None,
        said: CommitProperties,
    ) -> None:
        """One MERGE: `changes` are updates and inserts with their conditions, `delete` the condition of deletes."""
        merging = self._table.merge(
            housed(rows, self.partitions()),
            on,
            source_alias="s",
            target_alias="t",
            commit_properties=said,
            max_spill_size=SPILL_BYTES,
            streamed_exec=False,
        )
        if delete is not None:
            merging = merging.when_matched_delete(delete)
        for step, (columns, condition) in changes.items():
            if step == "insert":
                merging = merging.when_not_matched_insert(dict(columns), condition)
            else:
                merging = merging.when_matched_update(dict(columns), condition)
        merging.execute()

    def remove_older(self, seq: int, *, soft: bool, only: str = "") -> None:
        """What a TRUNCATE takes away; with `only`, the rest of a condition, what it leaves of that.

        Doing it twice changes nothing more.
        """
        if soft:
            updates = {"_ms_deleted": "true", "_ms_seq": str(seq)}
            self._table.update(updates=updates, predicate=f"_ms_seq < {seq} AND NOT _ms_deleted{only}")
        else:
            self._table.delete(f"_ms_seq < {seq}{only}")

    def make_older(self, seq: int, only: str = "") -> None:
        """Give rows of this version the one before it."""
        self._table.update(updates={"_ms_seq": str(seq - 1)}, predicate=f"_ms_seq = {seq}{only}")

    def read(self, columns: list[str], condition: ds.Expression | None = None) -> pa.Table:
        """Columns of all rows at this version, or of those for which the condition holds."""
        return self._table.to_pyarrow_dataset().to_table(columns=columns, filter=condition)

    def parts(self, columns: list[str], condition: ds.Expression | None) -> Iterator[pa.Table]:
        """The same, some rows at a time, and only of files that may have such rows. At least one table, maybe empty."""
        found, waiting, size = self._table.to_pyarrow_dataset(), list[pa.RecordBatch](), 0
        schema = pa.schema([found.schema.field(name) for name in columns])
        for fragment in found.get_fragments(filter=condition):
            for batch in fragment.to_batches(
                schema=found.schema, columns=columns, filter=condition, batch_size=READ_ROWS, batch_readahead=1
            ):
                waiting.append(batch)
                size += batch.nbytes
                if size >= PART_BYTES:
                    yield pa.Table.from_batches(waiting, schema)
                    waiting, size = [], 0
        yield pa.Table.from_batches(waiting, schema)

    def batches(
        self, part: int, of: int, columns: list[str], condition: ds.Expression | None
    ) -> Iterator[pa.RecordBatch]:
        """Columns, as far as there are such, of the rows in every `of`-th file, beginning with number `part`."""
        found = self._table.to_pyarrow_dataset()
        names = [name for name in columns if name in found.schema.names]
        fragments = sorted(found.get_fragments(), key=lambda fragment: str(fragment.path))
        for fragment in fragments[part::of]:
            yield from fragment.to_batches(
                schema=found.schema, columns=names, filter=condition, batch_size=READ_ROWS, use_threads=False
            )

    def is_scattered(self, most: int) -> bool:
        """Whether a compaction would save so many small files, and as many came since the last one.

        Partitions keep their files apart, and a small one may stand between large ones: what a compaction has left
        is no reason for another.
        """
        if self.files() <= most:
            return False
        partitions = [f"partition.{name}" for name in self.partitions()]
        files = pa.table(self._table.get_add_actions(flatten=True))
        files = files.select(["size_bytes", "modification_time", *partitions])  # not what is known of each column
        small = files.filter(pc.less(files["size_bytes"], SMALL_BYTES))
        if small.num_rows - small.group_by(partitions).aggregate([]).num_rows < most:
            return False
        found = (commit["timestamp"] for commit in self._table.history(most) if commit.get("operation") == "OPTIMIZE")
        since = next(found, None)
        return since is None or pc.sum(pc.greater(small["modification_time"].cast(pa.int64()), since)).as_py() >= most

    def compact(self) -> bool:
        """Write small files together. Whether there were any."""
        return bool(self._table.optimize.compact()["numFilesRemoved"])

    def sweep(self) -> None:
        """Remove files that no version of the last days needs."""
        self._table.vacuum(KEEP_HOURS, dry_run=False)
