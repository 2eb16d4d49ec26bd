"""Since when each description of a table was in force: one line for each change of it, never changed.

A line is written when a table's rows begin to refer to another description than before, and is durable
before those rows are visible. It stays when retention takes the rows. A journal of a version that did not
write these lines gets them from its rows: here by the next writer, and by each reader until then.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millstream.errors import JournalCorrupt, JournalFull
from millstream.failpoint import failpoint
from millstream.journal.files import (
    disk_errors,
    open_file,
    replace_file,
    sealed_json,
    sync_file,
    unsealed_json,
    write_all,
)
from millstream.journal.index import column

FILE = "schemas.jsonl"

DEFAULT_TENANT = "default"


@dataclass(frozen=True)
class InForce:
    """From `seq` on a table's rows were written under the description `relation`."""

    seq: int
    """The first row of the table under it,"""
    after: int
    """and the last seq before the transaction of that row: a batch can end there."""
    relation: int
    commit_position: int
    commit_ts_us: int
    tenant: str = DEFAULT_TENANT


def parse(raw: bytes, upto: int | None = None) -> list[InForce]:
    """The whole lines of `raw`, in order of seq, up to a seq.

    A last line that is not whole is being written. Raises JournalCorrupt for any other one.
    """
    found: list[InForce] = []
    lines = raw.splitlines(keepends=True)
    for number, line in enumerate(lines, start=1):
        body = unsealed_json(line)
        if body is None:
            if number == len(lines):
                break
            raise JournalCorrupt(
                f"{FILE}: line {number} is not what was written",
                hint="remove the file: the writer makes it again from the rows when it opens the journal",
            )
        one = InForce(**body)
        if upto is not None and one.seq > upto:
            break
        found.append(one)
    return found


class Current:
    """Which description of each table is in force, and where rows change that."""

    def __init__(self, tables: Sequence[str], history: Sequence[InForce] = (), tenant: str = DEFAULT_TENANT) -> None:
        """`tables[n]` is the name of the table that description n + 1 is of."""
        self._tenant = tenant
        self._tables = ["", *tables]
        self._of: dict[str, int] = {}
        self._is = np.zeros(max(16, 2 * len(self._tables)), np.bool_)
        # Logical messages belong to no table.
        self._is[0] = True
        for one in history:
            self._put(one.relation)

    def add(self, relation: int, table: str) -> None:
        """There is one more description."""
        if relation < len(self._tables):
            return
        self._tables.append(table)
        if relation >= len(self._is):
            self._is = np.concatenate((self._is, np.zeros(len(self._is), np.bool_)))

    def _put(self, relation: int) -> None:
        table = self._tables[relation]
        before = self._of.get(table)
        if before is not None:
            self._is[before] = False
        self._of[table] = relation
        self._is[relation] = True

    def note(self, rows: pa.RecordBatch, seq: npt.NDArray[np.int64]) -> Iterator[InForce]:
        """What rows, in order of seq, change. Costs next to nothing when they change nothing."""
        relation = column(rows, "relation")
        if self._is[relation].all():
            return
        starts = np.concatenate(([0], np.flatnonzero(np.diff(relation)) + 1))
        index, commit, ts = (column(rows, name) for name in ("tx_index", "commit_position", "commit_ts"))
        for at in starts.tolist():
            number = int(relation[at])
            if not self._is[number]:
                self._put(number)
                here = int(seq[at])
                yield InForce(here, here - int(index[at]) - 1, number, int(commit[at]), int(ts[at]), self._tenant)


class SchemaLog:
    """The writer's side. What `note` finds becomes durable with the next `sync`, before the rows are visible."""

    def __init__(
        self,
        directory: Path,
        tables: Sequence[str],
        end: int,
        tenant: str,
        from_rows: Callable[[], Sequence[InForce]],
    ) -> None:
        """Open, and cut off lines of rows beyond `end`, which were never committed.

        A file that is not there is made of what `from_rows` finds.
        """
        self._path = directory / FILE
        self._tenant = tenant
        self._tables = list(tables)
        with disk_errors(self._path, "open the schemas"):
            if not self._path.exists():
                replace_file(self._path, b"".join(map(_line, from_rows())))
                failpoint("journal.schemas_made")
            raw = self._path.read_bytes()
            self._fd = open_file(self._path, os.O_RDWR | os.O_APPEND)
        self._history = parse(raw, end)
        self._sizes = [len(line) for line in raw.splitlines(keepends=True)[: len(self._history)]]
        self._waiting: list[InForce] = []
        self._current = Current(tables, self._history, tenant)
        if sum(self._sizes) < len(raw):
            self._truncate()

    def add(self, relation: int, table: str) -> None:
        """There is one more description."""
        if relation > len(self._tables):
            self._tables.append(table)
            self._current.add(relation, table)

    def note(self, rows: pa.RecordBatch | None, first_seq: int) -> None:
        """Rows that follow were appended; the first has this seq."""
        if rows is not None and rows.num_rows:
            self._waiting += self._current.note(rows, first_seq + np.arange(rows.num_rows))

    def sync(self) -> None:
        """Make every line durable. Raises JournalFull; the caller then goes back."""
        if not self._waiting:
            return
        lines = [_line(one) for one in self._waiting]
        try:
            with disk_errors(self._path, "write a schema"):
                write_all(self._fd, lines)
        except JournalFull:
            self._truncate()
            raise
        sync_file(self._fd, self._path)
        self._sizes += map(len, lines)
        self._history += self._waiting
        self._waiting = []
        failpoint("journal.schema_written")

    def go_back(self, end: int) -> None:
        """Forget what came after `end`, on disk and in memory."""
        self._waiting = []
        self._history = [one for one in self._history if one.seq <= end]
        del self._sizes[len(self._history) :]
        self._truncate()
        self._current = Current(self._tables, self._history, self._tenant)

    def _truncate(self) -> None:
        os.ftruncate(self._fd, sum(self._sizes))
        sync_file(self._fd, self._path)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _line(one: InForce) -> bytes:
    return sealed_json(asdict(one))
