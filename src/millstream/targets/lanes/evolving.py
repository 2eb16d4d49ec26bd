"""The columns of a mirror in a database, brought to the names that the source's have now. See `targets.evolving`.

All of it is a part of the batch's transaction: it happens with the batch, or not at all.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from millstream.errors import TargetRefused
from millstream.model import Relation
from millstream.targets.base import TargetContext
from millstream.targets.evolving import evolution, numbers, renamed_since
from millstream.targets.lanes.database import Database

_SEEN = "columns"
"""Among what a connection knows: by owner and table, the numbers of the columns as it left them."""


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
    """For a change that comes late: it cannot be written under names that are not the columns' any more."""
    there, known = db.columns(relation), _known(db, relation, context)
    if there and evolution(relation.table, known, numbers(relation), list(there), _plain(db)):
        raise renamed_since(relation.table)


def follow(db: Database, relation: Relation, context: TargetContext) -> None:
    """Rename what has another name now, and remove what stands in the way of a column that took its name."""
    there, known, wanted = db.columns(relation), _known(db, relation, context), numbers(relation)
    if there is None or not known:
        return
    table = db.table(relation)
    found = evolution(relation.table, known, wanted, list(there), _plain(db))
    if not found:
        return
    db.known.clear()
    key = _key(db, relation)
    if lost := [name for name in found.dropped if name in key]:
        raise TargetRefused(
            f"{relation.table}: {lost[0]}, of the key, was dropped at the source, and is another column now",
            hint="its rows cannot be told any more: start a new target",
        )
    for name in found.dropped:
        db.drop_column(table, name)
    # Names may change places: each column first gets one that nobody has.
    for number, old in enumerate(found.renamed):
        db.rename_column(table, old, f"_ms_renamed_{number}")
    for number, new in enumerate(found.renamed.values()):
        db.rename_column(table, f"_ms_renamed_{number}", new)
    now = json.dumps([found.renamed.get(name, name) for name in key])
    db.run(f"UPDATE {db.own('tables')} SET key = ? WHERE name = ?", (now, table))


def remember(db: Database, relation: Relation, context: TargetContext) -> None:
    """Write down which columns of the source the mirror's are; those that are gone there stay known."""
    known, wanted = _known(db, relation, context), numbers(relation)
    held = set(wanted.values())
    now = {**{number: name for number, name in known.items() if name not in held}, **wanted}
    if not now:
        return
    columns, name, text = db.own("columns"), db.table(relation), json.dumps(now, sort_keys=True)
    db.known.setdefault(_SEEN, {})[context.stream, context.target, name] = text
    if now == known:
        return
    db.run(f"DELETE FROM {columns} WHERE name = ?", (name,))
    db.run(
        f"INSERT INTO {columns} (name, stream, target, numbers) VALUES (?, ?, ?, ?)",
        (name, context.stream, context.target, text),
    )


def _known(db: Database, relation: Relation, context: TargetContext) -> dict[str, str]:
    """Number to name, as far as this stream and target has written it down."""
    found = db.rows(
        f"SELECT numbers FROM {db.own('columns')} WHERE name = ? AND stream = ? AND target = ?",
        (db.table(relation), context.stream, context.target),
    )
    return dict(json.loads(found[0][0])) if found else {}


def _plain(db: Database) -> Callable[[str], str]:
    return str if db.case_matters else str.lower


def _key(db: Database, relation: Relation) -> list[str]:
    found = db.rows(f"SELECT key FROM {db.own('tables')} WHERE name = ?", (db.table(relation),))
    return list(json.loads(found[0][0])) if found else []
