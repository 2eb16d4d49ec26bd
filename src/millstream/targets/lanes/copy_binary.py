"""Tables of a Postgres that is a target, read as a source's are: binary COPY, decoded by the same types."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import psycopg
import pyarrow as pa

from millstream.model import Json, Op, Relation
from millstream.sources.decoders import decoder
from millstream.sources.postgres.copied import rows_of_copy, select_list
from millstream.targets.forms import form_schema

PART_PAGES = 8192
"""So many pages of a table are one part (64 MiB)."""
RUN_ROWS = 16_384
RUN_BYTES = 16 << 20
"""Rows are decoded when either is reached."""

_BEGIN = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"
_SETTINGS = "SELECT set_config('extra_float_digits', '3', true), set_config('bytea_output', 'hex', true)"


def page_ranges(pages: int) -> list[Json]:
    """A table of so many pages in parts; the last one has no end, as the table may grow."""
    begins = range(0, max(pages, 1), PART_PAGES)
    return [{"begin": begin, "end": begin + PART_PAGES if begin + PART_PAGES < pages else None} for begin in begins]


def copy_statement(
    relation: Relation, values: Sequence[str], table: str, part: Json, living: str, order: str | None = None
) -> str:
    """The COPY that gives the rows of a part. `values` are expressions for the relation's columns."""
    conditions = [f"ctid >= '({part['begin']},0)'", living]
    conditions += [] if part["end"] is None else [f"ctid < '({part['end']},0)'"]
    chosen = select_list(relation, values)
    where = " AND ".join(conditions) + (f" ORDER BY {order}" if order else "")
    return f"COPY (SELECT {chosen} FROM {table} WHERE {where}) TO STDOUT (FORMAT binary)"


def read_copy(connection: psycopg.Connection[Any], statement: str, relation: Relation) -> Iterator[pa.Table]:
    """The rows that a COPY gives, decoded; `relation` has the names that the columns get."""
    connection.execute(_BEGIN.encode())
    connection.execute(_SETTINGS.encode())
    with connection.cursor() as cursor, cursor.copy(statement.encode()) as copy:
        first, pieces, size = True, list[bytes](), 0
        for piece in copy:
            pieces.append(bytes(piece))
            size += len(pieces[-1])
            if len(pieces) >= RUN_ROWS or size >= RUN_BYTES:
                yield _decoded(pieces, relation, first=first)
                first, pieces, size = False, [], 0
        if pieces:
            yield _decoded(pieces, relation, first=first)
    connection.execute(b"COMMIT")


def _decoded(pieces: list[bytes], relation: Relation, *, first: bool) -> pa.Table:
    rows = rows_of_copy(b"".join(pieces), [len(piece) for piece in pieces], first=first)
    found = decoder(relation).decode(np.full(len(rows), Op.READ, np.uint8), rows)
    return pa.table([*found.after.columns, found.special], schema=form_schema(relation))
