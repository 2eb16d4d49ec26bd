"""A table of the target that has every change of one of the source, in order, with the `_ms_*` columns."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc

from millstream.changelog import BEFORE, METADATA
from millstream.latest import special_texts, whole
from millstream.targets.lanes.database import ColumnDef, Database, Values
from millstream.targets.lanes.tables import Prepared
from millstream.wire.json_columns import json_text

_AS_JSON = (BEFORE, "_ms_unchanged", "_ms_special")


def write_changes(db: Database, prepared: Prepared, changes: pa.Table, more: Sequence[Values] = ()) -> None:
    """Append the changes of one relation, with `more` columns. Structs, lists and maps of ours are JSON text."""
    special = special_texts(changes)
    types = db.metadata_types()
    values = [Values(column, whole(changes[column.name]), special.get(column.name)) for column in prepared.columns]
    for name in METADATA:
        if name in changes.column_names:
            array = whole(changes[name])
            values.append(Values(ColumnDef(name, types[name]), as_json(array) if name in _AS_JSON else array))
    db.insert(prepared.table, [*values, *more])


def as_json(array: pa.Array) -> pa.StringArray:
    """JSON text, NULL where the value is."""
    text = json_text(array)
    if not array.null_count:
        return text
    return pc.if_else(array.is_valid(), text, None)
