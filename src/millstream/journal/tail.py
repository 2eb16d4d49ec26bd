"""The end of the journal that is being written: the open segment, and the last commit in it."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from millstream.checksum import crc32
from millstream.failpoint import failpoint
from millstream.journal.commit import SCHEMA_MESSAGE, CommitMessages
from millstream.journal.files import disk_errors, sync_directory
from millstream.journal.grouping import by_relation, makes_long_runs
from millstream.journal.index import Cut, column
from millstream.journal.manifest import Entry, entry_of
from millstream.journal.segment import (
    End,
    Mark,
    SegmentFiles,
    addition,
    commit_record,
    remove_segment,
    with_cut,
)


class Tail:
    """Writes messages and records, and can always go back to the last accepted commit.

    `mark` and `end` are those of the last accepted commit. The group that is being written may
    have closed segments behind it already; they count only with the group's commit record. The
    first of them may hold committed rows that readers see, and stays in open form. All others are
    the group's alone: they are written in runs of one relation and named as sealed when they are
    full, so that a group of any size has two segments in open form, its first and its last. Many rows
    at once are written in such runs anywhere: then nothing is left for sealing to do.
    """

    def __init__(
        self, segments: Path, journal_id: str, epoch: int, *, mark: Mark, end: End, segment_bytes: int
    ) -> None:
        """Go on at `mark`, which has length 0 when its segment does not exist yet."""
        self._segments = segments
        self._journal_id = journal_id
        self._epoch = epoch
        self._segment_bytes = segment_bytes
        self._messages = CommitMessages()
        self._files: SegmentFiles | None = None
        self._new_names = False
        self.mark = mark
        self.end = end
        self._begin_group()
        self.go_back()

    def _begin_group(self) -> None:
        """The next byte is the first of a new group."""
        self._at = self.mark
        self._last = self.end
        self._group = (self.mark.number, self.mark.length)
        self._crc, self._crc_from = 0, self.mark.length
        self._closed: list[tuple[Mark, End]] = []
        self._clear_buffers()

    def _clear_buffers(self) -> None:
        self._parts: list[Any] = []
        self._index: list[bytes] = []
        self._cuts: list[bytes] = []

    @property
    def full(self) -> bool:
        """Whether the segment has reached its size: sealed its rows will take that, or now twice as much.

        Small commits cost more than their rows, and that goes with sealing.
        """
        return self._at.row_bytes >= self._segment_bytes or self._at.length >= 2 * self._segment_bytes

    @property
    def at_commit(self) -> bool:
        """Whether nothing was written since the last commit."""
        return self._at == self.mark and not self._closed

    def write(self, batch: pa.RecordBatch, open_end: bool) -> None:
        """Add a record batch to the group. `flush` or `commit` write it."""
        self._begin_segment()
        runs = by_relation(batch) if self._closed or makes_long_runs(batch) else (batch,)
        messages = [(rows, rows.serialize()) for rows in runs]
        add = addition(self._at, batch, messages, open_end)
        for _, message in messages:
            self._push(message)
        self._index.append(add.index.tobytes())
        self._cuts.append(add.cuts.tobytes())
        self._at = add.mark
        self._last = End(
            add.mark.last_seq,
            int(column(batch, "commit_position")[-1]),
            int(column(batch, "resume_position")[-1]),
            self._last.covered,
            int(column(batch, "commit_ts")[-1]),
        )

    def _begin_segment(self) -> None:
        if self._at.length == 0:
            self._push(SCHEMA_MESSAGE)
            self._at = replace(self._at, length=len(SCHEMA_MESSAGE))

    def _push(self, part: Any) -> None:
        self._parts.append(part)
        self._crc = crc32(part, self._crc)

    def flush(self) -> None:
        """Hand everything to the operating system: not durable, not visible, out of our memory."""
        if not self._parts:
            return
        if self._files is None:
            self._files = SegmentFiles(self._segments, self._at.number)
            self._new_names = True
        self._files.write(self._parts, b"".join(self._index), b"".join(self._cuts))
        self._clear_buffers()

    def _record(self, end: End, *, committed: bool) -> None:
        """End the segment's part of the group with a record, on disk."""
        self._begin_segment()
        record = commit_record(
            self._at,
            end,
            journal_id=self._journal_id,
            epoch=self._epoch,
            committed=committed,
            group=self._group,
            crc_from=self._crc_from,
            crc=self._crc,
        )
        message = self._messages.message(record)
        self._parts.append(message)
        self._at = replace(self._at, length=self._at.length + len(message))
        self.flush()

    def _sync(self) -> None:
        if self._files is not None:
            self._files.sync()
        if self._new_names:
            sync_directory(self._segments)
            self._new_names = False

    def roll_inside(self) -> None:
        """Close the segment in the middle of a group; the group goes on in the next one."""
        self._record(self._last, committed=False)
        if self._closed and self._files is not None:
            self._files.sync()
            self._files.name_sealed()
            self._new_names = True
        self._sync()
        self._closed.append((self._at, self._last))
        self._close_files()
        self._at = _after(self._at, self._last)
        self._crc, self._crc_from = 0, 0

    def commit(self, end: End) -> list[Entry]:
        """Write the group's commit record and make the group durable, with one fsync.

        Returns the segments that the group closed. The commit counts for `mark` and `end` with
        `accept`; until then `go_back` still undoes it.
        """
        if end.seq > self.end.seq and self._at.last_cut != end.seq:
            cut = Cut(end.seq, end.commit_position, end.resume_position, end.commit_ts_us)
            self._at, raw = with_cut(self._at, cut)
            self._cuts.append(raw)
        self._last = end
        self._record(end, committed=True)
        failpoint("journal.commit_record_written")
        self._sync()
        failpoint("journal.synced")
        closed, now = [entry_of(mark, at, self._epoch) for mark, at in self._closed], time.time()
        return [*closed[:1], *(replace(part, sealed_at=now) for part in closed[1:])]

    def accept(self) -> None:
        """The commit is final."""
        self.mark, self.end = self._at, self._last
        self._begin_group()

    def close_segment(self) -> Entry:
        """What the manifest has to say of the segment, which ends with a commit."""
        return entry_of(self.mark, self.end, self._epoch)

    def next_segment(self) -> None:
        """Leave the segment, which is in the manifest now; the next write makes a new one."""
        self._close_files()
        self.mark = _after(self.mark, self.end)
        self._begin_group()

    def go_back(self) -> None:
        """Remove everything after the last accepted commit, on disk and in memory."""
        self._close_files()
        for number in range(self._at.number, self.mark.number, -1):
            self._remove(number)
        if self.mark.length:
            self._files = SegmentFiles(self._segments, self.mark.number)
            self._files.truncate(self.mark)
        else:
            self._remove(self.mark.number)
        self._begin_group()

    def _remove(self, number: int) -> None:
        with disk_errors(self._segments, "cut the segments back"):
            remove_segment(self._segments, number)

    def _close_files(self) -> None:
        if self._files is not None:
            self._files.close()
            self._files = None

    def close(self) -> None:
        self._close_files()


def _after(mark: Mark, end: End) -> Mark:
    return Mark(mark.number + 1, end.seq + 1, end.seq)
