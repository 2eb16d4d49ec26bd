"""Filters and transforms in SQL and Python, as far as they can be known without Spark.

Spark says what an expression makes of which columns (`Output`); the rest follows from that: which columns there are
afterwards, which of them tell rows apart, and where values are unknown or have an exact text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from millstream.latest import Bools
from millstream.transforms.block import Block
from millstream.transforms.shape import Step
from millstream.transforms.steps import Columns


@dataclass(frozen=True)
class Output:
    """One column that Spark makes; of a filter the condition itself."""

    name: str
    kind: pa.DataType
    source: str | None
    """The column that it is, unchanged; None when it is computed."""
    needs: tuple[str, ...]
    """The columns that it is computed from."""


class Analyst(Protocol):
    """Says what Spark makes of expressions over a table's columns. Raises ConfigError for what does not compile."""

    def __call__(self, verb: str, texts: Sequence[tuple[str, Any]], columns: Columns) -> tuple[Output, ...]: ...


@dataclass(frozen=True)
class SqlStep:
    """A transform that Spark does."""

    step: Step
    outputs: tuple[Output, ...]
    before: tuple[tuple[str, pa.DataType], ...]
    """The columns before it,"""
    after: tuple[tuple[str, pa.DataType], ...]
    """and after it."""
    key: tuple[tuple[str, str], ...]
    """Names before and after of columns that come from the key."""
    table: str

    def carried(self, block: Block, was: Block) -> Block:
        """The block of Spark's values, with what is unknown and has exact texts, by what was so before it.

        Of a row that it lacks something for (`followed`) nothing is said: that one is set aside.
        """
        special = {name: was.special[source] for name, source in self._kept() if source in was.special}
        return Block(block.size, block.values, special, self.followed(was.unknown, was.size)[0])

    def followed(self, was: Mapping[str, Bools], size: int) -> tuple[dict[str, Bools], list[tuple[Bools, str]]]:
        """What is unknown after it, by what was before it; and the rows that it lacks values for, with the reasons.

        A value is computed from known ones, or did not change because none of them did. Between the two there is
        nothing that could be said of it. A function gets whole rows.
        """
        if self.step.verb == "python":
            (place, _), *_ = self.step.arguments
            return {}, [(mask, f"python {place} is to get {name}") for name, mask in was.items()]
        unknown = {name: was[source] for name, source in self._kept() if source in was}
        lacking: list[tuple[Bools, str]] = []
        for one in self.outputs:
            if one.source is not None or not any(name in was for name in one.needs):
                continue
            masks = {name: was.get(name, np.zeros(size, bool)) for name in one.needs}
            unsent = np.logical_and.reduce(list(masks.values()))
            if unsent.any():
                unknown[one.name] = unsent
            lacking += [(mask & ~unsent, f"{one.name} is computed from {name}") for name, mask in masks.items()]
        return unknown, lacking

    def _kept(self) -> list[tuple[str, str]]:
        """Names after and before of the columns that go through as they are."""
        kept = {name: name for name, _ in self.before} if self.step.verb == "add_sql" else {}
        return list({**kept, **{one.name: one.source for one in self.outputs if one.source is not None}}.items())


def bind_sql(step: Step, columns: Columns, analyst: Analyst) -> SqlStep:
    """The transform for this table; changes `columns` to what it leaves."""
    outputs = analyst(step.verb, step.arguments, columns)
    before, traced = dict(columns.fields), dict(columns.traced)
    if step.verb == "add_sql":
        for one in outputs:
            columns.check_new(one.name, "add")
            columns.fields[one.name] = (one.kind, None)
        moved = {name: name for name in before}
    else:
        columns.fields = {}
        for one in outputs:
            columns.check_new(one.name, step.verb)
            column = before[one.source][1] if one.source is not None and step.verb == "select" else None
            columns.fields[one.name] = (one.kind, column)
        moved = {one.source: one.name for one in reversed(outputs) if one.source is not None}
    if step.verb == "python":
        # It is held to leaving the key as it was.
        for name in set(columns.key.values()) & set(moved):
            columns.fields[name] = before[name]
    columns.move(moved, step.verb)
    key = tuple((now, columns.traced[first]) for first, now in traced.items() if first in columns.traced)
    after = tuple((name, kind) for name, (kind, _) in columns.fields.items())
    was = tuple((name, kind) for name, (kind, _) in before.items())
    return SqlStep(step, outputs, was, after, key, columns.table)
