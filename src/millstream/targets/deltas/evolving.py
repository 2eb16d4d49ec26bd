"""The columns of a table in Delta, brought to the names, types and constants that the source has now.

See `targets.evolving` and `targets.retyping`. Delta's columns cannot be changed in place, and a constant is a value in
every row: the table is written anew, in one commit. What the source's column is stands in the metadata of the table's
column, so what was done is not done again: its number, its type, and its place in the key. In a history the versions
of now get a constant, and those that had ended do not.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from millstream.changelog import END_POSITION
from millstream.latest import special_texts
from millstream.model import Json, Relation
from millstream.targets.constants import Constant
from millstream.targets.evolving import Evolution, evolution, gone, numbers, renamed_since
from millstream.targets.lanes.tables import SPECIAL, mirror_key
from millstream.targets.retyping import HeldType, check_retyped, held_types, keeps_values, read_again
from millstream.versions import IS_CURRENT
from millstream.wire.text import decimal_text

_NUMBER = b"millstream.column"
_TYPE = b"millstream.type"

ANOTHER_TARGET = "give the stream a new target, which begins with the new type"


def described(schema: pa.Schema, relation: Relation, *, mirror: bool) -> pa.Schema:
    """The columns of a relation, each with what it is at the source. Only a mirror follows numbers and keys."""
    found = {name: number for number, name in numbers(relation).items()} if mirror else {}
    key = {name: place for place, name in enumerate(mirror_key(relation))} if mirror else {}
    held = held_types(relation)
    return pa.schema(
        [
            field.with_metadata(
                {
                    _TYPE: json.dumps({**held[field.name].to_json(), "key": key.get(field.name)}).encode(),
                    **({_NUMBER: found[field.name].encode()} if field.name in found else {}),
                }
            )
            if field.name in held
            else field
            for field in schema
        ]
    )


def outdated(there: pa.Schema, wanted: pa.Schema) -> dict[str, dict[str, str]]:
    """By column the metadata of which a table does not have the newest."""
    return {
        field.name: {name.decode(): value.decode() for name, value in field.metadata.items()}
        for field in wanted
        if field.metadata and field.name in there.names and not _has(there.field(field.name), field)
    }


def with_key(relation: Relation, there: pa.Schema) -> Relation:
    """The relation with the table's key, where whole rows hide it and the catalog could not tell it."""
    if relation.enriched or relation.identity != "f" or relation.primary_key:
        return relation
    known = [(place, field.name) for field in there if (place := _said(field).get("key")) is not None]
    key = tuple(name for _, name in sorted(known))
    return replace(relation, primary_key=key) if set(key) <= {column.name for column in relation.columns} else relation


@dataclass(frozen=True)
class Rewriting:
    """How each row becomes one under the new columns."""

    renamed: Mapping[str, str]
    dropped: tuple[str, ...]
    added: Mapping[str, tuple[pa.Field, Constant]]
    converted: Mapping[str, pa.Field]
    """By the name they have then."""

    def schema(self, there: pa.Schema) -> pa.Schema:
        kept = [field.with_name(self._name(field.name)) for field in there if field.name not in self.dropped]
        kept = [self.converted.get(field.name, field) for field in kept]
        return pa.schema([*kept, *(field for field, _ in self.added.values())])

    def rewritten(self, batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
        columns = {self._name(name): batch[name] for name in batch.schema.names if name not in self.dropped}
        # What had ended before a column came never had it.
        current = batch[IS_CURRENT] if END_POSITION in batch.schema.names else None
        homes: list[str] = []
        if SPECIAL in columns:
            columns[SPECIAL] = self._special(columns[SPECIAL], current)
            homes = [name for name, field in self.converted.items() if types.is_string(field.type)]
        texts = special_texts(pa.table({SPECIAL: columns[SPECIAL]})) if homes else {}
        for name in self.converted:
            if types.is_decimal(columns[name].type) and name in homes:
                columns[name] = decimal_text(columns[name])
            elif types.is_integer(columns[name].type):
                # Arrow makes no decimal of an integer that might be too large for it, though none is.
                columns[name] = columns[name].cast(pa.string())
            if name in texts:
                columns[name] = pc.coalesce(texts[name], columns[name])
        if any(name in texts for name in homes):
            columns[SPECIAL] = _without(columns[SPECIAL], homes)
        for name, (field, constant) in self.added.items():
            values = pa.repeat(constant.value.cast(field.type)[0], batch.num_rows)
            columns[name] = values if current is None else pc.if_else(current, values, pa.scalar(None, field.type))
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


def rewriting(
    stream: str,
    table: str,
    there: pa.Schema,
    wanted: pa.Schema,
    constant: Mapping[str, Constant] | None,
    *,
    drops: bool = False,
) -> Rewriting | None:
    """What has to be written anew; None when nothing has. No `constant`: a changelog, whose columns follow no names.

    Raises TargetRefused for a name that is taken, and for a type that may have changed values.
    """
    found = Evolution({}, ())
    if constant is not None:
        found = evolution(table, _numbers(there), _numbers(wanted), there.names)
        found = found.without(gone(_numbers(there), _numbers(wanted), there.names)) if drops else found
    kept = {found.renamed.get(name, name): there.field(name) for name in there.names if name not in found.dropped}
    before = {name: held for name, field in kept.items() if (held := _held(field)) is not None}
    after = {field.name: held for field in wanted if (held := _held(field)) is not None}
    hint = ANOTHER_TARGET if constant is None else read_again(stream, table)
    retyped = check_retyped(table, before, after, hint)
    converted = {name: wanted.field(name) for name in retyped if not fits(wanted.field(name).type, kept[name].type)}
    fresh = [field for field in wanted if field.name not in kept]
    added = {field.name: (field, constant[field.name]) for field in fresh if constant and field.name in constant}
    return Rewriting(found.renamed, found.dropped, added, converted) if found or added or converted else None


def fits(wanted: pa.DataType, there: pa.DataType) -> bool:
    """Whether every value of one type can be written to a column of another."""
    if types.is_integer(wanted) and types.is_integer(there):
        return bool(wanted.bit_width <= there.bit_width)
    return _plain(wanted) == _plain(there)


def refuse_other_names(relation: Relation, there: pa.Schema, wanted: pa.Schema) -> None:
    """For a change that comes late: it cannot be written under names or types that are not the columns' any more."""
    now = held_types(relation)
    before = {field.name: held for field in there if (held := _held(field)) is not None}
    retyped = [name for name, was in before.items() if name in now and not keeps_values(was, now[name])]
    if retyped or evolution(relation.table, _numbers(there), _numbers(wanted), there.names):
        raise renamed_since(relation.table)


def _plain(kind: pa.DataType) -> str:
    """The type without what Delta does not tell: names inside lists, large or small offsets, views."""
    return re.sub(r"large_|_view|<(item|element|entries|key_value): | not null|, keys_sorted", "", str(kind))


def _numbers(schema: pa.Schema) -> dict[str, str]:
    return {field.metadata[_NUMBER].decode(): field.name for field in schema if _NUMBER in (field.metadata or {})}


def _said(field: pa.Field) -> Json:
    return dict(json.loads((field.metadata or {}).get(_TYPE, b"{}")))


def _held(field: pa.Field) -> HeldType | None:
    said = _said(field)
    return HeldType.from_json(said) if said else None


def _has(there: pa.Field, wanted: pa.Field) -> bool:
    """Whether a column says of itself what it should; how people call a type does not matter."""
    known = there.metadata or {}
    one, other = ({k: v for k, v in _said(each).items() if k != "text"} for each in (there, wanted))
    return one == other and known.get(_NUMBER, b"") == wanted.metadata.get(_NUMBER, known.get(_NUMBER, b""))


def _without(maps: pa.Array, names: list[str]) -> pa.Array:
    made = [[pair for pair in texts if pair[0] not in names] or None if texts else None for texts in maps.to_pylist()]
    return pa.array(made, pa.map_(pa.string(), pa.string()))
