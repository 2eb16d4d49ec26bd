"""The latest row per key of a run of changes, by column: what a mirror has to write.

    latest(changes, key) -> Latest
        truncated   the seq of the last TRUNCATE: everything older is gone
        gone        keys that no row has after the changes, each with the version of its last change
        rows        the rows that are there after them, one per key, each with its version
        kept        per column the rows whose value nobody sent: the target's own row has it, under
                    the key it had before the changes (`base`)

A change may leave out values that it did not change (`_ms_unchanged`). They are filled, in this
order, from the change's own old row, from earlier changes of the same row, following its key, and
from the target. A row for which none of these can have the value is `missing`, never a NULL.

Changes of one relation, in seq order. Cutting them in two and writing the halves one after another
gives the same table: so a run may be as short or as long as memory allows.

Rows whose key changes are followed one by one (`moves`); all others are found by column. `versions` keeps what a
row was in between.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from millstream.changelog import BEFORE, METADATA
from millstream.model import Op
from millstream.moves import KEPT, MISSING, Moved, Seen, follow
from millstream.wire.json_columns import json_text

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

SEQ = "_ms_seq"

FEW = 64
"""Up to so many changes are folded row by row, if there is nothing odd in them."""
_COMPARED = (types.is_integer, types.is_string, types.is_boolean, types.is_binary, types.is_date32)
"""Types of keys for that."""


@dataclass(frozen=True)
class Latest:
    """What a mirror has to write, in this order: `truncated`, `gone`, `rows`."""

    truncated: int | None
    gone: pa.Table
    """The key's columns and `_ms_seq`."""
    rows: pa.Table
    """The relation's columns and `_ms_seq`. In the order of their keys, but for rows whose key has changed."""
    kept: Mapping[str, Bools] = field(default_factory=dict)
    base: pa.Table | None = None
    """For each of `rows` the key it had before the changes; None when nothing is kept."""
    special: Mapping[str, pa.StringArray] = field(default_factory=dict)
    """By column the exact text of values that the column cannot hold; NULL where it can."""
    missing: Sequence[int] = ()
    """The versions of `rows` that lack a value which nobody can have."""


def latest(changes: pa.Table, key: Sequence[str]) -> Latest:
    """Fold the changes of one relation (schema: `changelog.schema`), which are in seq order, to its latest rows."""
    op = one_letter(whole(changes["_ms_op"]))
    cut = np.flatnonzero(op == Op.TRUNCATE)
    truncated = None
    if len(cut):
        truncated = int(changes[SEQ][int(cut[-1])].as_py())
        changes, op = changes.slice(int(cut[-1]) + 1), op[int(cut[-1]) + 1 :]
    if 0 < changes.num_rows <= FEW and _are_plain(changes, op, key):
        return _fold_few(changes, op, tuple(key), truncated)
    return Fold(changes, op, tuple(key), truncated).folded()


def _are_plain(changes: pa.Table, op: npt.NDArray[np.uint8], key: Sequence[str]) -> bool:
    """Whether each change tells all of its row, no row gets another key, and Python compares keys as Arrow does."""
    if not all(any(fits(changes.schema.field(name).type) for fits in _COMPARED) for name in key):
        return False
    if len(whole(changes["_ms_unchanged"]).flatten()) or len(whole(changes["_ms_special"]).keys):
        return False
    before = whole(changes[BEFORE])
    if before.null_count == len(before):
        return True
    # Of a deleted row its key is sent. An old row that is sent whole may be another one than its key says.
    olds = [(code, old) for code, old in zip(op.tolist(), before.to_pylist(), strict=True) if old is not None]
    return all(
        code == Op.DELETE and all(value is None for name, value in old.items() if name not in key) for code, old in olds
    )


def _fold_few(changes: pa.Table, op: npt.NDArray[np.uint8], key: tuple[str, ...], truncated: int | None) -> Latest:
    """The same for a few plain changes. Each call of Arrow's costs as much as some rows of Python's."""
    (batch,) = changes.combine_chunks().to_batches()
    found = list(zip(*(batch[name].to_pylist() for name in key), strict=True))
    last = {values: number for number, values in enumerate(found)}
    deleted = (op == Op.DELETE).tolist()
    live = [number for number in last.values() if not deleted[number]]
    live.sort(key=lambda number: [(value is None, value) for value in found[number]])
    gone = sorted(number for number in last.values() if deleted[number])
    names = [name for name in changes.column_names if name not in METADATA]

    def taken(columns: Sequence[str], numbers: list[int]) -> pa.Table:
        rows = batch.select([*columns, SEQ]).take(whole_numbers(np.array(numbers, np.int64)))
        return pa.table(rows.columns, names=rows.schema.names)

    return Latest(truncated, taken(key, gone), taken(names, live))


def special_texts(changes: pa.Table) -> dict[str, pa.StringArray]:
    """By column (and `_ms_before.` column) the exact texts of values without a home, NULL where there is none."""
    return _special(whole(changes["_ms_special"]), changes.num_rows)


def special_maps(texts: Mapping[str, pa.StringArray], size: int) -> pa.MapArray:
    """The same texts as a map for each row; NULL where a row has none."""
    kind = pa.map_(pa.string(), pa.string())
    masks = {name: booleans(column.is_valid()) for name, column in texts.items()}
    rows = np.concatenate([np.flatnonzero(mask) for mask in masks.values()]) if masks else np.zeros(0, np.int64)
    if not len(rows):
        return pa.nulls(size, kind)
    order = np.argsort(rows, kind="stable")
    counts = np.bincount(rows, minlength=size)
    names = pa.concat_arrays([pa.repeat(name, int(mask.sum())) for name, mask in masks.items()])
    values = pa.concat_arrays([column.drop_null() for column in texts.values()])
    entries = [each.take(whole_numbers(order)) for each in (names, values)]
    offsets = pa.py_buffer(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32))
    there = pa.py_buffer(np.packbits(counts > 0, bitorder="little"))
    pairs = pa.StructArray.from_arrays(entries, fields=[kind.key_field, kind.item_field])
    return pa.Array.from_buffers(kind, size, [there, offsets], children=[pairs])


class Gathered(NamedTuple):
    """Rows with what is not known of them: see `Latest`."""

    rows: pa.Table
    kept: Mapping[str, Bools]
    base: pa.Table | None
    special: Mapping[str, pa.StringArray]
    missing: Sequence[int]


class Fold:
    """Changes of one relation without a truncate among them. A *place* is where a value stands: n for the new row of
    change n, `size` + n for its old row."""

    def __init__(self, changes: pa.Table, op: npt.NDArray[np.uint8], key: tuple[str, ...], truncated: int | None):
        self.size = changes.num_rows
        self.op = op
        self.key = key
        self.truncated = truncated
        self.columns = [name for name in changes.column_names if name not in METADATA]
        self.new = {name: whole(changes[name]) for name in (*self.columns, SEQ)}
        before = whole(changes[BEFORE])
        self.has_before = booleans(before.is_valid())
        names = [inner.name for inner in before.type]
        self.old = dict(zip(names, before.flatten(), strict=True))
        self.unsent = unsent_masks(whole(changes["_ms_unchanged"]))
        self.special = _special(whole(changes["_ms_special"]), self.size)
        self.places = {name: self._sent(name, mask) for name, mask in self.unsent.items() if name in self.new}
        self.keys = {name: self._key_values(name) for name in key}
        self.whole = any(
            self.old[name].null_count < self.size or f"{BEFORE}.{name}" in self.special
            for name in self.columns
            if name not in self.keys
        )
        """Whether old rows are sent whole, and not only their keys."""

    def folded(self) -> Latest:
        new, old, place_of = self._numbered()
        concerned = self._concerned(new, old, len(place_of))
        moved = self._follow(np.flatnonzero(concerned), new, old) if concerned.any() else Moved()
        live, places, gone = self._settle(np.flatnonzero(~concerned), new, len(place_of))
        return self._assemble(live, places, gone, new, moved, place_of)

    def _numbered(self) -> tuple[Ints, Ints, Ints]:
        """Small numbers for keys: that of each change's row after it and before it, and where each key's value is."""
        ids = _ids([self.keys[name] for name in self.key])
        new, old = ids[: self.size], ids[self.size :]
        old = np.where(self.has_before, old, new)
        new = np.where(self.op == Op.DELETE, old, new)
        # Where a key's value can be found, whoever has it.
        place_of = np.zeros(int(ids.max(initial=-1)) + 1, np.int64)
        place_of[ids] = np.arange(len(ids))
        return new, old, place_of

    def _concerned(self, new: Ints, old: Ints, count: int) -> Bools:
        """The changes of keys that pass from row to row: they have to be followed one by one."""
        moving = np.zeros(count, bool)
        moves = (self.op == Op.UPDATE) & (new != old)
        moving[new[moves]] = moving[old[moves]] = True
        moving[new[self._strangers(new)]] = True
        return moving[new]

    def _settle(self, changes: Ints, keys: Ints, count: int) -> tuple[Ints, dict[str, Ints], Ints]:
        """Rows that keep their key: the last change of each says whether it lives; places of values by column."""
        last = np.full(count, -1, np.int64)
        last[keys[changes]] = changes
        last = np.sort(last[last >= 0])
        dead = self.op[last] == Op.DELETE
        live = self._by_key(last[~dead])
        return live, {name: filled[live] for name, filled in self._all_filled(changes, keys).items()}, last[dead]

    def _all_filled(self, changes: Ints, keys: Ints) -> dict[str, Ints]:
        """By column that some change did not send: for each of these changes the place of its row's value."""
        if not self.places:
            return {}
        order = changes[np.argsort(keys[changes], kind="stable")]
        return {name: self._filled(place, order, keys) for name, place in self.places.items()}

    def _by_key(self, changes: Ints) -> Ints:
        """The same changes in the order of their keys: whoever looks the rows up finds neighbours close together."""
        if len(changes) < 2:
            return changes
        columns = {name: self.keys[name].take(whole_numbers(changes)) for name in self.key}
        order = pc.sort_indices(pa.table(columns), [(name, "ascending") for name in columns])
        found: Ints = changes[np.frombuffer(order.buffers()[1], np.uint64, len(order), order.offset * 8)]
        return found

    def _filled(self, place: Ints, order: Ints, keys: Ints) -> Ints:
        """For each change the place of its row's value: its own, or that of the change of this key before it."""
        sent = np.where(self.op == Op.DELETE, MISSING, place)[order]
        numbers = np.arange(len(order))
        group = keys[order]
        begins = np.ones(len(order), bool)
        begins[1:] = group[1:] != group[:-1]
        first = np.maximum.accumulate(np.where(begins, numbers, 0))
        source = np.maximum.accumulate(np.where(sent != KEPT, numbers, -1))
        filled = np.empty(self.size, np.int64)
        filled[order] = np.where(source >= first, sent[source], KEPT)
        return filled

    def _follow(self, changes: Ints, new: Ints, old: Ints, seen: Seen | None = None) -> Moved:
        def is_row(change: int, other: int) -> bool:
            return bool(self._are_rows(np.array([change]), np.array([other]))[0])

        return follow(changes, self.op, new, old, self.places, is_row, self.has_before, seen)

    def _strangers(self, keys: Ints) -> Ints:
        """Changes whose old row is not what the change before them wrote under their key.

        With a deferrable key two rows share one for a while, and only whole old rows tell which is meant.
        """
        if not self.whole:
            return np.zeros(0, np.int64)
        order = np.argsort(keys, kind="stable")
        earlier, later = order[:-1], order[1:]
        follows = (keys[earlier] == keys[later]) & self.has_before[later] & (self.op[earlier] != Op.DELETE)
        earlier, later = earlier[follows], later[follows]
        found: Ints = later[~self._are_rows(later, earlier)]
        return found

    def _are_rows(self, changes: Ints, others: Ints) -> Bools:
        """Whether the old row of each change is the new row of the other, as far as both were sent."""
        same = np.ones(len(changes), bool)
        for name in self.columns if self.whole else ():
            if name not in self.keys:
                same &= self._are_equal(name, changes, others)
        return same

    def _are_equal(self, name: str, changes: Ints, others: Ints) -> Bools:
        old, new = self.old[name].take(whole_numbers(changes)), self.new[name].take(whole_numbers(others))
        no_old, no_new = booleans(old.is_null()), booleans(new.is_null())
        if pa.types.is_nested(old.type):
            old, new = json_text(old), json_text(new)
        equal = booleans(pc.fill_null(pc.equal(old, new), False)) & ~no_old & ~no_new
        if pa.types.is_floating(old.type):
            equal |= booleans(pc.fill_null(pc.and_(pc.is_nan(old), pc.is_nan(new)), False))
        equal |= no_old & no_new & self._same_text(name, changes, others)
        return equal | self.unsent[name][others] if name in self.unsent else equal

    def _same_text(self, name: str, changes: Ints, others: Ints) -> Bools:
        """Whether values that are NULL in their columns have the same exact text, or none."""
        old, new = self.special.get(f"{BEFORE}.{name}"), self.special.get(name)
        nothing = pa.nulls(self.size, pa.string())
        texts = [
            pc.fill_null((nothing if column is None else column).take(whole_numbers(at)), "")
            for column, at in ((old, changes), (new, others))
        ]
        return booleans(pc.equal(*texts))

    def _assemble(
        self, live: Ints, places: dict[str, Ints], gone: Ints, keys: Ints, moved: Moved, place_of: Ints
    ) -> Latest:
        change = np.concatenate([live, moved.change])
        every = {name: np.concatenate([at, moved.places[name]]) if moved.places else at for name, at in places.items()}
        found = self._gathered(change, every, np.concatenate([keys[live], moved.base]), place_of)
        gone_keys = np.concatenate([keys[gone], moved.gone_key])
        gone_seq = _taken(self.new[SEQ], np.concatenate([gone, moved.gone_change]))
        return Latest(
            truncated=self.truncated,
            gone=self._keys_at(place_of[gone_keys]).append_column(SEQ, gone_seq),
            rows=found.rows,
            kept=found.kept,
            base=found.base,
            special=found.special,
            missing=found.missing,
        )

    def _gathered(self, change: Ints, places: Mapping[str, Ints], base: Ints, place_of: Ints) -> Gathered:
        """The rows that changes have left, each with the number of the key it had before all of them."""
        columns = {}
        for name in self.columns:
            if name in self.keys:
                columns[name] = _taken(self.keys[name], change)
            else:
                columns[name] = self._values(name, places.get(name, change))
        kept = {name: at == KEPT for name, at in places.items() if name not in self.keys and (at == KEPT).any()}
        absent = [at == MISSING for name, at in places.items() if name not in self.keys]
        missing = change[np.logical_or.reduce(absent)] if absent else change[:0]
        return Gathered(
            rows=pa.table({**columns, SEQ: _taken(self.new[SEQ], change)}),
            kept=kept,
            base=self._keys_at(place_of[np.maximum(base, 0)]) if kept else None,
            special=self._texts(change, places),
            missing=tuple(_taken(self.new[SEQ], missing).to_pylist()),
        )

    def _keys_at(self, place: Ints) -> pa.Table:
        return pa.table({name: _taken(self.keys[name], place) for name in self.key})

    def _values(self, name: str, place: Ints) -> pa.Array:
        """The column's values at these places; NULL where there is none."""
        if not (place < 0).any() and not (place >= self.size).any():
            return _taken(self.new[name], place)
        both = pa.concat_arrays([self.new[name], self.old[name]])
        return both.take(whole_numbers(np.maximum(place, 0), place >= 0))

    def _texts(self, change: Ints, places: Mapping[str, Ints]) -> dict[str, pa.StringArray]:
        found = {}
        for name in self.columns:
            if name not in self.special and f"{BEFORE}.{name}" not in self.special:
                continue
            nothing = pa.nulls(self.size, pa.string())
            both = pa.concat_arrays([self.special.get(label, nothing) for label in (name, f"{BEFORE}.{name}")])
            place = places.get(name, change)
            texts = both.take(whole_numbers(np.maximum(place, 0), place >= 0))
            if texts.null_count < len(texts):
                found[name] = texts
        return found

    def _sent(self, name: str, unsent: Bools) -> Ints:
        """The place of each change's own value of the column, KEPT where it was not sent."""
        numbers = np.arange(self.size)
        in_old = self.has_before & booleans(self.old[name].is_valid())
        label = f"{BEFORE}.{name}"
        if label in self.special:
            in_old |= booleans(self.special[label].is_valid())
        return np.where(~unsent, numbers, np.where(in_old, numbers + self.size, KEPT))

    def _key_values(self, name: str) -> pa.Array:
        """A key column's values by place. What a new row did not send of its key is in the old one."""
        new, old = self.new[name], self.old[name]
        if name in self.unsent:
            both = pa.concat_arrays([new, old])
            new = both.take(whole_numbers(np.arange(self.size) + np.where(self.unsent[name], self.size, 0)))
        return pa.concat_arrays([new, old])


def _ids(columns: Sequence[pa.Array]) -> Ints:
    """One small number per distinct key."""
    ids = np.zeros(len(columns[0]), np.int64)
    for number, values in enumerate(columns):
        codes = _numbers(values.dictionary_encode(null_encoding="encode").indices)
        if not number:
            ids = codes
        else:
            # Numbers stay below the count of rows, so that their product with the next column's fits.
            ids = np.unique(ids * (int(codes.max(initial=0)) + 1) + codes, return_inverse=True)[1].astype(np.int64)
    return ids


def _numbers(array: pa.Array) -> Ints:
    return np.frombuffer(array.buffers()[1], np.int32, len(array), array.offset * 4).astype(np.int64)


def one_letter(array: pa.StringArray) -> npt.NDArray[np.uint8]:
    """A column of one-letter texts as their codes."""
    if not len(array):
        return np.zeros(0, np.uint8)
    offsets = np.frombuffer(array.buffers()[1], np.int32, len(array) + 1, array.offset * 4)
    return np.frombuffer(array.buffers()[2], np.uint8)[offsets[:-1]]


def booleans(array: pa.BooleanArray) -> Bools:
    """A column without NULLs as numpy's. (Arrow's own way imports pandas.)"""
    if not len(array):
        return np.zeros(0, bool)
    bits = np.frombuffer(array.buffers()[1], np.uint8)
    return np.unpackbits(bits, bitorder="little")[array.offset : array.offset + len(array)].astype(bool)


def whole_numbers(values: Ints, valid: Bools | None = None) -> pa.Int64Array:
    """An Arrow array over numpy's integers, for the same reason."""
    there = None if valid is None else pa.py_buffer(np.packbits(valid, bitorder="little"))
    held = np.ascontiguousarray(values, np.int64)
    return pa.Array.from_buffers(pa.int64(), len(held), [there, pa.py_buffer(held)])


def _taken(values: pa.Array, place: Ints) -> pa.Array:
    if len(place) == len(values) and (place == np.arange(len(values))).all():
        return values
    return values.take(whole_numbers(place))


def whole(column: pa.ChunkedArray) -> pa.Array:
    """A column in one piece."""
    combined = column.combine_chunks()
    return pa.concat_arrays(combined.chunks) if isinstance(combined, pa.ChunkedArray) else combined


def unsent_masks(lists: pa.ListArray) -> dict[str, Bools]:
    """By column which changes did not send it; empty when all sent everything."""
    names = lists.flatten()
    if not len(names):
        return {}
    offsets = np.frombuffer(lists.buffers()[1], np.int32, len(lists) + 1, lists.offset * 4)
    rows = np.repeat(np.arange(len(lists)), np.diff(offsets))
    return {label: _marked(len(lists), rows[at]) for label, at in _by_label(names)}


def _special(maps: pa.MapArray, size: int) -> dict[str, pa.StringArray]:
    """By label the exact texts, NULL where there is none; empty when there are none at all."""
    offsets = np.frombuffer(maps.buffers()[1], np.int32, len(maps) + 1, maps.offset * 4) if len(maps) else np.zeros(1)
    begin, end = int(offsets[0]), int(offsets[-1])
    if begin == end:
        return {}
    rows = np.repeat(np.arange(len(maps)), np.diff(offsets))
    keys, items = maps.keys.slice(begin, end - begin), maps.items.slice(begin, end - begin)
    found = {}
    for label, at in _by_label(keys):
        where = np.zeros(size, np.int64)
        where[rows[at]] = at
        found[label] = items.take(whole_numbers(where, _marked(size, rows[at])))
    return found


def _by_label(labels: pa.StringArray) -> list[tuple[str, Ints]]:
    encoded = labels.dictionary_encode()
    codes = _numbers(encoded.indices)
    return [(label, np.flatnonzero(codes == code)) for code, label in enumerate(encoded.dictionary.to_pylist())]


def _marked(size: int, rows: Ints) -> Bools:
    mask = np.zeros(size, bool)
    mask[rows] = True
    return mask
