"""The columns of a mirror in a database, brought to the names that the source's have now. See `targets.evolving`.

All of it is a part of the batch's transaction: it happens with the batch, or not at all.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from millstream.errors import CannotFollow
from millstream.model import Relation
from millstream.targets.base import TargetContext
from millstream.targets.evolving import Evolution, evolution, gone, numbers, renamed_since
from millstream.targets.lanes.database import Database
from millstream.targets.retyping import HeldType, held_types, keeps_values, read_again

_SEEN = "columns"
"""Among what a connection knows: by owner and table, what is written down of the columns as it left them."""
_TYPES, _KEY = "types", "key"
"""Beside the numbers, which have a dot in them."""


@dataclass(frozen=True)
class Noted:
    """What this stream and target has written down of a table's columns: the source's numbers, and its types."""

    numbers: Mapping[str, str] = field(default_factory=dict)
    """Number to name."""
    types: Mapping[str, HeldType] = field(default_factory=dict)
    """By name what the source's column was when it was last written to."""
    key: tuple[str, ...] = ()

    def after(self, found: Evolution) -> Noted:
        """The same when columns have been renamed and dropped."""
        kept = {name: found.renamed.get(name, name) for name in self.types if name not in found.dropped}
        return Noted(self.numbers, {now: self.types[name] for name, now in kept.items()}, self.key)

    def text(self) -> str:
        types = {name: each.to_json() for name, each in self.types.items()}
        return json.dumps({**self.numbers, _TYPES: types, _KEY: list(self.key)}, sort_keys=True)

    @classmethod
    def parsed(cls, text: str) -> Noted:
        found = json.loads(text)
        types = {name: HeldType.from_json(each) for name, each in found.pop(_TYPES, {}).items()}
        key = tuple(found.pop(_KEY, ()))
        return cls(found, types, key)


def refresh(db: Database, context: TargetContext) -> None:
    """Forget what this connection has found out about tables, if another one has changed their columns since."""
    owner = (context.stream, context.target)
    seen = {name: text for (*whose, name), text in db.known.get(_SEEN, {}).items() if tuple(whose) == owner}
    if not seen:
        return
    now = dict(db.rows(f"SELECT name, numbers FROM {db.own('columns')} WHERE stream = ? AND target = ?", owner))
    if any(now.get(name) != text for name, text in seen.items()):
        db.known.clear()


def refuse_other_names(db: Database, relation: Relation, context: TargetContext) -> None:
    """For a change that comes late: it cannot be written under names or types that are not the columns' any more."""
    there, known = db.columns(relation), noted(db, relation, context)
    if not there:
        return
    now = held_types(relation)
    retyped = [name for name, was in known.types.items() if name in now and not keeps_values(was, now[name])]
    if retyped or evolution(relation.table, known.numbers, numbers(relation), list(there), _plain(db)):
        raise renamed_since(relation.table)


def follow(db: Database, relation: Relation, context: TargetContext) -> Noted:
    """Rename what has another name now, and remove what stands in the way of a column that took its name.

    Where the target is to have no columns that the source has no more, those go, too. Returns what is noted of the
    columns as they are then.
    """
    there, known, wanted = db.columns(relation), noted(db, relation, context), numbers(relation)
    if there is None or not known.numbers:
        return known
    table = db.table(relation)
    found = evolution(relation.table, known.numbers, wanted, list(there), _plain(db))
    key = _key(db, relation)
    if db.options.dropped == "drop":
        # One of the key goes when the rows are told by another one (`tables.prepare`), with the next ALTER.
        left = gone(known.numbers, wanted, list(there), _plain(db))
        found = found.without([name for name in left if name not in key])
    if not found:
        return known
    db.known.clear()
    if lost := [name for name in found.dropped if name in key]:
        raise CannotFollow(
            f"{relation.table}: {lost[0]}, of the key, was dropped at the source: rows cannot be told by it any more",
            hint=read_again(context.stream, relation.table),
        )
    for name in found.dropped:
        db.drop_column(table, name)
    # Names may change places: each column first gets one that nobody has.
    for number, old in enumerate(found.renamed):
        db.rename_column(table, old, f"_ms_renamed_{number}")
    for number, new in enumerate(found.renamed.values()):
        db.rename_column(table, f"_ms_renamed_{number}", new)
    note_key(db, relation, [found.renamed.get(name, name) for name in key])
    return known.after(found)


def remember(db: Database, relation: Relation, context: TargetContext, known: Noted, key: tuple[str, ...]) -> None:
    """Write down which columns of the source the target's are; those that are gone there stay known."""
    wanted = numbers(relation) if db.options.write == "mirror" else {}
    held = set(wanted.values())
    kept = {number: name for number, name in known.numbers.items() if name not in held}
    text = Noted({**kept, **wanted}, {**known.types, **held_types(relation)}, key).text()
    columns, name = db.own("columns"), db.table(relation)
    db.known.setdefault(_SEEN, {})[context.stream, context.target, name] = text
    if db.rows(f"SELECT 1 FROM {columns} WHERE name = ? AND numbers = ?", (name, text)):
        return
    db.run(f"DELETE FROM {columns} WHERE name = ?", (name,))
    db.run(
        f"INSERT INTO {columns} (name, stream, target, numbers) VALUES (?, ?, ?, ?)",
        (name, context.stream, context.target, text),
    )


def noted(db: Database, relation: Relation, context: TargetContext) -> Noted:
    """As far as this stream and target has written it down."""
    found = db.rows(
        f"SELECT numbers FROM {db.own('columns')} WHERE name = ? AND stream = ? AND target = ?",
        (db.table(relation), context.stream, context.target),
    )
    return Noted.parsed(found[0][0]) if found else Noted()


def note_key(db: Database, relation: Relation, key: Sequence[str]) -> None:
    """Write down by which columns the mirror's rows are told."""
    db.run(f"UPDATE {db.own('tables')} SET key = ? WHERE name = ?", (json.dumps(list(key)), db.table(relation)))


def _plain(db: Database) -> Callable[[str], str]:
    return str if db.case_matters else str.lower


def _key(db: Database, relation: Relation) -> list[str]:
    found = db.rows(f"SELECT key FROM {db.own('tables')} WHERE name = ?", (db.table(relation),))
    return list(json.loads(found[0][0])) if found else []
