"""What rows of a mirror have that are older than a column: the constant default with which it was added.

The source gives all its rows this value when the column is added, and its log has no change for that. A mirror does
the same when it gets the column, before the first change that has it: what it holds then is older.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from millstream.changelog import exposed
from millstream.model import Column, Op, Relation
from millstream.sources.decoders import decoder


@dataclass(frozen=True)
class Constant:
    """One value: as the source writes it, and as it is decoded (one row). `special`: it has no home in its type."""

    text: str
    value: pa.Array
    special: str | None


def constants(relation: Relation) -> dict[str, Constant]:
    """The constants of a relation's columns, by the name that a target's column has."""
    return {
        column.name: _constant(relation, column) for column in exposed(relation).columns if column.missing is not None
    }


def _constant(relation: Relation, column: Column) -> Constant:
    """Decoded in the way of every other value: as the only one of an inserted row."""
    assert column.missing is not None  # noqa: S101 - the caller has looked
    text = column.missing.encode()
    message = b"I" + struct.pack(">IcHcI", relation.oid, b"N", 1, b"t", len(text)) + text
    alone = replace(relation, columns=(replace(column, key=False),), key=(), primary_key=())
    decoded = decoder(alone).decode(np.array([Op.CREATE], np.uint8), pa.array([message], pa.large_binary()))
    special = dict(decoded.special[0].as_py() or ())
    return Constant(column.missing, decoded.after.column(0), special.get(column.name))
