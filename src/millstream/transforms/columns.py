"""Types that transforms make: by the name that Spark has for them, as Arrow's, and as a column of a relation.

A relation describes columns as its source does. One that a transform made gets the source's type whose columns
become just that Arrow type, so that every target can make a table of it.
"""

from __future__ import annotations

import re
from dataclasses import replace

import pyarrow as pa

from millstream.errors import ConfigError
from millstream.model import Column, Relation
from millstream.sources.decoders import decoded_schema
from millstream.sources.postgres.types import BY_ARRAY_OID, BY_OID
from millstream.sources.scripted.decode import ARROW
from millstream.sources.scripted.script import KIND

_NAMES = {
    "boolean": pa.bool_(),
    "smallint": pa.int16(),
    "int": pa.int32(),
    "integer": pa.int32(),
    "bigint": pa.int64(),
    "long": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "string": pa.string(),
    "binary": pa.binary(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", "UTC"),
    "timestamp_ntz": pa.timestamp("us"),
}
_DECIMAL = re.compile(r"(?:decimal|numeric)\((\d{1,2})(?:,(\d{1,2}))?\)")

_OIDS = {
    pa.bool_(): 16,
    pa.int16(): 21,
    pa.int32(): 23,
    pa.int64(): 20,
    pa.float32(): 700,
    pa.float64(): 701,
    pa.string(): 25,
    pa.binary(): 17,
    pa.date32(): 1082,
    pa.timestamp("us"): 1114,
    pa.timestamp("us", "UTC"): 1184,
}
_NUMERIC = 1700

CASTS = f"{', '.join(_NAMES)}, decimal(p,s)"
"""The types that a cast can make, in words."""


def type_names() -> list[str]:
    """Their names, but for that of the decimals, which has numbers."""
    return list(_NAMES)


def named_type(name: str) -> pa.DataType | None:
    """The type that Spark calls so; None if a cast cannot make it."""
    plain = re.sub(r"\s", "", name.lower())
    found = _DECIMAL.fullmatch(plain)
    if found:
        precision, scale = int(found[1]), int(found[2] or 0)
        return pa.decimal128(precision, scale) if 0 < precision <= 38 and scale <= precision else None
    return _NAMES.get(plain)


def column_of(name: str, kind: pa.DataType, relation: Relation) -> Column | None:
    """A column of the relation's source that becomes this type; None where the source has none."""
    if relation.source_kind == KIND:
        names = [known for known, arrow in ARROW.items() if arrow == kind]
        return Column(name, 0, type_name=names[0]) if names else None
    if pa.types.is_list(kind):
        element = column_of(name, kind.value_type, relation)
        if element is None or pa.types.is_list(kind.value_type):
            return None
        array = BY_OID[element.type_oid].array
        delimiter = BY_ARRAY_OID[array].delimiter
        return replace(element, type_oid=array, element_type_oid=element.type_oid, element_delimiter=delimiter)
    if pa.types.is_decimal(kind):
        return Column(name, _NUMERIC, ((kind.precision << 16) | kind.scale) + 4)
    return Column(name, _OIDS[kind]) if kind in _OIDS else None


def described(
    relation: Relation, fields: dict[str, tuple[pa.DataType, Column | None]], key: dict[str, str]
) -> Relation:
    """The relation with these columns instead of its own: name to type, and the source's column if it is still that.

    `key` has the new names of key columns that are still there; a key that is not whole is none.
    """

    def mapped(names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(key[name] for name in names) if set(names) <= set(key) else ()

    def made(columns: list[Column]) -> Relation:
        return replace(
            relation, columns=tuple(columns), key=mapped(relation.key), primary_key=mapped(relation.primary_key)
        )

    columns = [
        replace(column, name=name) if column is not None else _made(name, kind, relation)
        for name, (kind, column) in fields.items()
    ]
    # A column's type may depend on whether it is in the key: what is another type then is said to be the one it has.
    types = decoded_schema(made(columns)).types
    wrong = [at for at, (kind, _) in enumerate(fields.values()) if types[at] != kind]
    for at in wrong:
        columns[at] = _made(columns[at].name, list(fields.values())[at][0], relation)
    result = made(columns)
    for (name, (kind, _)), found in zip(fields.items(), decoded_schema(result).types, strict=True):
        if found != kind:
            raise _homeless(name, kind, relation)
    return result


def _made(name: str, kind: pa.DataType, relation: Relation) -> Column:
    found = column_of(name, kind, relation)
    if found is None:
        raise _homeless(name, kind, relation)
    return found


def _homeless(name: str, kind: pa.DataType, relation: Relation) -> ConfigError:
    return ConfigError(
        f"{relation.table}.{name}: a transform makes it {kind}, for which there is no type in tables of this source",
        hint="cast it to string, or another of " + CASTS,
    )
