"""Changes that filters or transforms fail on: what goes on of them, and how they are found.

Of a change that cannot be shaped only its operation and its keys are known: a target must know them to see which of
its rows is older than the source's. The key comes through every transform (else there is no mirror) and none fails
on it. Where only the old row of a change fails, the change goes on with the old row's key: a row that is repaired or
deleted at the source must not be held by what it was before.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from millstream.errors import RowUnshaped
from millstream.latest import booleans, whole_numbers
from millstream.sources.decoders import decoded_schema
from millstream.transforms.block import Block
from millstream.transforms.changes import Rows, apart, together
from millstream.transforms.compiled import Compiled
from millstream.transforms.lacking import needed_by_filters
from millstream.transforms.sql import SqlStep


def stubs(bound: Compiled, batch: pa.RecordBatch) -> pa.RecordBatch:
    """What goes on of changes that cannot be shaped: changes of `bound.relation` with nothing but their keys."""
    rows = apart(batch, bound.rule)
    made = Rows(rows.op, _keys(bound, rows.new), _keys(bound, rows.old), rows.has_old)
    return together(batch, made, False, bound.relation, bound.traced)


def _keys(bound: Compiled, block: Block) -> Block:
    names = [name for name in bound.identity if name in block.values]
    special = {name: block.special[name] for name in names if name in block.special}
    carried = Block(block.size, {name: block.values[name] for name in names}, special)
    for part in bound.parts:
        carried = _renamed(carried, dict(part.key)) if isinstance(part, SqlStep) else part(carried)
    values = {
        field.name: carried.values.get(field.name, pa.nulls(block.size, field.type))
        for field in decoded_schema(bound.relation)
    }
    return Block(block.size, values, carried.special)


def _renamed(block: Block, names: dict[str, str]) -> Block:
    return Block(
        block.size,
        {names[name]: array for name, array in block.values.items() if name in names},
        {names[name]: texts for name, texts in block.special.items() if name in names},
    )


def shaped_apart(
    bound: Compiled, batch: pa.RecordBatch
) -> tuple[list[pa.RecordBatch], list[tuple[pa.RecordBatch, RowUnshaped]]]:
    """The changes of a batch that was refused, shaped without those that cannot be: these come second.

    Those that lack what a filter needs are known; the rest is cut in two until single changes are left.
    """
    made: list[pa.RecordBatch] = []
    batch, failed = without_unsent(bound, batch)
    waiting = [batch] if batch.num_rows else []
    while waiting:
        piece = waiting.pop(0)
        try:
            made.append(bound.changes(piece))
        except RowUnshaped:
            if piece.num_rows > 1:
                half = piece.num_rows // 2
                waiting[:0] = [rows_of(piece, 0, half), rows_of(piece, half, piece.num_rows)]
                continue
            try:
                made.append(bound.changes(piece, old_keys=True))
            except RowUnshaped as refused:
                failed.append((piece, refused))
    return made, failed


def without_unsent(
    bound: Compiled, batch: pa.RecordBatch
) -> tuple[pa.RecordBatch, list[tuple[pa.RecordBatch, RowUnshaped]]]:
    """The changes without those that did not send what a filter needs; and these, one by one."""
    lacking = needed_by_filters(bound, apart(batch, bound.rule))
    if lacking is None:
        return batch, []
    there = np.flatnonzero(booleans(lacking.is_null()))
    return batch.take(whole_numbers(there)), list(unsent_rows(batch, lacking))


def unsent_rows(batch: pa.RecordBatch, lacking: pa.StringArray) -> Iterator[tuple[pa.RecordBatch, RowUnshaped]]:
    """The changes that have a reason, one by one, with it."""
    for at in np.flatnonzero(booleans(lacking.is_valid())).tolist():
        yield rows_of(batch, at, at + 1), RowUnshaped(lacking[at].as_py(), kind="unsent")


def rows_of(batch: pa.RecordBatch, begin: int, end: int) -> pa.RecordBatch:
    """The rows from `begin` to before `end`, in memory of their own."""
    return batch.take(whole_numbers(np.arange(begin, end)))
