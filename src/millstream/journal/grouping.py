"""Rows in runs of one relation: what a sealed segment is made of, and the inner parts of a giant transaction."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from millstream.journal.index import column, integers, row_bytes

RUN_ROWS = 16 << 10
RUN_BYTES = 8 << 20
"""A run is one record batch of a sealed segment; a batch that ends inside one reads all of it."""


def by_relation(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """The rows as runs, one relation after another in order of id, in their old order inside a relation."""
    relation = column(batch, "relation")
    if len(batch) and (relation == relation[0]).all():
        yield from cut_runs(batch)
        return
    order = np.argsort(relation, kind="stable")
    borders = np.flatnonzero(np.diff(relation[order])) + 1
    for rows in np.split(order, borders):
        yield from cut_runs(batch.take(integers(rows)))


def cut_runs(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Rows of one relation, cut at RUN_ROWS rows and about RUN_BYTES bytes."""
    total = np.cumsum(row_bytes(batch))
    start = 0
    while start < len(batch):
        before = int(total[start - 1]) if start else 0
        end = int(np.searchsorted(total, before + RUN_BYTES, side="right"))
        end = min(max(end, start + 1), start + RUN_ROWS, len(batch))
        yield batch.slice(start, end - start)
        start = end
