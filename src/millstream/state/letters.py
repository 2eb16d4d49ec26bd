"""Dead letters, changes in doubt, and targets that must begin anew, in the state store's SQLite file."""

from __future__ import annotations

import json
import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import datetime
from typing import Any

from millstream.failpoint import failpoint
from millstream.state.base import INCOMPLETE, Doubt, Letter, LetterState

SINCE_3 = """
create table letters (
    id integer primary key autoincrement,
    stream text not null, target text not null, tab text not null, event_id text not null, seq integer not null,
    op text not null, kind text not null, reason text not null, at text not null, key text,
    state text not null, superseded_by integer, tries integer not null, relation_id integer not null,
    relation text not null, payload blob not null,
    unique (stream, target, event_id)
);
create table reloads (stream text not null, target text not null, reason text not null, primary key (stream, target))
    without rowid;
"""
SINCE_8 = """
create table doubts (
    stream text not null, target text not null, event_id text not null, tab text not null, seq integer not null,
    key text not null, until integer not null, primary key (stream, target, event_id)
) without rowid;
"""

_LISTED = "id, stream, target, tab, event_id, seq, op, kind, reason, at, key, state, superseded_by, tries"


class SqliteLetters(ABC):
    """The part of `SqliteStateStore` that is about them."""

    @abstractmethod
    def _read(self, sql: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]: ...

    @abstractmethod
    def _write(self, what: str) -> AbstractContextManager[sqlite3.Connection]: ...

    def add_letters(self, letters: Sequence[Letter], *, keep: int | None = None) -> list[Letter]:
        gone: list[Letter] = []
        with self._write("remember dead letters") as db:
            db.executemany(
                "insert into letters (stream, target, tab, event_id, seq, op, kind, reason, at, key, state, "
                "superseded_by, tries, relation_id, relation, payload) "
                "values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) on conflict do nothing",
                [_row(letter) for letter in letters],
            )
            for owner in dict.fromkeys((one.stream, one.target) for one in letters):
                if keep is not None:
                    old = db.execute(
                        f"select {_LISTED} from letters where stream = ? and target = ? order by id desc "
                        "limit -1 offset ?",
                        (*owner, keep),
                    ).fetchall()
                    gone += [_letter(row) for row in reversed(old)]
            db.executemany("delete from letters where id = ?", [(letter.id,) for letter in gone])
        failpoint("state.letters_added")
        return gone

    def letters(self, stream: str | None = None, target: str | None = None) -> list[Letter]:
        where = "(?1 is null or stream = ?1) and (?2 is null or target = ?2)"
        rows = self._read(f"select {_LISTED} from letters where {where} order by id", (stream, target))
        return [_letter(row) for row in rows]

    def get_letter(self, id: int) -> Letter | None:
        rows = self._read(f"select {_LISTED}, relation_id, relation, payload from letters where id = ?", (id,))
        return _letter(rows[0]) if rows else None

    def mark_letter(self, id: int, *, superseded_by: int | None = None, reason: str | None = None) -> None:
        with self._write("mark a dead letter") as db:
            if superseded_by is not None:
                db.execute(f"{_SUPERSEDE} where id = ?", (superseded_by, id))
            if reason is not None:
                db.execute("update letters set reason = ?, tries = tries + 1 where id = ?", (reason, id))

    def remove_letters(self, ids: Sequence[int]) -> int:
        with self._write("remove dead letters") as db:
            removed = sum(db.execute("delete from letters where id = ?", (id,)).rowcount for id in ids)
        failpoint("state.letters_removed")
        return removed

    def add_doubts(self, doubts: Sequence[Doubt]) -> None:
        with self._write("remember what is in doubt") as db:
            _add_doubts(db, doubts)
        failpoint("state.doubts_added")

    def doubts(self, stream: str, target: str) -> list[Doubt]:
        columns = "stream, target, tab, event_id, seq, key, until"
        sql = f"select {columns} from doubts where stream = ? and target = ? order by seq, event_id"
        return [Doubt(*row) for row in self._read(sql, (stream, target))]

    def set_doubts(self, stream: str, target: str, doubts: Sequence[Doubt]) -> None:
        with self._write("remember what is in doubt") as db:
            db.execute("delete from doubts where stream = ? and target = ?", (stream, target))
            _add_doubts(db, doubts)
        failpoint("state.doubts_set")

    def set_needs_reload(self, stream: str, target: str, reason: str | None) -> None:
        with self._write("remember that a target needs a reload") as db:
            if reason is None:
                db.execute("delete from reloads where stream = ? and target = ?", (stream, target))
            else:
                db.execute("insert or replace into reloads values (?, ?, ?)", (stream, target, reason))
        failpoint("state.reload_saved")

    def needs_reload(self, stream: str) -> dict[str, str]:
        return dict(self._read("select target, reason from reloads where stream = ?", (stream,)))


_SUPERSEDE = f"update letters set state = '{LetterState.SUPERSEDED.value}', superseded_by = coalesce(superseded_by, ?)"


def supersede(db: sqlite3.Connection, stream: str, target: str, events: Mapping[str, int], position: int) -> None:
    """Note, in a transaction that is open, that these rows were written by later changes, and all up to a position."""
    db.execute("delete from doubts where stream = ? and target = ? and until <= ?", (stream, target, position))
    mine = "where stream = ? and target = ? and event_id = ?"
    for event, seq in events.items():
        db.execute(f"delete from letters {mine} and kind in (?, ?)", (stream, target, event, *INCOMPLETE))
        db.execute(f"{_SUPERSEDE} {mine}", (seq, stream, target, event))
        db.execute(f"delete from doubts {mine}", (stream, target, event))


def _add_doubts(db: sqlite3.Connection, doubts: Sequence[Doubt]) -> None:
    db.executemany(
        "insert or replace into doubts (stream, target, event_id, tab, seq, key, until) values (?, ?, ?, ?, ?, ?, ?)",
        [(one.stream, one.target, one.event_id, one.table, one.seq, one.key, one.until) for one in doubts],
    )


def _row(letter: Letter) -> tuple[Any, ...]:
    head = (letter.stream, letter.target, letter.table, letter.event_id, letter.seq, letter.op, letter.kind)
    state = (letter.state.value, letter.superseded_by, letter.tries)
    body = (letter.relation_id, json.dumps(letter.relation), letter.payload)
    return (*head, letter.reason, letter.at.isoformat(), letter.key, *state, *body)


def _letter(row: Sequence[Any]) -> Letter:
    id, stream, target, table, event_id, seq, op, kind, reason, at, key, state, superseded_by, tries, *body = row
    relation_id, relation, payload = body or (0, "{}", b"")
    return Letter(
        stream=stream,
        target=target,
        table=table,
        event_id=event_id,
        seq=seq,
        op=op,
        kind=kind,
        reason=reason,
        at=datetime.fromisoformat(at),
        key=key,
        relation_id=relation_id,
        relation=json.loads(relation),
        payload=payload,
        state=LetterState(state),
        superseded_by=superseded_by,
        tries=tries,
        id=id,
    )
