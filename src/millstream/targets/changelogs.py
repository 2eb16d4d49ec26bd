"""What the changes of a changelog leave of a table: folded, for a comparison with the source."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa

from millstream.errors import VerifyFailed
from millstream.fold import Inconsistent, fold
from millstream.model import Json, Relation
from millstream.targets.forms import form_schema
from millstream.targets.lanes.tables import mirror_key

READ_ROWS = 16_384


class Changes(Protocol):
    """Where the changes are. Picklable."""

    def read(self, relation: Relation) -> Iterator[pa.Table] | None:
        """All changes of the table (schema: `changelog.schema`), in any order; None when it has none."""


@dataclass(frozen=True)
class ChangelogReader:
    """See `targets.base.Reader` for the contract. A task folds all of a table, and holds it in memory."""

    changes: Changes
    parallel = True

    def parts(self, relation: Relation) -> Sequence[Json]:
        return [{}]

    def read(self, relation: Relation, part: Json) -> Iterator[pa.Table]:
        found = self.changes.read(relation)
        if found is None:
            return
        try:
            rows = fold(found, mirror_key(relation))
        except Inconsistent as broken:
            raise VerifyFailed(
                f"the changelog of {relation.table} is not whole: {broken}",
                hint="deliver it once more (replay), or begin a new target",
            ) from None
        yield from (pa.Table.from_batches([batch]) for batch in _as_now(rows, relation).to_batches(READ_ROWS))

    def expected(self, relation: Relation, rows: pa.RecordBatch) -> pa.Table:
        return pa.Table.from_batches([rows]).select(form_schema(relation).names)


def _as_now(rows: pa.Table, relation: Relation) -> pa.Table:
    """The rows with the columns that the table has now."""
    wanted = form_schema(relation)
    columns = [
        rows[field.name].cast(field.type) if field.name in rows.column_names else pa.nulls(rows.num_rows, field.type)
        for field in wanted
    ]
    return pa.table(columns, schema=wanted)
