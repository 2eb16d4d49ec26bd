"""Changes of any table in one shape: what identifies the row, what it was, what it is, as JSON by column.

    table    string    schema.name
    key      string    the columns that identify the row; NULL for a table without key and for a truncate
    before   string    the old row, or only its key where the source sent no more; NULL where it sent none
    after    string    the new row; NULL when it is gone. A column that did not change and was not sent
                       (`_ms_unchanged`) is left out: null would not be its value
    _ms_...            as in the changelog (`changelog.COMMON`)

`json_columns` says how values are written. A value with no home in its column's type (`_ms_special`)
stands there as a string with its exact text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millstream import changelog
from millstream.changelog import BEFORE
from millstream.model import Column, Relation
from millstream.wire.json_columns import json_objects, json_text, quoted

ENVELOPE = pa.schema(
    [
        pa.field("table", pa.string(), nullable=False),
        pa.field("key", pa.string()),
        pa.field("before", pa.string()),
        pa.field("after", pa.string()),
        *changelog.COMMON,
    ]
)

_FULL = "f"
"""The replica identity of a table whose old rows are sent whole."""


def envelope(changes: pa.RecordBatch, relation: Relation) -> pa.RecordBatch:
    """A relation's changelog, as `changelog.assemble` gives it, in the envelope; row for row."""
    images = _Images(changes, relation)
    gone = changes["_ms_deleted"]
    table = pa.array([relation.table]).take(pa.array(np.zeros(changes.num_rows, np.int32)))
    columns = [table, images.key(), images.before(), pc.if_else(gone, None, images.after())]
    return pa.RecordBatch.from_arrays([*columns, *(changes[f.name] for f in changelog.COMMON)], schema=ENVELOPE)


@dataclass(frozen=True)
class _Entries:
    """The entries of a list or map column of the changelog, flat, each with the number of its row."""

    rows: npt.NDArray[np.int64]
    names: pa.StringArray
    texts: pa.StringArray | None = None

    @classmethod
    def of(cls, array: pa.ListArray | pa.MapArray) -> _Entries:
        offsets = np.frombuffer(array.buffers()[1], np.int32, len(array) + 1, array.offset * 4)
        rows = np.repeat(np.arange(len(array)), np.diff(offsets))
        begin, count = int(offsets[0]), int(offsets[-1] - offsets[0])
        if isinstance(array, pa.MapArray):
            return cls(rows, array.keys.slice(begin, count), array.items.slice(begin, count))
        return cls(rows, array.values.slice(begin, count))

    def having(self, name: str) -> npt.NDArray[np.int64]:
        """Which entries have this name."""
        if not len(self.rows):
            return np.empty(0, np.int64)
        return np.flatnonzero(pc.equal(self.names, name).to_numpy(zero_copy_only=False))


class _Images:
    """The rows of one changelog as JSON objects. A column's text is made once and used in each."""

    def __init__(self, changes: pa.RecordBatch, relation: Relation) -> None:
        self._changes = changes
        self._relation = relation
        # The changelog may call a column otherwise than the table does; here nothing can be confused.
        self._exposed = changelog.exposed(relation).columns
        self._special = _Entries.of(changes["_ms_special"])
        self._unchanged = _Entries.of(changes["_ms_unchanged"])
        self._new = [self._text(changes.column(i), c.name) for i, c in enumerate(self._exposed)]
        self._old = [self._old_text(i, c) for i, c in enumerate(self._exposed)]

    def after(self) -> pa.Array:
        return self._objects((i, self._sent(i)) for i in range(len(self._new)))

    def before(self) -> pa.Array:
        if BEFORE not in self._changes.schema.names:
            return self._nothing()
        known = self._keys() if self._relation.identity != _FULL else range(len(self._old))
        return pc.if_else(
            self._changes[BEFORE].is_valid(),
            self._objects((i, self._old[i]) for i in known),
            pa.scalar(None, pa.string()),
        )

    def key(self) -> pa.Array:
        """Of the new row; of the old one for what was not sent again, and when there is no new one."""
        keys = self._keys()
        if not keys:
            return self._nothing()
        truncated = pc.equal(self._changes["_ms_op"], "t")
        objects = self._objects((i, pc.coalesce(self._sent(i), self._old[i])) for i in keys)
        return pc.if_else(truncated, pa.scalar(None, pa.string()), objects)

    def _keys(self) -> Sequence[int]:
        return [i for i, column in enumerate(self._relation.columns) if column.name in self._relation.key]

    def _objects(self, members: Iterable[tuple[int, pa.Array]]) -> pa.Array:
        chosen = list(members)
        if not chosen:
            return pa.array(["{}"]).take(pa.array(np.zeros(self._changes.num_rows, np.int32)))
        return json_objects([self._relation.columns[i].name for i, _ in chosen], [text for _, text in chosen])

    def _sent(self, column: int) -> pa.Array:
        """The text of a new value, NULL where it was not sent."""
        unchanged = self._unchanged.having(self._exposed[column].name)
        if not len(unchanged):
            return self._new[column]
        return pc.if_else(self._mask(self._unchanged.rows[unchanged]), pa.scalar(None, pa.string()), self._new[column])

    def _old_text(self, column: int, exposed: Column) -> pa.Array:
        before = self._changes[BEFORE] if BEFORE in self._changes.schema.names else None
        if before is None or before.null_count == len(before):
            return self._nothing()
        return self._text(pc.struct_field(before, column), f"{BEFORE}.{exposed.name}")

    def _text(self, values: pa.Array, label: str) -> pa.Array:
        """JSON text of a column, with the exact texts of values that it had no home for."""
        text = json_text(values)
        odd = self._special.having(label)
        if not len(odd) or self._special.texts is None:
            return text
        exact = quoted(self._special.texts.take(pa.array(odd)))
        return pc.replace_with_mask(text, self._mask(self._special.rows[odd]), exact)

    def _mask(self, rows: npt.NDArray[np.int64]) -> pa.BooleanArray:
        mask = np.zeros(self._changes.num_rows, bool)
        mask[rows] = True
        return pa.array(mask)

    def _nothing(self) -> pa.Array:
        return pa.nulls(self._changes.num_rows, pa.string())
