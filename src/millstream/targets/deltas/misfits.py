"""Rows that a Delta table does not take: found without a commit, since none can be taken back.

They are appended to an empty twin of the table, which has its columns and constraints; a piece that the twin does not
take is cut in two until single rows are left.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa

from millstream.errors import RowRefused
from millstream.targets.deltas.tables import Handle
from millstream.targets.rejects import AT_ONCE

IN_A_ROW = ("failed validation check", "violat")
"""What delta-rs says of rows that a constraint does not allow. The rest of its words holds their values."""


def row_error(table: str, words: str) -> RowRefused | None:
    """The error for what delta-rs says of rows; None if it is not about rows."""
    if not any(sign in words for sign in IN_A_ROW):
        return None
    return RowRefused(
        f"{table}: a constraint of the Delta table does not allow the row",
        hint="change the constraint, or the row at the source",
        kind="constraint",
    )


def misfits(
    table: Handle, name: str, rows: pa.Table, check: Callable[[pa.Table], None], scratch: Path
) -> list[tuple[int, RowRefused]]:
    """The places of those rows that cannot be written, in order, each with the reason.

    `check` raises RowRefused for rows that we do not write ourselves.
    """
    twin = table.twin(scratch)
    found: list[tuple[int, RowRefused]] = []
    waiting = [(0, rows.num_rows)]
    while waiting and len(found) < AT_ONCE:
        begin, end = waiting.pop(0)
        refused = _refused(twin, name, rows.slice(begin, end - begin), check)
        if refused is None:
            continue
        if end - begin == 1:
            found.append((begin, refused))
        else:
            half = (begin + end) // 2
            waiting[:0] = [(begin, half), (half, end)]
    return found


def _refused(twin: Handle, name: str, rows: pa.Table, check: Callable[[pa.Table], None]) -> RowRefused | None:
    from deltalake import CommitProperties
    from deltalake.exceptions import DeltaError

    try:
        check(rows)
        twin.append(rows, CommitProperties())
    except RowRefused as refused:
        return refused
    except DeltaError as failed:
        found = row_error(name, str(failed))
        if found is None:
            raise
        return found
    return None
