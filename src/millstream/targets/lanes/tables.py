"""The tables of a target: made and completed to hold what the source sends, and each one's owner written down."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from millstream.changelog import BEFORE, METADATA, exposed
from millstream.errors import CannotFollow, TargetRefused
from millstream.model import Relation
from millstream.targets.base import TargetContext
from millstream.targets.constants import Constant, constants
from millstream.targets.lanes.database import UNKNOWN, ColumnDef, Database, LaneOptions, quoted
from millstream.targets.lanes.evolving import Noted, follow, note_key, noted, remember
from millstream.targets.retyping import ANOTHER_LOG, check_retyped, held_types, read_again

SPECIAL = "_ms_special"


@dataclass(frozen=True)
class Prepared:
    """A table that is ready to be written to, as one relation sees it."""

    relation_id: int
    name: str
    """As users write it."""
    table: str
    """As statements write it."""
    columns: tuple[ColumnDef, ...]
    """The relation's own, with the types that the table has for them, and `_ms_special` where the table has it."""
    key: tuple[str, ...]
    """Empty for a table whose rows have no identity."""

    @property
    def names(self) -> list[str]:
        return [column.name for column in self.columns]


def mirror_key(relation: Relation) -> tuple[str, ...]:
    """The columns that identify a row; none where only whole rows do, and so cannot be told apart."""
    seen = exposed(relation)
    if relation.identity == "f":
        return seen.primary_key
    return seen.key


def prepare(
    db: Database,
    relation: Relation,
    relation_id: int,
    context: TargetContext,
    options: LaneOptions,
    *,
    renewing: bool = False,
) -> Prepared:
    """Make the table if it is missing, add what it lacks. Raises TargetRefused when it cannot hold the relation.

    With `renewing` all rows come anew: a mirror of ours whose rows do not tell what became of them is made once more.
    """
    # A connection may serve several streams: what one of them may write is not another's.
    about = (relation, relation_id, context.stream, context.target, options.write, options.deletes)
    known = db.known.get(about)
    if isinstance(known, Prepared):
        return known
    try:
        prepared = _prepared(db, relation, relation_id, context, options)
    except CannotFollow:
        if not renewing or options.write != "mirror" or not _is_ours(db, relation, context):
            raise
        _forget(db, relation)
        prepared = _prepared(db, relation, relation_id, context, options)
    db.known[about] = prepared
    return prepared


def _prepared(
    db: Database, relation: Relation, relation_id: int, context: TargetContext, options: LaneOptions
) -> Prepared:
    names = [column.name for column in exposed(relation).columns]
    _refuse_twins(db, relation, names)
    wanted = [ColumnDef(name, kind) for name, kind in zip(names, db.types(relation), strict=True)]
    mirrors = options.write == "mirror"
    known = follow(db, relation, context) if mirrors else noted(db, relation, context)
    key = _key(db, relation) if mirrors else ()
    own = _own_columns(db, options, wanted)
    there = db.columns(relation)
    had = _settle_owner(db, relation, context, options, key, exists=there is not None)
    if there is None:
        db.create(relation, [*wanted, *own], key)
    else:
        constant = constants(relation) if mirrors and had is not None else {}
        wanted = _complete(db, relation, wanted, own, there, constant, known, context, key)
        if had is not None and had != key:
            _change_key(db, relation, context, had, key)
    remember(db, relation, context, known, key)
    if db.special_type is not None and mirrors:
        wanted = [*wanted, ColumnDef(SPECIAL, db.special_type)]
    return Prepared(relation_id, relation.table, db.table(relation), tuple(wanted), key)


def _is_ours(db: Database, relation: Relation, context: TargetContext) -> bool:
    found = db.rows(f"SELECT stream, target FROM {db.own('tables')} WHERE name = ?", (db.table(relation),))
    return found == [(context.stream, context.target)]


def _forget(db: Database, relation: Relation) -> None:
    """Remove a table of ours, and what is written down of it."""
    db.known.clear()
    db.run(f"DROP TABLE {db.table(relation)}")
    for name in ("tables", "columns"):
        db.run(f"DELETE FROM {db.own(name)} WHERE name = ?", (db.table(relation),))


def _change_key(
    db: Database, relation: Relation, context: TargetContext, old: tuple[str, ...], new: tuple[str, ...]
) -> None:
    """Tell the mirror's rows by another key, as the source does: up to here it has had the same rows."""
    table = db.table(relation)
    columns = ", ".join(map(quoted, new))
    nulls = " OR ".join(f"{quoted(name)} IS NULL" for name in new)
    twice = f"SELECT 1 FROM {table} GROUP BY {columns} HAVING count(*) > 1 LIMIT 1"
    if not new or db.rows(f"SELECT 1 FROM {table} WHERE {nulls} LIMIT 1") or db.rows(twice):
        raise CannotFollow(
            f"the key of {relation.table} was ({', '.join(old)}) and is ({', '.join(new)}) at the source now, and the "
            f"rows at {db.where} cannot be told by that",
            hint=read_again(context.stream, relation.table),
        )
    db.known.clear()
    db.change_key(table, old, new)
    note_key(db, relation, new)


def _key(db: Database, relation: Relation) -> tuple[str, ...]:
    """The mirror's key. A description that the catalog could not complete does not tell a key that whole rows hide."""
    key = mirror_key(relation)
    if key or relation.enriched or relation.identity != "f":
        return key
    known = db.rows(f"SELECT key FROM {db.own('tables')} WHERE name = ?", (db.table(relation),))
    before: list[str] = json.loads(known[0][0]) if known else []
    return tuple(before) if set(before) <= {column.name for column in exposed(relation).columns} else ()


def _own_columns(db: Database, options: LaneOptions, wanted: Sequence[ColumnDef]) -> list[ColumnDef]:
    types = db.metadata_types()
    if options.write == "changelog":
        return [ColumnDef(name, types[name]) for name in METADATA if name != BEFORE or wanted]
    names = ["_ms_seq", *(["_ms_deleted"] if options.deletes == "soft" else [])]
    special = [ColumnDef(SPECIAL, db.special_type)] if db.special_type is not None else []
    return [*(ColumnDef(name, types[name]) for name in names), *special]


def _refuse_twins(db: Database, relation: Relation, names: Sequence[str]) -> None:
    """Databases that compare names without case cannot hold two that differ in it alone."""
    if db.case_matters:
        return
    first: dict[str, str] = {}
    for name in names:
        other = first.setdefault(name.lower(), name)
        if other != name:
            raise TargetRefused(
                f"{relation.table}: {db.kind} cannot tell the columns {other} and {name} apart",
                hint="rename one of them at the source, or leave the table out of this stream",
            )


def _settle_owner(
    db: Database,
    relation: Relation,
    context: TargetContext,
    options: LaneOptions,
    key: tuple[str, ...],
    *,
    exists: bool,
) -> tuple[str, ...] | None:
    """The key that the table has, if it was this target's before; if it is nobody's, it is from now on."""
    name, tables = relation.table, db.own("tables")
    # Two tables may be called alike when they are written without quotes.
    identity = db.table(relation)
    found = db.rows(f"SELECT stream, target, write, key FROM {tables} WHERE name = ?", (identity,))
    if not found:
        if exists:
            _adopt(db, relation, options)
        owner = (identity, context.stream, context.target, options.write, json.dumps(key))
        db.run(f"INSERT INTO {tables} VALUES (?, ?, ?, ?, ?)", owner)
        return None
    stream, target, write, known_key = found[0]
    if (stream, target) != (context.stream, context.target):
        raise TargetRefused(
            f"the table {name} at {db.where} belongs to target {target} of stream {stream}",
            hint="give each stream a database, or tables, of its own",
        )
    if write != options.write:
        raise TargetRefused(
            f"the table {name} at {db.where} is a {write}, not a {options.write}",
            hint=f"write: {write}, or give this target another database",
        )
    if not exists:
        raise TargetRefused(
            f"the table {name} at {db.where} was dropped",
            hint="its rows are lost to this target: restore it, or start a new target",
        )
    return tuple(json.loads(known_key))


def _adopt(db: Database, relation: Relation, options: LaneOptions) -> None:
    """Take over a table that nobody owns. Versions that a stream which is gone has left mean nothing to this one."""
    db.check_adoption(relation)
    table = db.table(relation)
    if "_ms_seq" not in (db.columns(relation) or {}):
        return
    if options.write == "mirror":
        db.run(f"UPDATE {table} SET _ms_seq = {UNKNOWN} WHERE _ms_seq <> {UNKNOWN}")
    elif db.rows(f"SELECT 1 FROM {table} LIMIT 1"):
        raise TargetRefused(
            f"the table {relation.table} at {db.where} has the changes of a stream that is gone",
            hint="rename or drop it, or give this target another database",
        )


def _complete(
    db: Database,
    relation: Relation,
    wanted: Sequence[ColumnDef],
    own: Sequence[ColumnDef],
    there: Mapping[str, str],
    constant: Mapping[str, Constant],
    known: Noted,
    context: TargetContext,
    key: Sequence[str],
) -> list[ColumnDef]:
    """Add the columns that are missing, widen what is too narrow. Returns the relation's columns with their types.

    One that is not of the key may be too narrow for some values: the target takes the rows that it can.
    """
    hint = read_again(context.stream, relation.table) if db.options.write == "mirror" else ANOTHER_LOG
    retyped = check_retyped(relation.table, known.types, held_types(relation), hint)
    found = there if db.case_matters else {name.lower(): kind for name, kind in there.items()}
    table = db.table(relation)
    complete = []
    for column in (*wanted, *own):
        kind = found.get(column.name if db.case_matters else column.name.lower())
        if kind is None:
            default = f" DEFAULT {UNKNOWN}" if column.name == "_ms_seq" else ""
            default = " DEFAULT false" if column.name == "_ms_deleted" else default
            db.add_column(table, column, constant.get(column.name), default)
            complete.append(column)
            continue
        if column.name in retyped and db.must_convert(column.type, kind, *retyped[column.name]):
            db.known.clear()
            db.convert_column(table, column, kind, *retyped[column.name])
            complete.append(column)
            continue
        tight = not db.fits(column.type, kind)
        if tight and (column.name in key or column in own or not db.narrower(column.type, kind)):
            raise CannotFollow(
                f"{relation.table}.{column.name} is {column.type} at the source, and {kind} at {db.where}",
                hint=f"change the column there to {column.type}, and start the stream again; or "
                + read_again(context.stream, relation.table),
            )
        complete.append(ColumnDef(column.name, kind, tight))
    return complete[: len(wanted)]
