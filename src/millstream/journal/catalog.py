"""What a reader knows of a journal, and keeps: head, manifest, relations, index records, cuts."""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from millstream.checksum import crc32
from millstream.errors import JournalCorrupt
from millstream.journal.ends import BLOCKS, ENDS, decode_block, read_directory
from millstream.journal.files import HEAD
from millstream.journal.format import HEAD_BYTES, Head, Header
from millstream.journal.index import CUTS, INDEX, Records
from millstream.journal.locations import Locations
from millstream.journal.looks import FILE as LOOKS
from millstream.journal.looks import CatalogChange
from millstream.journal.looks import parse as parse_looks
from millstream.journal.manifest import FILE as MANIFEST
from millstream.journal.manifest import Entry, Manifest
from millstream.journal.pruned import Pruned
from millstream.journal.relations import FILE as RELATIONS
from millstream.journal.relations import parse_line
from millstream.journal.schemas import FILE as SCHEMAS
from millstream.journal.schemas import InForce
from millstream.journal.schemas import parse as parse_schemas
from millstream.journal.segment import segment_name, segment_number
from millstream.journal.slices import read_header
from millstream.model import Relation

_KEPT = 32
"""Index and cut files of closed segments that are kept in memory, each."""

_HEAD_TRIES = 100
_LOOK_TRIES = 5


class View(NamedTuple):
    """A segment as a reader sees it at one head: a closed one, or the visible part of the open one."""

    number: int
    name: str
    sealed: bool
    epoch: int
    first_seq: int
    last_seq: int
    bytes: int
    first_commit_position: int | None
    """None for the open segment: it must be read."""
    commit_position: int
    min_ts_us: int
    max_ts_us: int
    row_bytes: int
    last_cut: int | None
    index_entries: int
    index_crc: int | None
    cut_entries: int
    cut_crc: int | None
    bytes_before: int
    """Row bytes of all segments before it."""
    latest_us: int
    """The latest commit time in it and in all segments before it."""
    ends_blocks: int | None = None
    ends_crc: int = 0


class Catalog:
    """Reads small files and keeps them as long as they are good. Knows no search."""

    def __init__(self, bases: Sequence[str]) -> None:
        self._files = Locations(bases)
        self._header: Header | None = None
        self.forget()

    @property
    def bases(self) -> tuple[str, ...]:
        return self._files.bases

    def forget(self) -> None:
        """Drop everything but the header."""
        self._epoch = 0
        self._seen: tuple[bytes, Head] | None = None
        self._manifest = Manifest(version=-1)
        self._closed: list[View] = []
        self._relations: dict[int, Relation] = {}
        self._relations_bytes = 0
        self._schemas: tuple[bytes, list[InForce]] = b"", []
        self._changes: tuple[bytes, list[CatalogChange]] = b"", []
        self._kept: OrderedDict[str, Records] = OrderedDict()
        self._growing: dict[str, Records] = {}

    def header(self) -> Header:
        if self._header is None:
            self._header = read_header(self._files)
        return self._header

    def head(self) -> Head | None:
        """The head; a half-copied one is read again, and only None after many tries."""
        for _ in range(_HEAD_TRIES):
            try:
                raw = self._files.read(HEAD, 0, HEAD_BYTES)
            except FileNotFoundError:
                return None
            text = raw.to_pybytes()
            if self._seen is not None and self._seen[0] == text:
                # Readers look many times a second, most of the time at the same head.
                return self._seen[1]
            head = Head.from_bytes(text)
            if head is not None:
                self._note(head)
                self._seen = text, head
                return head
        return None

    def _note(self, head: Head) -> None:
        """A new writer may have rebuilt derived files; another journal has nothing in common with ours."""
        if self._header is not None and self._header.journal_id != head.journal_id:
            self._header = None
            self.forget()
        if self._epoch != head.epoch:
            self.forget()
            self._epoch = head.epoch

    def views(self, head: Head) -> list[View]:
        """All segments with rows, in order, up to this head."""
        if self._manifest.version < head.manifest_version:
            self._manifest = self._read_manifest(head)
            self._closed = list(_closed(self._manifest.entries))
        open_number = segment_number(head.segment)
        views = self._closed[: bisect_right(self._closed, head.seq, key=attrgetter("first_seq"))]
        if head.seq >= head.segment_first_seq and not any(view.number == open_number for view in views[-1:]):
            views.append(self._open(head, open_number, views[-1] if views else None))
        return views

    def pruned(self) -> Pruned | None:
        """What is gone before the first of the last `views`."""
        return self._manifest.pruned

    def _read_manifest(self, head: Head) -> Manifest:
        manifest = Manifest.from_bytes(self._files.read_all(MANIFEST))
        if manifest.version < head.manifest_version:
            raise JournalCorrupt(
                f"{MANIFEST} has version {manifest.version}, the head names {head.manifest_version}",
                hint="the journal's files are from different times; restore them together",
            )
        return manifest

    def _open(self, head: Head, number: int, before: View | None) -> View:
        name = segment_name(number)
        cuts = self._grow(f"segments/{name}.cuts", head.cut_entries, CUTS)
        latest = int(cuts["max_ts_us"].max())
        return View(
            number=number,
            name=name,
            sealed=False,
            epoch=head.epoch,
            first_seq=head.segment_first_seq,
            last_seq=head.seq,
            bytes=head.segment_length,
            first_commit_position=None,
            commit_position=head.commit_position,
            min_ts_us=int(cuts["min_ts_us"].min()),
            max_ts_us=latest,
            row_bytes=int(cuts["bytes"][-1]),
            last_cut=head.seq,
            index_entries=head.index_entries,
            index_crc=None,
            cut_entries=head.cut_entries,
            cut_crc=None,
            bytes_before=before.bytes_before + before.row_bytes if before else 0,
            latest_us=max(latest, before.latest_us) if before else latest,
        )

    def index(self, view: View) -> Records:
        return self._records(f"segments/{view.name}.idx", view.index_entries, view.index_crc, INDEX)

    def cuts(self, view: View) -> Records:
        return self._records(f"segments/{view.name}.cuts", view.cut_entries, view.cut_crc, CUTS)

    def ends(self, view: View, start: int, end: int) -> Records:
        """The transaction ends of a sealed segment with start < seq <= end."""
        assert view.ends_blocks is not None  # noqa: S101 - the caller has looked
        name = f"segments/{view.name}.ends"
        if name not in self._kept:
            raw = self._files.read(name, 0, view.ends_blocks * BLOCKS.itemsize).to_pybytes()
            self._keep(name, read_directory(raw, view.ends_blocks, view.ends_crc, name))
        directory = self._keep(name)
        first = int(np.searchsorted(directory["last_seq"], start, side="right"))
        last = int(np.searchsorted(directory["first_seq"], end, side="right"))
        found = [np.zeros(0, ENDS), *(self._block(name, directory[at], at) for at in range(first, last))]
        ends = np.concatenate(found)
        return ends[(ends["seq"] > start) & (ends["seq"] <= end)]

    def _block(self, name: str, block: Any, number: int) -> Records:
        key = f"{name}#{number}"
        if key not in self._kept:
            raw = self._files.read(name, int(block["offset"]), int(block["length"])).to_pybytes()
            self._keep(key, decode_block(raw, int(block["crc"]), name))
        return self._keep(key)

    def _keep(self, name: str, records: Records | None = None) -> Records:
        """Keep what was read, the longest unused goes; or what is kept."""
        if records is not None:
            self._kept[name] = records
            if len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(name)
        return self._kept[name]

    def _records(self, name: str, count: int, crc: int | None, dtype: np.dtype[np.void]) -> Records:
        if crc is None:
            return self._grow(name, count, dtype)
        if name not in self._kept:
            raw = self._files.read(name, 0, count * dtype.itemsize).to_pybytes()
            if len(raw) != count * dtype.itemsize or crc32(raw) != crc:
                raise JournalCorrupt(
                    f"{name} is damaged", hint="remove the file: the writer rebuilds it when it opens the journal"
                )
            self._keep(name, np.frombuffer(raw, dtype))
        return self._keep(name)

    def _grow(self, name: str, count: int, dtype: np.dtype[np.void]) -> Records:
        """The first `count` records of a file that is being appended to; only new bytes are read."""
        have = self._growing.get(name)
        known = len(have) if have is not None else 0
        if have is None or known < count:
            raw = self._files.read(name, known * dtype.itemsize, (count - known) * dtype.itemsize)
            if raw.size != (count - known) * dtype.itemsize:
                raise JournalCorrupt(f"{name} has fewer than the {count} records that the head names")
            more = np.frombuffer(raw, dtype)
            have = np.concatenate([have, more]) if have is not None else more
            if len(self._growing) > 4:
                self._growing.clear()
            self._growing[name] = have
        return have[:count]

    def relations(self, head: Head) -> dict[int, Relation]:
        if self._relations_bytes < head.relations_bytes:
            raw = self._files.read(
                RELATIONS, self._relations_bytes, head.relations_bytes - self._relations_bytes
            ).to_pybytes()
            for line in raw.splitlines():
                number = len(self._relations) + 1
                relation = parse_line(line, number)
                if relation is None:
                    raise JournalCorrupt(f"{RELATIONS}: line {number} is not the description that was written")
                self._relations[number] = relation
            self._relations_bytes = head.relations_bytes
        return dict(self._relations)

    def schemas(self, head: Head) -> list[InForce] | None:
        """Since when descriptions were in force; None where nobody has written it down yet."""
        try:
            raw = self._files.read_all(SCHEMAS)
        except FileNotFoundError:
            return None
        if self._schemas[0] != raw:
            # Whoever delivers looks with every batch, nearly always at the same lines.
            self._schemas = raw, parse_schemas(raw)
        return [one for one in self._schemas[1] if one.seq <= head.seq]

    def changes(self, head: Head) -> list[CatalogChange]:
        """What happened to tables without a row in the log, in the order in which it was found, up to a head."""
        for left in reversed(range(_LOOK_TRIES)):
            try:
                raw = self._files.read_all(LOOKS)
            except FileNotFoundError:
                return []
            try:
                if self._changes[0] != raw:
                    self._changes = raw, parse_looks(raw)[1]
                break
            except JournalCorrupt:
                # A large one is read in pieces, and may have been replaced between two of them.
                if not left:
                    raise
        return [one for one in self._changes[1] if one.is_covered(head.covered)]


def _closed(entries: Sequence[Entry]) -> Iterator[View]:
    """Closed segments with rows, each with what is before it."""
    size = latest = 0
    for entry in entries:
        if entry.rows:
            latest = max(latest, entry.max_ts_us or 0)
            yield _view(entry, size, latest)
            size += entry.row_bytes


def _view(entry: Entry, bytes_before: int, latest_us: int) -> View:
    return View(
        number=entry.number,
        name=entry.name,
        sealed=entry.sealed,
        epoch=entry.epoch,
        first_seq=entry.first_seq,
        last_seq=entry.last_seq,
        bytes=entry.bytes,
        first_commit_position=entry.first_commit_position,
        commit_position=entry.commit_position,
        min_ts_us=entry.min_ts_us or 0,
        max_ts_us=entry.max_ts_us or 0,
        row_bytes=entry.row_bytes,
        last_cut=entry.last_cut,
        index_entries=entry.index_entries,
        index_crc=entry.index_crc,
        cut_entries=entry.cut_entries,
        cut_crc=entry.cut_crc,
        bytes_before=bytes_before,
        latest_us=latest_us,
        ends_blocks=entry.ends_blocks if entry.ends_bytes is not None else None,
        ends_crc=entry.ends_crc,
    )
