"""Rows as a target holds them, told as text: two rows are equal if their texts are.

A *form* is a table with a relation's columns and, where values may have no home in their column, `_ms_special`
with their exact texts. A target whose columns take values of any type says JSON texts itself (`json_form`).
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from millstream.changelog import exposed
from millstream.latest import special_texts, whole
from millstream.model import Relation
from millstream.sources.decoders import decoded_schema
from millstream.wire.json_columns import json_objects, json_text, quoted

SPECIAL = "_ms_special"

_SAID = {b"form": b"json"}


def form_schema(relation: Relation) -> pa.Schema:
    """The usual form: the columns as they are decoded, and the exact texts of values without a home in them."""
    return pa.schema([*decoded_schema(exposed(relation)), pa.field(SPECIAL, pa.map_(pa.string(), pa.string()))])


def json_form(columns: Sequence[pa.StringArray], names: Sequence[str]) -> pa.Table:
    """A form whose columns are JSON texts already."""
    return pa.table(list(columns), names=list(names)).replace_schema_metadata(_SAID)


def told(rows: pa.Table, names: Sequence[str], key: Sequence[str]) -> tuple[pa.StringArray, pa.StringArray]:
    """The key of each row as a JSON object, NULL where the table has no key, and all of it as JSON values."""
    cells = _cells(rows, names)
    keys = json_objects(key, [cells[name] for name in key]) if key else pa.nulls(rows.num_rows, pa.string())
    if not cells:
        return keys, pa.repeat("", rows.num_rows)
    return keys, pc.binary_join_element_wise(*cells.values(), ",")


def _cells(rows: pa.Table, names: Sequence[str]) -> dict[str, pa.StringArray]:
    if (rows.schema.metadata or {}).get(b"form") == b"json":
        return {name: whole(rows[name]) for name in names}
    texts = special_texts(rows) if SPECIAL in rows.column_names else {}
    return {name: _cell(whole(rows[name]), texts.get(name)) for name in names}


def _cell(values: pa.Array, special: pa.StringArray | None) -> pa.StringArray:
    """JSON, or an exact text with a mark in front that no JSON has."""
    if types.is_timestamp(values.type) and values.type.tz is not None:
        # Both sides are in UTC; with a zone Arrow takes twenty times as long.
        values = values.cast(pa.timestamp(values.type.unit))
    text = json_text(values)
    if special is None:
        return text
    return pc.coalesce(pc.binary_join_element_wise("!", quoted(special), ""), text)
