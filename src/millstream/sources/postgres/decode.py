"""pgoutput messages of one relation to Arrow columns, by column.

    insert   I oid4 N tuple
    update   U oid4 [K|O tuple] N tuple       K: old key, O: old row (REPLICA IDENTITY FULL)
    delete   D oid4 K|O tuple
    truncate T ...                            names relations only; it has no row

A row that a baseline has read is no message: it is the row of a copy (see `copied`).

Insert, delete and an update without old tuple have the same layout, so the first tuple of all
rows is walked in one go, and the second one of those updates that have two. Rows come out in the
order they came in; nothing is regrouped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millstream.errors import JournalCorrupt
from millstream.model import Op, Relation
from millstream.sources.base import Decoded
from millstream.sources.postgres.casts import exact_text
from millstream.sources.postgres.cells import (
    BINARY,
    TEXT,
    UNCHANGED,
    Bools,
    Cells,
    Ints,
    Message,
    gather,
    integers,
    strings,
    walk,
)
from millstream.sources.postgres.copied import CopiedCells
from millstream.sources.postgres.types import ColumnType, column_types

CHUNK_ROWS = 16 << 10
CHUNK_CELLS = 1 << 20
CHUNK_BYTES = 16 << 20
"""How much is decoded at once: small enough for the caches, and never more than 32-bit offsets reach
(a row that is larger alone is a chunk of its own)."""

BEFORE = "_ms_before."
"""In `special`, what stands in front of a column's name when the old row's value is meant."""

_TAGS = np.zeros(256, np.uint8)
_TAGS[[Op.CREATE, Op.UPDATE, Op.DELETE, Op.TRUNCATE]] = list(b"IUDT")

_NEW, _OLD_KEY, _OLD_ROW = ord("N"), ord("K"), ord("O")
_TUPLE_AT = 6


class PostgresDecoder:
    """Implements `sources.base.Decoder` for a relation captured from Postgres, in text, binary or both."""

    def __init__(self, relation: Relation) -> None:
        self.relation = relation
        self.types = column_types(relation)
        self._copied = CopiedCells(relation)

    def decode(self, op: npt.NDArray[np.uint8], payload: pa.LargeBinaryArray) -> Decoded:
        """Decode a run of changes of this relation (see the contract in `sources.base`).

        The odd values of an old row are in `special` under `_ms_before.<column>`.
        """
        result = Result([column.name for column in self.relation.columns], self.types)
        for begin, end in chunks(payload, max(1, len(self.types))):
            self._chunk(op[begin:end], payload.slice(begin, end - begin), result)
        return result.decoded()

    def _chunk(self, op: npt.NDArray[np.uint8], payload: pa.LargeBinaryArray, result: Result) -> None:
        message = Message(payload)
        try:
            if (op == Op.READ).all():
                self._read(message, result)
                return
            after, before, has_before = self._cells(op, message)
        except IndexError:
            raise JournalCorrupt(f"a message of {self.relation.table} ends before its row does") from None
        result.add(message, after, before, has_before)

    def _read(self, message: Message, result: Result) -> None:
        """Rows that were read by a baseline."""
        values, at = self._copied.values(message)
        if (at != message.end).any():
            raise JournalCorrupt(f"a copied row of {self.relation.table} is not as long as its columns")
        result.add_copied(values, self._copied.kinds, len(at))

    def _cells(self, op: npt.NDArray[np.uint8], message: Message) -> tuple[Cells, Cells | None, Bools]:
        """The cells of the new rows (old ones, for deletes), those of the old rows, and which rows have old ones.

        The old rows' are only as many as there are, which are few in most tables.
        """
        tag = message.bytes[message.begin]
        if (tag != _TAGS[op]).any():
            raise JournalCorrupt(f"a message of {self.relation.table} is not of the kind its operation says")
        truncates = tag == ord("T")
        if not truncates.any():
            return self._tuples(message, tag, message.begin, message.end)
        rows = np.flatnonzero(~truncates)
        some_after, some_before, some = self._tuples(message, tag[rows], message.begin[rows], message.end[rows])
        after = Cells.missing(message, len(self.types))
        after.put(rows, some_after)
        has_before = np.zeros(len(op), bool)
        has_before[rows] = some
        return after, some_before, has_before

    def _tuples(
        self, message: Message, tag: npt.NDArray[np.uint8], begin: Ints, end: Ints
    ) -> tuple[Cells, Cells | None, Bools]:
        """The same for rows that have tuples."""
        columns = len(self.types)
        if (message.int32(begin + 1) != self.relation.oid).any():
            raise JournalCorrupt(f"a message is not of {self.relation.table}, though it stands among its rows")
        marker = message.bytes[begin + 5]
        has_before: Bools = (marker == _OLD_KEY) | (marker == _OLD_ROW)
        known = np.where(marker == _NEW, tag != ord("D"), has_before & (tag != ord("I")))
        if not known.all():
            raise JournalCorrupt(f"a message of {self.relation.table} has a tuple its kind cannot have")
        first, at = walk(message, begin + _TUPLE_AT, columns)
        rows = np.flatnonzero(has_before & (tag == ord("U")))
        every = len(rows) == len(begin)
        old = np.flatnonzero(has_before)
        after, before = first, first.of(old) if len(old) and not every else None
        if len(rows):
            if (message.bytes[at[rows]] != _NEW).any():
                raise JournalCorrupt(f"an update of {self.relation.table} has no new row")
            second, at[rows] = walk(message, at[rows] + 1, columns)
            if every:
                after, before = second, first
            else:
                after.put(rows, second)
        if (at != end).any():
            raise JournalCorrupt(f"a message of {self.relation.table} is not as long as its row")
        return after, before, has_before


def chunks(payload: pa.LargeBinaryArray, columns: int) -> Iterator[tuple[int, int]]:
    """Cut the rows so that no chunk has more rows, cells or bytes than decode wants at once."""
    rows = len(payload)
    if not rows:
        return
    offsets: Ints = np.frombuffer(payload.buffers()[1], np.int64, rows + 1, payload.offset * 8)
    most = max(1, min(CHUNK_ROWS, CHUNK_CELLS // columns))
    begin = 0
    while begin < rows:
        fits = int(np.searchsorted(offsets, offsets[begin] + CHUNK_BYTES, side="right")) - 1
        # A little more at the end is not worth a chunk of its own, with which all would have to be put together.
        left = rows - begin
        end = min(begin + (left if left <= most + most // 4 else most), max(begin + 1, fits))
        yield begin, end
        begin = end


@dataclass
class Result:
    """Collects the chunks' columns, and per row the marks that are rare: unchanged and special."""

    names: list[str]
    types: tuple[ColumnType, ...]
    rows: int = 0
    after: list[list[pa.Array]] = field(default_factory=list)
    before: list[list[pa.Array] | None] = field(default_factory=list)
    has_before: list[Bools] = field(default_factory=list)
    unchanged: list[tuple[Ints, Ints]] = field(default_factory=list)
    special: list[tuple[Ints, str, pa.StringArray]] = field(default_factory=list)

    def add(self, message: Message, after: Cells, before: Cells | None, has_before: Bools) -> None:
        """Cast and append one chunk."""
        left_out = after.kind == UNCHANGED
        if left_out.any():
            rows, which = np.nonzero(left_out.T)
            self.unchanged.append((rows + self.rows, which))
        new = self._columns(message, after, "")
        old = None if before is None else self._old(message, before, has_before)
        self.append(new, old, has_before)

    def add_copied(self, cells: Sequence[pa.Array], kinds: Sequence[int], rows: int) -> None:
        """Cast and append one chunk of rows that were copied; `kinds` are the forms of their columns."""
        pairs = enumerate(zip(cells, kinds, strict=True))
        columns = [self._cast(values, column, "", binary=kind == BINARY) for column, (values, kind) in pairs]
        self.append(columns, None, np.zeros(rows, bool))

    def append(self, after: list[pa.Array], before: list[pa.Array] | None, has_before: Bools) -> None:
        """Append the columns of one chunk, whose rare marks were noted already."""
        self.after.append(after)
        self.before.append(before)
        self.has_before.append(has_before)
        self.rows += len(has_before)

    def _columns(self, message: Message, cells: Cells, prefix: str) -> list[pa.Array]:
        # One look at all cells spares the common columns several looks at each: that is what few rows cost.
        whole = (cells.kind == TEXT).all(axis=1).tolist()
        return [
            self._values(message, cells, column, prefix, None, binary=False)
            if whole[column]
            else self._mixed(message, cells, column, prefix)
            for column in range(len(self.types))
        ]

    def _old(self, message: Message, cells: Cells, has_before: Bools) -> list[pa.Array]:
        """The old rows' columns, NULL where a row has none. `cells` are those of the rows that have one."""
        known, rows = len(self.special), np.flatnonzero(has_before)
        columns = self._columns(message, cells, BEFORE)
        if len(rows) == len(has_before):
            return columns
        found = [(rows[odd - self.rows] + self.rows, label, texts) for odd, label, texts in self.special[known:]]
        self.special[known:] = found
        place = integers(np.maximum(np.cumsum(has_before) - 1, 0), has_before)
        return [
            _nulls(column.type, len(has_before)) if column.null_count == len(column) else column.take(place)
            for column in columns
        ]

    def _mixed(self, message: Message, cells: Cells, column: int, prefix: str) -> pa.Array:
        """A column of which not every cell was sent as text."""
        kind = cells.kind[column]
        texts: Bools = kind == TEXT
        binaries: Bools = kind == BINARY
        if not binaries.any():
            if not texts.any():
                return pa.nulls(len(kind), self.types[column].arrow)
            return self._values(message, cells, column, prefix, texts, binary=False)
        array = self._values(message, cells, column, prefix, None if binaries.all() else binaries, binary=True)
        if not texts.any():
            return array
        # The source was told another wire format in between: each cell says which form it has.
        both = pa.concat_arrays([array, self._values(message, cells, column, prefix, texts, binary=False)])
        return both.take(integers(np.arange(len(kind)) + np.where(texts, len(kind), 0)))

    def _values(
        self, message: Message, cells: Cells, column: int, prefix: str, sent: Bools | None, *, binary: bool
    ) -> pa.Array:
        """The column with the cells that were `sent` in one form (None: all were); the others are NULL."""
        return self._cast(gather(message, cells.bounds[column], sent), column, prefix, binary=binary)

    def _cast(self, values: pa.Array, column: int, prefix: str, *, binary: bool) -> pa.Array:
        to = self.types[column]
        if values.null_count == len(values):
            return pa.nulls(len(values), to.arrow)
        array, odd = to.read_binary(values) if binary else to.read(values)
        if len(odd):
            exact = to.binary_text(values, odd) if binary else exact_text(values, odd)
            self.special.append((odd + self.rows, prefix + self.names[column], exact))
        return array

    def decoded(self) -> Decoded:
        """Everything that was added, as one run."""
        schema = pa.schema([pa.field(name, t.arrow) for name, t in zip(self.names, self.types, strict=True)])
        has_before = np.concatenate(self.has_before) if self.has_before else np.zeros(0, bool)
        return Decoded(
            after=_record_batch(schema, self.after, self.rows),
            before=_record_batch(schema, self._before(), self.rows),
            has_before=has_before,
            unchanged=self._unchanged(),
            special=self._special(),
        )

    def _before(self) -> list[list[pa.Array]]:
        """The old rows' chunks. Where no row at all has an old one, that is one chunk of NULLs."""
        if all(chunk is None for chunk in self.before):
            return [self._nulls(self.rows)]
        pairs = zip(self.before, self.has_before, strict=True)
        return [self._nulls(len(has_before)) if chunk is None else chunk for chunk, has_before in pairs]

    def _nulls(self, rows: int) -> list[pa.Array]:
        return [_nulls(t.arrow, rows) for t in self.types]

    def _unchanged(self) -> pa.ListArray:
        if not self.unchanged:
            return pa.ListArray.from_arrays(self._none(), pa.nulls(0, pa.string()))
        rows = np.concatenate([rows for rows, _ in self.unchanged])
        columns = np.concatenate([columns for _, columns in self.unchanged])
        return pa.ListArray.from_arrays(_offsets(rows, self.rows), strings(self.names).take(integers(columns)))

    def _none(self) -> pa.Array:
        """List offsets for rows without any entry."""
        return integers(np.zeros(self.rows + 1, np.int32))

    def _special(self) -> pa.MapArray:
        if not self.special:
            empty = pa.nulls(0, pa.string())
            return pa.MapArray.from_arrays(self._none(), empty, empty)
        rows = np.concatenate([rows for rows, _, _ in self.special])
        labels = strings([label for _, label, _ in self.special])
        which = np.repeat(np.arange(len(self.special)), [len(rows) for rows, _, _ in self.special])
        texts = pa.concat_arrays([texts for _, _, texts in self.special])
        order = np.argsort(rows, kind="stable")
        return pa.MapArray.from_arrays(
            _offsets(rows, self.rows), labels.take(integers(which[order])), texts.take(integers(order))
        )


def _record_batch(schema: pa.Schema, chunked: list[list[pa.Array]], rows: int) -> pa.RecordBatch:
    """The chunks of each column put together; a relation without columns still has its rows."""
    if not chunked:
        return pa.RecordBatch.from_arrays([pa.nulls(0, f.type) for f in schema], schema=schema)
    if not len(schema):
        return pa.RecordBatch.from_struct_array(pa.Array.from_buffers(pa.struct([]), rows, [None]))
    columns = [parts[0] if len(parts) == 1 else pa.concat_arrays(parts) for parts in zip(*chunked, strict=True)]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _nulls(kind: pa.DataType, rows: int) -> pa.Array:
    """So many NULLs, of which most chunks have the same number: made once, they are shared."""
    return _many_nulls(kind, 1 << rows.bit_length()).slice(0, rows)


@lru_cache(maxsize=256)
def _many_nulls(kind: pa.DataType, rows: int) -> pa.Array:
    return pa.nulls(rows, kind)


def _offsets(rows: Ints, total: int) -> pa.Array:
    """List offsets for entries that belong to these rows."""
    counts = np.bincount(rows, minlength=total) if total else np.zeros(0, np.int64)
    return integers(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32))
