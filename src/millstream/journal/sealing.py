"""Sealing: a closed segment is written once more, its rows grouped by relation, in long runs.

Decoding works on runs of one relation, and a mixed segment of small commits costs five times the
bytes. It happens on a thread of its own beside capture, with memory for a few record batches,
whatever the segment holds.
"""

from __future__ import annotations

import os
import threading
import time
import zlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from millstream.errors import JournalCorrupt
from millstream.failpoint import failpoint
from millstream.journal.commit import SCHEMA_MESSAGE, CommitMessages
from millstream.journal.ends import EndsOf, encode
from millstream.journal.files import disk_errors, open_file, remove_file, sync_directory, sync_file, write_all
from millstream.journal.grouping import RUN_BYTES, by_relation, cut_runs
from millstream.journal.index import INDEX, Records, column, index_of, integers
from millstream.journal.manifest import Entry
from millstream.journal.segment import End, Mark, commit_record, segment_name

GATHER_BYTES = RUN_BYTES
"""Relations whose rows take no more than this together are gathered in one pass over the segment."""

STRETCH_BYTES = 4 << 20
"""So much of the open form is read at a time, and one message more."""


SYNC_BYTES = 4 << 20
"""So much of the sealed form is synced at a time. All at once it would fill the disk's queue, and capture's
own small syncs would wait behind it."""


class Cancelled(Exception):
    """The writer is closing; the sealing is done again at its next opening."""


class Sealer:
    """Seals closed segments one after another on one thread. All methods are the writer thread's."""

    def __init__(self, segments: Path, journal_id: str, epoch: int) -> None:
        self._segments = segments
        self._journal_id = journal_id
        self._epoch = epoch
        self._queue: deque[Entry] = deque()
        self._done: Entry | None = None
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()

    @property
    def backlog(self) -> int:
        """Closed segments that are not sealed yet, the running one included."""
        return len(self._queue)

    def submit(self, *entries: Entry) -> None:
        self._queue.extend(entries)

    def start(self) -> None:
        """Begin with the next one, unless one is running or finished and not collected."""
        if self._queue and self._thread is None:
            self._thread = threading.Thread(target=self._run, args=(self._queue[0],), name="millstream-sealing")
            self._thread.start()

    def collect(self, wait: bool = False) -> Entry | None:
        """The sealed entry of a sealing that has ended, or None. Raises what it raised.

        After an error (no room, say) the segment stays first in the queue for the next `start`.
        """
        if self._thread is None or (self._thread.is_alive() and not wait):
            return None
        self._thread.join()
        self._thread = None
        done, error = self._done, self._error
        self._done = self._error = None
        if error is not None:
            raise error
        self._queue.popleft()
        return done

    def close(self) -> Entry | None:
        """Stop at the next step and wait for it. The entry, if the sealing was finished after all."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        return self._done

    def _run(self, entry: Entry) -> None:
        try:
            self._done = seal(self._segments, entry, self._journal_id, self._epoch, self._stop)
        except Exception as error:  # noqa: BLE001 - handed to the writer's thread, which raises it
            self._error = error


def seal(segments: Path, entry: Entry, journal_id: str, epoch: int, stop: threading.Event) -> Entry:
    """Write the sealed form of a closed segment durably; it counts once it is in the manifest."""
    target = segments / f"{segment_name(entry.number, sealed=True)}.arrows"
    try:
        sealed = _write_sealed(segments, entry, target, journal_id, epoch, stop)
    except BaseException:
        remove_file(target)
        remove_file(target.with_suffix(".idx"))
        remove_file(target.with_suffix(".ends"))
        raise
    failpoint("journal.seal_written")
    return sealed


def _write_sealed(
    segments: Path, entry: Entry, target: Path, journal_id: str, epoch: int, stop: threading.Event
) -> Entry:
    source = segments / f"{segment_name(entry.number)}.arrows"
    output = _Output(target)
    try:
        index, ends = [np.zeros(0, INDEX)], EndsOf(entry.first_seq, entry.rows)
        for batch in runs(source, entry, stop):
            index.append(output.batch(batch))
            ends.add(batch)
            # Arrow needs 20 MB here, but its allocator would keep 70: capture's memory is bounded.
            pa.default_memory_pool().release_unused()
        raw = np.concatenate(index).tobytes()
        end = End(entry.last_seq, entry.commit_position, entry.resume_position, entry.covered, entry.commit_ts_us)
        mark = Mark(
            number=entry.number,
            first_seq=entry.first_seq,
            last_seq=entry.last_seq,
            length=output.length,
            index_entries=len(raw) // INDEX.itemsize,
            index_crc=zlib.crc32(raw),
            cut_entries=entry.cut_entries,
            cut_crc=entry.cut_crc,
            row_bytes=entry.row_bytes,
            first_commit_position=entry.first_commit_position,
            min_ts_us=entry.min_ts_us,
            max_ts_us=entry.max_ts_us,
            last_cut=entry.last_cut,
        )
        record = commit_record(
            mark,
            end,
            journal_id=journal_id,
            epoch=epoch,
            committed=True,
            group=(entry.number, 0),
            crc_from=0,
            crc=output.crc,
        )
        output.write([CommitMessages().message(record)])
        output.sync()
        encoded = encode(ends.ends(open_end=entry.last_cut != entry.last_seq))
        _write_beside(target.with_suffix(".idx"), raw)
        _write_beside(target.with_suffix(".ends"), encoded.raw)
        sync_directory(segments)
    finally:
        output.close()
    return replace(
        entry,
        epoch=epoch,
        bytes=output.length,
        index_entries=mark.index_entries,
        index_crc=mark.index_crc,
        sealed_at=time.time(),
        ends_bytes=len(encoded.raw),
        ends_blocks=encoded.blocks,
        ends_crc=encoded.crc,
    )


def _write_beside(path: Path, raw: bytes) -> None:
    """Write a derived file, durably."""
    with disk_errors(path, "write the index"):
        fd = open_file(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            write_all(fd, [raw])
            sync_file(fd, path)
        finally:
            os.close(fd)


class _Output:
    """The sealed file while it is written."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with disk_errors(path, "write the sealed segment"):
            self._fd = open_file(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        self.length = self._synced = 0
        self.crc = 0
        self.write([SCHEMA_MESSAGE])

    def batch(self, batch: pa.RecordBatch) -> Records:
        message = batch.serialize()
        index = index_of(batch, self.length, message.size, zlib.crc32(message))
        self.write([message])
        return index

    def write(self, parts: list[Any]) -> None:
        with disk_errors(self._path, "write the sealed segment"):
            write_all(self._fd, parts)
        for part in parts:
            self.length += len(memoryview(part))
            self.crc = zlib.crc32(part, self.crc)
        if self.length - self._synced >= SYNC_BYTES:
            self.sync()

    def sync(self) -> None:
        sync_file(self._fd, self._path)
        self._synced = self.length

    def close(self) -> None:
        os.close(self._fd)


@dataclass(frozen=True)
class _Group:
    """Relations whose rows are gathered in one pass over the segment."""

    relations: frozenset[int]
    streamed: bool
    """A single relation too large to gather: its runs are written as they fill."""


def runs(source: Path, entry: Entry, stop: threading.Event) -> Iterator[pa.RecordBatch]:
    """The rows of a closed segment as runs of one relation, in seq order inside a relation."""
    raw = source.with_suffix(".idx").read_bytes()[: entry.index_entries * INDEX.itemsize]
    if zlib.crc32(raw) != entry.index_crc:
        raise JournalCorrupt(f"{source.with_suffix('.idx')} is damaged", hint="remove it: it is rebuilt")
    index = np.frombuffer(raw, INDEX)
    for group in _groups(index):
        wanted = index[np.isin(index["relation"], list(group.relations))]
        gathered: list[pa.RecordBatch] = []
        for batch in _matching(source, wanted, group.relations):
            if stop.is_set():
                raise Cancelled
            gathered.append(batch)
            if group.streamed:
                *full, rest = cut_runs(pa.concat_batches(gathered))
                yield from full
                gathered = [rest]
        yield from by_relation(pa.concat_batches(gathered))


def _groups(index: Records) -> Iterator[_Group]:
    """Relations in order of id, as many to a group as fit into memory together."""
    relations = np.unique(index["relation"])
    share = index["length"] * (index["rows"] / np.maximum(_rows_of_message(index), 1))
    relations_of: list[int] = []
    size = 0.0
    for relation in relations:
        weight = float(share[index["relation"] == relation].sum())
        if weight > GATHER_BYTES:
            yield _Group(frozenset({int(relation)}), streamed=True)
            continue
        if relations_of and size + weight > GATHER_BYTES:
            yield _Group(frozenset(relations_of), streamed=False)
            relations_of, size = [], 0.0
        relations_of.append(int(relation))
        size += weight
    if relations_of:
        yield _Group(frozenset(relations_of), streamed=False)


def _rows_of_message(index: Records) -> Records:
    """For each index record the number of rows in its whole message."""
    _, inverse = np.unique(index["offset"], return_inverse=True)
    return np.bincount(inverse, weights=index["rows"])[inverse]


def _matching(source: Path, wanted: Records, relations: frozenset[int]) -> Iterator[pa.RecordBatch]:
    """The rows of these relations, a stretch of messages at a time, each message's CRC checked.

    Arrow parses a stretch as one stream: message by message in Python would hold the interpreter
    for seconds over a segment of small commits, and capture's own commits with it.
    """
    _, first = np.unique(wanted["offset"], return_index=True)
    keys = np.array(sorted(relations))
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
        if zlib.crc32(view[at : at + length]) != crc:
            raise JournalCorrupt(
                f"{source} is damaged at byte {start + at - len(SCHEMA_MESSAGE)}",
                hint="`millstream journal verify` shows all",
            )
    return pa.ipc.open_stream(pa.py_buffer(data)).read_all().combine_chunks().to_batches()[0]


def _only(batch: pa.RecordBatch, keys: Records) -> pa.RecordBatch:
    chosen = np.isin(column(batch, "relation"), keys)
    return batch if chosen.all() else batch.take(integers(np.flatnonzero(chosen)))
