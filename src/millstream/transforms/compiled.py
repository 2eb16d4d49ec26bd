"""A stream's filters and transforms, bound to one of its tables.

bound = compiled(shaping, relation)     None when the table goes through as it is
bound.relation                          the table as targets get it
bound.changes(batch)                    changes of the source's table -> changes of that one (see `changes`)
bound.rows(batch)                       rows of the source's table -> the rows that the target should have
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

import numpy as np
import pyarrow as pa

from millstream.changelog import exposed
from millstream.errors import ConfigError
from millstream.latest import special_texts
from millstream.model import Relation
from millstream.sources.decoders import decoded_schema
from millstream.sources.patterns import matcher
from millstream.transforms import changes
from millstream.transforms.block import Block, text_maps
from millstream.transforms.columns import described
from millstream.transforms.fields import field_test
from millstream.transforms.shape import OPS, FieldFilter, Shape, Shaping, SqlFilter, Step
from millstream.transforms.steps import Apply, Columns, bind

_Chosen = TypeVar("_Chosen", SqlFilter, FieldFilter, Step)

SPECIAL = "_ms_special"


@dataclass(frozen=True)
class Compiled:
    """Filters and transforms of one table at one schema version."""

    source: Relation
    """The table as its changelog has it."""
    relation: Relation
    """The table as it is after the transforms."""
    rule: changes.Rule
    steps: tuple[Apply, ...]

    def changes(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """What these changes of the source's table mean for the filtered and transformed one; may be no row."""
        return changes.shaped(batch, self.rule, self.transformed, self.relation)

    def rows(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The rows that a target should have of these of the source: those that meet the filters, transformed.

        The columns are those of the source's changelog, and `_ms_special` if there are exact texts. The result has
        those of `relation`, and `_ms_special`. Row order is kept; a row is left out or stands once.
        """
        names = [column.name for column in self.source.columns]
        texts = special_texts(pa.Table.from_batches([batch])) if SPECIAL in batch.schema.names else {}
        block = Block(batch.num_rows, {name: batch[name] for name in names}, texts)
        kept = block.take(np.flatnonzero(self.rule.meets(block)))
        made = self.transformed(kept)
        schema = decoded_schema(self.relation).append(pa.field(SPECIAL, pa.map_(pa.string(), pa.string())))
        columns = [made.values[column.name] for column in self.relation.columns]
        return pa.RecordBatch.from_arrays([*columns, text_maps(made.special, made.size)], schema=schema)

    def transformed(self, block: Block) -> Block:
        """The block after all transforms."""
        for step in self.steps:
            block = step(block)
        return block


def compiled(shaping: Shaping, relation: Relation) -> Compiled | None:
    """Bind the stream's shape to a relation; None when nothing of it is for that table.

    Raises ConfigError that names stream, table and column for what the table does not allow.
    """
    return _compiled(shaping.key(), relation, shaping)


@lru_cache(maxsize=1024)
def _compiled(_: str, relation: Relation, shaping: Shaping) -> Compiled | None:
    shape = chosen(shaping.shape, relation)
    if not shape:
        return None
    try:
        return _bound(shape, relation, shaping.mirrors)
    except ConfigError as wrong:
        raise ConfigError(f"stream {shaping.stream}: {wrong.message}", hint=wrong.hint) from None


def chosen(shape: Shape, relation: Relation) -> Shape:
    """What of the shape is for this table."""

    def of_table(all: tuple[_Chosen, ...]) -> tuple[_Chosen, ...]:
        return tuple(one for one in all if matcher(one.tables)(relation))

    return Shape(of_table(shape.filters), of_table(shape.fields), shape.ops, of_table(shape.transforms))


def _bound(shape: Shape, relation: Relation, mirrors: bool) -> Compiled:
    source = exposed(relation)
    fields = {
        column.name: (kind, column) for column, kind in zip(source.columns, decoded_schema(source).types, strict=True)
    }
    key = source.primary_key if source.identity == "f" else source.key
    columns = Columns(source.table, dict(fields), {name: name for name in key}, mirrors)
    tests = tuple(field_test(one, columns.kind(one.column, one.test), source.table) for one in shape.fields)
    rule = changes.Rule(
        names=tuple(fields),
        needs=tuple(one.column for one in shape.fields),
        tests=tests,
        ops=frozenset(ord(OPS[name]) for name in shape.ops),
        key=frozenset(source.key),
        whole=source.identity == "f",
        table=source.table,
    )
    steps = tuple(bind(step, columns) for step in shape.transforms)
    result = described(source, columns.fields, columns.key)
    return Compiled(source, result, rule, steps)
