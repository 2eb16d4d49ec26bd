"""The event triggers' SQL: which there are, and what they do. What they tell is told in `telling`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from millstream.sources.postgres.catalog import described_as_json
from millstream.sources.postgres.connection import literal
from millstream.sources.postgres.looks import JOINED, STAMP
from millstream.sources.postgres.options import PostgresOptions
from millstream.sources.postgres.patterns import parse_patterns, quote
from millstream.sources.postgres.pgoutput import DDL_PREFIX

SCHEMA: Final = "_millstream"

TRIGGERS: Final[Mapping[str, tuple[str, tuple[str, ...]]]] = {
    "ddl": (
        "ddl_command_end",
        ("ALTER TABLE", "CREATE TABLE", "CREATE TABLE AS", "SELECT INTO", "ALTER SCHEMA", "CREATE SCHEMA"),
    ),
    "drop": ("sql_drop", ()),
    "anew": ("table_rewrite", ()),
}
"""By the end of its name, the event of each trigger, and for which commands it fires; none: for all."""


def name_of(options: PostgresOptions, kind: str) -> str:
    """Of a trigger and its function, or (`tell`) of what these call. At most 63 bytes: a slot has 56."""
    return f"{options.slot}_{kind}"


def functions(server_version: int, options: PostgresOptions, patterns: Sequence[str]) -> list[tuple[str, str, str]]:
    """(name, signature, body): one that writes into the log, and one for each trigger."""
    names = ", ".join(literal(name) for name in options.publications)
    captured = (
        f"(SELECT DISTINCT pr.prrelid FROM pg_publication_rel pr "
        f"JOIN pg_publication p ON p.oid = pr.prpubid AND p.pubname IN ({names}))"
    )
    tell = quote(SCHEMA, name_of(options, "tell"))
    bodies = {"ddl": _commands(tell, captured, patterns), "drop": _drops(tell, captured), "anew": _anew(tell, captured)}
    return [
        (name_of(options, "tell"), "(tables oid[], event json) RETURNS void", _tell(server_version, options, names)),
        *((name_of(options, kind), "() RETURNS event_trigger", _harmless(bodies[kind])) for kind in TRIGGERS),
    ]


def _tell(server_version: int, options: PostgresOptions, names: str) -> str:
    prefix = literal(f"{DDL_PREFIX}{options.slot}")
    described = described_as_json("c.oid = ANY (tables)", f"ARRAY[{names}]", server_version)
    # The server gives a message the place of the next record. If that is a change of another subtransaction, it is a
    # matter of luck which comes first: an empty message behind them takes that place.
    return f"""
BEGIN
    PERFORM pg_logical_emit_message(true, {prefix}, convert_to(told, 'UTF8')) FROM ({described}) described(told);
    IF event IS NOT NULL THEN
        PERFORM pg_logical_emit_message(true, {prefix}, convert_to(event::text, 'UTF8'));
    END IF;
    PERFORM pg_logical_emit_message(true, {prefix}, ''::bytea);
END
"""


def _harmless(body: str) -> str:
    return f"""{body.rstrip()}
EXCEPTION WHEN OTHERS THEN
    RAISE WARNING 'millstream could not tell of this command: %', SQLERRM;
END
"""


_WHOSE = """(SELECT {table} AS oid UNION SELECT a::oid FROM pg_partition_ancestors({table}) a)"""
"""A partition's ALTER may be one of the table above it, whose name the log has."""

_PARTS = f"""
    SELECT coalesce(json_object_agg(leaf.oid::int8, json_build_array(ln.nspname || '.' || leaf.relname,
        leaf.relfilenode::int8, {STAMP.format(table="leaf.oid")}, {JOINED.format(leaf="leaf.oid")},
        leaf.xmin::text::int8)), '{{}}')
    FROM pg_partition_tree(altered.touched) tree
    JOIN pg_class leaf ON leaf.oid = tree.relid JOIN pg_namespace ln ON ln.oid = leaf.relnamespace
    WHERE tree.isleaf AND leaf.relkind = 'r' AND leaf.relpersistence = 'p'"""


def _commands(tell: str, captured: str, patterns: Sequence[str]) -> str:
    """Tables that were altered or made, and those of a schema that was renamed."""
    named = ", ".join(f"({literal(one.schema)}, {literal(one.name)})" for one in parse_patterns(patterns))
    is_named = f"EXISTS (SELECT FROM (VALUES {named}) p(s, t) WHERE n.nspname LIKE p.s AND c.relname LIKE p.t)"
    above_is_named = is_named.replace("n.nspname", "an.nspname").replace("c.relname", "ac.relname")
    return f"""
DECLARE
    commands oid[] := ARRAY(
        SELECT DISTINCT c.oid FROM pg_event_trigger_ddl_commands() d
        JOIN pg_class c ON (d.classid = 'pg_class'::regclass AND c.oid = d.objid)
            OR (d.classid = 'pg_namespace'::regclass AND d.command_tag = 'ALTER SCHEMA' AND c.relnamespace = d.objid)
        WHERE c.relkind IN ('r', 'p') AND c.relpersistence = 'p');
    roots oid[];
    altered json;
    others json;
BEGIN
    IF cardinality(commands) = 0 THEN
        RETURN;
    END IF;
    SELECT array_agg(DISTINCT c.oid), json_agg(json_build_object(
        'oid', c.oid::int8, 'whole', c.oid = altered.touched, 'name', n.nspname || '.' || c.relname,
        'file', c.relfilenode::int8, 'stamp', {STAMP.format(table="c.oid")},
        'parts', CASE WHEN c.relkind = 'p' THEN ({_PARTS}) END)) INTO roots, altered
    FROM unnest(commands) altered(touched) CROSS JOIN LATERAL {_WHOSE.format(table="altered.touched")} whose
    JOIN {captured} captured ON captured.prrelid = whose.oid
    JOIN pg_class c ON c.oid = whose.oid JOIN pg_namespace n ON n.oid = c.relnamespace;
    SELECT json_object_agg(c.oid::int8, n.nspname || '.' || c.relname) INTO others
    FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE c.oid = ANY (commands) AND n.nspname !~ '^pg_' AND n.nspname <> 'information_schema' AND {is_named}
    AND c.oid NOT IN {captured}
    AND NOT (c.relispartition AND EXISTS (SELECT FROM pg_partition_ancestors(c.oid) above
        JOIN pg_class ac ON ac.oid = above::oid AND ac.oid <> c.oid JOIN pg_namespace an ON an.oid = ac.relnamespace
        WHERE {above_is_named} OR ac.oid IN {captured}));
    IF altered IS NOT NULL OR others IS NOT NULL THEN
        -- A new partition leaves the table's description as it was.
        PERFORM {tell}(CASE WHEN tg_tag LIKE 'ALTER %' THEN roots END,
            json_build_object('xid', pg_current_xact_id()::text, 'tables', coalesce(altered, '[]'),
                'others', coalesce(others, '{{}}')));
    END IF;
"""


def _drops(tell: str, captured: str) -> str:
    """Dropped tables, of which the catalog has no more than their numbers, and columns that went with a type."""
    return f"""
DECLARE
    gone json;
    altered oid[];
BEGIN
    IF tg_tag = 'ALTER TABLE' THEN
        RETURN;
    END IF;
    SELECT json_agg(d.objid::int8) INTO gone FROM pg_event_trigger_dropped_objects() d
    WHERE d.classid = 'pg_class'::regclass AND d.objsubid = 0 AND d.object_type = 'table' AND NOT d.is_temporary;
    SELECT array_agg(DISTINCT c.oid) INTO altered FROM pg_event_trigger_dropped_objects() d
    JOIN pg_namespace n ON n.nspname = d.address_names[1]
    JOIN pg_class c ON c.relnamespace = n.oid AND c.relname = d.address_names[2]
    JOIN {captured} captured ON captured.prrelid = c.oid
    WHERE d.object_type IN ('table column', 'default value', 'table constraint');
    IF gone IS NOT NULL OR altered IS NOT NULL THEN
        PERFORM {tell}(altered, CASE WHEN gone IS NOT NULL THEN
            json_build_object('xid', pg_current_xact_id()::text, 'gone', gone) END);
    END IF;
"""


def _anew(tell: str, captured: str) -> str:
    """A table that is about to be written anew."""
    return f"""
DECLARE
    rewritten oid := pg_event_trigger_table_rewrite_oid();
    whose json;
BEGIN
    SELECT json_agg(whose.oid::int8) INTO whose FROM {_WHOSE.format(table="rewritten")} whose
    JOIN {captured} captured ON captured.prrelid = whose.oid;
    IF whose IS NOT NULL THEN
        PERFORM {tell}(NULL, json_build_object('xid', pg_current_xact_id()::text, 'rewrite', json_build_object(
            'oid', rewritten::int8, 'whose', whose, 'reason', pg_event_trigger_table_rewrite_reason())));
    END IF;
"""
