"""What the changes of a changelog leave of a table: folded, for a comparison with the source."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json
from pyarrow import types

from millstream.errors import VerifyFailed
from millstream.fold import Inconsistent, fold
from millstream.latest import whole
from millstream.model import Json, Relation
from millstream.targets.forms import form_schema
from millstream.targets.lanes.tables import mirror_key

READ_ROWS = 16_384


class Changes(Protocol):
    """Where the changes are. Picklable."""

    def read(self, relation: Relation) -> Iterator[pa.Table] | None:
        """All changes of the table (schema: `changelog.schema`), in any order; None when it has none."""


@dataclass(frozen=True)
class ChangelogReader:
    """See `targets.base.Reader` for the contract. A task folds all of a table, and holds it in memory."""

    changes: Changes
    parallel = True

    def parts(self, relation: Relation) -> Sequence[Json]:
        return [{}]

    def read(self, relation: Relation, part: Json) -> Iterator[pa.Table]:
        found = self.changes.read(relation)
        if found is None:
            return
        rows = folded(relation, found)
        yield from (pa.Table.from_batches([batch]) for batch in _as_now(rows, relation).to_batches(READ_ROWS))

    def expected(self, relation: Relation, rows: pa.RecordBatch) -> pa.Table:
        return pa.Table.from_batches([rows]).select(form_schema(relation).names)


def folded(relation: Relation, changes: Iterable[pa.Table]) -> pa.Table:
    """The rows that changes leave. Raises VerifyFailed if they cannot be all that there were."""
    try:
        return fold(changes, mirror_key(relation))
    except Inconsistent as broken:
        raise VerifyFailed(
            f"the changelog of {relation.table} is not whole: {broken}",
            hint="deliver it once more (replay), or begin a new target",
        ) from None


def old_keys(texts: pa.StringArray, columns: Mapping[str, pa.DataType], table: str) -> pa.StructArray | None:
    """These columns of old rows that a changelog keeps as JSON; None if there is no old row."""
    if texts.null_count == len(texts):
        return None
    try:
        parsed = _parsed(pc.fill_null(texts, "{}"), columns)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        raise VerifyFailed(f"{table}: the key is of a type whose old values a changelog does not tell") from None
    return pa.StructArray.from_arrays(list(parsed.values()), names=list(parsed), mask=texts.is_null())


def _parsed(texts: pa.StringArray, columns: Mapping[str, pa.DataType]) -> dict[str, pa.Array]:
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


def _as_now(rows: pa.Table, relation: Relation) -> pa.Table:
    """The rows with the columns that the table has now."""
    wanted = form_schema(relation)
    columns = [
        rows[field.name].cast(field.type) if field.name in rows.column_names else pa.nulls(rows.num_rows, field.type)
        for field in wanted
    ]
    return pa.table(columns, schema=wanted)
