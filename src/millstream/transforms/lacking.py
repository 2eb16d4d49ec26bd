"""Changes that did not send what filters or transforms of their stream need.

Postgres does not send a large value that an update leaves as it was. A filter that looks at it cannot say whether the
row is inside; nor can anybody say what SQL makes of it together with values that were sent. Such changes are known
before anything is done to them, so that no SQL ever sees them. They are completed from the source, or kept aside.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millstream.latest import Bools, booleans
from millstream.transforms.block import Block, truths
from millstream.transforms.changes import WRITTEN, Rows, ongoing, unsent
from millstream.transforms.compiled import Compiled
from millstream.transforms.sql import SqlStep

_UNSENT = "whose value is large, did not change, and was not sent"


def needed_by_filters(bound: Compiled, rows: Rows) -> pa.StringArray | None:
    """Of each change why filters cannot look at it; NULL where they can. None if they can look at all."""
    lacking, column = unsent(rows, bound.rule)
    return _texts(len(lacking), [(lacking, f"{bound.rule.table}: a filter needs {column}, {_UNSENT}")])


def needed_by_transforms(bound: Compiled, rows: Rows, new_in: Bools, old_in: Bools) -> pa.StringArray | None:
    """The same of transforms, for changes that leave a row at the target, by which rows are inside the filters."""
    texts = needed_anyway(bound, rows.new)
    if texts is None:
        return None
    at = np.flatnonzero(booleans(texts.is_valid()))
    taken, left = ongoing(rows.take(at), bound.rule, new_in[at], old_in[at])
    mask = np.zeros(len(texts), bool)
    mask[at[taken[np.isin(left.op, WRITTEN)]]] = True
    return pc.if_else(truths(mask), texts, None) if mask.any() else None


def needed_anyway(bound: Compiled, rows: Block) -> pa.StringArray | None:
    """The same for rows of which it is not known yet whether they go on."""
    unknown, found = rows.unknown, list[tuple[Bools, str]]()
    for part in bound.parts:
        if not unknown:
            break
        if isinstance(part, SqlStep):
            unknown, lacking = part.followed(unknown, rows.size)
            found += [(mask, f"{bound.rule.table}: {why}, {_UNSENT}") for mask, why in lacking]
        else:
            # What was not sent goes where its column goes.
            unknown = part(Block(rows.size, {}, {}, unknown)).unknown
    return _texts(rows.size, found)


def _texts(size: int, found: list[tuple[Bools, str]]) -> pa.StringArray | None:
    """The first reason of each row."""
    found = [(mask, why) for mask, why in found if mask.any()]
    if not found:
        return None
    texts = pa.nulls(size, pa.string())
    for mask, why in reversed(found):
        texts = pc.if_else(truths(mask), pa.scalar(why), texts)
    return texts
