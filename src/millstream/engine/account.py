"""What a delivery has brought since it was started."""

from __future__ import annotations

from millstream.engine.batch import BatchResult
from millstream.model import Cursor, Json, SeqRange


class Account:
    """Counts of one query. They are replaced as a whole, so that any thread may read them."""

    def __init__(self) -> None:
        self.counts = {"events": 0, "bytes": 0, "batches": 0, "last_batch_ms": 0}

    def add(self, result: BatchResult) -> None:
        """Rows that did not come with a batch of changes."""
        events, size = self.counts["events"] + result.rows, self.counts["bytes"] + result.bytes
        self.counts = {**self.counts, "events": events, "bytes": size}

    def batch(self, span: SeqRange, result: BatchResult, cursor: Cursor, seconds: float) -> Json:
        """Count a batch. Returns what is told of it."""
        self.add(result)
        milliseconds = round(seconds * 1000)
        self.counts = {**self.counts, "batches": self.counts["batches"] + 1, "last_batch_ms": milliseconds}
        return {
            "start": span.start,
            "end": span.end,
            "rows": result.rows,
            "bytes": result.bytes,
            "skipped": result.skipped,
            "ms": milliseconds,
            "tables": result.tables,
            "commit_ts": cursor.commit_ts.isoformat() if cursor.commit_ts else None,
        }
