"""The changelog: what one change looks like to those who read it.

A relation's own columns come first, in their order, then:

    _ms_op         string      c created, u updated, d deleted, r read (snapshot), t truncated, m message
    _ms_seq        bigint      the change's number in its journal: dense, and never goes back
    _ms_position   string      commit position in the source, %08X/%08X: sorts as it grows
    _ms_tx_index   int         the change's place in its transaction
    _ms_commit_ts  timestamp   when the source committed
    _ms_txid       bigint      the source's transaction id (32 bits in Postgres: it wraps)
    _ms_event_id   string      journal-position-index: the same for the same change, always
    _ms_deleted    boolean     the row is gone after this change
    _ms_schema     int         which description of the relation was in force
    _ms_before     struct      the old row (or only its key), NULL where the source sent none
    _ms_unchanged  array       columns that did not change and were not sent: NULL is not their value
    _ms_special    map         exact text of values with no home in their column, which is NULL there;
                               `_ms_before.<column>` for those of the old row

A user's column that is called like one of these, in any case (Spark compares names without it),
gets a second underscore after its `_ms`: `_ms_seq` becomes `_ms__seq`. A table without columns
has no `_ms_before`, because Parquet has no empty struct.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millstream.model import Op, Relation
from millstream.sources.decoders import decoded_schema, decoder

_Number = TypeVar("_Number", np.uint8, np.int64)

_FRONT = [
    pa.field("_ms_op", pa.string(), nullable=False),
    pa.field("_ms_seq", pa.int64(), nullable=False),
    pa.field("_ms_position", pa.string(), nullable=False),
    pa.field("_ms_tx_index", pa.int32(), nullable=False),
    pa.field("_ms_commit_ts", pa.timestamp("us", "UTC"), nullable=False),
    pa.field("_ms_txid", pa.int64(), nullable=False),
    pa.field("_ms_event_id", pa.string(), nullable=False),
    pa.field("_ms_deleted", pa.bool_(), nullable=False),
    pa.field("_ms_schema", pa.int32(), nullable=False),
]
_BACK = [
    pa.field("_ms_unchanged", pa.list_(pa.string()), nullable=False),
    pa.field("_ms_special", pa.map_(pa.string(), pa.string()), nullable=False),
]

BEFORE = "_ms_before"

METADATA = (*(f.name for f in _FRONT), BEFORE, *(f.name for f in _BACK))
"""The names of our own columns, in order."""

EPOCH = "_ms_epoch"
"""What a changelog in a database or a lake has beside them once something was replayed to it: the number of that
replay, NULL in rows that came for the first time."""

END_POSITION = "_ms_end_position"
"""What a table of all versions of rows has beside `_ms_position`: where the version was over."""

COMMON = (*_FRONT, *_BACK)
"""Our own columns that have the same type for every table: all but `_ms_before`."""

PIECE_BYTES = 64 << 20

_UPPER = np.frombuffer(b"".join(b"%02X" % i for i in range(256)), np.uint16)
_LOWER = np.frombuffer(b"".join(b"%02x" % i for i in range(256)), np.uint16)


@lru_cache(maxsize=1024)
def exposed(relation: Relation) -> Relation:
    """The relation under the column names that its changelog has."""
    taken = {column.name.lower() for column in relation.columns}
    renamed = {column.name: column.name for column in relation.columns}
    for name in renamed:
        if _is_ours(name):
            other = f"{name[:3]}_{name[3:]}"
            while other.lower() in taken:
                other = f"{other[:3]}_{other[3:]}"
            taken.add(other.lower())
            renamed[name] = other
    return replace(
        relation,
        columns=tuple(replace(column, name=renamed[column.name]) for column in relation.columns),
        key=tuple(renamed[name] for name in relation.key),
        primary_key=tuple(renamed[name] for name in relation.primary_key),
    )


def _is_ours(name: str) -> bool:
    return name.lower() in (*METADATA, EPOCH, END_POSITION) or name.lower().startswith(BEFORE + ".")


@lru_cache(maxsize=1024)
def schema(relation: Relation) -> pa.Schema:
    """The schema of a relation's changelog. Every user column is nullable, whatever the source says:
    a delete may know its key only, and a truncate has no row."""
    own = list(decoded_schema(exposed(relation)))
    before = [pa.field(BEFORE, pa.struct(own))] if own else []
    return pa.schema([*own, *_FRONT, *before, *_BACK])


def assemble(rows: pa.RecordBatch, relation: Relation, relation_id: int, event_prefix: str) -> pa.RecordBatch:
    """Decode journal rows of one relation into its changelog, row for row.

    `rows` has the journal's schema and rows of this relation only. At most `PIECE_BYTES` or one
    row at a time (see `pieces`): text columns have 32-bit offsets.
    """
    op = _numpy(rows["op"], np.uint8)
    decoded = decoder(exposed(relation)).decode(op, rows["payload"])
    front = _front(rows, op, relation_id, event_prefix)
    before = []
    if decoded.before.num_columns:
        absent = _booleans(~decoded.has_before)
        before = [pa.StructArray.from_arrays(decoded.before.columns, fields=list(decoded.before.schema), mask=absent)]
    columns = [*decoded.after.columns, *front, *before, decoded.unchanged, decoded.special]
    return pa.RecordBatch.from_arrays(columns, schema=schema(relation))


def pieces(rows: pa.RecordBatch, max_bytes: int = PIECE_BYTES) -> Iterator[pa.RecordBatch]:
    """Cut journal rows so that no piece has more than `max_bytes` of payload, or more than one row."""
    payload = rows["payload"]
    if not len(payload):
        return
    offsets = np.frombuffer(payload.buffers()[1], np.int64, len(payload) + 1, payload.offset * 8)
    begin = 0
    while begin < len(payload):
        fits = int(np.searchsorted(offsets, offsets[begin] + max_bytes, side="right")) - 1
        end = min(len(payload), max(begin + 1, fits))
        yield rows.slice(begin, end - begin)
        begin = end


def _front(rows: pa.RecordBatch, op: npt.NDArray[np.uint8], relation_id: int, event_prefix: str) -> list[pa.Array]:
    """The metadata columns from `_ms_op` to `_ms_schema`."""
    position = _numpy(rows["commit_position"], np.int64)
    gone = (op == Op.DELETE) | (op == Op.TRUNCATE)
    return [
        _fixed_width(op.reshape(-1, 1)),
        rows["seq"],
        _position(position),
        rows["tx_index"],
        rows["commit_ts"],
        rows["txid"],
        _event_id(position, rows["tx_index"], event_prefix),
        _booleans(gone),
        _numbers(np.full(len(op), relation_id, np.int32)),
    ]


def _numpy(array: pa.Array, kind: type[_Number]) -> npt.NDArray[_Number]:
    """A column without NULLs as numpy. (Arrow's own ways, to numpy and back, import pandas: two seconds.)"""
    dtype = np.dtype(kind)
    return np.frombuffer(array.buffers()[1], dtype, len(array), array.offset * dtype.itemsize)


def _booleans(mask: npt.NDArray[np.bool_]) -> pa.BooleanArray:
    return pa.Array.from_buffers(pa.bool_(), len(mask), [None, pa.py_buffer(np.packbits(mask, bitorder="little"))])


def _numbers(values: npt.NDArray[np.int32]) -> pa.Int32Array:
    return pa.Array.from_buffers(pa.int32(), len(values), [None, pa.py_buffer(values)])


def _position(position: npt.NDArray[np.int64]) -> pa.StringArray:
    if len(position) > 1 and (position == position[0]).all():
        return pa.repeat(_position(position[:1])[0], len(position))
    digits = _hex(position, _UPPER)
    text = np.empty((len(position), 17), np.uint8)
    text[:, :8], text[:, 8], text[:, 9:] = digits[:, :8], ord("/"), digits[:, 8:]
    return _fixed_width(text)


def _event_id(position: npt.NDArray[np.int64], tx_index: pa.Array, event_prefix: str) -> pa.StringArray:
    front = f"{event_prefix}-".encode()
    if len(position) and (position == position[0]).all():
        # A transaction, or a chunk of a baseline.
        same = front + _hex(position[:1], _LOWER).tobytes() + b"-"
        return pc.binary_replace_slice(tx_index.cast(pa.string()), 0, 0, same)
    digits = _digits(tx_index)
    text = np.empty((len(position), len(front) + 17 + digits.shape[1]), np.uint8)
    text[:, : len(front)] = np.frombuffer(front, np.uint8)
    end = len(front) + 16
    text[:, len(front) : end], text[:, end], text[:, end + 1 :] = _hex(position, _LOWER), ord("-"), digits
    if digits.shape[1]:
        return _fixed_width(text)
    return pc.binary_join_element_wise(_fixed_width(text), tx_index.cast(pa.string()), _NOTHING)


def _digits(numbers: pa.Array) -> npt.NDArray[np.uint8]:
    """The one digit of each number; none at all where one of them has more. Small transactions have no others."""
    values = np.frombuffer(numbers.buffers()[1], np.int32, len(numbers), numbers.offset * 4)
    if values.max(initial=0) > 9:
        return np.empty((len(values), 0), np.uint8)
    return (values + ord("0")).astype(np.uint8).reshape(-1, 1)


def _hex(numbers: npt.NDArray[np.int64], digits: npt.NDArray[np.uint16]) -> npt.NDArray[np.uint8]:
    """Sixteen digits a number, as a matrix of characters."""
    octets = numbers.astype(">i8").view(np.uint8)
    return digits[octets].view(np.uint8).reshape(len(numbers), 16)


def _fixed_width(text: npt.NDArray[np.uint8]) -> pa.StringArray:
    """A string array from a matrix of characters, one row each."""
    rows, width = text.shape
    offsets = np.arange(rows + 1, dtype=np.int32) * np.int32(width)
    return pa.StringArray.from_buffers(rows, pa.py_buffer(offsets), pa.py_buffer(np.ascontiguousarray(text)))


_NOTHING = _fixed_width(np.empty((1, 0), np.uint8))[0]
