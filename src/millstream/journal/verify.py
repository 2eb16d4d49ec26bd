"""Checking a whole journal: every byte, every seq, every transaction, every derived file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa

from millstream.checksum import crc32
from millstream.errors import JournalError
from millstream.journal.ends import decode, ends_of
from millstream.journal.files import HEAD, HEADER, SEGMENTS
from millstream.journal.format import Head, Header
from millstream.journal.head import read_head, read_header
from millstream.journal.index import CUTS, INDEX, Records, in_seq_order, index_of
from millstream.journal.manifest import FILE as MANIFEST
from millstream.journal.manifest import Entry, Manifest
from millstream.journal.relations import FILE as RELATIONS
from millstream.journal.relations import parse
from millstream.journal.rowcheck import Problem, RowChecker
from millstream.journal.schemas import FILE as SCHEMAS
from millstream.journal.schemas import parse as parse_schemas
from millstream.journal.segment import frames, record_batch, segment_name
from millstream.journal.slices import EMPTY
from millstream.journal.walk import walk_segment

Progress = Callable[[int, int], None]
"""Called with bytes read so far and bytes in all."""


def verify(path: Path, progress: Progress | None = None) -> list[Problem]:
    """Everything that is wrong with the journal in `path`; nothing is changed.

    May run beside the writer: it looks at what was visible when it began, and looks again if
    segments changed their form meanwhile.
    """
    while True:
        version = _version(path)
        problems = _Verification(path, progress or (lambda _done, _all: None)).run()
        if not problems or _version(path) == version:
            return problems


def _version(path: Path) -> bytes:
    try:
        return (path / MANIFEST).read_bytes()
    except OSError:
        return b""


@dataclass
class _Verification:
    path: Path
    progress: Progress
    problems: list[Problem] = field(default_factory=list)
    _done: int = 0
    _all: int = 0

    def run(self) -> list[Problem]:
        try:
            header = read_header(self.path)
        except FileNotFoundError:
            return [Problem(HEADER, "is missing: this is no journal")]
        except JournalError as error:
            return [Problem(HEADER, error.message)]
        head = read_head(self.path)
        if head is None or head.journal_id != header.journal_id:
            self._say(HEAD, "is missing or damaged; the writer makes it again when it opens the journal")
            head = None
        manifest = self._manifest(head)
        first_seq = manifest.pruned.seq + 1 if manifest.pruned else header.first_seq
        relations = self._relations(head)
        self._schemas(head, relations)
        rows = RowChecker(first_seq, relations, self._say)
        self._all = sum(entry.bytes for entry in manifest.entries) + (head.segment_length if head else 0)
        for entry in manifest.entries:
            self._closed(entry, header, rows)
        if head is not None:
            self._last(head, header, manifest, rows)
        return self.problems

    def _say(self, file: str, message: str) -> None:
        self.problems.append(Problem(file, message))

    def _manifest(self, head: Head | None) -> Manifest:
        try:
            manifest = Manifest.from_bytes((self.path / MANIFEST).read_bytes())
        except FileNotFoundError:
            self._say(MANIFEST, "is missing")
        except JournalError as error:
            self._say(MANIFEST, error.message)
        else:
            if head and manifest.version < head.manifest_version:
                self._say(MANIFEST, f"has version {manifest.version}, the head names {head.manifest_version}")
            return manifest
        return Manifest()

    def _relations(self, head: Head | None) -> int:
        """How many relations are described."""
        try:
            raw = (self.path / RELATIONS).read_bytes()
        except FileNotFoundError:
            raw = b""
        committed = head.relations_bytes if head else raw.rfind(b"\n") + 1
        if len(raw) < committed:
            self._say(RELATIONS, f"has {len(raw)} bytes of the {committed} that were committed")
        try:
            return len(parse(raw[:committed], RELATIONS))
        except JournalError as error:
            self._say(RELATIONS, error.message)
            return raw.count(b"\n")

    def _schemas(self, head: Head | None, relations: int) -> None:
        try:
            found = parse_schemas((self.path / SCHEMAS).read_bytes(), head.seq if head else None)
        except FileNotFoundError:
            return  # the next writer makes it from the rows
        except JournalError as error:
            self._say(SCHEMAS, error.message)
            return
        for number, (one, seq) in enumerate(zip(found, [0, *(one.seq for one in found)], strict=False), start=1):
            if one.seq <= seq or not 0 < one.relation <= relations:
                self._say(SCHEMAS, f"line {number} does not follow what is before it")

    def _closed(self, entry: Entry, header: Header, rows: RowChecker) -> None:
        name = f"{SEGMENTS}/{entry.name}.arrows"
        data = self._read(name, entry.bytes)
        if data is not None:
            fault = _sealed_fault(data, header) if entry.sealed else _open_fault(data, entry.number, header)
            if fault:
                self._say(name, fault)
            else:
                batch, index = _content(data, name)
                self._index(f"{SEGMENTS}/{entry.name}.idx", index, entry.index_entries, entry.index_crc)
                cuts = self._cuts(entry.name, entry.cut_entries, entry.cut_crc)
                self._ends(entry, batch)
                rows.segment(name, batch, entry.first_seq, entry.last_seq, cuts, entry.last_cut)
        if data is None or rows.next_seq != entry.last_seq + 1:
            rows.skip_to(entry.last_seq + 1)
        if entry.sealed:
            self._superseded(entry.number, header)

    def _superseded(self, number: int, header: Header) -> None:
        """The open form of a sealed segment, while running batches may still refer to it."""
        name = f"{SEGMENTS}/{segment_name(number)}.arrows"
        try:
            data = pa.py_buffer((self.path / name).read_bytes())
        except FileNotFoundError:
            return
        if fault := _open_fault(data, number, header):
            self._say(name, fault)

    def _last(self, head: Head, header: Header, manifest: Manifest, rows: RowChecker) -> None:
        """The open segment, as far as the head shows it."""
        number = int(head.segment)
        name = f"{SEGMENTS}/{head.segment}.arrows"
        if head.segment_length and all(entry.number != number for entry in manifest.entries):
            data = self._read(name, head.segment_length)
            if data is None:
                return
            points, clean = walk_segment(data, number, header.journal_id)
            if not clean:
                at = points[-1].offset if points else 0
                self._say(name, f"is damaged between byte {at} and {head.segment_length}")
                return
            batch, index = _content(data, name)
            self._index(f"{SEGMENTS}/{head.segment}.idx", index, head.index_entries, None)
            cuts = self._cuts(head.segment, head.cut_entries, None)
            last_cut = head.seq if len(batch) else None
            rows.segment(name, batch, head.segment_first_seq, head.seq, cuts, last_cut)
            record = points[-1].record
            told = (head.seq, head.commit_position, head.resume_position, head.covered)
            if told != (record.seq, record.commit_position, record.resume_position, record.covered):
                self._say(HEAD, f"does not agree with the last commit record of {name}")
        if rows.next_seq != head.seq + 1:
            self._say(HEAD, f"names seq {head.seq}, the segments end at {rows.next_seq - 1}")

    def _read(self, name: str, length: int) -> pa.Buffer | None:
        try:
            with (self.path / name).open("rb") as file:
                raw = file.read(length)
        except FileNotFoundError:
            self._say(name, "is missing")
            return None
        self._done += len(raw)
        self.progress(self._done, self._all)
        if len(raw) < length:
            self._say(name, f"has {len(raw)} of its {length} bytes")
            return None
        return pa.py_buffer(raw)

    def _index(self, name: str, expected: Records, count: int, crc: int | None) -> None:
        found = self._records(name, count, crc, INDEX)
        if found is not None and not np.array_equal(found, expected):
            self._say(name, "does not agree with the segment")

    def _cuts(self, name: str, count: int, crc: int | None) -> Records | None:
        return self._records(f"{SEGMENTS}/{name}.cuts", count, crc, CUTS)

    def _ends(self, entry: Entry, rows: pa.RecordBatch) -> None:
        """The transaction ends of a sealed segment, against its rows."""
        name = f"{SEGMENTS}/{entry.name}.ends"
        if entry.ends_bytes is None or len(rows) != entry.rows:
            return
        try:
            found = decode((self.path / name).read_bytes(), entry.ends_blocks, entry.ends_crc, name)
        except FileNotFoundError:
            self._say(name, "is missing; the writer makes it again when it opens the journal")
        except JournalError:
            self._say(name, "is damaged; remove it and the writer makes it again when it opens the journal")
        else:
            if not np.array_equal(found, ends_of([rows], entry.first_seq, entry.last_seq, entry.last_cut)):
                self._say(name, "does not agree with the segment")

    def _records(self, name: str, count: int, crc: int | None, dtype: np.dtype[np.void]) -> Records | None:
        try:
            raw = (self.path / name).read_bytes()[: count * dtype.itemsize]
        except FileNotFoundError:
            self._say(name, "is missing; the writer makes it again when it opens the journal")
            return None
        if len(raw) < count * dtype.itemsize or (crc is not None and crc32(raw) != crc):
            self._say(name, "is damaged; remove it and the writer makes it again when it opens the journal")
            return None
        return np.frombuffer(raw, dtype)


def _open_fault(data: pa.Buffer, number: int, header: Header) -> str | None:
    points, clean = walk_segment(data, number, header.journal_id)
    if clean:
        return None
    return f"is damaged between byte {points[-1].offset if points else 0} and {data.size}"


def _sealed_fault(data: pa.Buffer, header: Header) -> str | None:
    points, clean = walk_segment(data, 0, header.journal_id)
    if clean and points:
        return None
    return "is damaged: its bytes are not those that were written"


def _content(data: pa.Buffer, name: str) -> tuple[pa.RecordBatch, Records]:
    """The rows of a segment whose CRCs hold, in seq order, and the index they should have."""
    batches, index = [], [np.zeros(0, INDEX)]
    for frame in frames(data):
        if frame.has_rows:
            batch = record_batch(frame, name)
            index.append(index_of(batch, frame.offset, frame.length, frame.crc()))
            batches.append(batch)
    if not batches:
        return EMPTY, index[0]
    return in_seq_order(pa.concat_batches(batches)), np.concatenate(index)
