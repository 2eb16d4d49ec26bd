"""What lies after a cursor, by relation: counted from the index alone, but for the runs that the cursor cuts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from millstream.journal.catalog import Catalog, View
from millstream.journal.format import Head
from millstream.journal.index import Records, column
from millstream.journal.slices import read_slice, sealed_slices
from millstream.model import SeqRange


@dataclass(frozen=True)
class Backlog:
    """Of one relation: how many rows, about how many bytes in the journal, and the first of them."""

    rows: int
    bytes: int
    first_seq: int

    def plus(self, other: Backlog) -> Backlog:
        return Backlog(self.rows + other.rows, self.bytes + other.bytes, min(self.first_seq, other.first_seq))


def backlog(catalog: Catalog, views: Sequence[View], head: Head, start: int) -> dict[int, Backlog]:
    """The rows with start < seq that are visible, by relation."""
    found: dict[int, Backlog] = {}
    for view in views:
        if view.last_seq <= start:
            continue
        index = catalog.index(view)
        shared = _bytes(index)
        after = index["last_seq"] > start
        cut = after & (index["first_seq"] <= start)
        whole = after & ~cut
        for relation in np.unique(index["relation"][whole]):
            mine = whole & (index["relation"] == relation)
            first = int(index["first_seq"][mine].min())
            _add(found, int(relation), int(index["rows"][mine].sum()), int(shared[mine].sum()), first)
        range = SeqRange(start, view.last_seq)
        names = {"journal_id": head.journal_id, "epoch": view.epoch, "segment": view.name}
        for slice in sealed_slices(index[cut], range, **names):
            seqs = column(read_slice(slice, catalog.bases, range), "seq")
            if len(seqs):
                _add(found, slice.relation, len(seqs), slice.length * len(seqs) // slice.rows, int(seqs[0]))
    return found


def _bytes(index: Records) -> Records:
    """A message with rows of several relations counts for each by its rows."""
    _, inverse = np.unique(index["offset"], return_inverse=True)
    rows = np.bincount(inverse, weights=index["rows"]) if len(index) else np.zeros(0)
    return np.asarray(index["length"] * index["rows"] / np.maximum(rows[inverse], 1), np.int64)


def _add(found: dict[int, Backlog], relation: int, rows: int, size: int, first_seq: int) -> None:
    before, more = found.get(relation), Backlog(rows, size, first_seq)
    found[relation] = more if before is None else before.plus(more)
