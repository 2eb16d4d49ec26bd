"""Which Arrow and Spark type a Postgres column has: the one mapping, for stream and snapshot alike.

A value without a home in its column's type (NaN in a decimal, infinity in a timestamp, a year
beyond 9999, bytes that are no UTF-8) is NULL in the column and stands with its exact text in
`_ms_special`. A key column must never be NULL like that, so a key column whose type has such
values is text. A type this module does not know, or cannot see through (a domain whose base the
catalog no longer told), arrives as its exact text.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import pyarrow as pa

from millstream.model import Column, Relation


class Cast(enum.Enum):
    """How the server's text becomes a column. `casts.py` has one function for each."""

    TEXT = "text"
    PARSED = "parsed"
    """Arrow's own parser reads the server's text; what it refuses has no home in the type."""
    BOOLEAN = "boolean"
    BYTEA = "bytea"


@dataclass(frozen=True)
class ColumnType:
    """What a column becomes. `special` says that its type has values that the column cannot hold."""

    arrow: pa.DataType
    spark: str
    cast: Cast
    special: bool = False


TEXT = ColumnType(pa.string(), "string", Cast.TEXT)

BOOL_OID, BYTEA_OID, TEXT_OID, NUMERIC_OID = 16, 17, 25, 1700

_FIXED: dict[int, ColumnType] = {
    BOOL_OID: ColumnType(pa.bool_(), "boolean", Cast.BOOLEAN),
    BYTEA_OID: ColumnType(pa.binary(), "binary", Cast.BYTEA),
    20: ColumnType(pa.int64(), "bigint", Cast.PARSED),
    21: ColumnType(pa.int16(), "smallint", Cast.PARSED),
    23: ColumnType(pa.int32(), "int", Cast.PARSED),
    700: ColumnType(pa.float32(), "float", Cast.PARSED),
    701: ColumnType(pa.float64(), "double", Cast.PARSED),
    1082: ColumnType(pa.date32(), "date", Cast.PARSED, special=True),
    1114: ColumnType(pa.timestamp("us"), "timestamp_ntz", Cast.PARSED, special=True),
    1184: ColumnType(pa.timestamp("us", "UTC"), "timestamp", Cast.PARSED, special=True),
}
"""By type OID. Text, varchar, char, name, uuid, json, jsonb and enums are text, as all the rest is."""

_MAX_DECIMAL = 38


def column_type(column: Column, *, key: bool = False) -> ColumnType:
    """The type of one column; `key` says that the column identifies rows and so may never be NULL."""
    oid, modifier = column.type_oid, column.type_mod
    if column.type_kind == "d":
        if column.base_type_oid is None:
            return TEXT
        oid, modifier = column.base_type_oid, -1 if column.base_type_mod is None else column.base_type_mod
    found = _numeric(modifier) if oid == NUMERIC_OID else _FIXED.get(oid, TEXT)
    return TEXT if key and found.special else found


def column_types(relation: Relation) -> tuple[ColumnType, ...]:
    """The types of all columns of a relation, in its order.

    Where whole rows are the identity (FULL without a primary key) no column is a key of its own.
    """
    keys = set(relation.key)
    if relation.identity == "f" and not relation.primary_key:
        keys = set()
    return tuple(column_type(column, key=column.name in keys) for column in relation.columns)


def _numeric(modifier: int) -> ColumnType:
    """Decimal where precision and scale are declared and Spark can hold them, else text."""
    if modifier < 4:
        return TEXT
    precision = (modifier - 4) >> 16 & 0xFFFF
    # An 11-bit signed number since Postgres 15, which allows a negative scale.
    scale = ((modifier - 4 & 0x7FF) ^ 0x400) - 0x400
    if scale < 0:
        precision, scale = precision - scale, 0
    if not scale <= precision <= _MAX_DECIMAL:
        return TEXT
    return ColumnType(pa.decimal128(precision, scale), f"decimal({precision},{scale})", Cast.PARSED, special=True)
