"""A journal in words and figures, for people: its segments, and its rows in order."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from millstream.errors import JournalError
from millstream.journal.catalog import Catalog
from millstream.journal.format import Head, Header
from millstream.journal.head import read_head, read_header
from millstream.journal.index import in_seq_order
from millstream.journal.manifest import FILE as MANIFEST
from millstream.journal.manifest import Manifest
from millstream.journal.reader import JournalReader, Retained
from millstream.journal.slices import open_slice
from millstream.model import SeqRange

STEP_ROWS = 16 << 10
"""How many seqs `rows` reads at a time."""


@dataclass(frozen=True)
class SegmentSummary:
    """One segment. `form` is open (being written), closed (waiting to be sealed) or sealed."""

    name: str
    form: str
    rows: int
    bytes: int
    first_seq: int
    last_seq: int
    commit_position: int
    covered: int
    min_ts_us: int | None
    max_ts_us: int | None


@dataclass(frozen=True)
class JournalSummary:
    """A journal: who it is, how far it is, its segments in order, and what it takes on disk."""

    header: Header
    head: Head
    retained: Retained
    tables: tuple[str, ...]
    segments: tuple[SegmentSummary, ...]
    files: int
    bytes: int


def describe(path: Path) -> JournalSummary:
    """Look at the journal in a directory of this host. Safe beside its writer."""
    header, head = read_header(path), read_head(path)
    if head is None:
        raise JournalError(f"the journal in {path} has no head", hint="start capture once: it makes it again")
    reader = JournalReader([str(path)])
    segments = [
        SegmentSummary(
            name=entry.name,
            form="sealed" if entry.sealed else "closed",
            rows=entry.rows,
            bytes=entry.bytes,
            first_seq=entry.first_seq,
            last_seq=entry.last_seq,
            commit_position=entry.commit_position,
            covered=entry.covered,
            min_ts_us=entry.min_ts_us,
            max_ts_us=entry.max_ts_us,
        )
        for entry in Manifest.from_bytes((path / MANIFEST).read_bytes()).entries
        if entry.name[:8] != head.segment or not head.segment_length
    ]
    if head.segment_length:
        segments.append(_open_segment(path, head))
    sizes = [file.stat().st_size for file in path.rglob("*") if file.is_file()]
    tables = tuple(sorted({relation.table for relation in reader.relations().values()}))
    return JournalSummary(header, head, reader.retained(), tables, tuple(segments), len(sizes), sum(sizes))


def _open_segment(path: Path, head: Head) -> SegmentSummary:
    catalog = Catalog([str(path)])
    views = catalog.views(head)
    cuts = catalog.cuts(views[-1]) if views and views[-1].name == head.segment else None
    return SegmentSummary(
        name=head.segment,
        form="open",
        rows=head.seq - head.segment_first_seq + 1,
        bytes=head.segment_length,
        first_seq=head.segment_first_seq,
        last_seq=head.seq,
        commit_position=head.commit_position,
        covered=head.covered,
        min_ts_us=int(cuts["min_ts_us"].min()) if cuts is not None else None,
        max_ts_us=int(cuts["max_ts_us"].max()) if cuts is not None else None,
    )


def rows(reader: JournalReader, range: SeqRange, tables: Sequence[str] = ()) -> Iterator[pa.RecordBatch]:
    """The raw rows of a range in seq order, a few thousand at a time; of these tables (patterns), or all."""
    wanted = {
        id
        for id, relation in reader.relations().items()
        if any(fnmatch.fnmatchcase(relation.table, pattern) for pattern in tables)
    }
    start = range.start
    while start < range.end:
        part = SeqRange(start, min(start + STEP_ROWS, range.end))
        found = [
            open_slice(slice, reader.locations, part)
            for slice in reader.slices(part)
            if not tables or slice.relation in wanted
        ]
        found = [batch for batch in found if len(batch)]
        if found:
            yield in_seq_order(pa.concat_batches(found))
        start = part.end
