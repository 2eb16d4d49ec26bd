"""Sessions on a Postgres that is written to: kept open between batches, with the settings that writing needs.

A session that met an error is closed, and so is everything in it. Every error is one of ours:
TargetUnavailable when trying again can help, TargetRefused with the fix when it cannot. None has a
password or a row's value in it: of what the server says only codes and names are told.
"""

from __future__ import annotations

import re
import select
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from millstream.errors import ConfigError, RowRefused, TargetError, TargetRefused, TargetUnavailable
from millstream.secrets import resolve
from millstream.targets.lanes.database import Values

_SETTINGS = {
    "client_encoding": "UTF8",
    "DateStyle": "ISO, MDY",
    "TimeZone": "UTC",
    "IntervalStyle": "postgres",
    "lc_monetary": "C",
    "search_path": "",
    "row_security": "off",
    "lock_timeout": "30s",
    "idle_in_transaction_session_timeout": "10min",
}
"""What the text of values is read by, the same as at the source; and that nobody who hangs holds up others for ever."""

_CONNECTION: dict[str, str | int | None] = {
    "connect_timeout": 10,
    "application_name": "millstream",
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "tcp_user_timeout": 60_000,
}

_PASSING = re.compile(r"08...|57P0[1-5]|53...|55006|55P03|57014|40001|40P01|25P03")
"""SQLSTATEs that pass: lost connection, shutdown and start, out of resources, in use, lock timeout, deadlock."""

_REFUSED: tuple[tuple[str, str], ...] = (
    (r"password authentication failed|SCRAM|no password supplied", "set auth_ref to the password of the role"),
    (r"role .* does not exist", "CREATE ROLE <user> LOGIN PASSWORD '...'"),
    (r"role .* is not permitted to log in", "ALTER ROLE <user> LOGIN"),
    (r"database .* does not exist", "create the database, or correct the uri"),
    (r"permission denied for database", "GRANT CONNECT ON DATABASE <database> TO <user>"),
    (r"pg_hba\.conf", "allow this host, role and database in pg_hba.conf"),
    (r"does not support SSL|certificate", "check sslmode and sslrootcert in the uri"),
)
"""Libpq tells no SQLSTATE for a refused connection, only the server's sentence."""

_AROUND = re.compile(
    r"connection failed: |connection to server at [^ ]+(?: \([^)]*\))?,? (?:port \d+ )?failed: "
    r"|\s*Is the server running[^?]*\?"
)

PREPARED = 2000
"""So many statements stay prepared in a session: a few for each table."""

IDLE = "10min"
"""How long a session is kept that no batch uses,"""
_KNOWS_IDLE = 140000
"""where the server can count that."""

T = TypeVar("T")

_COLUMN = re.compile(r"column (\w+)")

ASKING_SECONDS = 60.0
"""How long the driver waits for the answer to a statement: whoever stops or starts a stream may wait for it,"""
WRITING_SECONDS = 1800.0
"""and how long a task does. A server that never answers does not close the connection either."""
INDEXING_SECONDS = 24 * 3600.0
"""The same for a statement that reads all rows of a table, of which there may be any number."""


class Connection(psycopg.Connection[tuple[Any, ...]]):
    """One that gives up on a statement (OperationalError) that is not answered within `patience` seconds."""

    patience = ASKING_SECONDS

    def wait(self, gen: Generator[Any, Any, T], *args: Any, **kwargs: Any) -> T:
        return super().wait(_limited(gen, self.patience), *args, **kwargs)


def _limited(steps: Generator[Any, Any, T], seconds: float) -> Generator[Any, Any, T]:
    """The same steps, ended by an error when they still wait for the server after so many seconds."""
    deadline = time.monotonic() + seconds
    try:
        wanted = next(steps)
        while True:
            # Nothing is ready every tenth of a second, so that the time is looked at.
            ready = yield wanted
            if not ready and time.monotonic() >= deadline:
                raise psycopg.OperationalError("no answer in time")
            wanted = steps.send(ready)
    except StopIteration as done:
        found: T = done.value
        return found


@dataclass
class Session:
    """A connection and what was made in it."""

    connection: Connection
    where: str
    replica: bool
    """Whether foreign keys and triggers are left to the source (`session_replication_role`)."""
    known: dict[Any, Any] = field(default_factory=dict)
    staged: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    """The temporary tables there are, by name, with their columns."""
    origins: dict[str, bool] = field(default_factory=dict)
    """By name whether commits can carry that replication origin, as far as it was tried."""
    marked: bool = False
    """Whether the session's origin is set now."""
    used_before: bool = False
    """Whether what it knows was found out for an earlier batch."""


_idle: dict[tuple[str, str | None], list[Session]] = {}


def take(uri: str, auth_ref: str | None) -> Session:
    """A session that nobody uses, or a new one."""
    while (session := _pop(uri, auth_ref)) is not None:
        if _is_alive(session.connection):
            session.used_before = bool(session.known)
            return session
        session.connection.close()
    return _connect(uri, auth_ref)


def _pop(uri: str, auth_ref: str | None) -> Session | None:
    try:
        return _idle[uri, auth_ref].pop()
    except (KeyError, IndexError):
        return None


def give_back(uri: str, auth_ref: str | None, session: Session) -> None:
    """Keep a session for the next batch."""
    _idle.setdefault((uri, auth_ref), []).append(session)


def close_idle(uri: str, auth_ref: str | None) -> None:
    """Close the sessions that nobody uses."""
    for session in _idle.pop((uri, auth_ref), []):
        session.connection.close()


def _is_alive(connection: Connection) -> bool:
    """Whether the server has not gone since: an idle connection that has something to read was closed."""
    if connection.closed:
        return False
    waiting = select.poll()
    waiting.register(connection.fileno(), select.POLLIN)
    return not waiting.poll(0)


def _connect(uri: str, auth_ref: str | None) -> Session:
    try:
        parameters = conninfo_to_dict(uri)
    except psycopg.Error:
        raise ConfigError("the target's uri is not one of Postgres", hint="postgresql://user@host/database") from None
    port = f":{parameters['port']}" if "port" in parameters else ""
    where = f"{parameters.get('host', 'localhost')}{port}/{parameters.get('dbname', parameters.get('user', ''))}"
    if auth_ref is not None:
        parameters["password"] = resolve(auth_ref).reveal()
    conninfo = make_conninfo("", **{**_CONNECTION, **parameters})
    try:
        connection = Connection.connect(conninfo, autocommit=True, cursor_factory=psycopg.RawCursor)
        connection.prepared_max = PREPARED
    except psycopg.Error as failed:
        raise _refused(str(failed), where) from None
    try:
        with errors(where):
            return Session(connection, where, _prepare(connection))
    except BaseException:
        connection.close()
        raise


def _prepare(connection: Connection) -> bool:
    """Settle the session's settings. Returns whether it may leave foreign keys to the source."""
    settings = ", ".join(f"set_config('{name}', '{value}', false)" for name, value in _SETTINGS.items())
    connection.execute(f"SELECT {settings}".encode())
    # A commit that is told to be done must be on disk; a stricter setting stays.
    connection.execute(
        "SELECT set_config('synchronous_commit', 'on', false) WHERE current_setting('synchronous_commit') = 'off'"
    )
    if connection.info.server_version >= _KNOWS_IDLE:
        # Each process that ever wrote keeps a session: the server ends those that nobody uses any more.
        connection.execute("SELECT set_config('idle_session_timeout', $1, false)", (IDLE,))
    try:
        connection.execute("SET session_replication_role = replica")
    except psycopg.errors.InsufficientPrivilege:
        return False
    return True


def _refused(said: str, where: str) -> TargetError:
    for pattern, hint in _REFUSED:
        if re.search(pattern, said):
            return TargetRefused(f"cannot connect to {where}: {_sentence(said)}", hint=hint)
    return TargetUnavailable(f"cannot connect to {where}: {_sentence(said)}")


def _sentence(said: str) -> str:
    """What libpq says without what our own sentence has already: where it was to connect to."""
    return _AROUND.sub("", " ".join(said.split())) or "no reason given"


@contextmanager
def errors(
    where: str,
    values: Sequence[Values] = (),
    *,
    stale: bool = False,
    passing: tuple[type[psycopg.Error], ...] = (),
) -> Iterator[None]:
    """The server's errors as ours, but for those that are `passing`.

    `values` are the columns that are being copied, to name the one concerned. `stale`: what we know of the tables
    is from an earlier batch, so that a wrong name may be cured by looking again.
    """
    try:
        yield
    except passing:
        raise
    except psycopg.Error as failed:
        raise translated(failed, where, values, stale) from None


def translated(failed: psycopg.Error, where: str, values: Sequence[Values], stale: bool) -> TargetError:
    """An error of the server's as one of ours. `values` are what the statement has brought."""
    state, diag = failed.sqlstate, failed.diag
    if state is None:
        return TargetUnavailable(f"{where}: the connection was lost, or no answer came in time")
    name = f"{type(failed).__name__}, {state}"
    if _PASSING.fullmatch(state):
        return TargetUnavailable(f"{where}: {name}")
    if stale and state.startswith("42") and state != "42501":
        return TargetUnavailable(f"{where}: {name}; the table has changed and is looked at again")
    known = next((each.of.rpartition(".")[0] for each in values if each.of), "a table")
    table = f"{diag.schema_name}.{diag.table_name}" if diag.table_name else known
    if state == "42501":
        return TargetRefused(f"{where}: {diag.message_primary}", hint="grant the right that is missing to the role")
    if state.startswith("22") or state == "54000":
        return RowRefused(
            f"{where}: a value does not fit into {_column(diag.context, values) or table} ({name})",
            hint="change the column's type there to the one it has at the source",
        )
    if state.startswith("23"):
        subject = f"{table}.{diag.column_name}" if diag.column_name else table
        return RowRefused(
            f"{where}: constraint {diag.constraint_name or 'NOT NULL'} of {subject} does not allow a row ({name})",
            hint="a constraint that the source does not have must go; a foreign key must be DEFERRABLE, or the role "
            "be allowed to SET session_replication_role",
            kind="constraint",
        )
    if state == "P0001":
        return RowRefused(f"{where}: a trigger of {table} does not allow a row ({name})", kind="constraint")
    if state == "42P10":
        return TargetRefused(
            f"{where}: a table that was there before has no unique index on its key ({name})",
            hint="give it the primary key that it has at the source",
        )
    return TargetRefused(f"{where}: {name}")


def _column(context: str | None, values: Sequence[Values]) -> str | None:
    found = _COLUMN.search(context or "")
    return next((each.of or each.column.name for each in values if found and each.column.name == found[1]), None)
