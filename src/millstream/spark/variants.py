"""JSON text as Spark's VARIANT, where a VARIANT can hold it exactly.

A VARIANT holds numbers of so many digits, and an object's key once. What it cannot hold stays what it is
for every type: NULL in the column, its exact text in `_ms_special`. Each value is therefore read back and
compared; a value is converted once, however many rows of a batch have it.
"""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

import pyarrow as pa
from pyarrow import types
from pyspark.sql.types import DataType, StructField, StructType, VariantType, VariantVal

from millstream.changelog import BEFORE, exposed
from millstream.model import Relation

_JSON = (114, 3802)
"""The types json and jsonb."""


def with_variants(schema: StructType, relation: Relation) -> StructType:
    """The columns of a table's changes, those of JSON as VARIANT, in old rows too."""
    names = {column.name for column in exposed(relation).columns if column.type_oid in _JSON}

    def chosen(fields: list[StructField]) -> list[StructField]:
        return [StructField(f.name, kind(f), f.nullable) for f in fields]

    def kind(field: StructField) -> DataType:
        if field.name == BEFORE and isinstance(field.dataType, StructType):
            return StructType(chosen(field.dataType.fields))
        return VariantType() if field.name in names else field.dataType

    return StructType(chosen(schema.fields))


def is_variant(kind: pa.DataType) -> bool:
    """Whether an Arrow type is how Spark writes a VARIANT."""
    if not types.is_struct(kind) or [field.name for field in kind] != ["value", "metadata"]:
        return False
    return (kind.field("metadata").metadata or {}).get(b"variant") == b"true"


def variants(texts: pa.Array, kind: pa.DataType) -> tuple[pa.Array, list[int]]:
    """The texts as VARIANTs, and the rows whose text none can hold: they are NULL."""
    encoded = texts.dictionary_encode()
    made = [_variant(text) for text in encoded.dictionary.to_pylist()]
    nothing = (b"", b"")
    parts = [made[at] if at is not None else None for at in encoded.indices.to_pylist()]
    values, metadata = (pa.array([(part or nothing)[which] for part in parts], pa.binary()) for which in (0, 1))
    absent = pa.array([part is None for part in parts], pa.bool_())
    there = texts.is_valid().to_pylist()
    odd = [at for at, part in enumerate(parts) if there[at] and part is None]
    return pa.StructArray.from_arrays([values, metadata], fields=list(kind), mask=absent), odd


def _variant(text: str) -> tuple[bytes, bytes] | None:
    try:
        meant = _read(text)
        made = VariantVal.parseJson(text)
        if _read(made.toJson()) == meant:
            return bytes(made.value), bytes(made.metadata)
    except Exception:  # noqa: BLE001 - whatever it is, no VARIANT has this value, and its text is kept
        return None
    return None


def _read(text: str) -> Any:
    return json.loads(text, parse_float=Decimal, parse_int=Decimal, parse_constant=_refuse, object_pairs_hook=_once)


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key is there twice")
    return found


def noted(special: pa.Array, odd: dict[str, tuple[list[int], pa.Array]]) -> pa.Array:
    """The column `_ms_special` with the texts that could not be converted, by label."""
    rows = [list(entries or ()) for entries in special.to_pylist()]
    for label, (places, texts) in odd.items():
        for at in places:
            rows[at].append((label, texts[at].as_py()))
    return pa.array(rows, special.type)
