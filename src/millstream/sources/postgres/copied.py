"""Rows of a table as a binary COPY gives them, which is how a baseline reads them.

A row is `ncols int16`, then per column `length int32` (-1: NULL) and the bytes. Columns of built-in types come
in the type's binary form where that form tells everything; the others as the text that their type's output
function writes. Which is which follows from the relation alone: who asks and who decodes never disagree. In front of
a row may stand the head of the message that brought it (`copy_socket`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millstream.errors import JournalCorrupt
from millstream.model import Column, Relation
from millstream.sources.postgres.cells import BINARY, TEXT, Ints, Message, gather
from millstream.sources.postgres.copy_socket import HEAD
from millstream.sources.postgres.patterns import quote
from millstream.sources.postgres.pgoutput import copy_header
from millstream.sources.postgres.types import BY_ARRAY_OID, BY_OID

_NO_VALUE = 0xFFFFFFFF
_SIDE_BY_SIDE = 16
"""So many columns are taken out together, at most."""
_SIZES = {
    oid: size
    for size, oids in {
        1: (16,),
        2: (21,),
        4: (23, 26, 28, 29, 700, 1082),
        8: (20, 701, 790, 1083, 1114, 1184, 5069),
        16: (2950,),
    }.items()
    for oid in oids
}
"""By OID the types whose values have one size: numbers, dates and times, uuid."""
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


class CopiedCells:
    """Cuts copied rows of one relation into cells, by column, many rows at a time.

    Cells of one size that stand beside each other have the same places in every row, as long as none of them is NULL:
    those of all rows are taken out together. Which columns had NULLs is remembered, so that this is not tried in vain.
    """

    def __init__(self, relation: Relation) -> None:
        self.kinds = forms(relation)
        pairs = zip(relation.columns, self.kinds, strict=True)
        self._sizes = [_SIZES.get(column.type_oid) if kind == BINARY else None for column, kind in pairs]

    def values(self, message: Message) -> tuple[list[pa.Array], Ints]:
        """The cells of each column as a binary array, and where the rows end.

        The ends must be compared with where the rows end before a cell is used, as after `cells.walk`. Raises
        IndexError when a length leads out of the chunk.
        """
        columns = len(self.kinds)
        at = message.begin + head_of(message.bytes[message.begin])
        if (message.int16(at) != columns).any():
            raise JournalCorrupt(f"a copied row does not have the {columns} columns of its relation")
        found: list[pa.Array] = []
        at = at + 2
        while len(found) < columns:
            run = self._run(message, at, len(found))
            taken, at = _side_by_side(message, at, run) if run else ([], at)
            found += taken
            if len(taken) < len(run):
                self._sizes[len(found)] = None
            if not taken:
                values, at = _one_column(message, at)
                found.append(values)
        return found, at

    def _run(self, message: Message, at: Ints, first: int) -> list[int]:
        """The sizes of the columns from here on that can be taken together: no row ends before they do."""
        room = len(message.bytes) - int(at[-1])
        run: list[int] = []
        for size in self._sizes[first : first + _SIDE_BY_SIDE]:
            if size is None or sum(run) + 4 * len(run) + 4 + size > room:
                break
            run.append(size)
        return run


def head_of(first: npt.NDArray[np.uint8]) -> int:
    """How many bytes stand before copied rows, by the first byte of each: the head of its message, or nothing.

    Without it a row begins with the number of its columns, of which there are never so many.
    """
    headed = first == ord("d")
    if not headed.any():
        return 0
    if not headed.all():
        raise JournalCorrupt("copied rows are in two forms")
    return HEAD


def _side_by_side(message: Message, at: Ints, sizes: Sequence[int]) -> tuple[list[pa.Array], Ints]:
    """Cells of these sizes, which begin at `at`: as many columns as have no cell of another size."""
    pairs = [((f"length{at}", "<u4"), (f"value{at}", f"V{size}")) for at, size in enumerate(sizes)]
    form = np.dtype([part for pair in pairs for part in pair])
    every = np.ndarray((len(message.bytes) - form.itemsize + 1,), f"V{form.itemsize}", message.buffer, strides=(1,))
    together = every[at].view(form)
    found: list[pa.Array] = []
    for number, size in enumerate(sizes):
        if (together[f"length{number}"] != int.from_bytes(size.to_bytes(4), "little")).any():
            break
        values = np.ascontiguousarray(together[f"value{number}"])
        offsets = np.arange(0, size * len(at) + 1, size, dtype=np.int32)
        buffers = [None, pa.py_buffer(offsets), pa.py_buffer(values)]
        found.append(pa.Array.from_buffers(pa.binary(), len(at), buffers))
    return found, at + sum(4 + size for size in sizes[: len(found)])


def _one_column(message: Message, at: Ints) -> tuple[pa.Array, Ints]:
    """Cells of any size."""
    length = message.int32(at).astype(np.int64)
    there = length != _NO_VALUE
    every = bool(there.all())
    start = at + 4
    end = start + (length if every else np.where(there, length, 0))
    bounds = message.bounds(1, len(at))[0]
    bounds[0:-1:2], bounds[1::2] = start, end
    return gather(message, bounds, None if every else there), end


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
