"""An event trigger on the source, on request: each ALTER of a captured table is told in the log, where it happened.

The log describes a table by names and types alone, and the catalog can be asked only for what is true now: a capture
that is behind two ALTERs cannot tell a column that was renamed from one that was dropped and another one added, nor
the constant that older rows have. So the trigger writes the catalog's whole description into the log, as a logical
message of the transaction that altered the table. It comes before the first change under that description, however far
behind it is read.

    install(conn, options)             make or renew the trigger; then describe every captured table once
    remove(conn, options)              take it away again
    told(message, conn, options)       the description that a message carries

What the trigger does never fails the application's statement: its errors are warnings there, and capture asks the
catalog instead.
"""

from __future__ import annotations

import json
import struct

import psycopg

from millstream.errors import PreflightError
from millstream.failpoint import failpoint
from millstream.model import Relation
from millstream.sources.postgres.catalog import described_as_json, table_of_json
from millstream.sources.postgres.connection import Connection, literal, translated, value_encoding
from millstream.sources.postgres.options import PostgresOptions
from millstream.sources.postgres.patterns import quote
from millstream.sources.postgres.pgoutput import DDL_PREFIX

SCHEMA = "_millstream"
LOCK_TIMEOUT = "5s"
"""How long the first description waits for somebody who is altering a table."""


def install(conn: Connection, options: PostgresOptions) -> None:
    """Make the trigger, or renew it, and tell of every captured table once. Idempotent, one transaction.

    Call it when the slot is there: what is told before that, nobody hears. Raises PreflightError without the right.
    """
    with translated("installing the DDL trigger"):
        try:
            with conn.transaction():
                for statement in _statements(conn, options):
                    conn.execute(statement.encode())
                _tell_all(conn, options)
        except psycopg.errors.InsufficientPrivilege:
            raise PreflightError(
                "ddl_trigger: the role may not create an event trigger, which needs a superuser",
                hint="let a superuser's role capture the source, or leave ddl_trigger out",
            ) from None
    failpoint("capture.trigger_installed")


def is_installed(conn: Connection, options: PostgresOptions) -> bool:
    """Whether the trigger is there, on, and as this version makes it."""
    wanted = {name: body for name, _, body in _functions(conn, options)}
    with translated("looking for the DDL trigger"):
        rows = conn.execute(
            "SELECT proname, prosrc FROM pg_proc WHERE pronamespace = to_regnamespace(%s) AND proname = ANY (%s) "
            "AND EXISTS (SELECT FROM pg_event_trigger WHERE evtname = %s AND evtenabled = 'A')",
            (SCHEMA, list(wanted), trigger_name(options)),
        ).fetchall()
    return dict(rows) == wanted


def remove(conn: Connection, options: PostgresOptions) -> None:
    """Drop the trigger and its function; the schema too, if nothing else is in it. What is not there is not missed."""
    name = trigger_name(options)
    with translated("dropping the DDL trigger"):
        if conn.execute("SELECT 1 FROM pg_event_trigger WHERE evtname = %s", (name,)).fetchone() is None:
            return
        with conn.transaction():
            conn.execute(f"DROP EVENT TRIGGER IF EXISTS {quote(name)}".encode())
            for function, arguments in ((name, ""), (teller_name(options), "oid[]")):
                conn.execute(f"DROP FUNCTION IF EXISTS {quote(SCHEMA, function)}({arguments})".encode())
            others = conn.execute(
                "SELECT 1 FROM pg_depend WHERE refclassid = 'pg_namespace'::regclass "
                "AND refobjid = to_regnamespace(%s) LIMIT 1",
                (SCHEMA,),
            ).fetchone()
            if others is None:
                conn.execute(f"DROP SCHEMA IF EXISTS {quote(SCHEMA)}".encode())


def told(message: bytes, conn: Connection, options: PostgresOptions) -> Relation | None:
    """The description in a logical message of ours; None for one of another slot, or one that cannot be read."""
    prefix = f"{DDL_PREFIX}{options.slot}".encode() + b"\0"
    at = 10  # tag, flags, position
    if not message.startswith(prefix, at):
        return None
    (size,) = struct.unpack_from(">I", message, at + len(prefix))
    body = message[at + len(prefix) + 4 :][:size]
    try:
        row = json.loads(body)
    except ValueError:
        return None
    return table_of_json(row, conn.info.server_version, value_encoding(conn.pgconn)).relation


def trigger_name(options: PostgresOptions) -> str:
    """Of the trigger, and of what it calls. At most 63 bytes: a slot has 56."""
    return f"{options.slot}_ddl"


def teller_name(options: PostgresOptions) -> str:
    """Of the function that describes tables."""
    return f"{options.slot}_tell"


def _statements(conn: Connection, options: PostgresOptions) -> list[str]:
    name = trigger_name(options)
    there = conn.execute("SELECT 1 FROM pg_event_trigger WHERE evtname = %s", (name,)).fetchone()
    # As the one who made it: whoever alters a table may do nothing in our schema.
    safe = "LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog"
    made = [f"CREATE SCHEMA IF NOT EXISTS {quote(SCHEMA)}"] + [
        f"CREATE OR REPLACE FUNCTION {quote(SCHEMA, function)}{signature} {safe} AS $millstream${body}$millstream$"
        for function, signature, body in _functions(conn, options)
    ]
    if there is None:
        made.append(
            f"CREATE EVENT TRIGGER {quote(name)} ON ddl_command_end WHEN TAG IN ('ALTER TABLE') "
            f"EXECUTE FUNCTION {quote(SCHEMA, name)}()"
        )
    # Also in sessions that replicate, which fire nothing else.
    return [*made, f"ALTER EVENT TRIGGER {quote(name)} ENABLE ALWAYS"]


def _functions(conn: Connection, options: PostgresOptions) -> list[tuple[str, str, str]]:
    """(name, signature, body): one that describes tables, and one that is called when some were altered."""
    prefix = literal(f"{DDL_PREFIX}{options.slot}")
    names = ", ".join(literal(name) for name in options.publications)
    described = described_as_json("c.oid = ANY (tables)", f"ARRAY[{names}]", conn.info.server_version)
    # The server gives a message the place of the next record. If that is a change of another subtransaction, it is a
    # matter of luck which comes first: an empty message behind them takes that place.
    tell = f"""
BEGIN
    PERFORM pg_logical_emit_message(true, {prefix}, convert_to(told, 'UTF8')) FROM ({described}) described(told);
    PERFORM pg_logical_emit_message(true, {prefix}, ''::bytea);
END
"""
    # A partition's ALTER may be one of the table above it, whose name the log has.
    hear = f"""
BEGIN
    PERFORM {quote(SCHEMA, teller_name(options))}(ARRAY(
        SELECT DISTINCT pr.prrelid FROM pg_event_trigger_ddl_commands() d
        CROSS JOIN LATERAL (SELECT d.objid AS oid UNION SELECT a::oid FROM pg_partition_ancestors(d.objid) a) whose
        JOIN pg_publication_rel pr ON pr.prrelid = whose.oid
        JOIN pg_publication p ON p.oid = pr.prpubid AND p.pubname IN ({names})
        WHERE d.classid = 'pg_class'::regclass));
EXCEPTION WHEN OTHERS THEN
    RAISE WARNING 'millstream could not tell of this command: %', SQLERRM;
END
"""
    return [
        (teller_name(options), "(tables oid[]) RETURNS void", tell),
        (trigger_name(options), "() RETURNS event_trigger", hear),
    ]


def _tell_all(conn: Connection, options: PostgresOptions) -> None:
    """Describe every captured table as it is. Nobody can alter it until that is in the log."""
    conn.execute(f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT}'".encode())
    found = conn.execute(
        "SELECT pr.prrelid::int8, n.nspname, c.relname FROM pg_publication_rel pr "
        "JOIN pg_publication p ON p.oid = pr.prpubid JOIN pg_class c ON c.oid = pr.prrelid "
        "JOIN pg_namespace n ON n.oid = c.relnamespace WHERE p.pubname = ANY (%s) ORDER BY 1",
        (list(options.publications),),
    ).fetchall()
    if not found:
        return
    tables = ", ".join(quote(schema, name) for _, schema, name in found)
    conn.execute(f"LOCK TABLE ONLY {tables} IN ACCESS SHARE MODE".encode())
    tell = quote(SCHEMA, teller_name(options))
    conn.execute(f"SELECT {tell}(%s::int8[]::oid[])".encode(), ([oid for oid, _, _ in found],))
