"""Binary COPY at a Postgres that is a target.

Its tables are read as a source's are, and decoded by the same types. Rows that a source copies are passed on as they
are where the columns have the same built-in types: only their version is put in front.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import psycopg
import pyarrow as pa
import pyarrow.compute as pc

from millstream.model import Json, Op, Relation
from millstream.sources.decoders import decoder
from millstream.sources.postgres.cells import BINARY
from millstream.sources.postgres.copied import forms, head_of, rows_of_copy, select_list
from millstream.targets.forms import form_schema

PART_PAGES = 8192
"""So many pages of a table are one part (64 MiB)."""
RUN_ROWS = 16_384
RUN_BYTES = 16 << 20
"""Rows are decoded when either is reached."""

_MONEY = (790, 791)
"""What its bytes mean depends on the server's own language."""
_HEADER = b"PGCOPY\n\xff\r\n\0" + bytes(8)
_END = b"\xff\xff"

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


def takes_as_they_are(relation: Relation, names: Sequence[str], types: Mapping[str, int]) -> bool:
    """Whether rows that a source copies can be written to a table whose columns have these types, by OID."""
    pairs = zip(names, relation.columns, forms(relation), strict=True)
    return all(
        form == BINARY and column.type_oid not in _MONEY and types.get(name) == column.type_oid
        for name, column, form in pairs
    )


def copy_pieces(rows: Iterator[pa.LargeBinaryArray], columns: int, seq: int, *, soft: bool) -> Iterator[Any]:
    """A binary COPY of rows with so many columns, as they were copied, with `_ms_seq` (and `_ms_deleted`) in front."""
    own = (8).to_bytes(4) + seq.to_bytes(8) + ((1).to_bytes(4) + b"\0" if soft else b"")
    front = (columns + (2 if soft else 1)).to_bytes(2) + own
    yield _HEADER
    for some in rows:
        # Their number of columns, and what stands before it, makes way for the new one.
        longer = pc.binary_replace_slice(some, 0, _head(some) + 2, front)
        offsets = np.frombuffer(longer.buffers()[1], np.int64, len(longer) + 1, longer.offset * 8)
        yield longer.buffers()[2].slice(int(offsets[0]), int(offsets[-1] - offsets[0]))
    yield _END


def _head(rows: pa.LargeBinaryArray) -> int:
    """How many bytes stand before each of these rows."""
    offsets = np.frombuffer(rows.buffers()[1], np.int64, len(rows), rows.offset * 8)
    return head_of(np.frombuffer(rows.buffers()[2], np.uint8)[offsets])
