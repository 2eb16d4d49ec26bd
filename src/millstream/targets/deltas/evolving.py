"""The columns of a mirror in Delta, brought to the names and constants that the source has now. See `targets.evolving`.

Delta's columns cannot be renamed in place, and a constant is a value in every row: the table is written anew, in one
commit. The number of a source's column stands in the metadata of the table's, so what was done is not done again.
In a history the versions of now get a constant, and those that had ended do not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from millstream.changelog import END_POSITION
from millstream.model import Relation
from millstream.targets.constants import Constant
from millstream.targets.evolving import evolution, numbers, renamed_since
from millstream.targets.lanes.tables import SPECIAL
from millstream.versions import IS_CURRENT

_NUMBER = b"millstream.column"


def numbered(schema: pa.Schema, relation: Relation) -> pa.Schema:
    """The columns of a relation, each with its number at the source, where that is known."""
    found = {name: number for number, name in numbers(relation).items()}
    return pa.schema(
        [
            field.with_metadata({_NUMBER: found[field.name].encode()}) if field.name in found else field
            for field in schema
        ]
    )


@dataclass(frozen=True)
class Rewriting:
    """How each row becomes one under the new columns."""

    renamed: Mapping[str, str]
    dropped: tuple[str, ...]
    added: Mapping[str, tuple[pa.Field, Constant]]

    def schema(self, there: pa.Schema) -> pa.Schema:
        kept = [field.with_name(self._name(field.name)) for field in there if field.name not in self.dropped]
        return pa.schema([*kept, *(field for field, _ in self.added.values())])

    def rewritten(self, batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
        columns = {self._name(name): batch[name] for name in batch.schema.names if name not in self.dropped}
        # What had ended before a column came never had it.
        current = batch[IS_CURRENT] if END_POSITION in batch.schema.names else None
        for name, (field, constant) in self.added.items():
            values = pa.repeat(constant.value.cast(field.type)[0], batch.num_rows)
            columns[name] = values if current is None else pc.if_else(current, values, pa.scalar(None, field.type))
        columns[SPECIAL] = self._special(columns[SPECIAL], current)
        return pa.RecordBatch.from_arrays([columns[field.name].cast(field.type) for field in schema], schema=schema)

    def _name(self, name: str) -> str:
        return self.renamed.get(name, name)

    def _special(self, maps: pa.Array, current: pa.BooleanArray | None) -> pa.Array:
        """Exact texts go with their columns."""
        constant = [(name, one.special) for name, (_, one) in self.added.items() if one.special is not None]
        if not constant and not len(maps.keys):
            return maps
        living = [True] * len(maps) if current is None else current.to_pylist()
        made = [
            [
                *((self._name(name), text) for name, text in texts or () if name not in self.dropped),
                *(constant if lives else ()),
            ]
            for texts, lives in zip(maps.to_pylist(), living, strict=True)
        ]
        return pa.array(made, pa.map_(pa.string(), pa.string()))


def rewriting(table: str, there: pa.Schema, wanted: pa.Schema, constant: Mapping[str, Constant]) -> Rewriting | None:
    """What has to be written anew; None when nothing has. Raises TargetRefused for a name that is taken."""
    found = evolution(table, _numbers(there), _numbers(wanted), there.names)
    kept = {found.renamed.get(name, name) for name in there.names if name not in found.dropped}
    fresh = [field for field in wanted if field.name not in kept]
    added = {field.name: (field, constant[field.name]) for field in fresh if field.name in constant}
    return Rewriting(found.renamed, found.dropped, added) if found or added else None


def refuse_other_names(relation: Relation, there: pa.Schema, wanted: pa.Schema) -> None:
    """For a change that comes late: it cannot be written under names that are not the columns' any more."""
    if evolution(relation.table, _numbers(there), _numbers(wanted), there.names):
        raise renamed_since(relation.table)


def _numbers(schema: pa.Schema) -> dict[str, str]:
    return {field.metadata[_NUMBER].decode(): field.name for field in schema if _NUMBER in (field.metadata or {})}
