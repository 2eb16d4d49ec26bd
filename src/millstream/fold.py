"""The current rows of a table, folded from its whole changelog: a proof, not a way to mirror.

`fold` reads every change there ever was, in seq order, keeps nothing but which change each value of
each living row came from, and gathers the values at the end. It is strict: a changelog that no
table can have written (a seq twice, a row created twice, a value that nobody sent) is an error and
never a guess. So it proves delivery; it holds the whole changelog in memory.

Rows follow their key: an update whose old key differs moves the row, and what the update did not
send comes from the old row, if it was sent whole, or else from where the moved row had it. A table
without key is a bag of rows, each identified by the whole of itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from millstream.changelog import BEFORE, METADATA

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

Key = tuple[Any, ...]

_SPECIAL = "_ms_special"
_SPECIAL_TYPE = pa.map_(pa.string(), pa.string())


class Inconsistent(ValueError):
    """The changes given cannot be the whole changelog of one table."""


@dataclass
class Row:
    """A living row: the change that wrote it last, and the places of values that this one did not send."""

    change: int
    elsewhere: dict[str, int] = field(default_factory=dict)

    def place(self, column: str) -> int:
        return self.elsewhere.get(column, self.change)


def fold(changes: Iterable[pa.RecordBatch | pa.Table], key: Sequence[str]) -> pa.Table:
    """The table after its last change: the columns of its last schema version, and `_ms_special`.

    `changes` are all changes of one table, in any order and cut in any way. With an empty `key` whole
    rows are the identity. A column that a row's last writer did not know is NULL.
    """
    log = _Log(changes)
    rows = _living(log, tuple(key))
    columns = [log.values(name).take(pa.array([row.place(name) for row in rows], pa.int64())) for name in log.columns]
    return pa.table([*columns, _special(log, rows)], names=[*log.columns, _SPECIAL])


def fold_with_spark(changes: DataFrame, key: Sequence[str]) -> DataFrame:
    """The same for a DataFrame of changes: the fold runs in one task, on an executor."""
    from pyspark.sql.types import MapType, StringType, StructField, StructType

    own = [column for column in changes.schema.fields if column.name not in METADATA]
    special = StructField(_SPECIAL, MapType(StringType(), StringType()))

    def folded(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from fold([batch for batch in batches if batch.num_rows], key).to_batches()

    return changes.repartition(1).mapInArrow(folded, StructType([*own, special]))


class _Log:
    """All changes, numbered over parts of one schema each.

    A value's place is the number of its change; the value in that change's old row has its place
    behind all of these, at the number plus `size`.
    """

    def __init__(self, changes: Iterable[pa.RecordBatch | pa.Table]) -> None:
        parts: dict[str, list[pa.Table]] = {}
        for change in changes:
            table = pa.Table.from_batches([change]) if isinstance(change, pa.RecordBatch) else change
            parts.setdefault(str(table.schema), []).append(table)
        self._parts = [pa.concat_tables(tables).combine_chunks() for tables in parts.values()]
        self.size = sum(part.num_rows for part in self._parts)
        self.op = self._every("_ms_op")
        self.seq = self._every("_ms_seq")
        self.unchanged = self._every("_ms_unchanged")
        self.special = [dict(entries) for entries in self._every(_SPECIAL)]
        self.has_before = [there for part in self._parts for there in _has_before(part)]
        self.position = self._every("_ms_position")
        self.order = sorted(range(self.size), key=self._place)
        for earlier, later in zip(self.order, self.order[1:], strict=False):
            if self.seq[earlier] == self.seq[later] and not self._is_copied(earlier, later):
                raise Inconsistent(f"seq {self.seq[later]} is there twice")
        newest = self._newest()
        self.columns = [name for name in newest.names if name not in METADATA]
        self._values = {name: self._both(name, newest.field(name).type) for name in self.columns}
        self._sent: dict[str, list[bool]] = {}

    def _place(self, change: int) -> tuple[int, str, bool]:
        """Rows that were read come after the change of their seq, and those of a table's copy after its truncate."""
        return self.seq[change], self.position[change], self.op[change] != "t"

    def _is_copied(self, earlier: int, later: int) -> bool:
        """Whether two of the same seq can be: what was read has the version of the moment in which that was done."""
        if self.op[later] == "r":
            return True
        return bool(self.op[later] == "t" and self.position[earlier] < self.position[later])

    def values(self, column: str) -> pa.ChunkedArray:
        """A column's values by place: all new rows, then all old rows."""
        return self._values[column]

    def sent_before(self, change: int, column: str) -> bool:
        """Whether the change's old row has a value for the column; an old key has none but its own."""
        if column not in self._sent:
            self._sent[column] = self.values(column).slice(self.size).is_valid().to_pylist()
        return self._sent[column][change] or f"{BEFORE}.{column}" in self.special[change]

    def keys(self, columns: Sequence[str]) -> list[Key]:
        """By place, what identifies the rows. A value with no home in its type counts by its text."""
        if not columns:
            return [()] * (2 * self.size)
        lists = [self._identities(column) for column in columns]
        return list(zip(*lists, strict=True))

    def _identities(self, column: str) -> list[Any]:
        found = [_identity(value) for value in self.values(column).to_pylist()]
        for change, special in enumerate(self.special):
            if special:
                if column in special:
                    found[change] = (special[column],)
                if f"{BEFORE}.{column}" in special:
                    found[self.size + change] = (special[f"{BEFORE}.{column}"],)
        return found

    def _newest(self) -> pa.Schema:
        """The schema of the last change: what the table looks like now."""
        if not self.order:
            return self._parts[0].schema if self._parts else pa.schema([])
        change = self.order[-1]
        for part in self._parts:
            if change < part.num_rows:
                return part.schema
            change -= part.num_rows
        raise AssertionError("every change is in a part")

    def _every(self, name: str) -> list[Any]:
        return [value for part in self._parts for value in part[name].to_pylist()]

    def _both(self, name: str, to: pa.DataType) -> pa.ChunkedArray:
        new = [_column(part, name, to) for part in self._parts]
        old = [_column(_old_rows(part), name, to) for part in self._parts]
        return pa.chunked_array([chunk for column in (*new, *old) for chunk in column.chunks], to)


_NAN = "a number that is none, equal to itself"


def _identity(value: Any) -> Any:
    """The value as something that can be compared and hashed; NaN is equal to itself."""
    if isinstance(value, list):
        return tuple(map(_identity, value))
    return _NAN if value != value else value


def _has_before(part: pa.Table) -> list[bool]:
    if BEFORE not in part.column_names:
        return [op == "d" for op in part["_ms_op"].to_pylist()]
    there: list[bool] = part[BEFORE].is_valid().to_pylist()
    return there


def _old_rows(part: pa.Table) -> pa.Table:
    old = part.select([])
    if BEFORE in part.column_names:
        for inner in part.schema.field(BEFORE).type:
            old = old.append_column(inner.name, pc.struct_field(part[BEFORE], inner.name))
    return old


def _column(part: pa.Table, name: str, to: pa.DataType) -> pa.ChunkedArray:
    if name not in part.column_names:
        return pa.chunked_array([pa.nulls(part.num_rows, to)])
    return part[name].cast(to)


def _living(log: _Log, key: Key) -> list[Row]:
    """Go through all changes and return the rows that are there at the end."""
    if not log.order:
        return []
    names = key or log.columns
    keys = log.keys(names)
    living: dict[Key, list[Row]] = {}
    # What a truncate has removed says nothing, and need not be whole: a table may join with its rows on the way.
    last = max((number for number, change in enumerate(log.order) if log.op[change] == "t"), default=-1)
    for change in log.order[last + 1 :]:
        op = log.op[change]
        if not key and op in "ud" and not log.has_before[change]:
            raise Inconsistent(f"seq {log.seq[change]} does not say which row it changes, and the table has no key")
        old_key = keys[log.size + change if log.has_before[change] else change]
        if op == "d":
            _remove(living, old_key)
            continue
        if op not in "cru":
            raise Inconsistent(f"seq {log.seq[change]} has the operation {op!r}, which no table has")
        previous = _remove(living, old_key) if op == "u" else None
        row = _written(log, change, previous)
        new_key = keys[change]
        if log.unchanged[change]:
            new_key = tuple(
                old if name in row.elsewhere else new for name, new, old in zip(names, new_key, old_key, strict=True)
            )
        if key and new_key in living:
            raise Inconsistent(f"seq {log.seq[change]} writes a row under a key that another row has")
        living.setdefault(new_key, []).append(row)
    return [row for rows in living.values() for row in rows]


def _remove(living: dict[Key, list[Row]], key: Key) -> Row | None:
    """Take out one row of this key; None if it is older than the changelog."""
    rows = living.get(key)
    if not rows:
        return None
    row = rows.pop()
    if not rows:
        del living[key]
    return row


def _written(log: _Log, change: int, previous: Row | None) -> Row:
    """The row that a change wrote, with the places of the values it did not send."""
    row = Row(change)
    for column in log.unchanged[change]:
        if column not in log.columns:
            continue
        if log.sent_before(change, column):
            row.elsewhere[column] = log.size + change
        elif previous is not None:
            row.elsewhere[column] = previous.place(column)
        else:
            raise Inconsistent(f"seq {log.seq[change]} left out a value that no change before it has")
    return row


def _special(log: _Log, rows: list[Row]) -> pa.Array:
    """For each row the exact texts of its values with no home, wherever they came from."""
    return pa.array([list(_odd_values(log, row)) for row in rows], _SPECIAL_TYPE)


def _odd_values(log: _Log, row: Row) -> Iterator[tuple[str, str]]:
    if not row.elsewhere and not log.special[row.change]:
        return
    for column in log.columns:
        place = row.place(column)
        label = column if place < log.size else f"{BEFORE}.{column}"
        text = log.special[place % log.size].get(label)
        if text is not None:
            yield column, text
