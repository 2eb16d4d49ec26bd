"""The two derived files beside a segment: where each relation's rows are, where transactions end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millstream.journal.format import JOURNAL

INDEX = np.dtype(
    [
        ("first_seq", "<i8"),
        ("last_seq", "<i8"),
        ("offset", "<i8"),
        ("length", "<i8"),
        ("rows", "<i4"),
        ("crc", "<u4"),
        ("relation", "<i4"),
        ("reserved", "<i4"),
    ]
)
"""One record per (record batch message, relation); `crc` is of the message's bytes."""

CUTS = np.dtype(
    [
        ("seq", "<i8"),
        ("commit_position", "<i8"),
        ("resume_position", "<i8"),
        ("commit_ts_us", "<i8"),
        ("min_ts_us", "<i8"),
        ("max_ts_us", "<i8"),
        ("bytes", "<i8"),
    ]
)
"""Transaction ends, thinned. `min_ts_us` and `max_ts_us` are over all transactions since the record
before; `bytes` counts the row bytes of the segment up to here."""

CUT_ROWS = 64
CUT_BYTES = 64 << 10
"""A transaction end closer than both of these to the one kept before it is left out."""

ROW_BYTES = 49
"""What a row counts in `bytes` beside its payload: its eight fixed columns."""

Records = npt.NDArray[Any]


@dataclass(frozen=True)
class Cut:
    """The end of a transaction: its last seq, its positions and its commit time."""

    seq: int
    commit_position: int
    resume_position: int
    commit_ts_us: int


_DTYPES = {
    field.name: np.dtype("i8" if pa.types.is_timestamp(field.type) else field.type.to_pandas_dtype())
    for field in JOURNAL
    if not pa.types.is_large_binary(field.type)
}


def column(batch: pa.RecordBatch, name: str) -> npt.NDArray[Any]:
    """A fixed-width column as numpy, without a copy. Times are microseconds since 1970."""
    array = batch.column(name)
    if len(array) == 0:
        return np.zeros(0, _DTYPES[name])
    # Not to_numpy(): a commit of one row looks at a dozen columns, and this is four times as fast.
    return np.frombuffer(array.buffers()[1], _DTYPES[name], len(array), array.offset * _DTYPES[name].itemsize)


def integers(values: npt.NDArray[Any]) -> pa.Int64Array:
    """Numpy's numbers as Arrow's. (`pa.array` would do, but it imports pandas: two seconds at every start.)"""
    held = np.ascontiguousarray(values, dtype=np.int64)
    return pa.Array.from_buffers(pa.int64(), len(held), [None, pa.py_buffer(held)])


def in_seq_order(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The rows in order of seq; `batch` itself when they are."""
    seq = column(batch, "seq")
    return batch if (np.diff(seq) >= 0).all() else batch.take(integers(np.argsort(seq, kind="stable")))


def row_bytes(batch: pa.RecordBatch) -> npt.NDArray[np.int64]:
    """Bytes per row: payload and fixed columns."""
    payload = batch.column("payload")
    start = payload.offset
    offsets = np.frombuffer(payload.buffers()[1], dtype=np.int64)[start : start + len(payload) + 1]
    return np.diff(offsets) + ROW_BYTES


def index_of(batch: pa.RecordBatch, offset: int, length: int, crc: int) -> Records:
    """The index records of one message, in order of relation."""
    relation = column(batch, "relation")
    seq = column(batch, "seq")
    order = np.argsort(relation, kind="stable")
    relations, starts, counts = np.unique(relation[order], return_index=True, return_counts=True)
    records = np.zeros(len(relations), INDEX)
    records["first_seq"] = seq[order[starts]]
    records["last_seq"] = seq[order[starts + counts - 1]]
    records["offset"] = offset
    records["length"] = length
    records["rows"] = counts
    records["crc"] = crc
    records["relation"] = relations
    return records


def transaction_ends(commit_position: npt.NDArray[Any], open_end: bool) -> npt.NDArray[np.intp]:
    """Row numbers at which a transaction ends. With `open_end` the last row is not known to be one."""
    ends = np.flatnonzero(np.diff(commit_position))
    return ends if open_end else np.append(ends, len(commit_position) - 1)


def cuts_of(batch: pa.RecordBatch, open_end: bool, bytes_before: int) -> Records:
    """The cut records of one message: thinned, but always with its last transaction end.

    `open_end` says that the last transaction goes on in the next message.
    """
    commit = column(batch, "commit_position")
    ends = transaction_ends(commit, open_end)
    if len(ends) == 0:
        return np.zeros(0, CUTS)
    seq, ts = column(batch, "seq"), column(batch, "commit_ts")
    total = bytes_before + np.cumsum(row_bytes(batch))
    kept = ends[_thinned(ends, total[ends])]
    starts = np.concatenate(([0], kept[:-1] + 1))
    records = np.zeros(len(kept), CUTS)
    records["seq"] = seq[kept]
    records["commit_position"] = commit[kept]
    records["resume_position"] = column(batch, "resume_position")[kept]
    records["commit_ts_us"] = ts[kept]
    records["min_ts_us"] = np.minimum.reduceat(ts[: kept[-1] + 1], starts)
    records["max_ts_us"] = np.maximum.reduceat(ts[: kept[-1] + 1], starts)
    records["bytes"] = total[kept]
    return records


def _thinned(ends: npt.NDArray[Any], total: npt.NDArray[Any]) -> npt.NDArray[np.intp]:
    """Which of the ends to keep: the last of each stretch of 64 rows or 64 KiB, and the last of all.

    Stretches are counted from the message's start, so the choice needs no state and recovery makes
    the same one.
    """
    stretch = np.maximum(ends // CUT_ROWS, 0) + (total - total[0]) // CUT_BYTES
    return np.append(np.flatnonzero(np.diff(stretch)), len(ends) - 1)


def to_cut(record: Any) -> Cut:
    return Cut(
        int(record["seq"]),
        int(record["commit_position"]),
        int(record["resume_position"]),
        int(record["commit_ts_us"]),
    )
