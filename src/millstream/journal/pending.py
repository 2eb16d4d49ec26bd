"""What was appended and is not written yet."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from millstream.errors import JournalError
from millstream.journal.format import JOURNAL, MAX_BATCH_BYTES, MAX_BATCH_ROWS
from millstream.journal.index import column, integers, row_bytes
from millstream.journal.segment import End
from millstream.sources.base import CAPTURED, Block

FLUSH_BYTES = 8 << 20
"""More than this is not kept in memory, committed or not."""


class Pending:
    """Blocks waiting to become record batches, and where the journal will stand after them."""

    def __init__(self, end: End) -> None:
        self.reset(end)

    def reset(self, end: End) -> None:
        """Forget everything; the journal stands at `end`."""
        self.end = end
        self.open_transaction = False
        self.left = 0
        self._next_index = 0
        self.clear()

    def clear(self) -> None:
        """What was pending is committed."""
        self._blocks: list[pa.RecordBatch] = []
        self._rows = 0
        self._unwritten = 0
        self._next_seq = self.end.seq + 1
        self.bytes = 0
        self.since: float | None = None

    def full(self, flush_bytes: int) -> bool:
        return self._unwritten >= flush_bytes or self._rows >= MAX_BATCH_ROWS

    def add(self, block: Block, relations: int) -> None:
        """Take a block over, after looking that it follows what is there."""
        rows = block.rows
        end = self.end
        if rows is not None and len(rows):
            self._check(rows, relations)
            resume = int(column(rows, "resume_position")[-1])
            end = End(
                end.seq + len(rows),
                int(column(rows, "commit_position")[-1]),
                resume,
                end.covered if block.open_transaction else max(end.covered, resume),
                int(column(rows, "commit_ts")[-1]),
            )
            self._next_index = int(column(rows, "tx_index")[-1]) + 1
            self._blocks.append(rows)
            self._rows += len(rows)
            size = int(row_bytes(rows).sum())
            self._unwritten += size
            self.bytes += size
        elif self.open_transaction and not block.open_transaction:
            end = _covering(end, end.resume_position)
        if block.progress is not None:
            end = _covering(end, block.progress)
        if self.since is None and end != self.end:
            self.since = time.monotonic()
        self.open_transaction = block.open_transaction
        self.left = block.left
        self.end = end

    def _check(self, rows: pa.RecordBatch, relations: int) -> None:
        if not rows.schema.equals(CAPTURED):
            raise JournalError(f"a block has the columns {rows.schema.names}, not those of a captured block")
        commit, resume = column(rows, "commit_position"), column(rows, "resume_position")
        if self.open_transaction and commit[0] != self.end.commit_position:
            raise JournalError("a block starts a transaction while another one is open")
        if not self.open_transaction and resume[0] <= self.end.covered:
            raise JournalError(
                f"a block starts at resume position {resume[0]}, but the journal already covers {self.end.covered}"
            )
        if (np.diff(commit) < 0).any() or (np.diff(resume) < 0).any():
            raise JournalError("the positions in a block go back")
        index = column(rows, "tx_index")
        follows = np.where(np.diff(commit) == 0, np.diff(index) == 1, index[1:] == 0)
        if not follows.all() or index[0] != (self._next_index if self.open_transaction else 0):
            raise JournalError("a block holds a part of a transaction: its changes are not numbered on")
        relation = column(rows, "relation")
        if relation.min() < 0 or relation.max() > relations:
            raise JournalError(f"a block names relation {relation.max()}, but only {relations} are registered")

    def take(self) -> Iterator[tuple[pa.RecordBatch, bool]]:
        """What waits, as record batches with their seqs, each with whether its last transaction goes on."""
        if not self._blocks:
            return
        rows = pa.concat_batches(self._blocks) if len(self._blocks) > 1 else self._blocks[0]
        first = self._next_seq
        self._next_seq += len(rows)
        self._blocks, self._rows, self._unwritten = [], 0, 0
        commit = column(rows, "commit_position")
        total = np.cumsum(row_bytes(rows))
        start = 0
        while start < len(rows):
            before = int(total[start - 1]) if start else 0
            end = int(np.searchsorted(total, before + MAX_BATCH_BYTES // 2, side="right"))
            end = min(max(end, start + 1), start + MAX_BATCH_ROWS, len(rows))
            goes_on = bool(commit[end] == commit[end - 1]) if end < len(rows) else self.open_transaction
            yield _numbered(rows.slice(start, end - start), first + start), goes_on
            start = end


def _numbered(rows: pa.RecordBatch, first: int) -> pa.RecordBatch:
    seq = integers(np.arange(first, first + len(rows)))
    return pa.RecordBatch.from_arrays([seq, *rows.columns], schema=JOURNAL)


def _covering(end: End, position: int) -> End:
    return End(end.seq, end.commit_position, end.resume_position, max(end.covered, position), end.commit_ts_us)
