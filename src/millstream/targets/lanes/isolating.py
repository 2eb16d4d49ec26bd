"""Finding the rows that a database does not take: only after a batch was refused for the sake of one.

Changes are written in order. A piece that is refused is taken back and cut in two, until what is left of it is
a single change: that one is rejected, and all others are in their places as if it had never come.
"""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa
import pyarrow.compute as pc

from millstream.errors import MissingBase, RowRefused
from millstream.latest import SEQ
from millstream.targets.lanes.database import Database
from millstream.targets.lanes.runs import Run
from millstream.targets.rejects import BYTES_AT_ONCE, Reject, RowsRejected, at_once, rejected


class Isolating:
    """The rejects of one batch."""

    def __init__(self, db: Database) -> None:
        self._db = db
        self._found: list[Reject] = []
        self._bytes = 0

    def write(self, run: Run, key: tuple[str, ...], write: Callable[[pa.Table], None]) -> None:
        """Write the run's changes, except for those that cannot be. Raises RowsRejected when that are too many."""
        waiting = [run.changes]
        while waiting:
            changes = waiting.pop(0)
            try:
                with self._db.piece():
                    write(changes)
            except MissingBase as missing:
                if not missing.seqs:
                    raise
                # Each of them may be completed from elsewhere, and then completes those before it.
                self._add(run, key, changes.filter(pc.is_in(changes[SEQ], pa.array(missing.seqs, pa.int64()))), missing)
            except RowRefused as refused:
                if changes.num_rows == 1:
                    self._add(run, key, changes, refused)
                else:
                    half = changes.num_rows // 2
                    waiting[:0] = [changes.slice(0, half), changes.slice(half)]

    def check(self) -> None:
        """Raise RowsRejected if there are any."""
        if self._found:
            raise RowsRejected(self._found)

    def _add(self, run: Run, key: tuple[str, ...], rows: pa.Table, refused: RowRefused) -> None:
        found = rejected(run.relation, run.relation_id, rows, key, refused)
        self._found += found
        self._bytes += sum(len(one.row) for one in found)
        if len(self._found) >= at_once(refused) or self._bytes >= BYTES_AT_ONCE or len(found) < rows.num_rows:
            self.check()
