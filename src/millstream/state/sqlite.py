"""The state store in one SQLite file.

Write-ahead log with synchronous=FULL: a write is on disk when the call returns, and readers, in
this process or another, see the last whole write without waiting. Writes go through one
connection and one lock, reads through another, so that a reader never waits for an fsync.
"""

from __future__ import annotations

import json
import os
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from millstream.errors import StateError
from millstream.failpoint import failpoint
from millstream.model import Cursor, Json, StreamState
from millstream.registry.kinds import Decided, Decision
from millstream.state.base import FAULTS, EpochRecord, Fault, Request, Runtime, Tally, Total
from millstream.state.letters import SINCE_3, SINCE_8, SqliteLetters, supersede
from millstream.state.memory import HISTORY, refuse_epoch_below, refuse_going_back

SCHEMA_VERSION = 8

_SCHEMA = """
create table streams (name text primary key, definition text not null, updated_at text not null) without rowid;
create table cursors (
    stream text not null, target text not null, journal_id text not null, epoch integer not null,
    seq integer not null, position integer not null, commit_ts text, updated_at text not null,
    primary key (stream, target)
) without rowid;
create table cursor_history (
    id integer primary key,
    stream text not null, target text not null, journal_id text not null, epoch integer not null,
    seq integer not null, position integer not null, commit_ts text, updated_at text not null
);
create index cursor_history_of on cursor_history (stream, target, id);
create table epochs (
    stream text not null, target text not null, epoch integer not null, journal_id text not null,
    start_seq integer not null, after_position integer, reason text not null, opened_at text not null,
    primary key (stream, target, epoch)
) without rowid;
create table acks (source text primary key, position integer not null) without rowid;
create table runtimes (
    stream text not null, target text not null, state text not null, fields text not null, updated_at text not null,
    primary key (stream, target)
) without rowid;
"""

_SINCE_2 = """
create table totals (
    stream text not null, target text not null, tab text not null,
    events integer not null, bytes integer not null, last_seq integer not null,
    primary key (stream, target, tab)
) without rowid;
create table pauses (stream text not null, target text not null, primary key (stream, target)) without rowid;
create table captured (source text not null, pattern text not null, primary key (source, pattern)) without rowid;
create table deletions (stream text primary key, options text not null) without rowid;
create table faults (
    id integer primary key,
    stream text not null, target text not null, kind text not null, message text not null, at text not null
);
create index faults_of on faults (stream, id);
create table requests (
    id integer primary key autoincrement, verb text not null, arguments text not null, submitted_at text not null,
    answer text, answered_at text
);
"""
_SINCE_4 = """
create table verifications (
    stream text not null, target text not null, result text not null, primary key (stream, target)
) without rowid;
"""
_SINCE_5 = """
create table ddl_decisions (
    stream text not null, journal_id text not null, seq integer not null, decision text not null, at text not null,
    primary key (stream, journal_id, seq)
) without rowid;
"""
_SINCE_6 = """
create table replays (
    stream text not null, target text not null, replay text not null, primary key (stream, target)
) without rowid;
"""
_SINCE_7 = """
create table notes (
    stream text not null, target text not null, kind text not null, note text not null,
    primary key (stream, target, kind)
) without rowid;
"""
_STEPS = (_SCHEMA, _SINCE_2, SINCE_3, _SINCE_4, _SINCE_5, _SINCE_6, _SINCE_7, SINCE_8)
"""What makes a store of each version from one of the version before."""

_OF_A_STREAM = (
    *("cursors", "cursor_history", "epochs", "runtimes", "totals", "pauses", "deletions", "faults"),
    *("letters", "reloads", "doubts"),
    *("verifications", "ddl_decisions", "replays", "notes"),
)
ANSWERS_KEPT = timedelta(hours=1)
"""How long an answer waits for the process that asked."""

_CURSOR = "stream, target, journal_id, epoch, seq, position, commit_ts, updated_at"
_REQUEST = "id, verb, arguments, submitted_at, answer"
_EPOCH = "stream, target, epoch, journal_id, start_seq, after_position, reason, opened_at"
_BUSY_SECONDS = 30.0
CREATING_SECONDS = 5.0
"""So long a reader waits for the process that creates the store: its file is there before its tables are."""


class SqliteStateStore(SqliteLetters):
    """Implements `StateStore`. Safe to use from several threads and to read from several processes.

    `read_only` opens what another process may be writing at this moment, creates nothing and
    refuses every write.
    """

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        self.path = path
        self._write_lock = threading.Lock()
        self._read_lock = threading.Lock()
        self._connections: list[sqlite3.Connection] = []
        with self._guard("open"):
            if not read_only:
                # Created by hand: SQLite gives its WAL the mode of the database file.
                os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
                self._writer: sqlite3.Connection | None = self._connect("rw")
                self._set_up(self._writer)
            else:
                self._writer = None
            self._reader = self._connect("ro")
            self._check_version(self._reader)

    def put_stream(self, name: str, definition: Json) -> None:
        text = json.dumps(definition, sort_keys=True)
        with self._write("remember a stream") as db:
            db.execute("insert or replace into streams values (?, ?, ?)", (name, text, _now()))

    def get_stream(self, name: str) -> Json | None:
        rows = self._read("select definition from streams where name = ?", (name,))
        return dict(json.loads(rows[0][0])) if rows else None

    def list_streams(self) -> list[str]:
        return [row[0] for row in self._read("select name from streams order by name")]

    def delete_stream(self, name: str, *, source: str | None = None) -> None:
        with self._write("forget a stream") as db:
            db.execute("delete from streams where name = ?", (name,))
            for table in _OF_A_STREAM:
                db.execute(f"delete from {table} where stream = ?", (name,))
            for table in ("acks", "captured"):
                db.execute(f"delete from {table} where source = ?", (source,))

    def begin_deletion(self, name: str, options: Json) -> None:
        with self._write("begin a deletion") as db:
            db.execute("insert or replace into deletions values (?, ?)", (name, json.dumps(options)))

    def deletions(self) -> dict[str, Json]:
        return {name: json.loads(text) for name, text in self._read("select stream, options from deletions")}

    def set_paused(self, stream: str, target: str, paused: bool) -> None:
        with self._write("pause or resume") as db:
            if paused:
                db.execute("insert or ignore into pauses values (?, ?)", (stream, target))
            else:
                db.execute("delete from pauses where stream = ? and target = ?", (stream, target))

    def paused(self, stream: str) -> set[str]:
        return {row[0] for row in self._read("select target from pauses where stream = ?", (stream,))}

    def save_cursor(
        self, cursor: Cursor, tallies: Sequence[Tally] = (), superseded: Mapping[str, int] | None = None
    ) -> None:
        with self._write("save a cursor") as db:
            key = (cursor.stream, cursor.target)
            old = db.execute(f"select {_CURSOR} from cursors where stream = ? and target = ?", key).fetchone()
            if old is not None:
                refuse_going_back(_cursor(old), cursor)
                db.execute(f"insert into cursor_history ({_CURSOR}) values (?, ?, ?, ?, ?, ?, ?, ?)", tuple(old))
                db.execute(
                    "delete from cursor_history where stream = ? and target = ? and id <= ("
                    "select id from cursor_history where stream = ? and target = ? "
                    "order by id desc limit 1 offset ?)",
                    (*key, *key, HISTORY),
                )
            db.execute(
                f"insert or replace into cursors ({_CURSOR}) values (?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    *key,
                    cursor.journal_id,
                    cursor.epoch,
                    cursor.seq,
                    cursor.position,
                    cursor.commit_ts.isoformat() if cursor.commit_ts else None,
                    cursor.updated_at.isoformat(),
                ),
            )
            _add_totals(db, *key, tallies)
            supersede(db, *key, superseded or {}, cursor.position)
        failpoint("state.cursor_saved")

    def get_cursor(self, stream: str, target: str) -> Cursor | None:
        rows = self._read(f"select {_CURSOR} from cursors where stream = ? and target = ?", (stream, target))
        return _cursor(rows[0]) if rows else None

    def cursors(self, stream: str | None = None) -> list[Cursor]:
        sql = f"select {_CURSOR} from cursors where ?1 is null or stream = ?1 order by stream, target"
        return [_cursor(row) for row in self._read(sql, (stream,))]

    def cursor_history(self, stream: str, target: str, limit: int = 100) -> list[Cursor]:
        sql = f"select {_CURSOR} from cursor_history where stream = ? and target = ? order by id desc limit ?"
        return [_cursor(row) for row in self._read(sql, (stream, target, limit))]

    def add_totals(self, stream: str, target: str, tallies: Sequence[Tally]) -> None:
        with self._write("add to the totals") as db:
            _add_totals(db, stream, target, tallies)

    def totals(self, stream: str | None = None) -> list[Total]:
        sql = "select stream, target, tab, events, bytes, last_seq from totals where ?1 is null or stream = ?1"
        return [Total(*row) for row in self._read(f"{sql} order by stream, target, tab", (stream,))]

    def open_epoch(self, record: EpochRecord) -> None:
        with self._write("open a delivery epoch") as db:
            (last,) = db.execute(
                "select max(epoch) from epochs where stream = ? and target = ?", (record.stream, record.target)
            ).fetchone()
            refuse_epoch_below(last, record)
            db.execute(
                f"insert into epochs ({_EPOCH}) values (?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    record.stream,
                    record.target,
                    record.epoch,
                    record.journal_id,
                    record.start_seq,
                    record.after_position,
                    record.reason,
                    record.opened_at.isoformat(),
                ),
            )

    def current_epoch(self, stream: str, target: str) -> EpochRecord | None:
        sql = f"select {_EPOCH} from epochs where stream = ? and target = ? order by epoch desc limit 1"
        rows = self._read(sql, (stream, target))
        return _epoch(rows[0]) if rows else None

    def save_ack(self, source: str, position: int) -> None:
        with self._write("remember an acknowledgement") as db:
            db.execute(
                "insert into acks values (?, ?) on conflict do update set position = max(position, excluded.position)",
                (source, position),
            )

    def get_ack(self, source: str) -> int | None:
        rows = self._read("select position from acks where source = ?", (source,))
        return int(rows[0][0]) if rows else None

    def add_captured(self, source: str, patterns: Sequence[str]) -> None:
        with self._write("remember what is captured") as db:
            rows = [(source, pattern) for pattern in patterns]
            db.executemany("insert or ignore into captured values (?, ?)", rows)

    def captured(self, source: str) -> list[str]:
        return [row[0] for row in self._read("select pattern from captured where source = ? order by 1", (source,))]

    def set_runtime(self, runtime: Runtime) -> None:
        at = runtime.updated_at.isoformat() if runtime.updated_at else _now()
        row = (runtime.stream, runtime.target, runtime.state.value, json.dumps(dict(runtime.fields)), at)
        with self._write("save runtime state") as db:
            db.execute("insert or replace into runtimes values (?, ?, ?, ?, ?)", row)

    def runtimes(self, stream: str | None = None) -> list[Runtime]:
        sql = (
            "select stream, target, state, fields, updated_at from runtimes "
            "where ?1 is null or stream = ?1 order by stream, target"
        )
        return [
            Runtime(row[0], row[1], StreamState(row[2]), json.loads(row[3]), datetime.fromisoformat(row[4]))
            for row in self._read(sql, (stream,))
        ]

    def add_fault(self, fault: Fault) -> None:
        with self._write("remember a fault") as db:
            db.execute(
                "insert into faults (stream, target, kind, message, at) values (?, ?, ?, ?, ?)",
                (fault.stream, fault.target, fault.kind, fault.message, fault.at.isoformat()),
            )
            db.execute(
                "delete from faults where stream = ?1 and id <= "
                "(select id from faults where stream = ?1 order by id desc limit 1 offset ?2)",
                (fault.stream, FAULTS),
            )

    def faults(self, stream: str) -> list[Fault]:
        sql = "select stream, target, kind, message, at from faults where stream = ? order by id desc"
        rows = self._read(sql, (stream,))
        return [Fault(name, target, kind, text, datetime.fromisoformat(at)) for name, target, kind, text, at in rows]

    def decide_ddl(self, stream: str, journal_id: str, seq: int, decided: Decided) -> None:
        row = (stream, journal_id, seq, decided.decision.value, decided.at.isoformat())
        with self._write("remember a decision") as db:
            db.execute("insert or replace into ddl_decisions values (?, ?, ?, ?, ?)", row)
        failpoint("state.ddl_decided")

    def ddl_decisions(self, stream: str, journal_id: str) -> dict[int, Decided]:
        statement = "select seq, decision, at from ddl_decisions where stream = ? and journal_id = ?"
        found = self._read(statement, (stream, journal_id))
        return {seq: Decided(Decision(decision), datetime.fromisoformat(at)) for seq, decision, at in found}

    def save_verification(self, stream: str, target: str, result: Json) -> None:
        with self._write("remember a comparison") as db:
            row = (stream, target, json.dumps(result))
            db.execute("insert or replace into verifications values (?, ?, ?)", row)

    def verifications(self, stream: str) -> dict[str, Json]:
        rows = self._read("select target, result from verifications where stream = ?", (stream,))
        return {target: json.loads(result) for target, result in rows}

    def save_replay(self, stream: str, target: str, replay: Json) -> None:
        with self._write("remember a replay") as db:
            db.execute("insert or replace into replays values (?, ?, ?)", (stream, target, json.dumps(replay)))

    def replays(self, stream: str) -> dict[str, Json]:
        rows = self._read("select target, replay from replays where stream = ?", (stream,))
        return {target: json.loads(replay) for target, replay in rows}

    def save_note(self, stream: str, target: str, kind: str, note: Json) -> None:
        with self._write("remember a note") as db:
            db.execute("insert or replace into notes values (?, ?, ?, ?)", (stream, target, kind, json.dumps(note)))

    def notes(self, stream: str, kind: str) -> dict[str, Json]:
        rows = self._read("select target, note from notes where stream = ? and kind = ?", (stream, kind))
        return {target: json.loads(note) for target, note in rows}

    def submit(self, verb: str, arguments: Json) -> int:
        with self._write("leave a request") as db:
            sql = "insert into requests (verb, arguments, submitted_at) values (?, ?, ?) returning id"
            ((id,),) = db.execute(sql, (verb, json.dumps(arguments), _now())).fetchall()
        return int(id)

    def pending(self) -> list[Request]:
        sql = f"select {_REQUEST} from requests where answer is null order by id"
        return [_request(row) for row in self._read(sql)]

    def answer(self, id: int, answer: Json) -> None:
        with self._write("answer a request") as db:
            values = (json.dumps(answer), _now(), id)
            db.execute("update requests set answer = ?, answered_at = ? where id = ?", values)
            db.execute("delete from requests where answered_at < ?", ((datetime.now(UTC) - ANSWERS_KEPT).isoformat(),))

    def get_request(self, id: int) -> Request | None:
        rows = self._read(f"select {_REQUEST} from requests where id = ?", (id,))
        return _request(rows[0]) if rows else None

    def withdraw(self, id: int) -> bool:
        with self._write("withdraw a request") as db:
            return db.execute("delete from requests where id = ? and answer is null", (id,)).rowcount > 0

    def close(self) -> None:
        with self._write_lock, self._read_lock:
            while self._connections:
                self._connections.pop().close()

    def _connect(self, mode: str) -> sqlite3.Connection:
        uri = f"{self.path.absolute().as_uri()}?mode={mode}"
        connection = sqlite3.connect(
            uri, uri=True, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False
        )
        self._connections.append(connection)
        return connection

    def _set_up(self, db: sqlite3.Connection) -> None:
        db.execute("pragma journal_mode = wal")
        db.execute("pragma synchronous = full")
        db.execute("begin immediate")
        version = db.execute("pragma user_version").fetchone()[0]
        if version < SCHEMA_VERSION:
            for step in _STEPS[version:]:
                for statement in filter(str.strip, step.split(";")):
                    db.execute(statement)
            db.execute(f"pragma user_version = {SCHEMA_VERSION}")
        db.execute("commit")

    def _check_version(self, db: sqlite3.Connection) -> None:
        deadline, pause = time.monotonic() + CREATING_SECONDS, threading.Event()
        while not (version := db.execute("pragma user_version").fetchone()[0]) and time.monotonic() < deadline:
            pause.wait(0.02)
        if version != SCHEMA_VERSION:
            self.close()
            if not version:
                raise StateError(
                    f"the state store {self.path} is being created",
                    hint="try again; if no other process is at it, one was killed there: run a stream, it goes on",
                )
            if version < SCHEMA_VERSION:
                raise StateError(
                    f"the state store {self.path} was written by an older version of millstream",
                    hint="run a stream or change something there once: that brings it up to date",
                )
            raise StateError(
                f"the state store {self.path} has version {version}, this program knows version {SCHEMA_VERSION}",
                hint="use the version of millstream that wrote it, or another --home",
            )

    def _read(self, sql: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        with self._guard("read"), self._read_lock:
            return self._reader.execute(sql, parameters).fetchall()

    @contextmanager
    def _write(self, what: str) -> Iterator[sqlite3.Connection]:
        """One transaction: committed when the block ends, rolled back when it raises."""
        if self._writer is None:
            raise StateError(f"cannot {what}: the state store {self.path} was opened for reading")
        with self._guard(what), self._write_lock:
            self._writer.execute("begin immediate")
            try:
                yield self._writer
                self._writer.execute("commit")
            finally:
                if self._writer.in_transaction:  # not after some errors: SQLite rolls back by itself
                    self._writer.execute("rollback")

    @contextmanager
    def _guard(self, what: str) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            hint = "check that the directory exists, is writable and has room, or choose another --home"
            raise StateError(f"cannot {what}: state store {self.path}: {error}", hint=hint) from error


def _cursor(row: Sequence[Any]) -> Cursor:
    stream, target, journal_id, epoch, seq, position, commit_ts, updated_at = row
    at = datetime.fromisoformat(commit_ts) if commit_ts else None
    return Cursor(stream, target, journal_id, epoch, seq, position, at, datetime.fromisoformat(updated_at))


def _epoch(row: Sequence[Any]) -> EpochRecord:
    stream, target, epoch, journal_id, start_seq, after_position, reason, opened_at = row
    opened = datetime.fromisoformat(opened_at)
    return EpochRecord(stream, target, epoch, journal_id, start_seq, after_position, reason, opened)


def _request(row: Sequence[Any]) -> Request:
    id, verb, arguments, submitted_at, answer = row
    at = datetime.fromisoformat(submitted_at)
    return Request(id, verb, json.loads(arguments), at, json.loads(answer) if answer else None)


def _now() -> str:
    return datetime.now(UTC).isoformat()


def _add_totals(db: sqlite3.Connection, stream: str, target: str, tallies: Sequence[Tally]) -> None:
    db.executemany(
        "insert into totals values (?, ?, ?, ?, ?, ?) on conflict do update set events = events + "
        "excluded.events, bytes = bytes + excluded.bytes, last_seq = max(last_seq, excluded.last_seq)",
        [(stream, target, one.table, one.events, one.bytes, one.last_seq) for one in tallies],
    )
