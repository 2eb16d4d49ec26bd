"""Connections to the source: plain ones for control, raw ones for replication.

Both have the same session settings, since these decide the text of every value that is captured.
They are given at connection start, read back, and recorded in the journal's header.

    connect(spec, options)              -> psycopg.Connection   autocommit, for catalog, preflight, checks
    connect_replication(spec, options)  -> psycopg.pq.PGconn    replication=database, for slot and stream
    connect_session(spec, options)      -> psycopg.pq.PGconn    plain, for statements that are waited for in turns
    command(pgconn, "IDENTIFY_SYSTEM")  -> list of rows of text
    session_settings(pgconn)            -> dict, for the identity

Every error is one of ours: SourceUnavailable when trying again can help, SourceHalted with the fix
when it cannot, ConfigError for a URI that is none. None of them contains a password.
"""

from __future__ import annotations

import re
import select
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg import pq
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.pq.abc import PGconn, PGresult

from millstream.errors import ConfigError, SourceError, SourceHalted, SourceUnavailable
from millstream.model import SourceSpec
from millstream.secrets import resolve
from millstream.sources.postgres.options import PostgresOptions

SESSION_SETTINGS: Mapping[str, str] = {
    "client_encoding": "UTF8",
    "DateStyle": "ISO, MDY",
    "TimeZone": "UTC",
    "IntervalStyle": "postgres",
    "extra_float_digits": "3",
    "bytea_output": "hex",
    "lc_monetary": "C",
    "search_path": "",
    "row_security": "off",
}
"""What the text of values depends on. The values are as SHOW gives them."""

UNKNOWN_ENCODING = "SQL_ASCII"
"""The encoding of a database that takes any bytes for text. As UTF8 the server would refuse to send
those that are none, and the slot would never move again: so they are asked for as they are."""

LOCK_TIMEOUT = "10s"
"""How long the control connection waits for a table's lock before it gives way and tries later."""

Connection = psycopg.Connection[tuple[Any, ...]]

_KEEPALIVE = {
    "keepalives": "1",
    "keepalives_idle": "30",
    "keepalives_interval": "10",
    "keepalives_count": "3",
    "tcp_user_timeout": "60000",
}

_TRANSIENT_STATES = re.compile(r"08...|57P0[1-5]|53...|55006|55P03|57014|40001|40P01|25P03")
"""SQLSTATEs that pass: lost connection, shutdown and start, out of resources, in use, lock timeout."""

POOLER_HINT = "connect to the server itself: replication and session state do not pass through a pooler"

_TOO_LARGE_HINT = (
    "no reader of its log gets such a row from Postgres (bytea counts twice, as text; an old row that is sent whole "
    "counts too); all before it is in the journal. To go on without it: drop the slot, re-base the stream "
    "(millstream journal rebase STREAM --confirm) and reload its tables"
)
TEXT_INSTEAD = "set wire: text for this source; a journal that has begun goes on with it"

_PERMANENT: tuple[tuple[str, str], ...] = (
    (r"password authentication failed|SCRAM|no password supplied", "set auth_ref to the password of the role"),
    (r"role .* does not exist", "CREATE ROLE <user> LOGIN REPLICATION PASSWORD '...'"),
    (r"role .* is not permitted to log in", "ALTER ROLE <user> LOGIN"),
    (r"database .* does not exist", "correct the database at the end of the uri"),
    (r"permission denied for database", "GRANT CONNECT ON DATABASE <database> TO <user>"),
    (
        r"permission denied to start WAL sender|must be superuser or replication role",
        "ALTER ROLE <user> REPLICATION",
    ),
    (
        r"no pg_hba\.conf entry.*no encryption",
        "the server wants TLS from this role: add sslmode=require (or verify-full) to the uri",
    ),
    (
        r"no pg_hba\.conf entry|pg_hba\.conf rejects",
        "add to pg_hba.conf: hostssl <database> <user> <address of this host> scram-sha-256",
    ),
    (r"does not support SSL", "turn on ssl at the server, or choose another sslmode in the uri"),
    (
        r"server certificate for .* does not match host name",
        "use a host name that the certificate has in the uri, or sslmode=verify-ca to check none",
    ),
    (
        r"certificate verify failed|root certificate file",
        "give the certificate of the server's authority: ?sslmode=verify-full&sslrootcert=/path/ca.pem",
    ),
    (r"unsupported startup parameter|replication connections are not|no such database|pgbouncer", POOLER_HINT),
)
"""Libpq tells no SQLSTATE for a refused connection, only the server's sentence."""


def connect(spec: SourceSpec, options: PostgresOptions, *, application_name: str | None = None) -> Connection:
    """A plain autocommit connection with the pinned settings, certain not to go through a pooler."""
    parameters = _parameters(spec, options, application_name)
    try:
        # Prepared statements off: control statements are rare, and DDL in between would break them.
        connection = psycopg.connect(make_conninfo("", **parameters), autocommit=True, prepare_threshold=None)
    except psycopg.Error as error:
        raise _refused(str(error), parameters) from None
    try:
        with translated(f"preparing the session at {where(spec)}"):
            for statement in _timeouts(connection.info.server_version, LOCK_TIMEOUT):
                connection.execute(statement.encode())
            _refuse_pooler(connection.pgconn)
            _check_settings(session_settings(connection.pgconn))
    except BaseException:
        connection.close()
        raise
    return connection


def connect_replication(spec: SourceSpec, options: PostgresOptions, *, application_name: str | None = None) -> PGconn:
    """A raw connection to a walsender of the database, with the same settings. Call `finish()` on it."""
    return _connect_raw(_parameters(spec, options, application_name) | {"replication": "database"}, options)


def connect_session(spec: SourceSpec, options: PostgresOptions, *, application_name: str | None = None) -> PGconn:
    """A raw connection to a plain session, with the same settings and no timeouts. Call `finish()` on it."""
    return _connect_raw(_parameters(spec, options, application_name), options)


def _connect_raw(parameters: Mapping[str, str], options: PostgresOptions) -> PGconn:
    *others, last = _attempts(parameters)
    for attempt in others:
        try:
            connection = _open(attempt, options.connect_timeout / 1000)
            break
        except SourceError:
            continue
    else:
        connection = _open(last, options.connect_timeout / 1000)
    try:
        for statement in _timeouts(connection.server_version, "0"):
            command(connection, statement)
        encoding = value_encoding(connection)
        command(connection, f"SET client_encoding = '{encoding}'")
        _refuse_pooler(connection)
        _check_settings(session_settings(connection), encoding)
    except BaseException:
        connection.finish()
        raise
    return connection


def command(
    connection: PGconn, statement: str, on_wait: Callable[[], None] | None = None
) -> list[tuple[str | None, ...]]:
    """Run one statement or replication command to its end and return its rows as text.

    `on_wait` is called once a second while there is no answer; it may raise to give up, and the
    connection must be closed then.
    """
    result = _execute(connection, statement, on_wait)
    if result.status in (pq.ExecStatus.TUPLES_OK, pq.ExecStatus.COMMAND_OK):
        return [
            tuple(_text(result.get_value(row, column)) for column in range(result.nfields))
            for row in range(result.ntuples)
        ]
    verb = " ".join(statement.split()[:2])
    state = _text(result.error_field(pq.DiagnosticField.SQLSTATE))
    message = _text(result.error_field(pq.DiagnosticField.MESSAGE_PRIMARY)) or "unknown error"
    raise translate(state, message, verb)


def _attempts(parameters: Mapping[str, str]) -> list[dict[str, str]]:
    """One set of parameters per host of the uri, so that each gets the whole time."""
    lists = {name: parameters[name].split(",") for name in ("host", "hostaddr", "port") if name in parameters}
    count = max((len(values) for values in lists.values()), default=1)
    return [
        {**parameters, **{name: values[number if len(values) > 1 else 0] for name, values in lists.items()}}
        for number in range(count)
    ]


def _open(parameters: Mapping[str, str], seconds: float) -> PGconn:
    """Libpq's own blocking call would hold up every thread of the process, so we wait in Python."""
    connection = pq.PGconn.connect_start(make_conninfo("", **parameters).encode())
    deadline = time.monotonic() + seconds
    said = None
    try:
        turn = pq.PollingStatus.WRITING if connection.status != pq.ConnStatus.BAD else pq.PollingStatus.FAILED
        while turn in (pq.PollingStatus.READING, pq.PollingStatus.WRITING):
            # The socket can be another one after each step: libpq tries one address after the other.
            ends = [connection.socket]
            reading = turn == pq.PollingStatus.READING
            left = deadline - time.monotonic()
            if left <= 0 or not any(select.select(ends if reading else [], [] if reading else ends, [], left)):
                said = "connection timeout expired"
                break
            turn = pq.PollingStatus(connection.connect_poll())
    except (psycopg.Error, OSError) as error:
        said = str(error)
    if connection.status == pq.ConnStatus.OK and said is None:
        return connection
    refused = _refused(said or connection.get_error_message(), parameters)
    connection.finish()
    raise refused


def _execute(connection: PGconn, statement: str, on_wait: Callable[[], None] | None) -> PGresult:
    """The last result of the statement. Waits in Python and not in libpq, so that signals are heard."""
    last: PGresult | None = None
    try:
        connection.send_query(statement.encode())
        while True:
            while connection.is_busy():
                if not select.select([connection.socket], [], [], 1.0)[0] and on_wait is not None:
                    on_wait()
                connection.consume_input()
            result = connection.get_result()
            if result is None:
                break
            last = result
    except psycopg.OperationalError:
        last = None
    if last is None:
        raise SourceUnavailable("the connection to the source was lost")
    return last


def session_settings(connection: PGconn) -> dict[str, str]:
    """The pinned settings as this session has them."""
    names = list(SESSION_SETTINGS)
    (row,) = command(connection, "SELECT " + ", ".join(f"current_setting('{name}')" for name in names))
    return {name: value or "" for name, value in zip(names, row, strict=True)}


def value_encoding(connection: PGconn) -> str:
    """The encoding of the values that replication sends: UTF8, unless the database itself has none."""
    stored = (connection.parameter_status(b"server_encoding") or b"").decode()
    return UNKNOWN_ENCODING if stored == UNKNOWN_ENCODING else SESSION_SETTINGS["client_encoding"]


class Crossed(SourceUnavailable):
    """What others did at that moment was in the way (SQLSTATE 40001): the same may succeed at once."""


def translate(sqlstate: str | None, message: str, doing: str) -> SourceError:
    """Our error for one of the server's, by its SQLSTATE. `message` is the server's primary message."""
    text = f"{doing}: {message}"
    if sqlstate == "40001":
        return Crossed(text)
    if sqlstate is None or _TRANSIENT_STATES.fullmatch(sqlstate):
        return SourceUnavailable(text)
    if sqlstate == "42501":
        return SourceHalted(text, hint="grant the missing right; `millstream check` names it with its SQL")
    if sqlstate == "22021":
        return SourceHalted(text, hint="a name, default or enum label in the database is no UTF-8: give it one that is")
    if sqlstate == "54000" or "memory alloc request size" in message:
        return SourceHalted(f"{text}: a row is larger than 1 GB as it would be sent", hint=_TOO_LARGE_HINT)
    if "no binary output function" in message:
        return SourceHalted(text, hint=TEXT_INSTEAD)
    return SourceHalted(f"{text} (SQLSTATE {sqlstate})")


@contextmanager
def translated(doing: str) -> Iterator[None]:
    """Turn psycopg's errors into ours. `doing` says what was tried, for the message."""
    try:
        yield
    except psycopg.Error as error:
        # Only the primary message: details can quote values of rows.
        message = error.diag.message_primary or "the connection was lost"
        state = error.sqlstate if error.diag.message_primary else None
        raise translate(state, message, doing) from None


def literal(value: str) -> str:
    """A text as SQL and the replication commands write it."""
    return "'" + value.replace("'", "''") + "'"


def where(spec: SourceSpec) -> str:
    """`user@host:port/database` of a source, for messages. Never a password."""
    return _where(_parse(spec.uri))


def _parse(uri: str) -> dict[str, str]:
    try:
        parsed = {name: str(value) for name, value in conninfo_to_dict(uri).items() if value is not None}
    except psycopg.Error:
        # Libpq's own message quotes the piece it stumbled on, which can be the password.
        raise ConfigError(
            "the source's uri is not a Postgres connection string",
            hint="postgresql://user@host:5432/database?sslmode=require; percent-encode special characters",
        ) from None
    if any(not port.isdigit() for port in parsed.get("port", "").split(",") if port):
        raise ConfigError("the port in the source's uri is not a number", hint="postgresql://user@host:5432/database")
    return parsed


def _where(parsed: Mapping[str, str]) -> str:
    user = f"{parsed['user']}@" if "user" in parsed else ""
    host = parsed.get("host") or parsed.get("hostaddr") or "localhost"
    return f"{user}{host}:{parsed.get('port', '5432')}/{parsed.get('dbname') or parsed.get('user', '')}"


def _parameters(spec: SourceSpec, options: PostgresOptions, application_name: str | None) -> dict[str, str]:
    parsed = _parse(spec.uri)
    if spec.auth_ref is not None:
        if "password" in parsed:
            raise ConfigError(
                f"source {spec.name} has a password in its uri and an auth_ref",
                hint="remove the password from the uri",
            )
        parsed["password"] = resolve(spec.auth_ref).reveal()
    pinned = " ".join(f"-c {name}={value.replace(' ', '')}" for name, value in SESSION_SETTINGS.items())
    own = {
        "client_encoding": SESSION_SETTINGS["client_encoding"],
        "application_name": application_name or f"millstream {options.slot}",
        "options": f"{parsed.get('options', '')} {pinned}".strip(),
    }
    defaults = _KEEPALIVE | {"connect_timeout": str(options.connect_timeout // 1000)}
    return defaults | parsed | own


def _timeouts(server_version: int, lock_timeout: str) -> list[str]:
    names = ["statement_timeout", "idle_in_transaction_session_timeout", "idle_session_timeout"]
    if server_version >= 170000:
        names.append("transaction_timeout")
    known = [name for name in names if server_version >= 140000 or name != "idle_session_timeout"]
    return [*(f"SET {name} = 0" for name in known), f"SET lock_timeout = '{lock_timeout}'"]


def _refused(message: str, parameters: Mapping[str, str]) -> SourceError:
    """The error for a connection that was not made; secrets are cut out whatever libpq says."""
    said = " ".join(message.split())
    for name in ("password", "sslpassword"):
        if parameters.get(name):
            said = said.replace(parameters[name], "***")
    said = re.sub(
        r"connection failed: |connection to server at [^ ]+(?: \([^)]*\))?,? (?:port \d+ )?failed: ", "", said
    )
    said = re.sub(r"\s*Is the server running[^?]*\?", "", said)
    text = f"cannot connect to {_where(parameters)}: {said}"
    for pattern, hint in _PERMANENT:
        if re.search(pattern, said):
            return SourceHalted(text, hint=_fill(hint, parameters))
    return SourceUnavailable(text, hint="is the server up, and is the host of the uri right?")


def _fill(hint: str, parameters: Mapping[str, str]) -> str:
    user = parameters.get("user", "<user>")
    return hint.replace("<user>", user).replace("<database>", parameters.get("dbname", user))


def _refuse_pooler(connection: PGconn) -> None:
    ((pid,),) = command(connection, "SELECT pg_backend_pid()")
    if pid != str(connection.backend_pid):
        raise SourceHalted("a connection pooler stands between us and the server", hint=POOLER_HINT)


def _check_settings(actual: Mapping[str, str], encoding: str = SESSION_SETTINGS["client_encoding"]) -> None:
    wanted = {**SESSION_SETTINGS, "client_encoding": encoding}
    wrong = [f"{name} is {actual[name]!r}" for name, value in wanted.items() if actual[name] != value]
    if wrong:
        raise SourceHalted(
            f"the server did not take our session settings: {', '.join(wrong)}",
            hint="remove what overrides them: a login trigger, or a pooler in front of the server",
        )


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode("utf-8", "replace")
