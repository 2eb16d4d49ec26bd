"""The forms in which a Delta table can have a table of the source: as a mirror, as a changelog, as its history."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from millstream.changelog import BEFORE, schema
from millstream.latest import SEQ, whole
from millstream.model import Relation
from millstream.targets.deltas.evolving import described
from millstream.targets.deltas.history import history_schema, past_rows, versions_to_write, write_history
from millstream.targets.deltas.mirror import has_newer, mirror_schema, mirrored, rows_to_write, write_mirror
from millstream.targets.deltas.tables import Handle, lake_schema
from millstream.targets.lanes.changelog import as_json

if TYPE_CHECKING:
    from deltalake import CommitProperties

Write = Literal["mirror", "changelog", "scd2"]
Said = Callable[[int], "CommitProperties"]
"""What a commit says that brings a table to a seq."""


class Form(Protocol):
    """How changes of a table become rows of its Delta table."""

    @property
    def keyed(self) -> bool:
        """Whether rows are found by their key, and columns follow those of the source."""

    def schema(self, relation: Relation) -> pa.Schema:
        """The columns, in types that Delta has."""

    def baseline(self, relation: Relation, rows: pa.Table) -> pa.Table:
        """Rows that were read, as the table has them."""

    def write(self, table: Handle, relation: Relation, changes: pa.Table, said: Said) -> None:
        """Write changes that the table does not have, in seq order. Each commit says up to which of them it goes."""

    def rows(self, table: Handle, relation: Relation, changes: pa.Table) -> pa.Table:
        """The rows that `write` would add, in the order of their changes."""

    def has(self, table: Handle, relation: Relation, change: pa.Table) -> bool:
        """Whether the table has a single change, or a newer row in its place."""


def form_of(write: Write, *, soft: bool) -> Form:
    """The form that a target's options ask for."""
    if write == "changelog":
        return ChangelogForm()
    return MirrorForm(soft) if write == "mirror" else HistoryForm()


@dataclass(frozen=True)
class MirrorForm:
    soft: bool
    keyed = True

    def schema(self, relation: Relation) -> pa.Schema:
        return lake_schema(mirror_schema(relation, soft=self.soft))

    def baseline(self, relation: Relation, rows: pa.Table) -> pa.Table:
        return mirrored(rows, mirror_schema(relation, soft=self.soft)).cast(self.schema(relation))

    def write(self, table: Handle, relation: Relation, changes: pa.Table, said: Said) -> None:
        write_mirror(table, relation, changes, said(_last(changes)), soft=self.soft)

    def rows(self, table: Handle, relation: Relation, changes: pa.Table) -> pa.Table:
        return rows_to_write(table, relation, changes, soft=self.soft)

    def has(self, table: Handle, relation: Relation, change: pa.Table) -> bool:
        return has_newer(table, relation, change)


@dataclass(frozen=True)
class ChangelogForm:
    keyed = False

    def schema(self, relation: Relation) -> pa.Schema:
        return lake_schema(described(logged(schema(relation).empty_table()).schema, relation, mirror=False))

    def baseline(self, relation: Relation, rows: pa.Table) -> pa.Table:
        return logged(rows).cast(self.schema(relation))

    def write(self, table: Handle, relation: Relation, changes: pa.Table, said: Said) -> None:
        table.append(self.baseline(relation, changes), said(_last(changes)))

    def rows(self, table: Handle, relation: Relation, changes: pa.Table) -> pa.Table:
        return self.baseline(relation, changes)

    def has(self, table: Handle, relation: Relation, change: pa.Table) -> bool:
        events = table.read(["_ms_event_id"])["_ms_event_id"]
        return bool(pc.any(pc.equal(events, change["_ms_event_id"][0])).as_py())


@dataclass(frozen=True)
class HistoryForm:
    keyed = True

    def schema(self, relation: Relation) -> pa.Schema:
        return lake_schema(history_schema(relation))

    def baseline(self, relation: Relation, rows: pa.Table) -> pa.Table:
        return past_rows(relation, rows).cast(self.schema(relation))

    def write(self, table: Handle, relation: Relation, changes: pa.Table, said: Said) -> None:
        write_history(table, relation, changes, said)

    def rows(self, table: Handle, relation: Relation, changes: pa.Table) -> pa.Table:
        return versions_to_write(table, relation, changes)

    def has(self, table: Handle, relation: Relation, change: pa.Table) -> bool:
        return has_newer(table, relation, change)


def logged(changes: pa.Table) -> pa.Table:
    """Changes as a changelog has them: old rows as JSON text, since their columns come and go with the table's."""
    if BEFORE not in changes.column_names:
        return changes
    text = as_json(whole(changes[BEFORE]))
    return changes.set_column(changes.column_names.index(BEFORE), BEFORE, text)


def _last(changes: pa.Table) -> int:
    return int(changes[SEQ][-1].as_py())
