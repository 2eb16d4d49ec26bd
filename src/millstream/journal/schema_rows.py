"""Since when descriptions were in force, found out from the rows: for journals that did not write it down."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from millstream.journal import lookup
from millstream.journal.catalog import Catalog, View
from millstream.journal.index import column
from millstream.journal.schemas import Current, InForce
from millstream.journal.slices import open_slices, read_slice, sealed_slices
from millstream.model import Relation, SeqRange

Pairs = npt.NDArray[np.int64]
"""Seqs and the descriptions that come into force there: two columns, in order of seq."""


def from_rows(catalog: Catalog, views: Sequence[View], relations: Mapping[int, Relation]) -> list[InForce]:
    """What the retained rows tell. The index says most of it; rows are read only where a table's
    descriptions change within a segment."""
    current = Current([relations[number].table for number in sorted(relations)])
    found: list[InForce] = []
    for view in views:
        for seq, _ in _candidates(catalog, view, relations).tolist():
            # Not every candidate is a change: the description may have been in force before this segment.
            row = lookup.rows_between(catalog, views, seq - 1, seq)
            found += current.note(row, column(row, "seq"))
    return found


def _candidates(catalog: Catalog, view: View, relations: Mapping[int, Relation]) -> Pairs:
    """Where a description of the segment can have come into force."""
    index = catalog.index(view)
    tables: dict[str, list[int]] = {}
    for number in np.unique(index["relation"]).tolist():
        if number:
            tables.setdefault(relations[number].table, []).append(number)
    found: list[tuple[int, int]] = []
    for numbers in tables.values():
        if len(numbers) == 1:
            first = int(index["first_seq"][index["relation"] == numbers[0]].min())
            found.append((first, numbers[0]))
        else:
            found += _changes_among(catalog, view, numbers)
    return np.array(sorted(found), np.int64).reshape(-1, 2)


def _changes_among(catalog: Catalog, view: View, numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Where the rows of one table go over from one description to another."""
    span = SeqRange(view.first_seq - 1, view.last_seq)
    make = sealed_slices if view.sealed else open_slices
    names = {"journal_id": catalog.header().journal_id, "epoch": view.epoch, "segment": view.name}
    slices = [one for one in make(catalog.index(view), span, **names) if one.relation in numbers]
    rows = [read_slice(one, catalog.bases, span) for one in slices]
    seq = np.concatenate([column(batch, "seq") for batch in rows])
    relation = np.concatenate([column(batch, "relation") for batch in rows])
    order = np.argsort(seq, kind="stable")
    seq, relation = seq[order], relation[order]
    at = np.concatenate(([0], np.flatnonzero(np.diff(relation)) + 1))
    return list(zip(seq[at].tolist(), relation[at].tolist(), strict=True))
