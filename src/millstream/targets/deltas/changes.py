"""The changes in a Delta changelog as a changelog has them: old keys out of the JSON that the table keeps them in."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json
from pyarrow import types

from millstream.changelog import BEFORE, EPOCH, METADATA
from millstream.errors import VerifyFailed
from millstream.latest import whole
from millstream.model import Relation
from millstream.targets.deltas.partitions import restored
from millstream.targets.deltas.reading import table_path
from millstream.targets.deltas.tables import Handle
from millstream.targets.lanes.tables import mirror_key


@dataclass(frozen=True)
class DeltaChanges:
    """Implements `targets.changelogs.Changes`."""

    root: str

    def read(self, relation: Relation) -> Iterator[pa.Table] | None:
        table = Handle.existing(table_path(self.root, relation))
        if table is None:
            return None
        names = table.schema().names
        own = [name for name in names if name not in (*METADATA, EPOCH)]
        # What came once more is there the first time as well.
        first = pc.field(EPOCH).is_null() if EPOCH in names else None
        # Without a key a row is known by all of itself.
        key = mirror_key(relation) or own
        held = (pa.Table.from_batches([batch]) for batch in table.batches(0, 1, [*own, *METADATA], first))
        by = table.partitions()
        return (restored(_with_old_keys(part, key, relation.table), by) for part in held if part.num_rows)


def _with_old_keys(changes: pa.Table, key: Sequence[str], table: str) -> pa.Table:
    """`_ms_before` as a struct of the key's columns. The rest of an old row is in the change before it."""
    if BEFORE not in changes.column_names:
        return changes
    texts = whole(changes[BEFORE])
    at = changes.column_names.index(BEFORE)
    if texts.null_count == len(texts):
        return changes.remove_column(at)
    try:
        parsed = _parsed(pc.fill_null(texts, "{}"), {name: changes.schema.field(name).type for name in key})
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        raise VerifyFailed(f"{table}: the key is of a type whose old values a Delta changelog does not tell") from None
    old = pa.StructArray.from_arrays(list(parsed.values()), names=list(parsed), mask=texts.is_null())
    return changes.set_column(at, BEFORE, old)


def _parsed(texts: pa.StringArray, columns: dict[str, pa.DataType]) -> dict[str, pa.Array]:
    """Members of JSON objects, by column."""
    read_as = {name: kind if _is_plain(kind) else pa.string() for name, kind in columns.items()}
    lines = pc.binary_join_element_wise(texts, "", "\n")
    raw = pa.BufferReader(lines.buffers()[2])
    options = pa.json.ParseOptions(explicit_schema=pa.schema(read_as), unexpected_field_behavior="ignore")
    block = pa.json.ReadOptions(use_threads=False, block_size=max(1 << 20, raw.size() + 1))
    found = pa.json.read_json(raw, read_options=block, parse_options=options)
    return {name: _typed(whole(found[name]), kind) for name, kind in columns.items()}


def _typed(values: pa.Array, kind: pa.DataType) -> pa.Array:
    if types.is_binary(kind):
        return pa.array([None if text is None else b64decode(text) for text in values.to_pylist()], kind)
    return values.cast(kind)


def _is_plain(kind: pa.DataType) -> bool:
    """Whether JSON has such values; others are strings there."""
    return bool(types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind))
