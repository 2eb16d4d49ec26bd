"""Columns whose type has changed at the source: what becomes of values that a target holds.

What `ALTER COLUMN .. TYPE` does to rows is in no log. Where the source's own conversion keeps each value, a target
repeats it: its column becomes wider, or was wide enough. Everything else has to be read from the source again. A target
keeps beside each column the type that the source's had when it last wrote it, since its own types say less: in SQLite
a numeric(10,2) and a date are both text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from millstream.changelog import exposed
from millstream.errors import CannotFollow
from millstream.model import Column, Json, Relation
from millstream.registry.structure import type_text

_INTEGERS = frozenset({21, 23, 20})
_TEXTS = frozenset({25, 1043})
_NUMERIC = 1700
_FRACTIONS = frozenset({1083, 1114, 1184, 1266})
"""Times, whose modifier is the number of digits after the second; -1: as many as there are."""
_REAL, _DOUBLE = 700, 701

MOST_DIGITS = 38
"""Of a decimal in Arrow."""


@dataclass(frozen=True)
class HeldType:
    """A type of the source, by number and modifier; of a domain the one beneath it. `text` is how people call it."""

    oid: int
    mod: int
    text: str
    domain: int | None = None
    """The number of the domain, if it is one."""

    def is_same(self, other: HeldType) -> bool:
        if (self.oid, self.mod) == (other.oid, other.mod):
            return True
        # A description that the catalog could not complete does not know that a type is a domain.
        known = self.domain is not None or other.domain is not None
        return known and (self.domain or self.oid) == (other.domain or other.oid)

    @property
    def is_integer(self) -> bool:
        return self.oid in _INTEGERS

    @property
    def scale(self) -> int | None:
        """Of a numeric: how many digits after the point; None where it has no limit."""
        if self.oid != _NUMERIC or self.mod < 4:
            return None
        digits = (self.mod - 4) & 0x7FF
        return digits - 0x800 if digits >= 0x400 else digits

    @property
    def digits(self) -> int:
        """Of a numeric with a limit: how many digits it has."""
        return (self.mod - 4) >> 16 if self.oid == _NUMERIC and self.mod >= 4 else 0

    def to_json(self) -> Json:
        return {"oid": self.oid, "mod": self.mod, "text": self.text, "domain": self.domain}

    @classmethod
    def from_json(cls, value: Json) -> HeldType:
        return cls(int(value["oid"]), int(value["mod"]), str(value["text"]), value["domain"])


def held_type(column: Column) -> HeldType:
    """The type of the values of a column."""
    if column.base_type_oid is None:
        return HeldType(column.type_oid, column.type_mod, type_text(column))
    mod = -1 if column.base_type_mod is None else column.base_type_mod
    return HeldType(column.base_type_oid, mod, type_text(column), column.type_oid)


def held_types(relation: Relation) -> dict[str, HeldType]:
    """By the name that a target's column has."""
    return {column.name: held_type(column) for column in exposed(relation).columns}


def keeps_values(before: HeldType, after: HeldType) -> bool:
    """Whether every value is the same under the new type, and written as a plain conversion writes it.

    A type that became narrower keeps values too: the source has refused to do it with one that does not fit.
    """
    if before.is_same(after):
        return True
    if before.oid in _TEXTS:
        return after.oid in _TEXTS
    if before.oid in _INTEGERS and after.oid in _INTEGERS | _TEXTS:
        return True
    if before.oid in _INTEGERS | {_NUMERIC} and after.oid == _NUMERIC:
        was, now = 0 if before.is_integer else before.scale, after.scale
        if now is None or now == was:
            return True
        # What is too long for a decimal is text at most targets, and would keep the digits it has.
        return was is not None and now > was >= 0 and max(before.digits, after.digits) <= MOST_DIGITS
    if before.oid in _FRACTIONS and before.oid == after.oid:
        return after.mod == -1 or (before.mod != -1 and after.mod >= before.mod)
    return before.oid == _REAL and after.oid == _DOUBLE


ANOTHER_LOG = (
    "rename the column there, and a new one is made beside it when the stream is started again; or give the stream a "
    "new target"
)
"""What there is to choose when a changelog cannot follow."""


def check_retyped(
    table: str, before: Mapping[str, HeldType], after: Mapping[str, HeldType], hint: str
) -> dict[str, tuple[HeldType, HeldType]]:
    """The columns that have another type now. Raises TargetRefused for one whose values may be others."""
    found = {name: (was, after[name]) for name, was in before.items() if name in after and not was.is_same(after[name])}
    for name, (was, now) in found.items():
        if not keeps_values(was, now):
            raise CannotFollow(
                f"{table}.{name} was {was.text} at the source and is {now.text} now: what that made of the values of "
                "rows that are there is in no log",
                hint=hint,
            )
    return found


def read_again(stream: str, table: str) -> str:
    """What there is to choose when a target cannot follow."""
    return (
        f"read the table again with `millstream reload {stream} --table {table}`, or give the stream a new target, "
        "which begins with the table as it is"
    )
