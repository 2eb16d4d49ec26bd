"""The rows of a table in a file: as an Arrow IPC stream, or as JSON lines.

JSON lines are as `wire.json_columns` writes them, except that dates and times are the numbers that Arrow has for
them (days, or microseconds, since 1970): each of their values comes back as it was, infinity too.
"""

from __future__ import annotations

import base64
import enum
import json
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from itertools import islice
from typing import Any

import pyarrow as pa
from pyarrow import types

from millstream.errors import SnapshotError
from millstream.snapshots.files import Summed
from millstream.wire.json_columns import json_objects, json_text

LINES = 8192
"""So many lines are read at a time."""


class Format(enum.StrEnum):
    """How rows are written."""

    ARROW = "arrow"
    JSONL = "jsonl"


def write_rows(file: Summed, format: Format, schema: pa.Schema, batches: Iterator[pa.RecordBatch]) -> int:
    """Write the rows of a table; returns how many there were."""
    return _write_arrow(file, schema, batches) if format is Format.ARROW else _write_lines(file, batches)


def read_rows(file: Summed, format: Format, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """The rows back, all of the file. Raises SnapshotError for what they cannot be."""
    try:
        if format is Format.ARROW:
            yield from _read_arrow(file, schema)
        else:
            yield from _read_lines(file, schema)
    except (pa.ArrowException, ValueError, KeyError, TypeError, EOFError) as damaged:
        # Its words may hold a row's value.
        raise SnapshotError(f"a file of the snapshot is damaged: {type(damaged).__name__}") from None
    while file.read(1 << 20):
        pass


def schema_text(schema: pa.Schema) -> str:
    """A schema for a manifest."""
    return base64.b64encode(schema.serialize()).decode()


def schema_of(text: str) -> pa.Schema:
    return pa.ipc.read_schema(pa.BufferReader(base64.b64decode(text)))


def _write_arrow(file: Summed, schema: pa.Schema, batches: Iterator[pa.RecordBatch]) -> int:
    count = 0
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_stream(pa.PythonFile(file, "w"), schema, options=options) as writer:
        for batch in batches:
            writer.write_batch(batch)
            count += batch.num_rows
    return count


def _read_arrow(file: Summed, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    reader = pa.ipc.open_stream(pa.PythonFile(file, "r"))
    if not reader.schema.equals(schema):
        raise SnapshotError("a file of the snapshot has other columns than its manifest says")
    yield from reader


def _write_lines(file: Summed, batches: Iterator[pa.RecordBatch]) -> int:
    count = 0
    for batch in batches:
        values = [json_text(column.cast(_countable(column.type))) for column in batch.columns]
        lines = json_objects(batch.schema.names, values)
        file.write("".join(f"{line}\n" for line in lines.to_pylist()).encode())
        count += batch.num_rows
    return count


def _read_lines(file: Summed, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    lines = _lines(file)
    while some := list(islice(lines, LINES)):
        rows = [json.loads(line) for line in some]
        columns = [_column([row[field.name] for row in rows], field.type) for field in schema]
        yield pa.RecordBatch.from_arrays(columns, schema=schema)


def _lines(file: Summed) -> Iterator[bytes]:
    rest = b""
    while piece := file.read(1 << 20):
        *whole, rest = (rest + piece).split(b"\n")
        yield from whole
    if rest:
        raise SnapshotError("a file of the snapshot ends within a line")


def _countable(kind: pa.DataType) -> pa.DataType:
    """The type with numbers in place of dates and times."""
    if types.is_timestamp(kind) or types.is_time64(kind):
        return pa.int64()
    if types.is_date32(kind):
        return pa.int32()
    if types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_countable(kind.value_type)))
    if types.is_struct(kind):
        return pa.struct([field.with_type(_countable(field.type)) for field in kind])
    return kind


def _column(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    meant = _meaning(kind)
    read = values if meant is None else [None if value is None else meant(value) for value in values]
    return pa.array(read, _countable(kind)).cast(kind)


def _meaning(kind: pa.DataType) -> Callable[[Any], Any] | None:
    """What makes a value of what JSON has for it; None where that is the value."""
    if types.is_floating(kind):
        return float
    if types.is_decimal(kind):
        return Decimal
    if types.is_binary(kind):
        return base64.b64decode
    if types.is_list(kind):
        inner = _meaning(kind.value_type)
        return None if inner is None else lambda value: [None if one is None else inner(one) for one in value]
    if types.is_struct(kind):
        inners = {field.name: _meaning(field.type) for field in kind}
        return lambda value: {name: _applied(inners[name], one) for name, one in value.items()}
    if types.is_map(kind):
        item = _meaning(kind.item_type)
        return lambda value: [(key, _applied(item, one)) for key, one in value.items()]
    return None


def _applied(meant: Callable[[Any], Any] | None, value: Any) -> Any:
    return value if meant is None or value is None else meant(value)
