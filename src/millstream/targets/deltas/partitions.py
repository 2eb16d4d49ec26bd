"""Columns by whose values the files of a Delta table are kept apart.

Delta writes such values as text into paths and its log, and reads some texts back as NULL: the empty one, and the
one that Hive wrote for NULL. There is no home for them in such a column: like others without one they are NULL
there, and stand in `_ms_special`.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from millstream.errors import RowRefused, TargetRefused
from millstream.latest import special_texts, whole
from millstream.transforms.block import text_maps

SPECIAL = "_ms_special"

_HOMELESS = pa.array(["", "__HIVE_DEFAULT_PARTITION__"])


def check_partitions(table: str, wanted: pa.Schema, columns: Sequence[str]) -> None:
    """Raise TargetRefused for columns that a table cannot be partitioned by."""
    for name in columns:
        if name not in wanted.names:
            raise TargetRefused(
                f"{table} has no column {name} to be partitioned by", hint="correct partition_by of the target"
            )
        kind = wanted.field(name).type
        if types.is_nested(kind) or types.is_binary(kind) or types.is_floating(kind):
            raise TargetRefused(
                f"{table}: a Delta table cannot be partitioned by {name}, which is {kind}",
                hint="partition it by a column of text, whole numbers, dates, times or truths",
            )


def housed(rows: pa.Table, columns: Sequence[str]) -> pa.Table:
    """The rows as the table can hold them."""
    wrong = {name: _homeless(whole(rows[name])) for name in columns if _is_text(rows, name)}
    wrong = {name: mask for name, mask in wrong.items() if pc.any(mask).as_py()}
    if not wrong:
        return rows
    special = special_texts(rows)
    for name, mask in wrong.items():
        values = whole(rows[name])
        special[name] = pc.if_else(mask, values, special.get(name, pa.scalar(None, pa.string())))
        rows = _with(rows, name, pc.if_else(mask, pa.scalar(None, values.type), values))
    return _with(rows, SPECIAL, text_maps(special, rows.num_rows))


def restored(rows: pa.Table, columns: Sequence[str]) -> pa.Table:
    """The rows back as they were, when the table holds them like that."""
    special = special_texts(rows)
    mine = [name for name in columns if name in special and _is_text(rows, name)]
    for name in mine:
        mask = _homeless(special[name])
        rows = _with(rows, name, pc.if_else(mask, special[name], whole(rows[name])))
        special[name] = pc.if_else(mask, pa.scalar(None, pa.string()), special[name])
    return _with(rows, SPECIAL, text_maps(special, rows.num_rows)) if mine else rows


def refuse_homeless_keys(table: str, rows: pa.Table, columns: Sequence[str], key: Sequence[str]) -> None:
    """Raise RowRefused for a key that could not be found again: NULL equals nothing."""
    for name in key:
        if name in columns and _is_text(rows, name) and pc.any(_homeless(whole(rows[name]))).as_py():
            raise RowRefused(
                f"{table}: {name}, by which the Delta table is partitioned, is an empty text in a key",
                hint="partition the table by another column",
            )


def _homeless(values: pa.Array) -> pa.BooleanArray:
    return pc.and_(values.is_valid(), pc.is_in(values, _HOMELESS))


def _is_text(rows: pa.Table, name: str) -> bool:
    return name in rows.column_names and bool(types.is_string(rows.schema.field(name).type))


def _with(rows: pa.Table, name: str, values: pa.Array) -> pa.Table:
    at = rows.column_names.index(name)
    return rows.set_column(at, rows.schema.field(name), values.cast(rows.schema.field(name).type))
