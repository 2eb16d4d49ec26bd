"""Reading a journal: what is visible, where a batch may end, which bytes hold it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TypeVar

import numpy as np

from millstream.errors import JournalCorrupt, JournalError, OutOfRange
from millstream.journal import lookup
from millstream.journal.backlog import Backlog, backlog
from millstream.journal.catalog import Catalog, View
from millstream.journal.format import Head, Header, Slice
from millstream.journal.index import CUT_ROWS, Cut, to_cut
from millstream.journal.looks import CatalogChange
from millstream.journal.places import Earliest
from millstream.journal.pruned import Pruned
from millstream.journal.schema_rows import from_rows
from millstream.journal.schemas import InForce
from millstream.journal.slices import open_slices, sealed_slices
from millstream.model import Relation, SeqRange

T = TypeVar("T")

_TRIES = 10
"""A segment may be sealed and its open form dropped between two reads; then the head says more."""


@dataclass(frozen=True)
class Planned:
    """Where a batch ends: at a transaction's end, within the limits or one transaction beyond them.

    `full` says that a limit ended it, so that waiting longer would not make it larger.
    """

    end: int
    rows: int
    bytes: int
    full: bool
    position: int
    commit_ts_us: int


@dataclass(frozen=True)
class Retained:
    """What a journal holds: its first change, the oldest commit time (None without rows), the bytes of its
    segments, and what is gone before it, if anything is."""

    earliest: Earliest
    oldest_ts_us: int | None
    bytes: int
    pruned: Pruned | None


class JournalReader:
    """Reads what the writer has published. Picklable by its locations; one thread at a time.

    Never lists a directory, asks for a file's size or maps one, and never reads beyond `head`.
    """

    def __init__(self, locations: Sequence[str]) -> None:
        self._locations = tuple(locations)
        self._catalog = Catalog(self._locations)

    def __reduce__(self) -> tuple[object, ...]:
        return JournalReader, (self._locations,)

    @property
    def locations(self) -> tuple[str, ...]:
        return self._locations

    def header(self) -> Header:
        """Who this journal is. Raises JournalError if there is none."""
        return self._catalog.header()

    def head(self) -> Head | None:
        """The visible end now; None while the writer has not published one."""
        return self._catalog.head()

    def relation(self, id: int) -> Relation:
        """The description with this id. Id 0 belongs to logical messages and has none."""
        found = self.relations().get(id)
        if found is None:
            raise JournalCorrupt(f"the journal has no relation {id}")
        return found

    def relations(self) -> dict[int, Relation]:
        """All descriptions that visible rows may refer to."""
        return self._catalog.relations(self._visible())

    def schemas(self) -> list[InForce]:
        """Since when the descriptions of visible rows, also of pruned ones, were in force; in order of seq."""
        written = self._catalog.schemas(self._visible())
        return self.schemas_of_rows() if written is None else written

    def catalog_changes(self) -> list[CatalogChange]:
        """What happened to tables without a row in the log, in the order in which it was found."""
        return self._catalog.changes(self._visible())

    def schemas_of_rows(self) -> list[InForce]:
        """The same, as far as the retained rows themselves tell it."""

        def find(views: Sequence[View], head: Head) -> list[InForce]:
            return from_rows(self._catalog, views, self._catalog.relations(head))

        return self._with_views(find)

    def first_seq(self) -> int:
        """The lowest retained seq; one above the last when nothing is there."""

        def find(views: Sequence[View], head: Head) -> int:
            return views[0].first_seq if views else head.seq + 1

        return self._with_views(find)

    def retained(self) -> Retained:
        """What the journal holds now, and from where on."""

        def find(views: Sequence[View], head: Head) -> Retained:
            size = sum(view.bytes for view in views)
            oldest = views[0].min_ts_us if views else None
            return Retained(lookup.earliest(self._catalog, views, head), oldest, size, self._catalog.pruned())

        return self._with_views(find)

    def plan_end(self, start: int, *, max_events: int, max_bytes: int) -> Planned | None:
        """Where a batch that starts at cursor `start` should end; None if nothing is visible after it.

        At least one whole transaction, else as many as fit into both limits. Raises OutOfRange for
        a start that is not retained or lies beyond the head.
        """

        def find(views: Sequence[View], head: Head) -> Planned | None:
            self._check_range(views, head, start)
            if start == head.seq:
                return None
            cut = self._end_of_batch(views, start, max_events, max_bytes)
            size = self._bytes_at(views, cut.seq) - self._bytes_at(views, start)
            rows = cut.seq - start
            full = cut.seq < head.seq or rows >= max_events or size >= max_bytes
            return Planned(cut.seq, rows, size, full, cut.resume_position, cut.commit_ts_us)

        return self._with_views(find)

    def slices(self, range: SeqRange) -> list[Slice]:
        """The byte ranges that hold the rows of `range`, in order of segment, then place.

        Opening all of them with `open_slice(..., range)` gives every row of the range once.
        """

        def find(views: Sequence[View], head: Head) -> list[Slice]:
            self._check_range(views, head, range.start, range.end)
            found: list[Slice] = []
            first = bisect_right(views, range.start, key=attrgetter("last_seq"))
            for view in views[first : bisect_right(views, range.end, key=attrgetter("first_seq"))]:
                make = sealed_slices if view.sealed else open_slices
                found += make(
                    self._catalog.index(view),
                    range,
                    journal_id=head.journal_id,
                    epoch=view.epoch,
                    segment=view.name,
                )
            return found

        return self._with_views(find)

    def backlog(self, start: int) -> dict[int, Backlog]:
        """What is visible after cursor `start`, by relation. Raises OutOfRange as `plan_end` does."""

        def find(views: Sequence[View], head: Head) -> dict[int, Backlog]:
            self._check_range(views, head, start)
            return backlog(self._catalog, views, head, start)

        return self._with_views(find)

    def cut_at(self, seq: int) -> Cut | None:
        """The transaction that ends with `seq`; None if none does, or the seq is not retained or visible."""

        def find(views: Sequence[View], head: Head) -> Cut | None:
            return lookup.cut_at(self._catalog, views, seq)

        return self._with_views(find)

    def seq_at_position(self, position: int) -> int:
        """The cursor before the first transaction whose commit position is at or after `position`.

        A resume position will do as well: the next commit lies at or after it. Raises OutOfRange
        before the earliest retained position and beyond what the journal covers.
        """

        def find(views: Sequence[View], head: Head) -> int:
            return lookup.seq_at_position(self._catalog, views, head, self.header(), position)

        return self._with_views(find)

    def seq_at_time(self, ts_us: int) -> int:
        """The cursor before the first transaction, in commit order, with commit time >= `ts_us`.

        Times are not in order of commit; this is the first, so later ones may be older. The head
        if there is none yet. Raises OutOfRange before the earliest retained time.
        """

        def find(views: Sequence[View], head: Head) -> int:
            return lookup.seq_at_time(self._catalog, views, head, self.header(), ts_us)

        return self._with_views(find)

    def _end_of_batch(self, views: Sequence[View], start: int, max_events: int, max_bytes: int) -> Cut:
        """The last transaction end within the limits, or the first one there is."""
        most = self._bytes_at(views, start) + max_bytes
        best: Cut | None = None
        for view in views[bisect_right(views, start, key=attrgetter("last_seq")) :]:
            if view.last_cut is None or view.last_cut <= start:
                continue
            cuts, base = self._catalog.cuts(view), view.bytes_before
            whole_fits = view.last_cut - start <= max_events and base + view.row_bytes <= most
            first = int(np.searchsorted(cuts["seq"], start, side="right"))
            last = len(cuts) - 1
            if not whole_fits:
                within = np.searchsorted(cuts["seq"], start + max_events, side="right")
                last = int(min(within, np.searchsorted(cuts["bytes"] + base, most, side="right"))) - 1
            if last >= first:
                best = to_cut(cuts[last])
            elif best is None:
                best = self._first_end(views, start, to_cut(cuts[first]), max_events)
            if not whole_fits:
                break
        if best is None:
            raise JournalCorrupt(f"no transaction ends after seq {start}", hint="`millstream journal verify`")
        return best

    def _first_end(self, views: Sequence[View], start: int, cut: Cut, max_events: int) -> Cut:
        """An end that was thinned out, when the first that was kept lies beyond a small limit."""
        if cut.seq - start > CUT_ROWS or cut.seq - start <= max_events:
            return cut
        view = lookup.view_of(views, cut.seq)
        assert view is not None  # noqa: S101 - the cut is from it
        ends = lookup.ends_between(self._catalog, views, view, start, cut.seq)
        within = int(np.searchsorted(ends["seq"], start + max_events, side="right"))
        return to_cut(ends[max(within - 1, 0)])

    def _bytes_at(self, views: Sequence[View], seq: int) -> int:
        """Row bytes of the retained journal up to a seq; exact at the ends that the cuts hold."""
        number = bisect_right(views, seq, key=attrgetter("first_seq")) - 1
        if number < 0:
            return 0
        view = views[number]
        if view.last_seq <= seq:
            return view.bytes_before + view.row_bytes
        cuts = self._catalog.cuts(view)
        at = int(np.searchsorted(cuts["seq"], seq, side="right")) - 1
        return view.bytes_before + (int(cuts["bytes"][at]) if at >= 0 else 0)

    def _check_range(self, views: Sequence[View], head: Head, start: int, end: int | None = None) -> None:
        first = views[0].first_seq if views else head.seq + 1
        if start < first - 1:
            first_there = lookup.earliest(self._catalog, views, head)
            raise first_there.refuse(f"seq {start + 1}", self.header().source_kind)
        if max(start, end or start) > head.seq:
            raise OutOfRange(f"seq {max(start, end or start)} is beyond the visible end {head.seq}")

    def _visible(self) -> Head:
        head = self.head()
        if head is None:
            raise JournalError(f"the journal at {', '.join(self._locations)} has no head yet")
        return head

    def _with_views(self, find: Callable[[Sequence[View], Head], T]) -> T:
        """Run a search on one consistent view; on a new one if a segment changed form meanwhile."""
        for attempt in range(_TRIES):
            head = self._visible()
            try:
                return find(self._catalog.views(head), head)
            except FileNotFoundError as error:
                self._catalog.forget()
                if attempt == _TRIES - 1:
                    raise JournalCorrupt(
                        f"a segment is missing: {error}", hint="`millstream journal verify` shows which"
                    ) from error
        raise AssertionError("unreachable")
