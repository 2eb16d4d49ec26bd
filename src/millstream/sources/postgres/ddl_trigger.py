"""Event triggers on the source, on request: what commands do to captured tables is told in the log, where it happens.

The log describes a table by names and types alone, and the catalog can be asked only for what is true now: a capture
that is behind two ALTERs cannot tell a column that was renamed from one that was dropped and another one added, nor
the constant that older rows have; and that a table was dropped, or written anew, is in no log at all. So triggers
write it into the log, as logical messages of the transaction that does it: the catalog's whole description of an
altered table, before the first change under it, and what happened to tables (`telling`). However far behind it is read.

    install(conn, options, patterns)   make or renew the triggers; then describe every captured table once
    found(conn, options, patterns)     whether they are there, and as this version makes them
    remove(conn, options)              take them away again
    said(message, options)             what a message carries: a description for `described`, or an event

What a trigger does never fails the application's statement: its errors are warnings there, and capture asks the
catalog instead.
"""

from __future__ import annotations

import enum
import json
import struct
from collections.abc import Sequence
from typing import Any

import psycopg

from millstream.errors import PreflightError
from millstream.failpoint import failpoint
from millstream.model import Json, Relation
from millstream.sources.postgres.catalog import table_of_json
from millstream.sources.postgres.connection import Connection, literal, translated, value_encoding
from millstream.sources.postgres.options import PostgresOptions
from millstream.sources.postgres.patterns import quote
from millstream.sources.postgres.pgoutput import DDL_PREFIX
from millstream.sources.postgres.trigger_sql import SCHEMA, TRIGGERS, functions, name_of

LOCK_TIMEOUT = "5s"
"""How long the first description waits for somebody who is altering a table."""

_HEAD = 10  # tag, flags, position
_PLACE = 2


class State(enum.Enum):
    """What is on the source of what this version makes there."""

    NONE = enum.auto()
    OTHER = enum.auto()
    """Of another version of Millstream, of other tables, turned off, or in part."""
    CURRENT = enum.auto()


def install(conn: Connection, options: PostgresOptions, patterns: Sequence[str]) -> None:
    """Make the triggers, or put them in the place of others, and describe every captured table. One transaction.

    Call it when the slot is there: what is told before that, nobody hears. Raises PreflightError without the right.
    """
    with translated("installing the DDL triggers"):
        try:
            with conn.transaction():
                _drop(conn, options)
                for statement in _statements(conn, options, patterns):
                    conn.execute(statement.encode())
                _tell_all(conn, options)
        except psycopg.errors.InsufficientPrivilege:
            raise PreflightError(
                "ddl_trigger: the role may not create an event trigger, or replace the one that is there: that needs "
                "a superuser",
                hint="let a superuser's role capture the source, or leave ddl_trigger out",
            ) from None
    failpoint("capture.trigger_installed")


def found(conn: Connection, options: PostgresOptions, patterns: Sequence[str]) -> State:
    """What is there: every trigger on, and each function to the letter, or not."""
    wanted = {name: body for name, _, body in functions(conn.info.server_version, options, patterns)}
    with translated("looking for the DDL triggers"):
        triggers = conn.execute(
            "SELECT evtname, evtevent, evtenabled FROM pg_event_trigger WHERE evtname = ANY (%s)", (_names(options),)
        ).fetchall()
        bodies = conn.execute(
            "SELECT proname, prosrc FROM pg_proc WHERE pronamespace = to_regnamespace(%s) AND proname = ANY (%s)",
            (SCHEMA, list(wanted)),
        ).fetchall()
    if not triggers:
        return State.NONE
    on = {(name_of(options, kind), event, "A") for kind, (event, _) in TRIGGERS.items()}
    return State.CURRENT if set(triggers) == on and dict(bodies) == wanted else State.OTHER


def remove(conn: Connection, options: PostgresOptions) -> None:
    """Drop the triggers, also those of an earlier version, and what they call; the schema too, if nothing else is in
    it. What is not there is not missed. Raises PreflightError without the right."""
    with translated("dropping the DDL triggers"):
        try:
            with conn.transaction():
                _drop(conn, options)
        except psycopg.errors.InsufficientPrivilege:
            names = ", ".join(quote(name) for name in _names(options))
            raise PreflightError(
                "the role may not drop the event triggers that ddl_trigger once made: they are another role's",
                hint=f"drop them as their owner or a superuser, those that are there: DROP EVENT TRIGGER {names}",
            ) from None


def said(message: bytes, options: PostgresOptions) -> tuple[int, list[Any] | Json] | None:
    """The place of a logical message of ours in the log, and what it carries: a list describes a table, an object
    is an event. None for one of another slot, or one that cannot be read."""
    prefix = f"{DDL_PREFIX}{options.slot}".encode() + b"\0"
    if not message.startswith(prefix, _HEAD):
        return None
    (place,) = struct.unpack_from(">q", message, _PLACE)
    (size,) = struct.unpack_from(">I", message, _HEAD + len(prefix))
    body = message[_HEAD + len(prefix) + 4 :][:size]
    try:
        return place, json.loads(body)
    except ValueError:
        return None


def described(row: list[Any], conn: Connection) -> Relation:
    """The table that a message describes."""
    return table_of_json(row, conn.info.server_version, value_encoding(conn.pgconn)).relation


def _names(options: PostgresOptions) -> list[str]:
    return [name_of(options, kind) for kind in TRIGGERS]


def _drop(conn: Connection, options: PostgresOptions) -> None:
    """Whatever of ours is there, with whatever arguments an earlier version gave it."""
    triggers = "SELECT evtname FROM pg_event_trigger WHERE evtname = ANY (%s)"
    for (name,) in conn.execute(triggers.encode(), (_names(options),)).fetchall():
        conn.execute(f"DROP EVENT TRIGGER {quote(name)}".encode())
    made = [*_names(options), name_of(options, "tell")]
    ours = (
        "SELECT proname, pg_get_function_identity_arguments(oid) FROM pg_proc "
        "WHERE pronamespace = to_regnamespace(%s) AND proname = ANY (%s)"
    )
    for name, arguments in conn.execute(ours.encode(), (SCHEMA, made)).fetchall():
        conn.execute(f"DROP FUNCTION {quote(SCHEMA, name)}({arguments})".encode())
    others = conn.execute(
        "SELECT EXISTS (SELECT FROM pg_depend WHERE refclassid = 'pg_namespace'::regclass AND refobjid = n.oid) "
        "FROM pg_namespace n WHERE nspname = %s",
        (SCHEMA,),
    ).fetchone()
    if others is not None and not others[0]:
        conn.execute(f"DROP SCHEMA {quote(SCHEMA)}".encode())


def _statements(conn: Connection, options: PostgresOptions, patterns: Sequence[str]) -> list[str]:
    # As the one who made it: whoever alters a table may do nothing in our schema.
    safe = "LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog SET standard_conforming_strings = on"
    made = [f"CREATE SCHEMA IF NOT EXISTS {quote(SCHEMA)}"] + [
        f"CREATE FUNCTION {quote(SCHEMA, function)}{signature} {safe} AS $millstream${body}$millstream$"
        for function, signature, body in functions(conn.info.server_version, options, patterns)
    ]
    for kind, (event, tags) in TRIGGERS.items():
        name = quote(name_of(options, kind))
        when = f"WHEN TAG IN ({', '.join(map(literal, tags))})" if tags else ""
        function = quote(SCHEMA, name_of(options, kind))
        made.append(f"CREATE EVENT TRIGGER {name} ON {event} {when} EXECUTE FUNCTION {function}()")
        # Also in sessions that replicate, which fire nothing else.
        made.append(f"ALTER EVENT TRIGGER {name} ENABLE ALWAYS")
    return made


def _tell_all(conn: Connection, options: PostgresOptions) -> None:
    """Describe every captured table as it is. Nobody can alter it until that is in the log."""
    conn.execute(f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT}'".encode())
    captured = conn.execute(
        "SELECT pr.prrelid::int8, n.nspname, c.relname FROM pg_publication_rel pr "
        "JOIN pg_publication p ON p.oid = pr.prpubid JOIN pg_class c ON c.oid = pr.prrelid "
        "JOIN pg_namespace n ON n.oid = c.relnamespace WHERE p.pubname = ANY (%s) ORDER BY 1",
        (list(options.publications),),
    ).fetchall()
    if not captured:
        return
    tables = ", ".join(quote(schema, name) for _, schema, name in captured)
    conn.execute(f"LOCK TABLE ONLY {tables} IN ACCESS SHARE MODE".encode())
    tell = quote(SCHEMA, name_of(options, "tell"))
    conn.execute(f"SELECT {tell}(%s::int8[]::oid[], NULL)".encode(), ([oid for oid, _, _ in captured],))
