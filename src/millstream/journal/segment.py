"""Segments in open form: writing them, and walking over their messages."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from millstream.checksum import crc32
from millstream.errors import JournalCorrupt
from millstream.failpoint import failpoint
from millstream.journal.commit import COMMIT_BODY, CommitRecord
from millstream.journal.files import disk_errors, open_file, remove_file, sync_file, write_all
from millstream.journal.format import JOURNAL
from millstream.journal.index import CUTS, INDEX, Cut, Records, column, cuts_of, index_of, row_bytes


def segment_name(number: int, sealed: bool = False) -> str:
    """The name of a segment's files without their endings: `00000001`, `00000001.sealed`."""
    return f"{number:08d}.sealed" if sealed else f"{number:08d}"


def segment_number(name: str) -> int:
    return int(name[:8])


@dataclass(frozen=True)
class Frame:
    """One IPC message of a segment: where it is and what Arrow made of its frame."""

    offset: int
    raw: pa.Buffer
    message: Any

    @property
    def length(self) -> int:
        return int(self.raw.size)

    @property
    def has_rows(self) -> bool:
        return bool(self.message.type == "record batch" and self.message.body.size > COMMIT_BODY)

    @property
    def end(self) -> int:
        return self.offset + self.length

    def record(self) -> CommitRecord | None:
        """The commit record that this message is, if its own CRC holds."""
        if self.has_rows or self.message.type != "record batch":
            return None
        return CommitRecord.of_message(self.raw.to_pybytes())

    def crc(self) -> int:
        return crc32(self.raw)


def frames(data: pa.Buffer, base: int = 0) -> Iterator[Frame]:
    """The whole messages at the start of `data`; ends at the first that is not one.

    Whether the bytes in them are right is for the caller's CRC to say.
    """
    reader = pa.BufferReader(data)
    while True:
        offset = reader.tell()
        try:
            message = pa.ipc.read_message(reader)
        except (EOFError, OSError, pa.ArrowException):
            return
        yield Frame(base + offset, data.slice(offset, reader.tell() - offset), message)


def record_batch(frame: Frame, where: str) -> pa.RecordBatch:
    """The rows of a frame whose CRC was checked."""
    try:
        return pa.ipc.read_record_batch(frame.message, JOURNAL)
    except (OSError, pa.ArrowException) as error:
        raise JournalCorrupt(f"{where}: the record batch at byte {frame.offset} cannot be read: {error}") from error


@dataclass(frozen=True)
class Mark:
    """All that is known of an open segment up to one byte; going back to a mark is going back in time."""

    number: int
    first_seq: int
    last_seq: int
    length: int = 0
    index_entries: int = 0
    index_crc: int = 0
    cut_entries: int = 0
    cut_crc: int = 0
    row_bytes: int = 0
    first_commit_position: int | None = None
    min_ts_us: int | None = None
    max_ts_us: int | None = None
    last_cut: int | None = None
    """The seq of the last transaction end in this segment."""

    @property
    def rows(self) -> int:
        return self.last_seq - self.first_seq + 1

    @classmethod
    def after(cls, record: CommitRecord, number: int, length: int) -> Mark:
        """The mark right after a record of segment `number` that ends at byte `length`."""
        return cls(
            number=number,
            first_seq=record.first_seq,
            last_seq=record.seq,
            length=length,
            index_entries=record.index_entries,
            index_crc=record.index_crc,
            cut_entries=record.cut_entries,
            cut_crc=record.cut_crc,
            row_bytes=record.row_bytes,
            first_commit_position=record.first_commit_position,
            min_ts_us=record.min_ts_us,
            max_ts_us=record.max_ts_us,
            last_cut=record.last_cut,
        )


@dataclass(frozen=True)
class End:
    """Where the journal stands after some row or progress record."""

    seq: int
    commit_position: int
    resume_position: int
    covered: int
    commit_ts_us: int

    @classmethod
    def of(cls, record: CommitRecord) -> End:
        return cls(record.seq, record.commit_position, record.resume_position, record.covered, record.commit_ts_us)


def commit_record(
    mark: Mark,
    end: End,
    *,
    journal_id: str,
    epoch: int,
    committed: bool,
    group: tuple[int, int],
    crc_from: int,
    crc: int,
) -> CommitRecord:
    """The record that says that the segment stands at `mark` and the journal at `end`."""
    return CommitRecord(
        journal_id=journal_id,
        epoch=epoch,
        committed=committed,
        seq=end.seq,
        commit_position=end.commit_position,
        resume_position=end.resume_position,
        covered=end.covered,
        commit_ts_us=end.commit_ts_us,
        group_segment=group[0],
        group_offset=group[1],
        at=mark.length,
        crc_from=crc_from,
        crc=crc,
        first_seq=mark.first_seq,
        row_bytes=mark.row_bytes,
        first_commit_position=mark.first_commit_position,
        min_ts_us=mark.min_ts_us,
        max_ts_us=mark.max_ts_us,
        last_cut=mark.last_cut,
        index_entries=mark.index_entries,
        index_crc=mark.index_crc,
        cut_entries=mark.cut_entries,
        cut_crc=mark.cut_crc,
    )


Message = tuple[pa.RecordBatch, Any]
"""Rows, and the bytes of the IPC message that holds them."""


@dataclass(frozen=True)
class Addition:
    """What one batch adds to the files beside its segment, and the mark after it."""

    index: Records
    cuts: Records
    mark: Mark


def addition(mark: Mark, batch: pa.RecordBatch, messages: Sequence[Message], open_end: bool) -> Addition:
    """Describe `batch`, whose rows are in seq order, written as these messages right after `mark`."""
    parts, length = [], mark.length
    for rows, message in messages:
        size = len(memoryview(message))
        parts.append(index_of(rows, length, size, crc32(message)))
        length += size
    index = np.concatenate(parts)
    cuts = cuts_of(batch, open_end, mark.row_bytes)
    ts = column(batch, "commit_ts")
    low, high = int(ts.min()), int(ts.max())
    first = mark.first_commit_position
    after = replace(
        mark,
        last_seq=int(column(batch, "seq")[-1]),
        length=length,
        index_entries=mark.index_entries + len(index),
        index_crc=crc32(index.tobytes(), mark.index_crc),
        cut_entries=mark.cut_entries + len(cuts),
        cut_crc=crc32(cuts.tobytes(), mark.cut_crc),
        row_bytes=mark.row_bytes + int(row_bytes(batch).sum()),
        first_commit_position=int(column(batch, "commit_position")[0]) if first is None else first,
        min_ts_us=low if mark.min_ts_us is None else min(mark.min_ts_us, low),
        max_ts_us=high if mark.max_ts_us is None else max(mark.max_ts_us, high),
        last_cut=int(cuts["seq"][-1]) if len(cuts) else mark.last_cut,
    )
    return Addition(index, cuts, after)


def with_cut(mark: Mark, cut: Cut) -> tuple[Mark, bytes]:
    """Add a transaction end that was not known to be one when its rows were written."""
    record = (
        cut.seq,
        cut.commit_position,
        cut.resume_position,
        cut.commit_ts_us,
        cut.commit_ts_us,
        cut.commit_ts_us,
        mark.row_bytes,
    )
    raw = np.array([record], CUTS).tobytes()
    return replace(mark, cut_entries=mark.cut_entries + 1, cut_crc=crc32(raw, mark.cut_crc), last_cut=cut.seq), raw


OPEN_FORM = (".arrows", ".idx", ".cuts")
SEALED_FORM = (".sealed.arrows", ".sealed.idx", ".sealed.cuts", ".sealed.ends")
EVERY_FORM = (*OPEN_FORM, *SEALED_FORM)
"""The files of a segment in each of its forms; the rows go first when one is removed."""


def remove_segment(directory: Path, number: int, endings: Sequence[str] = EVERY_FORM) -> None:
    """Remove every file of a segment that is there, or of one form."""
    for ending in endings:
        remove_file(directory / (segment_name(number) + ending))


class SegmentFiles:
    """The three files of an open segment, open for appending. Knows bytes, not what they mean."""

    def __init__(self, directory: Path, number: int) -> None:
        self.number = number
        self.path = directory / f"{segment_name(number)}.arrows"
        self._paths = [self.path, self.path.with_suffix(".idx"), self.path.with_suffix(".cuts")]
        self._fds: list[int] = []
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        with disk_errors(self.path, "open the segment"):
            try:
                for path in self._paths:
                    self._fds.append(open_file(path, flags))
            except OSError:
                self.close()
                raise

    def write(self, parts: list[Any], index: bytes = b"", cuts: bytes = b"") -> None:
        """Append to all three. Whatever fails, the caller goes back to a mark."""
        with disk_errors(self.path, "write the segment"):
            for fd, data in zip(self._fds, (parts, [index], [cuts]), strict=True):
                write_all(fd, data)

    def sync(self) -> None:
        sync_file(self._fds[0], self.path)

    def truncate(self, mark: Mark) -> None:
        """Forget everything after a mark, durably."""
        sizes = (mark.length, mark.index_entries * INDEX.itemsize, mark.cut_entries * CUTS.itemsize)
        with disk_errors(self.path, "cut the segment back"):
            if any(os.fstat(fd).st_size != size for fd, size in zip(self._fds, sizes, strict=True)):
                for fd, size in zip(self._fds, sizes, strict=True):
                    os.ftruncate(fd, size)
                self.sync()

    def name_sealed(self) -> None:
        """Give the files the names of a sealed segment, for one that was written in runs of one relation."""
        with disk_errors(self.path, "name the segment"):
            sealed = self.path.with_name(f"{segment_name(self.number, sealed=True)}.arrows")
            self.path.rename(sealed)
            failpoint("journal.part_named")
            for ending in (".idx", ".cuts"):
                self.path.with_suffix(ending).rename(sealed.with_suffix(ending))

    def close(self) -> None:
        while self._fds:
            os.close(self._fds.pop())
