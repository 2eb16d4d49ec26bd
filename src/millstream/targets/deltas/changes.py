"""The changes in a Delta changelog as a changelog has them: old keys out of the JSON that the table keeps them in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from millstream.changelog import BEFORE, EPOCH, METADATA
from millstream.latest import whole
from millstream.model import Relation
from millstream.targets.changelogs import old_keys
from millstream.targets.deltas.partitions import restored
from millstream.targets.deltas.reading import table_path
from millstream.targets.deltas.tables import Handle
from millstream.targets.lanes.tables import mirror_key


@dataclass(frozen=True)
class DeltaChanges:
    """Implements `targets.changelogs.Changes`."""

    root: str

    def read(self, relation: Relation) -> Iterator[pa.Table] | None:
        table = Handle.existing(table_path(self.root, relation))
        if table is None:
            return None
        names = table.schema().names
        own = [name for name in names if name not in (*METADATA, EPOCH)]
        # What came once more is there the first time as well.
        first = pc.field(EPOCH).is_null() if EPOCH in names else None
        # Without a key a row is known by all of itself.
        key = mirror_key(relation) or own
        held = (pa.Table.from_batches([batch]) for batch in table.batches(0, 1, [*own, *METADATA], first))
        by = table.partitions()
        return (restored(_with_old_keys(part, key, relation.table), by) for part in held if part.num_rows)


def _with_old_keys(changes: pa.Table, key: Sequence[str], table: str) -> pa.Table:
    """`_ms_before` as a struct of the key's columns. The rest of an old row is in the change before it."""
    if BEFORE not in changes.column_names:
        return changes
    at = changes.column_names.index(BEFORE)
    old = old_keys(whole(changes[BEFORE]), {name: changes.schema.field(name).type for name in key}, table)
    return changes.remove_column(at) if old is None else changes.set_column(at, BEFORE, old)
