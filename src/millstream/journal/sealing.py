"""Sealing: a closed segment is written once more, its rows grouped by relation, in long runs.

Decoding works on runs of one relation, and a mixed segment of small commits costs many times the
bytes. It happens on a thread of its own beside capture, with memory for a few record batches,
whatever the segment holds. What comes out small is written again with the next one. That is much
writing for few bytes, but only slow traffic comes out small. What was written in long runs already
keeps its bytes (`adoption`).
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from millstream.checksum import crc32
from millstream.errors import JournalCorrupt
from millstream.failpoint import failpoint
from millstream.journal.adoption import adopt, is_in_long_runs, write_beside
from millstream.journal.commit import SCHEMA_MESSAGE, CommitMessages
from millstream.journal.ends import EndsOf, encode
from millstream.journal.files import disk_errors, open_file, sync_directory, sync_file, write_all
from millstream.journal.grouping import runs
from millstream.journal.index import CUTS, INDEX, Records, index_of
from millstream.journal.manifest import Entry, Manifest
from millstream.journal.segment import SEALED_FORM, End, Mark, commit_record, remove_segment, segment_name

SYNC_BYTES = 4 << 20
"""So much of the sealed form is synced at a time. All at once it would fill the disk's queue, and capture's
own small syncs would wait behind it."""


@dataclass(frozen=True)
class Sealed:
    """A segment in sealed form, and the number of the one before it whose rows it holds too, if it does."""

    entry: Entry
    absorbed: int | None


class Sealer:
    """Seals closed segments one after another on one thread. All methods are the writer thread's."""

    def __init__(self, segments: Path, journal_id: str, epoch: int, segment_bytes: int) -> None:
        self._segments = segments
        self._journal_id = journal_id
        self._epoch = epoch
        self._segment_bytes = segment_bytes
        self._queue: deque[Entry] = deque()
        self._done: Entry | None = None
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self.absorbing: int | None = None
        """The number of a sealed segment that is being taken over: it must stay until that is collected."""

    @property
    def backlog(self) -> int:
        """Closed segments that are not sealed yet, the running one included."""
        return len(self._queue)

    def submit(self, *entries: Entry) -> None:
        self._queue.extend(entries)

    def start(self, manifest: Manifest) -> None:
        """Begin with the next one, unless one is running or finished and not collected.

        If the one before it came out small (small commits cost more than their rows, and that goes
        with sealing), both become one: so there are no more files than the journal's size asks for.
        """
        if not self._queue or self._thread is not None:
            return
        entry = self._queue[0]
        before = next((one for one in reversed(manifest.entries) if one.number < entry.number), None)
        small = before is not None and before.sealed and before.bytes < self._segment_bytes
        self.absorbing = before.number if before is not None and small else None
        sources = (before, entry) if before is not None and small else (entry,)
        self._thread = threading.Thread(target=self._run, args=(sources,), name="millstream-sealing")
        self._thread.start()

    def collect(self, wait: bool = False) -> Sealed | None:
        """The outcome of a sealing that has ended, or None. Raises what it raised.

        After an error (no room, say) the segment stays first in the queue for the next `start`.
        """
        if self._thread is None or (self._thread.is_alive() and not wait):
            return None
        self._thread.join()
        self._thread = None
        error, self._error = self._error, None
        if error is not None:
            self.absorbing = None
            raise error
        self._queue.popleft()
        return self._take()

    def close(self) -> Sealed | None:
        """Stop at the next step and wait for it. The outcome, if the sealing was finished after all."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        return self._take()

    def _take(self) -> Sealed | None:
        done, self._done = self._done, None
        absorbed, self.absorbing = self.absorbing, None
        return Sealed(done, absorbed) if done is not None else None

    def _run(self, sources: tuple[Entry, ...]) -> None:
        try:
            self._done = seal(self._segments, sources, self._journal_id, self._epoch, self._stop)
        except Exception as error:  # noqa: BLE001 - handed to the writer's thread, which raises it
            self._error = error


def seal(segments: Path, sources: Sequence[Entry], journal_id: str, epoch: int, stop: threading.Event) -> Entry:
    """Write the rows of closed segments, one after another, in sealed form under the last one's number, durably.

    It counts once it is in the manifest.
    """
    number = sources[-1].number
    try:
        sealed = adopt(segments, sources[0], epoch) if len(sources) == 1 and is_in_long_runs(sources[0]) else None
        sealed = sealed or _write_sealed(segments, sources, journal_id, epoch, stop)
    except BaseException:
        remove_segment(segments, number, SEALED_FORM)
        raise
    failpoint("journal.seal_written")
    return sealed


def _write_sealed(
    segments: Path, sources: Sequence[Entry], journal_id: str, epoch: int, stop: threading.Event
) -> Entry:
    files = [(segments / f"{entry.name}.arrows", _index(segments, entry)) for entry in sources]
    cuts = _joined_cuts(segments, sources)
    entry = _joined(sources, cuts)
    target = segments / f"{segment_name(entry.number, sealed=True)}.arrows"
    output = _Output(target)
    try:
        index, ends = [np.zeros(0, INDEX)], EndsOf(entry.first_seq, entry.rows)
        for batch in runs(files, stop):
            index.append(output.batch(batch))
            ends.add(batch)
            # Arrow needs 20 MB here, but its allocator would keep 70: capture's memory is bounded.
            pa.default_memory_pool().release_unused()
        raw = np.concatenate(index).tobytes()
        entry = replace(entry, index_entries=len(raw) // INDEX.itemsize, index_crc=crc32(raw))
        output.end(entry, journal_id, epoch)
        encoded = encode(ends.ends(open_end=entry.last_cut != entry.last_seq))
        for ending, content in ((".idx", raw), (".cuts", cuts.tobytes()), (".ends", encoded.raw)):
            write_beside(target.with_suffix(ending), content)
        sync_directory(segments)
    finally:
        output.close()
    return replace(
        entry,
        epoch=epoch,
        bytes=output.length,
        sealed_at=time.time(),
        ends_bytes=len(encoded.raw),
        ends_blocks=encoded.blocks,
        ends_crc=encoded.crc,
    )


def _joined(sources: Sequence[Entry], cuts: Records) -> Entry:
    """What is to be said of a segment that holds the rows of all of these."""
    filled = [entry for entry in sources if entry.rows] or [sources[-1]]
    lows = [entry.min_ts_us for entry in filled if entry.min_ts_us is not None]
    highs = [entry.max_ts_us for entry in filled if entry.max_ts_us is not None]
    return replace(
        sources[-1],
        first_seq=sources[0].first_seq,
        row_bytes=sum(entry.row_bytes for entry in sources),
        first_commit_position=filled[0].first_commit_position,
        min_ts_us=min(lows, default=None),
        max_ts_us=max(highs, default=None),
        last_cut=next((entry.last_cut for entry in reversed(sources) if entry.last_cut is not None), None),
        cut_entries=len(cuts),
        cut_crc=crc32(cuts.tobytes()),
    )


def _joined_cuts(segments: Path, sources: Sequence[Entry]) -> Records:
    """The cuts of all of these; `bytes` counts on from one to the next."""
    parts, size = [], 0
    for entry in sources:
        cuts = _beside(segments / f"{entry.name}.cuts", CUTS, entry.cut_entries, entry.cut_crc).copy()
        cuts["bytes"] += size
        parts.append(cuts)
        size += entry.row_bytes
    return np.concatenate(parts)


def _index(segments: Path, entry: Entry) -> Records:
    return _beside(segments / f"{entry.name}.idx", INDEX, entry.index_entries, entry.index_crc)


def _beside(path: Path, dtype: np.dtype[np.void], count: int, crc: int) -> Records:
    """A derived file of a closed segment."""
    raw = path.read_bytes()[: count * dtype.itemsize]
    if crc32(raw) != crc:
        raise JournalCorrupt(f"{path} is damaged", hint="remove it: it is rebuilt")
    return np.frombuffer(raw, dtype)


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
        index = index_of(batch, self.length, message.size, crc32(message))
        self.write([message])
        return index

    def write(self, parts: list[Any]) -> None:
        with disk_errors(self._path, "write the sealed segment"):
            write_all(self._fd, parts)
        for part in parts:
            self.length += len(memoryview(part))
            self.crc = crc32(part, self.crc)
        if self.length - self._synced >= SYNC_BYTES:
            self.sync()

    def end(self, entry: Entry, journal_id: str, epoch: int) -> None:
        """The one commit record of a sealed segment; then everything is durable."""
        mark = Mark(
            number=entry.number,
            first_seq=entry.first_seq,
            last_seq=entry.last_seq,
            length=self.length,
            index_entries=entry.index_entries,
            index_crc=entry.index_crc,
            cut_entries=entry.cut_entries,
            cut_crc=entry.cut_crc,
            row_bytes=entry.row_bytes,
            first_commit_position=entry.first_commit_position,
            min_ts_us=entry.min_ts_us,
            max_ts_us=entry.max_ts_us,
            last_cut=entry.last_cut,
        )
        at = End(entry.last_seq, entry.commit_position, entry.resume_position, entry.covered, entry.commit_ts_us)
        record = commit_record(
            mark,
            at,
            journal_id=journal_id,
            epoch=epoch,
            committed=True,
            group=(entry.number, 0),
            crc_from=0,
            crc=self.crc,
        )
        self.write([CommitMessages().message(record)])
        self.sync()

    def sync(self) -> None:
        sync_file(self._fd, self._path)
        self._synced = self.length

    def close(self) -> None:
        os.close(self._fd)
