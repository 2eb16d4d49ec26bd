"""Filters and transforms of a stream as plain values: what the stream file says, and what tasks are given."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

Constant = str | int | float | bool
Test = Literal["equals", "prefix", "regex", "in"]
Verb = Literal["drop", "rename", "cast", "add", "add_sql", "mask", "hash", "truncate", "select", "python"]

EVERY = ("*.*",)
"""The pattern of all tables."""

OPS = {"insert": "c", "update": "u", "delete": "d", "truncate": "t"}
"""What `ops` names, as `_ms_op` has it."""

SQL_VERBS = ("add_sql", "select", "python")
"""Transforms that only Spark can do."""

MASKED = "***"


@dataclass(frozen=True)
class SqlFilter:
    """A condition in Spark SQL on the source's row, for the tables that the patterns mean."""

    condition: str
    tables: tuple[str, ...] = EVERY


@dataclass(frozen=True)
class FieldFilter:
    """A condition on one column. `equals`, `prefix` and `regex` have one value, `in` has any number."""

    column: str
    test: Test
    values: tuple[Constant, ...]
    tables: tuple[str, ...] = EVERY


@dataclass(frozen=True)
class Step:
    """One transform. `arguments` are pairs:

    drop (column, None), rename (old, new), cast (column, type), add (name, constant), add_sql (name, expression),
    mask (column, text), hash (column, where the salt is), truncate (column, length), select (expression, None),
    python ("module:function", None).
    """

    verb: Verb
    arguments: tuple[tuple[str, Any], ...]
    tables: tuple[str, ...] = EVERY


@dataclass(frozen=True)
class Shape:
    """All of a stream's filters and transforms. A row must meet every filter that is for its table."""

    filters: tuple[SqlFilter, ...] = ()
    fields: tuple[FieldFilter, ...] = ()
    ops: tuple[str, ...] = tuple(OPS)
    """Which operations are delivered; keys of `OPS`."""
    transforms: tuple[Step, ...] = ()

    def __bool__(self) -> bool:
        """Whether it changes anything."""
        return bool(self.filters or self.fields or self.transforms or set(self.ops) != set(OPS))

    @property
    def in_spark(self) -> bool:
        """Whether something is in SQL, or in Python."""
        return bool(self.filters) or any(step.verb in SQL_VERBS for step in self.transforms)

    def to_json(self) -> dict[str, Any]:
        value: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return value

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Shape:
        return cls(
            tuple(SqlFilter(one["condition"], tuple(one["tables"])) for one in value["filters"]),
            tuple(
                FieldFilter(one["column"], one["test"], tuple(one["values"]), tuple(one["tables"]))
                for one in value["fields"]
            ),
            tuple(value["ops"]),
            tuple(
                Step(one["verb"], tuple((name, argument) for name, argument in one["arguments"]), tuple(one["tables"]))
                for one in value["transforms"]
            ),
        )


@dataclass(frozen=True)
class Shaping:
    """A shape as one target gets it. Small, picklable."""

    stream: str
    shape: Shape
    mirrors: bool
    """Whether the target keeps tables equal to the source's: then the key must come through."""

    def key(self) -> str:
        """Equal only for what is the same: to Python 1 and true are not different enough."""
        return json.dumps([self.stream, self.shape.to_json(), self.mirrors])
