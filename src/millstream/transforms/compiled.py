"""A stream's filters and transforms, bound to one of its tables.

    bound = compiled(shaping, relation)     None when the table goes through as it is
    bound.relation                          the table as targets get it
    bound.changes(batch)                    changes of the source's table -> changes of that one (see `changes`)
    bound.rows(batch)                       rows of the source's table -> the rows that the target should have

Where something is in SQL, or Python, Spark must say what it makes of the columns (`analyst`), and do it: then
`bound.parts` has the transforms in their order, those that Spark does among them, and `spark.shaped` runs them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from millstream.changelog import exposed
from millstream.errors import ConfigError, NotSupported
from millstream.latest import special_texts
from millstream.model import Relation
from millstream.sources.decoders import decoded_schema
from millstream.sources.patterns import matcher
from millstream.transforms import changes
from millstream.transforms.block import Block, text_maps
from millstream.transforms.columns import described
from millstream.transforms.fields import field_test
from millstream.transforms.shape import OPS, SQL_VERBS, FieldFilter, Shape, Shaping, SqlFilter, Step
from millstream.transforms.sql import Analyst, Output, SqlStep, bind_sql
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
    conditions: tuple[str, ...]
    """Filters in SQL."""
    parts: tuple[Apply | SqlStep, ...]
    """The transforms, in their order."""
    traced: frozenset[str]
    """The columns of `relation` that come from what an old row has at least."""
    outputs: tuple[tuple[Output, ...], ...]
    """What the analyst said, in the order in which it was asked: it need not be asked again."""

    def changes(self, batch: pa.RecordBatch, *, old_keys: bool = False) -> pa.RecordBatch:
        """What these changes of the source's table mean for the filtered and transformed one; may be no row.

        `old_keys`: of old rows only the keys go on. Raises RowUnshaped if a transform fails on a row.
        """
        of_old = frozenset(self.identity) if old_keys else None
        return changes.shaped(batch, self.rule, self.transformed, self.relation, self.traced, of_old=of_old)

    @property
    def identity(self) -> tuple[str, ...]:
        """The columns of the source's table that tell its rows apart."""
        return self.source.primary_key if self.source.identity == "f" else self.source.key

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
        for part in self.parts:
            if isinstance(part, SqlStep):
                raise TypeError("what is in SQL or Python is done by Spark")
            block = part(block)
        return block


def compiled(shaping: Shaping, relation: Relation) -> Compiled | None:
    """Bind the stream's shape to a relation; None when nothing of it is for that table.

    Raises ConfigError that names stream, table and column for what the table does not allow. Where something
    is in SQL or Python it takes an analyst: `compiled_by`.
    """
    return _compiled(shaping.key(), relation, shaping)


def compiled_by(analyst: Analyst, shaping: Shaping, relation: Relation) -> Compiled | None:
    """The same, with Spark's help where that is needed."""
    shape = chosen(shaping.shape, relation)
    if not shape:
        return None
    try:
        return _bound(shape, relation, shaping.mirrors, analyst)
    except ConfigError as wrong:
        raise ConfigError(f"stream {shaping.stream}: {wrong.message}", hint=wrong.hint) from None


def recompiled(shaping: Shaping, relation: Relation, outputs: tuple[tuple[Output, ...], ...]) -> Compiled:
    """The same again, elsewhere, by what an analyst said."""
    said = iter(outputs)
    found = compiled_by(lambda *_: next(said), shaping, relation)
    assert found is not None  # noqa: S101 - there was something to say
    return found


def wants_spark(shaping: Shaping, relation: Relation) -> bool:
    """Whether something that is for this table is in SQL or Python."""
    return shaping.shape.in_spark and chosen(shaping.shape, relation).in_spark


@lru_cache(maxsize=1024)
def _compiled(_: str, relation: Relation, shaping: Shaping) -> Compiled | None:
    return compiled_by(_nobody, shaping, relation)


def _nobody(verb: str, texts: Sequence[tuple[str, Any]], columns: Columns) -> tuple[Output, ...]:
    raise NotSupported(
        f"{columns.table}: its filters or transforms are in SQL or Python, which only a running stream can follow"
    )


def chosen(shape: Shape, relation: Relation) -> Shape:
    """What of the shape is for this table."""

    def of_table(all: tuple[_Chosen, ...]) -> tuple[_Chosen, ...]:
        return tuple(one for one in all if matcher(one.tables)(relation))

    return Shape(of_table(shape.filters), of_table(shape.fields), shape.ops, of_table(shape.transforms))


def _bound(shape: Shape, relation: Relation, mirrors: bool, analyst: Analyst) -> Compiled:
    source = exposed(relation)
    fields = {
        column.name: (kind, column) for column, kind in zip(source.columns, decoded_schema(source).types, strict=True)
    }
    key = source.primary_key if source.identity == "f" else source.key
    columns = Columns(source.table, dict(fields), _itself(key), _itself(source.key), mirrors)
    tests = tuple(field_test(one, columns.kind(one.column, one.test), source.table) for one in shape.fields)
    said: list[tuple[Output, ...]] = []

    def asked(verb: str, texts: Sequence[tuple[str, Any]], columns: Columns) -> tuple[Output, ...]:
        said.append(analyst(verb, texts, columns))
        return said[-1]

    conditions = tuple(one.condition for one in shape.filters)
    found = [asked("filter", [(condition, None)], columns)[0] for condition in conditions]
    needs = [one.column for one in shape.fields] + [name for one in found for name in one.needs]
    rule = changes.Rule(
        names=tuple(fields),
        needs=tuple(dict.fromkeys(needs)),
        tests=tests,
        filters=bool(tests or conditions),
        ops=frozenset(ord(OPS[name]) for name in shape.ops),
        key=frozenset(source.key),
        whole=source.identity == "f",
        table=source.table,
    )
    parts = tuple(
        bind_sql(step, columns, asked) if step.verb in SQL_VERBS else bind(step, columns) for step in shape.transforms
    )
    result = described(source, columns.fields, columns.key)
    return Compiled(source, result, rule, conditions, parts, frozenset(columns.traced.values()), tuple(said))


def _itself(names: Iterable[str]) -> dict[str, str]:
    return {name: name for name in names}
