"""What the changelog of a database leaves of a table: folded, for a comparison with the source.

Values are read in the database's own form, as those of a mirror are; what says how to fold them stands beside them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from millstream.changelog import BEFORE, EPOCH, exposed
from millstream.errors import VerifyFailed
from millstream.latest import whole
from millstream.model import Json, Relation
from millstream.sources.decoders import decoded_schema
from millstream.targets.changelogs import READ_ROWS, folded, old_keys
from millstream.targets.lanes.database import Database
from millstream.targets.lanes.reading import DatabaseReader
from millstream.targets.lanes.tables import mirror_key

SPECIAL = "_ms_special"
_MAPS = pa.map_(pa.string(), pa.string())
_ASKED = "_ms_op, _ms_seq, _ms_position, CAST(_ms_before AS text), CAST(_ms_unchanged AS text)"


@dataclass(frozen=True)
class LoggedReader(DatabaseReader):
    """See `targets.base.Reader` for the contract. A task folds all of a table, and holds its changes in memory."""

    def parts_of(self, db: Database, relation: Relation) -> Sequence[Json]:
        return [{"begin": 0, "end": None}]

    def read(self, relation: Relation, part: Json) -> Iterator[pa.Table]:
        with self.database(self.options) as db:
            # What came once more is there the first time as well.
            first = f"{EPOCH} IS NULL" if EPOCH in (db.columns(relation) or {}) else "true"
            said = db.rows(f"SELECT {_ASKED} FROM {db.table(relation)} WHERE {first} ORDER BY _ms_event_id")
            held = list(db.held(relation, part, first, order="_ms_event_id"))
        if not held:
            return
        values = pa.concat_tables(held).combine_chunks()
        if values.num_rows != len(said):
            raise VerifyFailed(f"the changelog of {relation.table} changed while it was read")
        rows = folded(relation, [self._changes(relation, values, said)])
        names = [name for name in values.column_names if name in rows.column_names]
        found = rows.select(names).replace_schema_metadata(values.schema.metadata)
        yield from (pa.Table.from_batches([batch]) for batch in found.to_batches(READ_ROWS))

    def _changes(self, relation: Relation, values: pa.Table, said: Sequence[tuple[Any, ...]]) -> pa.Table:
        """The changes as `fold` reads them, in the database's form."""
        op, seq, position, before, unchanged = zip(*said, strict=True)
        ours = {
            "_ms_op": pa.array(op, pa.string()),
            "_ms_seq": pa.array(seq, pa.int64()),
            "_ms_position": pa.array(position, pa.string()),
            "_ms_unchanged": pa.array([json.loads(text or "[]") for text in unchanged], pa.list_(pa.string())),
        }
        if SPECIAL not in values.column_names:
            ours[SPECIAL] = pa.array([[]] * len(said), _MAPS)
        old = self._old(relation, pa.array(before, pa.string()))
        if old is not None:
            ours[BEFORE] = old
        for name, column in ours.items():
            values = values.append_column(name, column)
        return values

    def _old(self, relation: Relation, texts: pa.StringArray) -> pa.StructArray | None:
        """Keys of old rows in the database's form."""
        seen = exposed(relation)
        kinds = dict(zip((column.name for column in seen.columns), decoded_schema(seen).types, strict=True))
        key = mirror_key(relation) or tuple(kinds)
        found = old_keys(texts, {name: kinds[name] for name in key}, relation.table)
        if found is None:
            return None
        typed = {name: found.field(name) if name in key else pa.nulls(len(texts), kind) for name, kind in kinds.items()}
        said = self.database.form(relation, pa.table({**typed, SPECIAL: pa.array([[]] * len(texts), _MAPS)}))
        columns = [whole(said[name]) for name in key]
        return pa.StructArray.from_arrays(columns, names=list(key), mask=texts.is_null())
