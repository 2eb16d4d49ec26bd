"""Rows of a SQLite table as Arrow columns, and back, each value as it was.

In SQLite every value has a type of its own, whatever its column's: a text in a column of numbers, bytes in one of
text. A column here has the type that SQLite's declared; a value of another type is NULL in it, and stands in
`_ms_other`, a map by column: its kind (i, f, t, b) and its text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import NoneType
from typing import Any

import pyarrow as pa

OTHER = "_ms_other"
_PYTHON = {pa.int64(): int, pa.float64(): float, pa.string(): str, pa.binary(): bytes}


def arrow_schema(columns: Mapping[str, str]) -> pa.Schema:
    """For the columns of a table, with their declared types."""
    fields = [pa.field(name, _type(declared)) for name, declared in columns.items()]
    return pa.schema([*fields, pa.field(OTHER, pa.map_(pa.string(), pa.string()))])


def _type(declared: str) -> pa.DataType:
    """By the rules of SQLite's affinity."""
    text = declared.upper()
    if "INT" in text:
        return pa.int64()
    if any(word in text for word in ("CHAR", "CLOB", "TEXT")):
        return pa.string()
    if any(word in text for word in ("REAL", "FLOA", "DOUB")):
        return pa.float64()
    return pa.binary() if not text or "BLOB" in text else pa.string()


def to_arrow(rows: Sequence[tuple[Any, ...]], schema: pa.Schema) -> pa.RecordBatch:
    """Rows that were read."""
    other: list[list[tuple[str, str]] | None] = [None] * len(rows)
    arrays = []
    for field, column in zip(schema, zip(*rows, strict=True), strict=False):
        wanted = _PYTHON[field.type]
        values: Sequence[Any] = column
        if not set(map(type, column)) <= {wanted, NoneType}:
            for number, value in enumerate(column):
                if value is not None and type(value) is not wanted:
                    other[number] = [*(other[number] or []), (field.name, _said(value))]
            values = [value if type(value) is wanted else None for value in column]
        arrays.append(pa.array(values, field.type))
    return pa.RecordBatch.from_arrays([*arrays, pa.array(other, schema.field(OTHER).type)], schema=schema)


def from_arrow(batch: pa.RecordBatch) -> list[Sequence[Any]]:
    """The columns back, as SQLite takes them."""
    columns = {name: batch.column(name).to_pylist() for name in batch.schema.names if name != OTHER}
    other = batch.column(OTHER)
    if other.null_count < len(other):
        for number, found in enumerate(other.to_pylist()):
            for name, said in found or ():
                columns[name][number] = _meant(said)
    return list(columns.values())


def _said(value: Any) -> str:
    if isinstance(value, bytes):
        return f"b{value.hex()}"
    if isinstance(value, float):
        return f"f{value.hex()}"
    return f"i{value}" if isinstance(value, int) else f"t{value}"


def _meant(said: str) -> Any:
    kind, text = said[0], said[1:]
    if kind == "b":
        return bytes.fromhex(text)
    if kind == "f":
        return float.fromhex(text)
    return int(text) if kind == "i" else text
