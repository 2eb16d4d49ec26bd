"""Finding a place in a journal: by seq, by position, by time.

Cuts are thinned: an end is left out only if a later one of the same 64 rows is kept. So between two
cuts, ends that were left out lie in the last 64 rows, and looking at those is enough to be exact. A sealed
segment has them in `.ends`; of the one or two others the rows are read.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from operator import attrgetter

import numpy as np
import pyarrow as pa

from millstream.errors import OutOfRange
from millstream.journal.catalog import Catalog, View
from millstream.journal.ends import ends_of
from millstream.journal.format import Head, Header
from millstream.journal.index import CUT_ROWS, Cut, Records, column, in_seq_order, to_cut
from millstream.journal.places import Earliest, position_text, time_text
from millstream.journal.slices import EMPTY, open_slices, read_slice, sealed_slices
from millstream.model import SeqRange


def rows_between(catalog: Catalog, views: Sequence[View], start: int, end: int) -> pa.RecordBatch:
    """The rows with start < seq <= end, of all relations, in seq order. For short ranges."""
    range = SeqRange(start, end)
    found = [EMPTY]
    for view in views:
        if view.last_seq > start and view.first_seq <= end:
            make = sealed_slices if view.sealed else open_slices
            names = {"journal_id": catalog.header().journal_id, "epoch": view.epoch, "segment": view.name}
            found += [read_slice(slice, catalog.bases, range) for slice in make(catalog.index(view), range, **names)]
    return in_seq_order(pa.concat_batches(found))


def ends_between(catalog: Catalog, views: Sequence[View], view: View, start: int, end: int) -> Records:
    """The transaction ends with start < seq <= end in a segment; `end` must be one."""
    if view.ends_blocks is not None:
        return catalog.ends(view, start, end)
    rows = rows_between(catalog, views, start, end)
    return ends_of([rows], start + 1, end, end)


def view_of(views: Sequence[View], seq: int) -> View | None:
    """The segment that holds a seq."""
    at = bisect_left(views, seq, key=attrgetter("last_seq"))
    return views[at] if at < len(views) and views[at].first_seq <= seq else None


def cut_at(catalog: Catalog, views: Sequence[View], seq: int) -> Cut | None:
    pruned = catalog.pruned()
    if pruned is not None and pruned.seq == seq:
        return pruned.cut
    view = view_of(views, seq)
    if view is None:
        return None
    cuts = catalog.cuts(view)
    at = int(np.searchsorted(cuts["seq"], seq))
    if at == len(cuts):
        return None
    if cuts["seq"][at] == seq:
        return to_cut(cuts[at])
    if cuts["seq"][at] - seq >= CUT_ROWS:
        return None
    ends = ends_between(catalog, views, view, seq - 1, int(cuts["seq"][at]))
    return to_cut(ends[0]) if ends["seq"][0] == seq else None


def seq_at_position(catalog: Catalog, views: Sequence[View], head: Head, header: Header, position: int) -> int:
    kind, pruned = header.source_kind, catalog.pruned()
    asked = f"position {position_text(kind, position)}"
    if pruned is not None and position <= pruned.commit_position:
        raise earliest(catalog, views, head).refuse(asked, kind)
    if position < header.start_position:
        raise OutOfRange(
            f"{asked} is before the beginning of the journal, {position_text(kind, header.start_position)}",
            hint="start there",
        )
    if position > head.covered:
        raise OutOfRange(f"{asked} is beyond what the journal covers, {position_text(kind, head.covered)}")
    number = bisect_left(views, position, key=attrgetter("commit_position"))
    if number == len(views):
        return head.seq
    cuts = catalog.cuts(views[number])
    at = int(np.searchsorted(cuts["commit_position"], position))
    return _before_first(catalog, views, views[number], at, "commit_position", position)


def seq_at_time(catalog: Catalog, views: Sequence[View], head: Head, header: Header, ts_us: int) -> int:
    # Times are not in order, but the latest time up to a segment is: it grows where a later one comes first.
    number = bisect_left(views, ts_us, key=attrgetter("latest_us"))
    found = head.seq
    if number < len(views):
        cuts = catalog.cuts(views[number])
        reached = np.flatnonzero(cuts["max_ts_us"] >= ts_us)
        at = int(reached[0]) if len(reached) else len(cuts)
        found = _before_first(catalog, views, views[number], at, "commit_ts_us", ts_us)
    pruned = catalog.pruned()
    if pruned is not None and ts_us <= pruned.max_ts_us:
        first = replace(earliest(catalog, views, head), ts_us=pruned.max_ts_us + 1)
        raise first.refuse(f"some of what was committed from {time_text(ts_us)} on", header.source_kind)
    if pruned is None and views and found == views[0].first_seq - 1:
        _check_beginning(views, header, ts_us)
    return found


def _check_beginning(views: Sequence[View], header: Header, ts_us: int) -> None:
    """The first transaction is the answer only if none before the journal could have been."""
    created = int(datetime.fromisoformat(header.created_at).timestamp() * 1_000_000)
    first = min(created, *(view.min_ts_us for view in views))
    if ts_us < first:
        raise OutOfRange(
            f"{time_text(ts_us)} is before the beginning of the journal, {time_text(first)}", hint="start there"
        )


def earliest(catalog: Catalog, views: Sequence[View], head: Head) -> Earliest:
    """The first change that is retained; where the next one will be when there is none."""
    if not views:
        return Earliest(head.seq + 1, head.covered, head.commit_ts_us)
    first, position = views[0].first_seq, views[0].first_commit_position
    if position is None:
        position = int(column(rows_between(catalog, views, first - 1, first), "commit_position")[0])
    return Earliest(first, position, views[0].min_ts_us)


def _before_first(catalog: Catalog, views: Sequence[View], view: View, at: int, field: str, value: int) -> int:
    """The seq before the first transaction whose `field` reaches `value`, given the first cut that may end it.

    Without such a cut the transaction ends in a later segment, and it begins right after the last
    end in this one: had it begun earlier, an earlier segment would have matched.
    """
    cuts = catalog.cuts(view)
    before = int(cuts["seq"][at - 1]) if at else view.first_seq - 1
    if at == len(cuts):
        return before
    end = int(cuts["seq"][at])
    start = max(before, end - CUT_ROWS)
    ends = ends_between(catalog, views, view, start, end)
    first = int(np.flatnonzero(ends[field] >= value)[0])
    return int(ends["seq"][first - 1]) if first else before
