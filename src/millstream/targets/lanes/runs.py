"""The changes of a table in seq order, in runs of one relation that fit into memory.

A table may have several relations (schema versions) in a batch, one after another and, when a
description comes back, in turns. Each run is of one relation: what it writes is written before the
next one begins, so that a fold never has to bring two schemas together.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import pyarrow as pa

from millstream.latest import Latest
from millstream.model import Relation
from millstream.targets.base import Part

RUN_ROWS = 1_000_000
RUN_BYTES = 128 << 20
"""A run is written when either is reached. A lane holds two of them: one that is written, and the next (`ahead`)."""

T = TypeVar("T")


@dataclass(frozen=True)
class Run:
    """Changes of one relation that follow each other."""

    relation: Relation
    relation_id: int
    changes: pa.Table
    latest: Latest | None = None
    """The changes folded, if that was done ahead."""


def by_table(parts: Sequence[Part]) -> list[list[Part]]:
    """The parts of each table, in the order in which the tables first come."""
    tables: dict[tuple[str, str], list[Part]] = {}
    for part in parts:
        tables.setdefault((part.relation.schema, part.relation.name), []).append(part)
    return list(tables.values())


def runs(parts: Sequence[Part]) -> Iterator[Run]:
    """All changes of one table, in seq order."""
    waiting: list[pa.RecordBatch] = []
    rows = size = 0
    current: Part | None = None
    for part, batch in _in_order(parts):
        full = rows + batch.num_rows > RUN_ROWS or size + batch.nbytes > RUN_BYTES
        if current is not None and (part is not current or full):
            yield Run(current.relation, current.relation_id, pa.Table.from_batches(waiting))
            waiting, rows, size = [], 0, 0
        current = part
        waiting.append(batch)
        rows += batch.num_rows
        size += batch.nbytes
    if current is not None:
        yield Run(current.relation, current.relation_id, pa.Table.from_batches(waiting))


def ahead(items: Iterator[T]) -> Generator[T]:
    """The same items, each made on another thread while the one before it is worked on.

    Only one thread at a time is inside `items`. What it raises is raised here, in its place. Who stops early waits
    until the item is made that was begun.
    """
    with ThreadPoolExecutor(1, "ahead") as beside:
        coming = beside.submit(next, items, None)
        while (item := coming.result()) is not None:
            coming = beside.submit(next, items, None)
            yield item


def _in_order(parts: Sequence[Part]) -> Iterator[tuple[Part, pa.RecordBatch]]:
    """The batches of all parts, cut where another part's changes come in between."""
    if len(parts) == 1:
        for batch in parts[0].batches:
            if batch.num_rows:
                yield parts[0], batch
        return
    heads = [(part, batch) for part in parts if (batch := _next(part)) is not None]
    while heads:
        heads.sort(key=lambda head: _first(head[1]))
        part, batch = heads[0]
        count = batch.num_rows
        if len(heads) > 1:
            count = int(np.searchsorted(_seqs(batch), _first(heads[1][1])))
        yield part, batch.slice(0, count)
        rest = batch.slice(count) if count < batch.num_rows else _next(part)
        heads[:1] = [] if rest is None else [(part, rest)]


def _next(part: Part) -> pa.RecordBatch | None:
    return next((batch for batch in part.batches if batch.num_rows), None)


def _first(batch: pa.RecordBatch) -> int:
    return int(batch["_ms_seq"][0].as_py())


def _seqs(batch: pa.RecordBatch) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    seqs = batch["_ms_seq"]
    return np.frombuffer(seqs.buffers()[1], np.int64, len(seqs), seqs.offset * 8)
