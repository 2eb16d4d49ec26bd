"""The state of a database that is a target, kept aside and brought back. See `targets.base.Keepable`.

What is kept are the tables that belong to the target, in the database's own values, the statements that made them,
and what our own tables say of them. All of it is read in one transaction, and written in one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from millstream.errors import NotReady, TargetRefused
from millstream.failpoint import failpoint
from millstream.targets.base import Kept, KeptTable, TargetCursor
from millstream.targets.lanes.database import Database, quoted
from millstream.targets.lanes.reloading import reload_name
from millstream.targets.lanes.replaying import replay_name

_COLUMNS = {"tables": "name, stream, target, write, key", "columns": "name, stream, target, numbers"}
"""What is kept of our own tables. Tombstones are there during a replay only, and the cursor is apart."""


@contextmanager
def keep(db: Database, stream: str, target: str) -> Iterator[Kept]:
    """The state, to be read within the block."""
    if not db.is_there():
        raise _nothing(db, stream, target)
    with db, db.reading():
        if not db.has_own():
            raise _nothing(db, stream, target)
        cursor = db.rows(
            f"SELECT journal_id, epoch, seq, position FROM {db.own('cursors')} WHERE stream = ? AND target = ?",
            (stream, target),
        )
        if not cursor or cursor[0][2] is None:
            raise _nothing(db, stream, target)
        own = {name: _noted(db, name, stream, target) for name in _COLUMNS}
        places = sorted(row[0] for row in own["tables"])
        yield Kept(TargetCursor(*cursor[0]), own, (db.kept_table(place) for place in places))


def _noted(db: Database, name: str, stream: str, target: str) -> list[list[str]]:
    """What one of our own tables says of the target's."""
    which = f"{_COLUMNS[name]} FROM {db.own(name)}"
    return [list(row) for row in db.rows(f"SELECT {which} WHERE stream = ? AND target = ?", (stream, target))]


def bring_back(db: Database, stream: str, target: str, kept: Kept, token: str, *, overwrite: bool) -> bool:
    """Give the database that state. See `targets.base.Keepable`."""
    with db:
        with db.transaction():
            db.create_own()
            db.known.clear()
            there = db.rows(
                f"SELECT run, seq FROM {db.own('cursors')} WHERE stream = ? AND target = ?", (stream, target)
            )
            if there and there[0][0] == token:
                return False
            if there and there[0][1] is not None and not overwrite:
                raise TargetRefused(
                    f"{db.where} is not empty: target {target} of stream {stream} is at seq {there[0][1]}",
                    hint="restore with --overwrite: its tables are replaced by those of the snapshot",
                )
            _clear(db, stream, target)
            for table in kept.tables:
                _put_back(db, table, stream, target, overwrite=overwrite)
            _note(db, stream, target, kept, token)
            failpoint("restore.written")
        failpoint("restore.committed")
    return True


def _clear(db: Database, stream: str, target: str) -> None:
    """Remove the target's tables, and what is written down of them."""
    for (place,) in db.rows(f"SELECT name FROM {db.own('tables')} WHERE stream = ? AND target = ?", (stream, target)):
        db.run(f"DROP TABLE IF EXISTS {place}")
    for name in ("cursors", "tables", "columns", "tombstones"):
        owners = (stream, target, replay_name(target), reload_name(target))
        db.run(f"DELETE FROM {db.own(name)} WHERE stream = ? AND target IN (?, ?, ?)", owners)


def _put_back(db: Database, table: KeptTable, stream: str, target: str, *, overwrite: bool) -> None:
    owner = db.rows(f"SELECT stream, target FROM {db.own('tables')} WHERE name = ?", (table.place,))
    if owner:
        raise TargetRefused(
            f"the table {table.name} at {db.where} belongs to target {owner[0][1]} of stream {owner[0][0]}",
            hint="restore to a database of its own",
        )
    if db.has_table(table.place):
        if not overwrite and db.rows(f"SELECT 1 FROM {table.place} LIMIT 1"):
            raise TargetRefused(
                f"the table {table.name} at {db.where} has rows already",
                hint="remove it, or restore with --overwrite: it is replaced by the one of the snapshot",
            )
        db.run(f"DROP TABLE {table.place}")
    for statement in table.make:
        db.run(statement)
    for batch in table.batches:
        db.put_rows(table.place, batch)
    for statement in table.finish:
        db.run(statement)


def _note(db: Database, stream: str, target: str, kept: Kept, token: str) -> None:
    for name, columns in _COLUMNS.items():
        marks = ", ".join("?" * len(columns.split(", ")))
        for row in kept.own.get(name, []):
            db.run(f"INSERT INTO {db.own(name)} ({columns}) VALUES ({marks})", row)
    cursor = kept.cursor
    db.run(
        f"INSERT INTO {db.own('cursors')} (stream, target, epoch, run, journal_id, seq, position) "
        "VALUES (?, ?, ?, ?, ?, ?, ?)",
        (stream, target, cursor.epoch, token, cursor.journal_id, cursor.seq, cursor.position),
    )


def plain(place: str) -> str:
    """A table's name as users write it: without quotes."""
    return place.replace('""', "\0").replace('"', "").replace("\0", '"')


def same_table(place: str, schema: str, name: str) -> bool:
    """Whether a statement's name is that table's."""
    return place == f"{quoted(schema)}.{quoted(name)}"


def _nothing(db: Database, stream: str, target: str) -> NotReady:
    return NotReady(
        f"target {target} of stream {stream} has nothing yet at {db.where}", hint="take a snapshot when it has"
    )
