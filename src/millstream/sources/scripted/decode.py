"""The decode side of a scripted source. A payload is JSON: `{"after": {...}, "before": {...} or null}`.

For tests: it goes row by row, which no source that is meant for work may do.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millstream.errors import JournalCorrupt
from millstream.model import Column, Json, Op, Relation
from millstream.sources.base import Decoded
from millstream.sources.scripted.script import KIND

ARROW = {
    "integer": pa.int64(),
    "text": pa.string(),
    "boolean": pa.bool_(),
    "float": pa.float64(),
    "timestamp": pa.timestamp("us", "UTC"),
}
MESSAGES = Relation(
    oid=0,
    schema="millstream",
    name="messages",
    identity="n",
    columns=(Column("prefix", 0, type_name="text"), Column("content", 0, type_name="text")),
    enriched=True,
    source_kind=KIND,
)
"""The description of relation id 0 in the journal of a scripted source."""


def arrow_schema(relation: Relation) -> pa.Schema:
    """The columns that a relation is decoded to."""
    return pa.schema([pa.field(column.name, ARROW[column.type_name or "text"]) for column in relation.columns])


class ScriptedDecoder:
    """Implements `sources.base.Decoder`."""

    def __init__(self, relation: Relation) -> None:
        self.relation = relation

    def decode(self, op: npt.NDArray[np.uint8], payload: pa.LargeBinaryArray) -> Decoded:
        try:
            changes = [json.loads(one) for one in payload.to_pylist()]
            after = [change["after"] for change in changes]
            before = [change["before"] for change in changes]
        except (ValueError, KeyError, TypeError):
            raise JournalCorrupt(f"{self.relation.table}: a payload is no change of a scripted source") from None
        names = [column.name for column in self.relation.columns]
        unchanged = [
            [name for name in names if name not in row] if code == Op.UPDATE else []
            for code, row in zip(op.tolist(), after, strict=True)
        ]
        return Decoded(
            self._rows(after),
            self._rows([row or {} for row in before]),
            np.array([row is not None for row in before], bool),
            pa.array(unchanged, pa.list_(pa.string())),
            pa.array([[]] * len(changes), pa.map_(pa.string(), pa.string())),
        )

    def _rows(self, rows: Sequence[Json]) -> pa.RecordBatch:
        schema = arrow_schema(self.relation)
        columns = [pa.array([_value(row.get(field.name), field.type) for row in rows], field.type) for field in schema]
        return pa.RecordBatch.from_arrays(columns, schema=schema)


def _value(value: Any, kind: pa.DataType) -> Any:
    return datetime.fromisoformat(value) if pa.types.is_timestamp(kind) and value is not None else value
