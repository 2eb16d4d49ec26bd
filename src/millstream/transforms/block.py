"""Rows of one table by column, with what a plain column cannot say: exact texts, and values that nobody sent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millstream.latest import Bools, booleans, special_texts, unsent_masks, whole, whole_numbers

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Block:
    """Columns of equal length.

    `special` has the exact text of values that their column cannot hold, NULL where it can; `unknown` marks values
    that did not change and were not sent. A column is in either only if it has such values.
    """

    size: int
    values: Mapping[str, pa.Array]
    special: Mapping[str, pa.StringArray] = field(default_factory=dict)
    unknown: Mapping[str, Bools] = field(default_factory=dict)

    def take(self, rows: Ints) -> Block:
        """These rows."""
        at = whole_numbers(rows)
        return Block(
            len(rows),
            {name: array.take(at) for name, array in self.values.items()},
            {name: texts.take(at) for name, texts in self.special.items()},
            {name: mask[rows] for name, mask in self.unknown.items()},
        )

    def only(self, mask: Bools, but: frozenset[str]) -> Block:
        """The block with nothing known of the rows outside the mask, but for these columns."""
        if mask.all():
            return self
        valid = truths(mask)
        values = {
            name: array if name in but else pc.if_else(valid, array, pa.scalar(None, array.type))
            for name, array in self.values.items()
        }
        special = {
            name: texts if name in but else pc.if_else(valid, texts, None) for name, texts in self.special.items()
        }
        unknown = {name: known if name in but else known & mask for name, known in self.unknown.items()}
        return Block(self.size, values, special, unknown)

    def filled(self, other: Block, where: Bools) -> Block:
        """What is unknown here, from another block, where a row of that may be used and has the value."""
        if not self.unknown:
            return self
        values, special, unknown = dict(self.values), dict(self.special), dict(self.unknown)
        for name, mask in self.unknown.items():
            there = booleans(other.values[name].is_valid())
            text = other.special.get(name)
            if text is not None:
                there |= booleans(text.is_valid())
            found = truths(mask & where & there)
            values[name] = pc.if_else(found, other.values[name], self.values[name])
            if text is not None:
                special[name] = pc.if_else(found, text, special.get(name, pa.scalar(None, pa.string())))
            unknown[name] = mask & ~(where & there)
        return Block(self.size, values, special, {name: mask for name, mask in unknown.items() if mask.any()})


def new_rows(changes: pa.RecordBatch, names: list[str]) -> Block:
    """The new rows of a changelog's batch; of a delete what is known of the old one."""
    table = pa.Table.from_batches([changes])
    texts = special_texts(table)
    return Block(
        changes.num_rows,
        {name: changes[name] for name in names},
        {name: texts[name] for name in names if name in texts},
        {name: mask for name, mask in unsent_masks(whole(table["_ms_unchanged"])).items() if name in names},
    )


def old_rows(changes: pa.RecordBatch, names: list[str], before: str) -> tuple[Block, Bools]:
    """The old rows, and where there is one."""
    texts = special_texts(pa.Table.from_batches([changes]))
    if before not in changes.schema.names:
        return Block(changes.num_rows, {}), np.zeros(changes.num_rows, bool)
    olds = changes[before]
    values = dict(zip([inner.name for inner in olds.type], olds.flatten(), strict=True))
    special = {name: texts[f"{before}.{name}"] for name in names if f"{before}.{name}" in texts}
    return Block(changes.num_rows, values, special), booleans(olds.is_valid())


def name_lists(masks: Mapping[str, Bools], size: int) -> pa.ListArray:
    """For each row the names whose mask marks it."""
    rows = _rows(masks)
    order = whole_numbers(np.argsort(rows, kind="stable"))
    names = [pa.repeat(name, int(mask.sum())) for name, mask in masks.items()]
    labels = pa.concat_arrays(names).take(order) if names else pa.nulls(0, pa.string())
    return pa.Array.from_buffers(pa.list_(pa.string()), size, [None, _offsets(rows, size)], children=[labels])


def text_maps(texts: Mapping[str, pa.StringArray], size: int) -> pa.MapArray:
    """For each row the texts that it has, by name; never NULL."""
    kind = pa.map_(pa.string(), pa.string())
    masks = {name: booleans(column.is_valid()) for name, column in texts.items()}
    rows = _rows(masks)
    order = whole_numbers(np.argsort(rows, kind="stable"))
    names = [pa.repeat(name, int(mask.sum())) for name, mask in masks.items()]
    labels = pa.concat_arrays(names).take(order) if names else pa.nulls(0, pa.string())
    values = [column.drop_null() for column in texts.values()]
    items = pa.concat_arrays(values).take(order) if values else pa.nulls(0, pa.string())
    pairs = pa.StructArray.from_arrays([labels, items], fields=[kind.key_field, kind.item_field])
    return pa.Array.from_buffers(kind, size, [None, _offsets(rows, size)], children=[pairs])


def truths(mask: Bools) -> pa.BooleanArray:
    """A column of numpy's booleans."""
    return pa.Array.from_buffers(pa.bool_(), len(mask), [None, pa.py_buffer(np.packbits(mask, bitorder="little"))])


def _rows(masks: Mapping[str, Bools]) -> Ints:
    found = [np.flatnonzero(mask) for mask in masks.values()]
    return np.concatenate(found) if found else np.zeros(0, np.int64)


def _offsets(rows: Ints, size: int) -> pa.Buffer:
    counts = np.bincount(rows, minlength=size)
    return pa.py_buffer(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32))
