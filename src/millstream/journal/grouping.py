"""Rows in runs of one relation: what a sealed segment is made of, and the inner parts of a giant transaction."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import FileIO
from itertools import chain
from pathlib import Path

import numpy as np
import pyarrow as pa

from millstream.checksum import crc32
from millstream.errors import JournalCorrupt
from millstream.journal.commit import SCHEMA_MESSAGE
from millstream.journal.files import disk_errors
from millstream.journal.index import Records, column, integers, row_bytes

RUN_ROWS = 16 << 10
RUN_BYTES = 8 << 20
"""A run is one record batch of a sealed segment; a batch that ends inside one reads all of it."""

LONG_ROWS = 1024
"""Runs of so many rows on average decode about as fast as longer ones."""

GATHER_BYTES = RUN_BYTES
"""Relations whose rows take no more than this together are gathered in one pass over the segments."""

STRETCH_BYTES = 4 << 20
"""So much of a segment is read at a time, and one message more."""


class Cancelled(Exception):
    """The writer is closing; the sealing is done again at its next opening."""


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


def makes_long_runs(batch: pa.RecordBatch) -> bool:
    """Whether the rows of each relation are many."""
    return len(batch) >= LONG_ROWS and len(batch) >= LONG_ROWS * len(np.unique(column(batch, "relation")))


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


@dataclass(frozen=True)
class _Group:
    """Relations whose rows are gathered in one pass over the segment."""

    relations: frozenset[int]
    streamed: bool
    """A single relation too large to gather: its runs are written as they fill."""


def runs(files: Sequence[tuple[Path, Records]], stop: threading.Event) -> Iterator[pa.RecordBatch]:
    """The rows of segments, given with their index, as runs of one relation, in seq order inside a relation.

    With memory for a few record batches, whatever the segments hold. Raises Cancelled once `stop` is set.
    """
    for group in _groups([index for _, index in files]):
        gathered: list[pa.RecordBatch] = []
        for batch in chain.from_iterable(_matching(path, index, group.relations) for path, index in files):
            if stop.is_set():
                raise Cancelled
            gathered.append(batch)
            if group.streamed:
                *full, rest = cut_runs(pa.concat_batches(gathered))
                yield from full
                gathered = [rest]
        yield from by_relation(pa.concat_batches(gathered))


def _groups(indexes: Sequence[Records]) -> Iterator[_Group]:
    """Relations in order of id, as many to a group as fit into memory together."""
    relation = np.concatenate([index["relation"] for index in indexes])
    share = np.concatenate(
        [index["length"] * (index["rows"] / np.maximum(_rows_of_message(index), 1)) for index in indexes]
    )
    relations, inverse = np.unique(relation, return_inverse=True)
    relations_of: list[int] = []
    size = 0.0
    for one, weight in zip(relations.tolist(), np.bincount(inverse, share).tolist(), strict=True):
        if weight > GATHER_BYTES:
            yield _Group(frozenset({one}), streamed=True)
            continue
        if relations_of and size + weight > GATHER_BYTES:
            yield _Group(frozenset(relations_of), streamed=False)
            relations_of, size = [], 0.0
        relations_of.append(one)
        size += weight
    if relations_of:
        yield _Group(frozenset(relations_of), streamed=False)


def _rows_of_message(index: Records) -> Records:
    """For each index record the number of rows in its whole message."""
    _, inverse = np.unique(index["offset"], return_inverse=True)
    return np.bincount(inverse, weights=index["rows"])[inverse]


def _matching(source: Path, index: Records, relations: frozenset[int]) -> Iterator[pa.RecordBatch]:
    """The rows of these relations, a stretch of messages at a time, each message's CRC checked.

    Arrow parses a stretch as one stream: message by message in Python would hold the interpreter
    for seconds over a segment of small commits, and capture's own commits with it.
    """
    keys = np.array(sorted(relations))
    wanted = index[np.isin(index["relation"], keys)]
    if len(wanted) == 0:
        return
    _, first = np.unique(wanted["offset"], return_index=True)
    messages = wanted[first]
    stretch = (messages["offset"] - messages["offset"][0]) // STRETCH_BYTES
    with disk_errors(source, "read the segment"), source.open("rb", buffering=0) as file:
        for part in np.split(messages, np.flatnonzero(np.diff(stretch)) + 1):
            yield _only(_read_stretch(file, part, source), keys)


def _read_stretch(file: FileIO, messages: Records, source: Path) -> pa.RecordBatch:
    start = int(messages["offset"][0])
    length = int(messages["offset"][-1] + messages["length"][-1]) - start
    data = bytearray(len(SCHEMA_MESSAGE) + length)
    view = memoryview(data)
    view[: len(SCHEMA_MESSAGE)] = SCHEMA_MESSAGE
    file.seek(start)
    if file.readinto(view[len(SCHEMA_MESSAGE) :]) != length:
        raise JournalCorrupt(f"{source} ends before byte {start + length}", hint="restore the file")
    starts = (messages["offset"] - start + len(SCHEMA_MESSAGE)).tolist()
    places = zip(starts, messages["length"].tolist(), messages["crc"].tolist(), strict=True)
    for at, length, crc in places:
        if crc32(view[at : at + length]) != crc:
            raise JournalCorrupt(
                f"{source} is damaged at byte {start + at - len(SCHEMA_MESSAGE)}",
                hint="`millstream journal verify` shows all",
            )
    return pa.ipc.open_stream(pa.py_buffer(data)).read_all().combine_chunks().to_batches()[0]


def _only(batch: pa.RecordBatch, keys: Records) -> pa.RecordBatch:
    chosen = np.isin(column(batch, "relation"), keys)
    return batch if chosen.all() else batch.take(integers(np.flatnonzero(chosen)))
