"""What the structure of a table is, its fingerprint, and what is different between two of them.

A log names columns and types; the catalog adds numbers of columns, nullability, defaults, labels. Where one
of two descriptions lacks what only the catalog tells, it is not compared: what is unknown has not changed.
"""

from __future__ import annotations

import enum
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from millstream.model import Column, Json, Relation
from millstream.registry.kinds import Kind


class Compatibility(enum.StrEnum):
    """Whose readers can read whose rows."""

    FULL = "full"
    """Either schema's readers can read the rows of both."""
    BACKWARD = "backward"
    """Readers of the later one can read rows of the earlier one, too."""
    FORWARD = "forward"
    """Readers of the earlier one can read rows of the later one, too."""
    NONE = "none"


@dataclass(frozen=True)
class Change:
    """One difference. `before` and `after` are in words; None where there is nothing on that side."""

    kind: Kind
    column: str | None = None
    before: str | None = None
    after: str | None = None

    def to_json(self) -> Json:
        return {"kind": self.kind.value, "column": self.column, "before": self.before, "after": self.after}

    @classmethod
    def from_json(cls, value: Json) -> Change:
        return cls(Kind(value["kind"]), value["column"], value["before"], value["after"])

    def in_words(self) -> str:
        place = f" {self.column}" if self.column else ""
        was = " -> ".join(text for text in (self.before, self.after) if text is not None)
        return f"{self.kind.value}{place}{': ' + was if was else ''}"


def structure(relation: Relation) -> Json:
    """What a fingerprint is taken of: names, order, types, key; not the numbers that a restored database gives anew."""
    return {
        "table": relation.table,
        "identity": relation.identity,
        "key": list(relation.key),
        "columns": [_column_structure(column) for column in relation.columns],
    }


def _column_structure(column: Column) -> Json:
    known: dict[str, Any] = {
        "nullable": column.nullable,
        "default": column.default,
        "generated": column.generated,
        "labels": list(column.enum_labels) if column.enum_labels is not None else None,
    }
    return {
        "name": column.name,
        "type": type_text(column),
        "key": column.key,
        **{name: value for name, value in known.items() if value is not None},
    }


def fingerprint(relation: Relation) -> str:
    """SHA-256 over the structure: equal for equal structures, in whatever journal they are."""
    text = json.dumps(structure(relation), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def type_text(column: Column) -> str:
    """The type as the database writes it; by its number where only the log is known."""
    if column.type_name is not None:
        return column.type_name
    return f"oid {column.type_oid}" + (f" mod {column.type_mod}" if column.type_mod != -1 else "")


def differences(before: Relation | None, after: Relation) -> list[Change]:
    """What is different, in a stable order: the table, its columns in their order, its key."""
    if before is None:
        return [Change(Kind.CREATE_TABLE, None, None, after.table)]
    found: list[Change] = []
    if before.oid != after.oid:
        found.append(Change(Kind.REPLACE_TABLE, None, f"{before.table} ({before.oid})", f"{after.table} ({after.oid})"))
    elif before.table != after.table:
        found.append(Change(Kind.RENAME_TABLE, None, before.table, after.table))
    found += _columns(before, after)
    if before.enriched == after.enriched and before.key != after.key and not _only_renamed(before, after, found):
        found.append(Change(Kind.KEY, None, ", ".join(before.key) or "none", ", ".join(after.key) or "none"))
    if before.identity != after.identity:
        found.append(Change(Kind.IDENTITY, None, _IDENTITIES[before.identity], _IDENTITIES[after.identity]))
    return found


_IDENTITIES = {"d": "default", "f": "full", "i": "index", "n": "nothing"}


def _only_renamed(before: Relation, after: Relation, found: Sequence[Change]) -> bool:
    names = {one.before: one.after for one in found if one.kind is Kind.RENAME_COLUMN}
    return tuple(names.get(name, name) for name in before.key) == after.key


def _columns(before: Relation, after: Relation) -> Iterator[Change]:
    pairs = list(_paired(before, after))
    taken = {old.name for old, _, _ in pairs if old is not None}
    for old in before.columns:
        if old.name not in taken:
            yield Change(Kind.DROP_COLUMN, old.name, type_text(old), None)
    for old_or_none, new, sure in pairs:
        if old_or_none is None:
            words = type_text(new) + (f" default {new.default}" if new.default is not None else "")
            yield Change(Kind.ADD_COLUMN, new.name, None, words)
            continue
        if old_or_none.name != new.name:
            kind = Kind.RENAME_COLUMN if sure else Kind.MAYBE_RENAME_COLUMN
            yield Change(kind, new.name, old_or_none.name, new.name)
        yield from _within(old_or_none, new)


def _paired(before: Relation, after: Relation) -> Iterator[tuple[Column | None, Column, bool]]:
    """Each column of the later description with the one it was, and whether that is certain."""
    numbered = before.oid == after.oid and all(c.attnum is not None for c in (*before.columns, *after.columns))
    if numbered:
        by_number = {column.attnum: column for column in before.columns}
        for column in after.columns:
            yield by_number.get(column.attnum), column, True
        return
    names, later = {column.name: column for column in before.columns}, {column.name for column in after.columns}
    places = {column.name: place for place, column in enumerate(before.columns)}
    for place, column in enumerate(after.columns):
        if column.name in names:
            yield names[column.name], column, True
            continue
        # A column that was added comes last; one that stands where another of its type stood may be that one.
        stood = [c for c in before.columns if c.name not in later and places[c.name] == place and _same_type(c, column)]
        yield (stood[0] if stood else None), column, False


def _same_type(one: Column, other: Column) -> bool:
    return (one.type_oid, one.type_mod) == (other.type_oid, other.type_mod)


def _within(old: Column, new: Column) -> Iterator[Change]:
    """What is different in a column that is the same one."""
    if not _same_type(old, new):
        yield Change(Kind.RETYPE_COLUMN, new.name, type_text(old), type_text(new))
    if None not in (old.nullable, new.nullable) and old.nullable != new.nullable:
        words = {True: "null", False: "not null"}
        yield Change(Kind.NULLABILITY, new.name, words[bool(old.nullable)], words[bool(new.nullable)])
    # Without the catalog a column has no default that anybody could see: then nothing is compared.
    known = old.attnum is not None and new.attnum is not None
    if known and old.default != new.default:
        yield Change(Kind.DEFAULT, new.name, old.default or "none", new.default or "none")
    if None not in (old.generated, new.generated) and old.generated != new.generated:
        words = {True: "generated", False: "plain"}
        yield Change(Kind.GENERATED, new.name, words[bool(old.generated)], words[bool(new.generated)])
    if old.enum_labels is not None and new.enum_labels is not None and old.enum_labels != new.enum_labels:
        yield Change(Kind.LABELS, new.name, ", ".join(old.enum_labels), ", ".join(new.enum_labels))


_WIDER = {
    21: frozenset({23, 20, 1700}),
    23: frozenset({20, 1700}),
    20: frozenset({1700}),
    700: frozenset({701}),
    1043: frozenset({25}),
    1042: frozenset({25}),
}
"""Types of Postgres by number, and those that hold all of their values."""


def compatibility(before: Relation, after: Relation) -> Compatibility:
    """Whether readers of one can read rows of the other."""
    backward = forward = True
    pairs = list(_paired(before, after))
    for old, new, sure in pairs:
        if old is None:
            backward &= new.nullable is not False or new.default is not None
        elif old.name != new.name or not sure:
            backward = forward = False
        elif not _same_type(old, new):
            backward &= new.type_oid in _WIDER.get(old.type_oid, ())
            forward &= old.type_oid in _WIDER.get(new.type_oid, ())
        elif old.nullable is not None and new.nullable is not None:
            backward &= new.nullable or not old.nullable
            forward &= old.nullable or not new.nullable
    kept = {old.name for old, _, _ in pairs if old is not None}
    forward &= all(column.nullable is not False for column in before.columns if column.name not in kept)
    if before.oid != after.oid or before.table != after.table:
        backward = forward = False
    both = {(True, True): "FULL", (True, False): "BACKWARD", (False, True): "FORWARD", (False, False): "NONE"}
    return Compatibility[both[backward, forward]]
