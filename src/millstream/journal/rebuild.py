"""Rebuilding what is derived: `.idx` and `.cuts` from a segment's rows, an entry from a sealed segment."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from millstream.checksum import crc32
from millstream.errors import JournalCorrupt
from millstream.journal.commit import SCHEMA_MESSAGE, CommitRecord
from millstream.journal.ends import ENDS, encode, ends_of
from millstream.journal.files import disk_errors, open_file, write_all
from millstream.journal.index import CUTS, INDEX, Records, column, cuts_of, in_seq_order, index_of
from millstream.journal.manifest import Entry, entry_of
from millstream.journal.segment import (
    Addition,
    End,
    Mark,
    Message,
    addition,
    frames,
    record_batch,
    segment_name,
    segment_number,
)
from millstream.journal.walk import walk_segment


def ensure_index(segments: Path, name: str, length: int, record: CommitRecord) -> Mark:
    """The mark of the segment in `name`, which ends with `record`; derived files that disagree are rebuilt."""
    number = segment_number(name)
    mark = Mark.after(record, number, length)
    sizes = (mark.index_entries * INDEX.itemsize, mark.cut_entries * CUTS.itemsize)
    paths = (segments / f"{name}.idx", segments / f"{name}.cuts")
    if all(
        _crc_of(path, size) == crc for path, size, crc in zip(paths, sizes, (mark.index_crc, mark.cut_crc), strict=True)
    ):
        return mark
    rebuilt = list(additions(segments / f"{name}.arrows", number, length, record))
    _overwrite(paths[0], [part.index.tobytes() for part in rebuilt])
    _overwrite(paths[1], [part.cuts.tobytes() for part in rebuilt])
    last = rebuilt[-1].mark if rebuilt else Mark(number, record.first_seq, record.seq)
    return replace(last, length=length)


def additions(path: Path, number: int, length: int, record: CommitRecord) -> Iterator[Addition]:
    """What each batch of an open-form segment added, worked out again from its rows."""
    mark = Mark(number, record.first_seq, record.first_seq - 1, len(SCHEMA_MESSAGE))
    with pa.memory_map(str(path)) as source:
        batches = _batches(source.read_buffer(length), record.first_seq, str(path))
        following = next(batches, None)
        while following is not None:
            (offset, batch, messages), following = following, next(batches, None)
            mark = replace(mark, length=offset)
            part = addition(mark, batch, messages, _goes_on(batch, following[1] if following else None, record))
            mark = part.mark
            yield part


def _batches(data: pa.Buffer, first: int, where: str) -> Iterator[tuple[int, pa.RecordBatch, list[Message]]]:
    """The batches of a segment as they were written: offset, rows in seq order, messages.

    A batch that was written in runs of one relation is whole when no seq is missing in between.
    """
    offset, rows, last = 0, 0, first - 1
    messages: list[Message] = []
    for frame in frames(data):
        if not frame.has_rows:
            continue
        batch = record_batch(frame, where)
        offset = offset if messages else frame.offset
        messages.append((batch, frame.raw))
        rows += len(batch)
        last = max(last, int(column(batch, "seq")[-1]))
        if rows == last - first + 1:
            yield offset, in_seq_order(pa.concat_batches([part for part, _ in messages])), messages
            messages, rows, first = [], 0, last + 1


def _goes_on(batch: pa.RecordBatch, after: pa.RecordBatch | None, record: CommitRecord) -> bool:
    """Whether the last transaction of a message continues in the next one."""
    if after is None:
        return record.last_cut != record.seq
    return bool(column(batch, "commit_position")[-1] == column(after, "commit_position")[0])


def sealed_entry(segments: Path, number: int, journal_id: str) -> tuple[Entry, bool] | None:
    """The entry of a sealed segment, from the segment alone; None unless every byte of it checks out.

    Also whether its rows are committed for sure: a part of a transaction over several segments is
    so only with the last of them.
    """
    name = segment_name(number, sealed=True)
    path = segments / f"{name}.arrows"
    with pa.memory_map(str(path)) as source:
        data = source.read_buffer()
        points, whole = walk_segment(data, number, journal_id)
        if not whole or not points:
            return None
        record = points[-1].record
        index, cuts, ends = sealed_parts(data, record, str(path))
    mark = Mark.after(record, number, data.size)
    mark = replace(
        mark,
        index_entries=len(index),
        index_crc=crc32(index.tobytes()),
        cut_entries=len(cuts),
        cut_crc=crc32(cuts.tobytes()),
    )
    encoded = encode(ends)
    _overwrite(segments / f"{name}.idx", [index.tobytes()])
    _overwrite(segments / f"{name}.cuts", [cuts.tobytes()])
    _overwrite(segments / f"{name}.ends", [encoded.raw])
    entry = replace(
        entry_of(mark, End.of(record), record.epoch),
        sealed_at=time.time(),
        ends_bytes=len(encoded.raw),
        ends_blocks=encoded.blocks,
        ends_crc=encoded.crc,
    )
    return entry, record.committed


def sealed_parts(data: pa.Buffer, record: CommitRecord, where: str) -> tuple[Records, Records, Records]:
    """The index, the cuts and the ends of a sealed segment, from its rows."""
    index, batches = [np.zeros(0, INDEX)], []
    for frame in frames(data):
        if frame.has_rows:
            batch = record_batch(frame, where)
            batches.append(batch)
            index.append(index_of(batch, frame.offset, frame.length, frame.crc()))
    if not batches:
        return index[0], np.zeros(0, CUTS), np.zeros(0, ENDS)
    rows = pa.concat_batches(batches)
    rows = in_seq_order(rows)
    if len(rows) != record.seq - record.first_seq + 1:
        raise JournalCorrupt(f"{where} has {len(rows)} rows for seq {record.first_seq} to {record.seq}")
    ends = ends_of([rows], record.first_seq, record.seq, record.last_cut)
    return np.concatenate(index), cuts_of(rows, record.last_cut != record.seq, 0), ends


def derived_files_fit(segments: Path, entry: Entry) -> bool:
    """Whether `.idx`, `.cuts` and `.ends` of a closed segment are there and long enough."""
    sizes = {
        f"{entry.name}.idx": entry.index_entries * INDEX.itemsize,
        f"{entry.name}.cuts": entry.cut_entries * CUTS.itemsize,
    }
    if entry.ends_bytes is not None:
        sizes[f"{entry.name}.ends"] = entry.ends_bytes
    paths = {segments / name: size for name, size in sizes.items()}
    return all(path.exists() and path.stat().st_size >= size for path, size in paths.items())


def rebuilt_entry(segments: Path, entry: Entry) -> Entry:
    """The entry of a closed segment after its derived files were made again from its rows."""
    path = segments / f"{entry.name}.arrows"
    with pa.memory_map(str(path)) as source:
        data = source.read_buffer(entry.bytes)
        last = None
        for frame in frames(data):
            last = frame
        record = last.record() if last is not None else None
    if record is None:
        raise JournalCorrupt(f"{path} does not end with a commit record", hint="restore the file")
    if entry.sealed:
        rebuilt = sealed_entry(segments, entry.number, record.journal_id)
        if rebuilt is None:
            raise JournalCorrupt(f"{path} is damaged", hint="restore the file")
        return replace(rebuilt[0], sealed_at=entry.sealed_at)
    mark = ensure_index(segments, entry.name, entry.bytes, record)
    return replace(
        entry,
        index_entries=mark.index_entries,
        index_crc=mark.index_crc,
        cut_entries=mark.cut_entries,
        cut_crc=mark.cut_crc,
    )


def _crc_of(path: Path, size: int) -> int | None:
    """The CRC of the first `size` bytes; None if there are fewer."""
    try:
        raw = path.read_bytes()[:size]
    except FileNotFoundError:
        return None
    return crc32(raw) if len(raw) == size else None


def _overwrite(path: Path, parts: list[bytes]) -> None:
    with disk_errors(path, "rebuild the index"):
        fd = open_file(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            write_all(fd, parts)
        finally:
            os.close(fd)
