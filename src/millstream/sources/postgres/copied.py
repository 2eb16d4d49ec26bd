"""Rows of a table as a binary COPY gives them, which is how a baseline reads them.

A row is `ncols int16`, then per column `length int32` (-1: NULL) and the bytes. Columns of built-in types come
in the type's binary form where that form tells everything; the others as the text that their type's output
function writes. Which is which follows from the relation alone: who asks and who decodes never disagree.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import pyarrow as pa

from millstream.errors import JournalCorrupt
from millstream.model import Column, Relation
from millstream.sources.postgres.cells import BINARY, NULL, TEXT, Cells, Ints, Message
from millstream.sources.postgres.patterns import quote
from millstream.sources.postgres.pgoutput import copy_header
from millstream.sources.postgres.types import BY_ARRAY_OID, BY_OID

_NO_VALUE = 0xFFFFFFFF
_COPY_END = b"\xff\xff"
_BY_VERSION = "char"
"""Its text is another from Postgres 16 on, and its bytes do not tell which is meant."""


@lru_cache(maxsize=1024)
def forms(relation: Relation) -> tuple[int, ...]:
    """By column, whether it is copied as BINARY or as TEXT."""
    return tuple(BINARY if relation.encoding == "UTF8" and _tells_all(c) else TEXT for c in relation.columns)


def select_list(relation: Relation, values: Sequence[str] | None = None) -> str:
    """The expressions that give the relation's columns in those forms, to stand after SELECT.

    `values` are the columns' own expressions where they are not just their names.
    """
    names = [quote(column.name) for column in relation.columns] if values is None else values
    pairs = zip(names, forms(relation), strict=True)
    return ", ".join(name if form == BINARY else _as_text(name) for name, form in pairs)


def walk_copied(message: Message, at: Ints, kinds: Sequence[int]) -> tuple[Cells, Ints]:
    """What `cells.walk` does, for rows of a copy; `kinds` are the forms of the columns."""
    columns = len(kinds)
    if (message.int16(at) != columns).any():
        raise JournalCorrupt(f"a copied row does not have the {columns} columns of its relation")
    cells = Cells(np.empty((columns, len(at)), np.uint8), message.bounds(columns, len(at)))
    at = at + 2
    for column, kind in enumerate(kinds):
        length = message.int32(at).astype(np.int64)
        missing = length == _NO_VALUE
        start = at + 4
        at = start + np.where(missing, 0, length)
        cells.kind[column] = np.where(missing, NULL, kind)
        cells.bounds[column, 0:-1:2], cells.bounds[column, 1::2] = start, at
    return cells, at


def rows_of_copy(raw: bytes, sizes: list[int], *, first: bool) -> pa.LargeBinaryArray:
    """Each row of a piece of a copy, whose messages have these sizes.

    In front of the first stands the copy's header; its end mark is no row.
    """
    begin = copy_header(raw) if first and sizes else 0
    if sizes:
        sizes[0] -= begin
        if sizes[-1] == len(_COPY_END) and raw.endswith(_COPY_END):
            sizes.pop()
    offsets = np.zeros(len(sizes) + 1, np.int64)
    offsets[0] = begin
    offsets[1:] = begin + np.cumsum(sizes) if sizes else 0
    return pa.Array.from_buffers(pa.large_binary(), len(sizes), [None, pa.py_buffer(offsets), pa.py_buffer(raw)])


def _tells_all(column: Column) -> bool:
    entry = BY_OID.get(column.type_oid) or BY_ARRAY_OID.get(column.type_oid)
    return entry is not None and entry.becomes.binary is not None and entry.name != _BY_VERSION


def _as_text(name: str) -> str:
    """`format` uses the output function, as the log does; a cast to text strips blanks and spells out booleans.

    A row of a composite type that holds only NULLs IS NULL, but is a value: so values are counted.
    """
    return f"CASE WHEN num_nonnulls({name}) = 1 THEN format('%s', {name}) END"
