"""Commits of one Delta table, whatever form it has: each says how far the table is, and goes through once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from millstream.changelog import schema
from millstream.errors import TargetRefused, TargetUnavailable
from millstream.failpoint import failpoint
from millstream.latest import SEQ
from millstream.model import Relation
from millstream.targets.base import Correction, TargetContext
from millstream.targets.constants import constants
from millstream.targets.deltas.correcting import Moment, correct
from millstream.targets.deltas.evolving import refuse_other_names, with_key
from millstream.targets.deltas.forms import Form, Write
from millstream.targets.deltas.marks import app_of, commit, owner_of
from millstream.targets.deltas.misfits import misfits, row_error
from millstream.targets.deltas.partitions import refuse_homeless_keys
from millstream.targets.deltas.reading import correct_mirror, table_path
from millstream.targets.deltas.tables import Following, Handle, open_table
from millstream.targets.lanes.runs import Run
from millstream.targets.lanes.tables import mirror_key
from millstream.targets.rejects import Reject, reject

if TYPE_CHECKING:
    from deltalake import CommitProperties

TRIES = 10
"""How often a commit is tried again when somebody else (a compaction, a reader's repair) was faster."""
SWEEP_COMMITS = 1000
"""After so many commits files that no version needs any more are looked for, also where nothing is compacted."""


class Place(Protocol):
    """Where tables are, whose they are, and in which form."""

    @property
    def root(self) -> str: ...

    @property
    def context(self) -> TargetContext: ...

    @property
    def form(self) -> Form: ...

    @property
    def write(self) -> Write: ...

    @property
    def compact_files(self) -> int: ...

    @property
    def drops(self) -> bool:
        """Whether columns go that the source has no more."""

    def partitions(self, relation: Relation) -> list[str]: ...


class Writer:
    """Commits of one table."""

    def __init__(self, place: Place, relation: Relation) -> None:
        self._form, self._write = place.form, place.write
        self._owner, self._stream, self._drops = owner_of(place.context), place.context.stream, place.drops
        self.app = app_of(place.context)
        self._path = table_path(place.root, relation)
        self.name = self._path.name
        self._partition_by = place.partitions(relation)
        self._compact_files = place.compact_files
        self._commits = 0
        self.compacted = False
        """Whether the last `finish` wrote files together."""
        self._committed: Handle | None = None
        """The table after a commit of changes, if that was the last one: to open it anew is to read its log anew."""

    def keyed(self, run: Run) -> Run:
        """The run with the key by which the table's rows are told, where its description does not say it."""
        there = self.existing() if self._form.keyed and not run.relation.enriched else None
        return run if there is None else replace(run, relation=with_key(run.relation, there.schema()))

    def write_changes(self, run: Run, *, renewing: bool = False) -> None:
        """The changes of a run that the table does not have yet, in commits that say so.

        `renewing`: a table that cannot follow the source's is made anew, and gets its other rows in another way.
        """
        wanted = self.schema_of(run.relation)
        existing = self.existing()
        known = existing.transaction_version(self.app) if existing else None
        if known is not None and run.changes[SEQ][-1].as_py() <= known:
            # Of a batch that comes again. The table's columns may be those of later changes.
            return

        def commit(table: Handle) -> None:
            changes = self._not_done(table, run.changes)
            if changes.num_rows:
                self._form.write(table, run.relation, changes, self.said)

        self._committed = self.attempt(wanted, run.relation, commit, renewing=renewing, there=existing)
        failpoint("delta.table_committed")

    def rejects(self, run: Run, scratch: Path, *, baseline: bool) -> list[Reject]:
        """The changes of a run that the table does not take, of those that it does not have yet."""
        run = run if baseline else self.keyed(run)
        table = self._open(run.relation, self.schema_of(run.relation), None)
        changes = run.changes if baseline else self._not_done(table, run.changes)
        form, about = self._form, run.relation
        rows = form.baseline(about, changes) if baseline else form.rows(table, about, changes)
        found = misfits(table, run.relation.table, rows, partial(self._check, run.relation, table), scratch)
        key = mirror_key(run.relation) if self._form.keyed else ()
        folded = self._form.keyed and not baseline
        rejects = []
        for place, refused in found:
            # A row is what its last change left.
            at = pc.index(changes[SEQ], rows[SEQ][place]).as_py() if folded else place
            rejects.append(reject(run.relation, run.relation_id, changes.slice(at, 1), key, refused))
        return rejects

    def _check(self, relation: Relation, table: Handle, rows: pa.Table) -> None:
        if self._form.keyed:
            refuse_homeless_keys(relation.table, rows, table.partitions(), mirror_key(relation))

    def _not_done(self, table: Handle, changes: pa.Table) -> pa.Table:
        done = table.transaction_version(self.app)
        return changes if done is None else changes.filter(pc.greater(changes[SEQ], done))

    def write_again(self, run: Run) -> bool:
        """One change that is not of the batch at hand. False if the table has it, or a newer row, already."""
        done = False
        existing = self.existing()
        if self._form.keyed and existing is not None:
            refuse_other_names(run.relation, existing.schema(), self.schema_of(run.relation))

        def commit(table: Handle) -> None:
            nonlocal done
            done = not self._form.has(table, run.relation, run.changes)
            if done:
                self._form.write(table, run.relation, run.changes, lambda _: self.said(None))

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
                rows = self._form.baseline(run.relation, run.changes)
                self._check(run.relation, table, rows)
                table.append(rows, self.said(seq if last else None, baseline=True), overwrite=first)

            self.attempt(wanted, run.relation, commit, renewing=number == 0)
            failpoint("delta.baseline_part_committed")

    def _clear(self, relation: Relation, seq: int) -> None:
        if self.existing() is None:
            return
        wanted = self.schema_of(relation)
        self.attempt(wanted, relation, lambda table: table.append(wanted.empty_table(), self.said(seq), overwrite=True))

    def correct(self, wrong: Correction, seq: int, *, soft: bool) -> None:
        """Replace wrong rows of a mirror, or let a history go on with the right ones. How far it is stays as it is."""
        wanted = self.schema_of(wrong.relation)
        right = pa.Table.from_batches(list(wrong.rows), schema(wrong.relation))
        said = self.said(None)

        def commit(table: Handle) -> None:
            if self._write == "scd2":
                # Of no key its type is not known.
                keys = [one for one in (wrong.stale, wrong.gone) if one.num_rows]
                moment = Moment(seq, wrong.taken_at, wrong.position)
                correct(table, wrong.relation, pa.concat_tables(keys or [wrong.gone]), right, moment, said)
            else:
                correct_mirror(table, wrong, right, seq, said, soft=soft)

        self.attempt(wanted, wrong.relation, commit)

    def finish(self, *, compacts: bool = True) -> int | None:
        """Keep the number of files small, unless that shall wait: whether it `compacts`.

        Returns the table's version; None when there is no table.
        """
        table = self._committed or self.existing()
        if table is None:
            return None
        self.compacted = compacts and table.is_scattered(self._compact_files) and table.compact()
        # A mirror of a few files has as few after each commit, which writes one of them anew.
        if self.compacted or table.version() % SWEEP_COMMITS < self._commits:
            table.sweep()
        return table.version()

    def schema_of(self, relation: Relation) -> pa.Schema:
        """The columns that the table has for a relation."""
        return self._form.schema(relation)

    def existing(self) -> Handle | None:
        """The table as it is now; None when there is none."""
        return Handle.existing(self._path)

    def said(self, seq: int | None, app: str | None = None, *, baseline: bool = False) -> CommitProperties:
        """What a commit says: how far the table is then, in the words of an application."""
        return commit(app or self.app, seq, baseline=baseline)

    def attempt(
        self,
        wanted: pa.Schema,
        relation: Relation,
        commit: Callable[[Handle], None],
        *,
        renewing: bool = False,
        there: Handle | None = None,
    ) -> Handle:
        """Commit to the table, made or completed to have these columns; again if somebody else was faster.

        `renewing`: what is in a table that cannot follow the source's need not be kept. `there` is the table, where it
        has just been opened. Returns the table that was given to `commit`.
        """
        from deltalake.exceptions import CommitFailedError, DeltaError

        keyed = self._form.keyed
        constant = constants(relation) if keyed else None
        how = Following(self._stream, constant, keyed and self._drops, keyed and renewing)
        self._committed = None
        for _ in range(TRIES):
            try:
                table = self._open(relation, wanted, how, there)
                commit(table)
                self._commits += 1
                return table
            except CommitFailedError:
                there = None
            except DeltaError as failed:
                # Its words may hold a row's value.
                raise row_error(relation.table, str(failed)) or TargetRefused(
                    f"{relation.table}: Delta does not take the batch ({type(failed).__name__})",
                    hint="see whether the table at this path was changed by somebody else",
                ) from None
        raise TargetUnavailable(f"{relation.table}: others commit to the table all the time")

    def _open(
        self, relation: Relation, wanted: pa.Schema, how: Following | None, there: Handle | None = None
    ) -> Handle:
        owner, by = self._owner, self._partition_by
        return open_table(self._path, relation.table, wanted, owner, by, how, write=self._write, there=there)
