"""Transforms that need no SQL, each bound to a table: which columns it makes, and how, by column with Arrow."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from millstream.changelog import METADATA
from millstream.errors import ConfigError, RowUnshaped
from millstream.model import Column
from millstream.secrets import resolve
from millstream.transforms.block import Block
from millstream.transforms.casts import can_cast, cast, hashed, keeps_apart, masked
from millstream.transforms.columns import CASTS, named_type
from millstream.transforms.shape import Step

Apply = Callable[[Block], Block]
OneColumn = Callable[[pa.Array, pa.StringArray | None], pa.Array]


@dataclass
class Columns:
    """The columns of a table as they are between two transforms."""

    table: str
    fields: dict[str, tuple[pa.DataType, Column | None]]
    """By name the type, and the source's own column while it is still that."""
    key: dict[str, str]
    """The key's columns by their first names, with the names they have now; those that are lost are gone."""
    traced: dict[str, str]
    """The same of the columns that an old row has at least: also of those that no longer tell rows apart."""
    mirrors: bool

    def kind(self, name: str, verb: str) -> pa.DataType:
        """The type of a column. Raises ConfigError if there is none of that name."""
        if name not in self.fields:
            raise ConfigError(
                f"{verb}: {self.table} has no column {name}",
                hint=f"it has {', '.join(self.fields)} there; `tables` says which tables are meant",
            )
        return self.fields[name][0]

    def lose(self, name: str, verb: str) -> None:
        """A column that tells rows apart no longer does."""
        losing = [first for first, now in self.key.items() if now == name]
        if losing and self.mirrors:
            raise ConfigError(
                f"{verb}: {self.table}.{name} is part of the key, without which a mirror cannot tell rows apart",
                hint="leave it, or hash it; or write: changelog to the target",
            )
        for first in losing:
            del self.key[first]

    def move(self, names: Mapping[str, str], verb: str) -> None:
        """Columns have new names; those without one are gone."""
        for first, now in list(self.key.items()):
            if now not in names:
                self.lose(now, verb)
            else:
                self.key[first] = names[now]
        self.traced = {first: names[now] for first, now in self.traced.items() if now in names}

    def check_new(self, name: str, verb: str) -> None:
        """Raise ConfigError for a name that no new column can have."""
        if name.lower() in METADATA or name.lower().startswith("_ms_"):
            raise ConfigError(f"{verb}: {self.table}: names that begin with _ms_ are ours", hint=f"not {name}")
        if name in self.fields:
            raise ConfigError(f"{verb}: {self.table} has a column {name} already", hint="drop or rename that first")


def bind(step: Step, columns: Columns) -> Apply:
    """The transform for this table; changes `columns` to what it leaves. Raises ConfigError for what cannot be."""
    return _BINDERS[step.verb](step, columns)


def _drop(step: Step, columns: Columns) -> Apply:
    names = [name for name, _ in step.arguments]
    for name in names:
        columns.kind(name, "drop")
        columns.fields.pop(name, None)
    columns.move({name: name for name in columns.fields}, "drop")

    def without(found: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in found.items() if name not in names}

    return lambda block: Block(block.size, without(block.values), without(block.special), without(block.unknown))


def _rename(step: Step, columns: Columns) -> Apply:
    names = dict(step.arguments)
    for old in names:
        columns.kind(old, "rename")
    kept = Columns(columns.table, {n: f for n, f in columns.fields.items() if n not in names}, {}, {}, False)
    for new in names.values():
        kept.check_new(new, "rename")
        kept.fields[new] = (pa.null(), None)

    def renamed(found: Mapping[str, Any]) -> dict[str, Any]:
        return {names.get(name, name): value for name, value in found.items()}

    columns.move({name: names.get(name, name) for name in columns.fields}, "rename")
    columns.fields = renamed(columns.fields)
    return lambda block: Block(block.size, renamed(block.values), renamed(block.special), renamed(block.unknown))


def _cast(step: Step, columns: Columns) -> Apply:
    changes: dict[str, OneColumn] = {}
    for name, wanted in step.arguments:
        have, to = columns.kind(name, "cast"), named_type(wanted)
        if to is None:
            raise ConfigError(f"cast: {columns.table}.{name}: there is no type {wanted}", hint=f"types: {CASTS}")
        if not can_cast(have, to):
            raise ConfigError(
                f"cast: {columns.table}.{name} is {have}, of which no value is {wanted}",
                hint="select (SQL) can do more than cast",
            )
        if not keeps_apart(have, to):
            columns.lose(name, f"cast to {wanted}")
        # Also where Arrow's type is the same: a uuid that is cast to string is text to targets.
        columns.fields[name] = (to, None)
        if have != to:
            changes[name] = _exactly(to, columns.table, name)
    return _by_column(changes)


def _exactly(to: pa.DataType, table: str, name: str) -> OneColumn:
    def change(array: pa.Array, special: pa.StringArray | None) -> pa.Array:
        try:
            return cast(array, special, to)
        except pa.ArrowInvalid:
            # Its words hold the value.
            raise RowUnshaped(
                f"{table}.{name}: a value has no exact form as {to}",
                hint="cast to another type, or leave such rows out with a filter; a new target begins with that",
                column=name,
            ) from None

    return change


def _add(step: Step, columns: Columns) -> Apply:
    scalars = {}
    for name, value in step.arguments:
        columns.check_new(name, "add")
        scalars[name] = pa.scalar(value)
        columns.fields[name] = (scalars[name].type, None)

    def apply(block: Block) -> Block:
        added = {name: pa.repeat(value, block.size) for name, value in scalars.items()}
        return Block(block.size, {**block.values, **added}, block.special, block.unknown)

    return apply


def _mask(step: Step, columns: Columns) -> Apply:
    changes: dict[str, OneColumn] = {}
    for name, text in step.arguments:
        columns.kind(name, "mask")
        columns.lose(name, "mask")
        columns.fields[name] = (pa.string(), None)
        changes[name] = lambda array, special, text=text: masked(array, special, text)  # type: ignore[misc]
    return _by_column(changes)


def _hash(step: Step, columns: Columns) -> Apply:
    changes: dict[str, OneColumn] = {}
    for name, reference in step.arguments:
        columns.kind(name, "hash")
        columns.fields[name] = (pa.string(), None)
        changes[name] = _salted(reference)
    return _by_column(changes)


def _salted(reference: str) -> OneColumn:
    # The salt is read where it is used: on a cluster by the executors.
    return lambda array, special: hashed(array, special, resolve(reference).reveal().encode())


def _truncate(step: Step, columns: Columns) -> Apply:
    changes: dict[str, OneColumn] = {}
    for name, length in step.arguments:
        kind = columns.kind(name, "truncate")
        if not types.is_string(kind):
            raise ConfigError(f"truncate: {columns.table}.{name} is {kind}, not text", hint="cast it to string first")
        columns.lose(name, "truncate")
        # It may not be of the source's type any more: a date that is cut is none.
        columns.fields[name] = (kind, None)
        changes[name] = lambda array, _, length=length: pc.utf8_slice_codeunits(array, 0, length)  # type: ignore[misc]
    return _by_column(changes)


def _by_column(changes: Mapping[str, OneColumn]) -> Apply:
    def apply(block: Block) -> Block:
        values = {
            name: changes[name](array, block.special.get(name)) if name in changes else array
            for name, array in block.values.items()
        }
        special = {name: texts for name, texts in block.special.items() if name not in changes}
        return Block(block.size, values, special, block.unknown)

    return apply


_BINDERS: dict[str, Callable[[Step, Columns], Apply]] = {
    "drop": _drop,
    "rename": _rename,
    "cast": _cast,
    "add": _add,
    "mask": _mask,
    "hash": _hash,
    "truncate": _truncate,
}
