"""What the catalog says about tables: which a pattern means, their columns, keys and identities.

    select(conn, patterns)     -> Selection: every capturable table, and findings about the rest
    relations(conn, patterns)  -> list[Relation], the same without the findings
    enrich(conn, relation, publications) -> Relation, what the log said plus what the catalog knows

Each is one query. `Table` carries what only preflight and publication need.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any

from millstream.model import Column, Relation
from millstream.sources.base import Finding, Severity
from millstream.sources.postgres.connection import Connection, translated, value_encoding
from millstream.sources.postgres.identity import IdentityFacts, partition_mismatch, usable_identity
from millstream.sources.postgres.patterns import Pattern, parse_patterns, quote

PUBLISHES_GENERATED = 180000
"""The first server version that can publish stored generated columns."""

_INDEXES = """
    SELECT json_agg(json_build_object(
        'primary', i.indisprimary, 'identity', i.indisreplident,
        'usable', i.indisvalid AND i.indisunique AND i.indpred IS NULL, 'immediate', i.indimmediate,
        'columns', (SELECT json_agg(a.attname ORDER BY k.place)
            FROM unnest(i.indkey::int2[]) WITH ORDINALITY k(attnum, place)
            JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.attnum
            WHERE k.place <= i.indnkeyatts)))
    FROM pg_index i WHERE i.indrelid = {relation} AND (i.indisprimary OR i.indisreplident)"""

_MISSING = """
    CASE WHEN c.relkind = 'p' THEN (
        SELECT CASE WHEN count(DISTINCT old.value) = 1 THEN min(old.value) END
        FROM pg_partition_tree(c.oid) tree CROSS JOIN LATERAL (
            SELECT array_to_string(m.attmissingval, '') AS value FROM pg_attribute m
            WHERE m.attrelid = tree.relid AND m.attname = a.attname AND m.atthasmissing OFFSET 0) old
        WHERE tree.isleaf OR tree.relid = c.oid)
    WHEN a.atthasmissing THEN array_to_string(a.attmissingval, '') END"""
"""What rows have that are older than the column. A partitioned table has no rows: its partitions know it, and agree.
(OFFSET 0: Postgres would else look for the column's name in all tables that there are.)"""

_COLUMNS = f"""
    SELECT json_agg(json_build_object(
        'name', a.attname, 'type', a.atttypid::int8, 'mod', a.atttypmod, 'attnum', a.attnum,
        'type_name', format_type(a.atttypid, a.atttypmod), 'kind', t.typtype,
        'nullable', NOT (a.attnotnull OR (t.typtype = 'd' AND (t.typnotnull OR base.inner_notnull))),
        'default', (SELECT pg_get_expr(d.adbin, d.adrelid) FROM pg_attrdef d
            WHERE d.adrelid = a.attrelid AND d.adnum = a.attnum),
        'missing', {_MISSING}, 'generated', a.attgenerated, 'base', base.oid::int8, 'base_mod', base.typmod,
        'element', (SELECT json_build_object('oid', e.typelem::int8, 'delimiter', e.typdelim) FROM pg_type e
            WHERE e.oid = coalesce(base.oid, t.oid)
            AND e.typsubscript = 'array_subscript_handler'::regproc AND e.typelem <> 0),
        'labels', (SELECT json_agg(l.enumlabel ORDER BY l.enumsortorder) FROM pg_enum l
            WHERE l.enumtypid = coalesce(base.oid, t.oid))
        ) ORDER BY a.attnum)
    FROM pg_attribute a
    JOIN pg_type t ON t.oid = a.atttypid
    LEFT JOIN LATERAL (
        WITH RECURSIVE beneath(oid, typmod, inner_notnull, depth) AS (
            SELECT t.typbasetype, t.typtypmod, false, 1 WHERE t.typtype = 'd'
            UNION ALL
            SELECT b.typbasetype, b.typtypmod, inner_notnull OR b.typnotnull, depth + 1 FROM beneath
            JOIN pg_type b ON b.oid = beneath.oid WHERE b.typtype = 'd')
        SELECT oid, typmod, inner_notnull FROM beneath ORDER BY depth DESC LIMIT 1) base ON true
    WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped"""

_PARTITIONS = """
    SELECT json_agg(json_build_object('schema', pn.nspname, 'name', pc.relname, 'kind', pc.relkind,
        'persistence', pc.relpersistence, 'identity', pc.relreplident, 'indexes', ({indexes})) ORDER BY 1)
    FROM pg_partition_tree(c.oid) tree
    JOIN pg_class pc ON pc.oid = tree.relid
    JOIN pg_namespace pn ON pn.oid = pc.relnamespace
    WHERE tree.isleaf AND pc.oid <> c.oid"""

_FIELDS = f"""c.oid::int8, n.nspname, c.relname, c.relkind, c.relpersistence, c.relreplident,
        c.relrowsecurity, pg_has_role(c.relowner, 'USAGE'), has_table_privilege(c.oid, 'SELECT'),
        n.nspname ~ '^pg_' OR n.nspname = 'information_schema',
        ARRAY(SELECT a::oid::int8 FROM pg_partition_ancestors(c.oid) a WHERE a <> c.oid),
        ({_COLUMNS}), ({_INDEXES.format(relation="c.oid")}),
        CASE WHEN c.relkind = 'p' THEN ({_PARTITIONS.format(indexes=_INDEXES.format(relation="pc.oid"))}) END,
        {{listed}}"""

_FROM = """FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE c.relkind IN ('r', 'p', 'v', 'm', 'f') AND {condition}
    ORDER BY n.nspname COLLATE "C", c.relname COLLATE "C\""""

_BY_PATTERN = """EXISTS (SELECT FROM unnest(%(schemas)s::text[], %(names)s::text[]) p(s, t)
    WHERE n.nspname LIKE p.s AND c.relname LIKE p.t)"""

_COLUMN_LIST = """(SELECT pr.prattrs::int2[] FROM pg_publication_rel pr JOIN pg_publication p ON p.oid = pr.prpubid
    WHERE pr.prrelid = c.oid AND p.pubname = ANY ({publications}) LIMIT 1)"""


@dataclass(frozen=True)
class Table:
    """A table as the catalog has it now. `relation` holds the columns that would be published."""

    relation: Relation
    kind: str
    persistence: str
    system: bool
    owned: bool
    """Whether our role has the rights of the owner, which adding it to a publication needs."""
    selectable: bool
    row_security: bool
    ancestors: tuple[int, ...]
    unpublished: tuple[str, ...]
    """Columns the log cannot carry: generated ones, by the server's version and their kind."""
    unusable: str | None
    """Why updates and deletes cannot be published without hurting the application; None: they can."""
    identity_fix: str | None
    """The SQL that makes the identity usable."""
    uncaptured_partitions: tuple[str, ...]
    """Partitions whose changes never reach the log: foreign and unlogged ones."""

    @property
    def uncapturable(self) -> str | None:
        """Why no change of it ever reaches the log; None when it can be captured."""
        if self.system:
            return "a system table"
        if self.kind != "r" and self.kind != "p":
            return {"v": "a view", "m": "a materialized view", "f": "a foreign table"}[self.kind]
        return {"p": None, "u": "an unlogged table", "t": "a temporary table"}[self.persistence]


@dataclass(frozen=True)
class Selection:
    """What the patterns mean at this moment, in order of name, each table once."""

    tables: tuple[Table, ...]
    findings: tuple[Finding, ...]


_NAMES = """
SELECT n.nspname || '.' || c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE c.relkind IN ('r', 'p') AND n.nspname NOT LIKE 'pg\\_%' AND n.nspname NOT IN ('information_schema', '_millstream')
LIMIT 10000
"""


def select(conn: Connection, patterns: Sequence[str]) -> Selection:
    """The capturable tables that the patterns name, and a finding for whatever they name in vain.

    A partition is left out when a partitioned table above it is in the selection too: its changes
    come under the name of that one.
    """
    wanted = parse_patterns(patterns)
    found = _read(
        conn,
        condition=_BY_PATTERN,
        parameters={"schemas": [p.schema for p in wanted], "names": [p.name for p in wanted]},
    )
    findings = _unmatched(conn, wanted, found)
    usable = []
    for table in found:
        named = any(p.literal and p.matches(table.relation.schema, table.relation.name) for p in wanted)
        reason = table.uncapturable
        if reason is None:
            usable.append(table)
        elif named or not table.system:
            findings.append(_uncapturable(table, reason, named=named))
    chosen = {table.relation.oid for table in usable}
    return Selection(
        tuple(table for table in usable if not chosen.intersection(table.ancestors)),
        tuple(findings),
    )


def relations(conn: Connection, patterns: Sequence[str]) -> list[Relation]:
    """The tables that the patterns name now, described from the catalog."""
    return [table.relation for table in select(conn, patterns).tables]


def enrich(
    conn: Connection, relation: Relation, publications: Sequence[str] = (), before: Relation | None = None
) -> Relation:
    """Add to a relation as the log described it what only the catalog knows.

    `publications` are those the log was read through; their column lists say which columns it can
    have. The result has `enriched=True` only if name, identity and published columns (order, names,
    types, key flags) are still what the log said. Otherwise the table has changed since: then `before`,
    what was last known of it, is returned if the log would say the same of it, and else the log's own
    facts, with the flagged columns as key. Where whole rows are logged, which hides the key, it is the
    one from before.
    """
    found = tables_by_oid(conn, [relation.oid], publications)
    return completed(relation, found[0].relation if found else None, before, value_encoding(conn.pgconn))


def completed(relation: Relation, known: Relation | None, before: Relation | None, encoding: str) -> Relation:
    """The same for a relation that was found in the catalog (`known`), or was not there any more."""
    if known is None or _said(known) != _said(relation):
        if before is not None and _said(before) == _said(relation):
            return before
        flagged = tuple(column.name for column in relation.columns if column.key)
        primary: tuple[str, ...] = ()
        if relation.identity == "f" and before is not None and before.primary_key:
            primary = before.primary_key if set(before.primary_key) <= set(flagged) else ()
        return replace(relation, key=primary or flagged, primary_key=primary, enriched=False, encoding=encoding)
    return replace(known, enriched=True)


def tables_by_oid(conn: Connection, oids: Sequence[int], publications: Sequence[str] = ()) -> list[Table]:
    """The tables with these OIDs that still exist; with `publications`, as these publish them."""
    return _read(
        conn,
        condition="c.oid = ANY (%(oids)s::int8[]::oid[])",
        parameters={"oids": list(oids), "publications": list(publications)},
        column_lists=bool(publications) and conn.info.server_version >= 150000,
    )


def described_as_json(condition: str, publications: str, server_version: int) -> str:
    """A query that gives tables as texts, for `table_of_json`. `publications` is an array of names, in SQL."""
    listed = _COLUMN_LIST.format(publications=publications) if server_version >= 150000 else "NULL"
    return f"SELECT json_build_array({_FIELDS.format(listed=listed)})::text {_FROM.format(condition=condition)}"


def table_of_json(row: Sequence[Any], server_version: int, encoding: str) -> Table:
    """The table that a text of `described_as_json` is about."""
    return _table(tuple(row), server_version, encoding)


def is_same(one: Relation, other: Relation) -> bool:
    """Whether a log would describe both alike."""
    return _said(one) == _said(other)


def _said(relation: Relation) -> tuple[object, ...]:
    """What a log and a catalog can both say of a table."""
    columns = tuple((column.name, column.type_oid, column.type_mod, column.key) for column in relation.columns)
    return relation.oid, relation.schema, relation.name, relation.identity, columns


def _read(
    conn: Connection, *, condition: str, parameters: Mapping[str, Any], column_lists: bool = False
) -> list[Table]:
    listed = _COLUMN_LIST.format(publications="%(publications)s") if column_lists else "NULL"
    query = f"SELECT {_FIELDS.format(listed=listed)} {_FROM.format(condition=condition)}"
    with translated("reading the catalog"):
        rows = conn.execute(query.encode(), parameters).fetchall()
    encoding = value_encoding(conn.pgconn)
    return [_table(row, conn.info.server_version, encoding) for row in rows]


def _table(row: tuple[Any, ...], server_version: int, encoding: str) -> Table:
    (oid, schema, name, kind, persistence, identity, row_security, owned, selectable, system) = row[:10]
    ancestors, raw_columns, indexes, partitions, listed = row[10:]
    columns = raw_columns or []
    published = [c for c in columns if _is_published(c, listed, server_version)]
    facts = IdentityFacts.of(identity, indexes or [])
    unusable, fix = usable_identity(
        facts,
        quote(schema, name),
        published=frozenset(c["name"] for c in published),
        virtual=any(c["generated"] == "v" for c in columns),
    )
    leaves = [(quote(p["schema"], p["name"]), p) for p in partitions or []]
    if unusable is None:
        unusable, fix = partition_mismatch(
            facts, [(leaf, IdentityFacts.of(p["identity"], p["indexes"] or [])) for leaf, p in leaves]
        )
    return Table(
        relation=Relation(
            oid=oid,
            schema=schema,
            name=name,
            identity=identity,
            columns=tuple(_column(c, facts) for c in published),
            key=facts.key(tuple(c["name"] for c in published)),
            primary_key=facts.primary_key,
            enriched=True,
            encoding=encoding,
        ),
        kind=kind,
        persistence=persistence,
        system=system,
        owned=owned,
        selectable=selectable,
        row_security=row_security,
        ancestors=tuple(ancestors),
        unpublished=tuple(c["name"] for c in columns if not _is_published(c, None, server_version)),
        unusable=unusable,
        identity_fix=fix,
        uncaptured_partitions=tuple(leaf for leaf, p in leaves if p["kind"] == "f" or p["persistence"] != "p"),
    )


def _is_published(column: Mapping[str, Any], listed: Sequence[int] | None, server_version: int) -> bool:
    if listed is not None:
        return column["attnum"] in listed
    return column["generated"] == "" or (column["generated"] == "s" and server_version >= PUBLISHES_GENERATED)


def _column(c: Mapping[str, Any], facts: IdentityFacts) -> Column:
    element = c["element"] or {"oid": None, "delimiter": None}
    return Column(
        name=c["name"],
        type_oid=c["type"],
        type_mod=c["mod"],
        key=facts.identity == "f" or c["name"] in (facts.identity_columns or ()),
        type_name=c["type_name"],
        attnum=c["attnum"],
        nullable=c["nullable"],
        default=c["default"],
        generated=c["generated"] != "",
        type_kind=c["kind"],
        base_type_oid=c["base"],
        base_type_mod=c["base_mod"],
        element_type_oid=element["oid"],
        element_delimiter=element["delimiter"],
        enum_labels=tuple(c["labels"]) if c["labels"] is not None else None,
        missing=c["missing"],
    )


def _unmatched(conn: Connection, wanted: Sequence[Pattern], found: Sequence[Table]) -> list[Finding]:
    unmatched = [p for p in wanted if not any(p.matches(t.relation.schema, t.relation.name) for t in found)]
    known = _names(conn) if any(p.literal for p in unmatched) else []
    return [
        Finding("tables", Severity.ERROR, f"table {p.text} does not exist", _meant(p, known), p.text)
        if p.literal
        else Finding("tables", Severity.WARNING, f"no table matches {p.text} now", None, p.text)
        for p in unmatched
    ]


def _names(conn: Connection) -> list[str]:
    """The tables of users that there are, as one would write them in `tables`."""
    with translated("reading the catalog"):
        names = [name for (name,) in conn.execute(_NAMES.encode()).fetchall()]
    # In a database without an encoding names are bytes.
    return [name for name in names if isinstance(name, str)]


def _meant(pattern: Pattern, known: Sequence[str]) -> str:
    near = get_close_matches(pattern.text, known, n=1, cutoff=0.75)
    fix = "correct its name in `tables` (upper and lower case count), or create it"
    return f"did you mean {near[0]}? Else {fix}" if near else fix


def _uncapturable(table: Table, reason: str, *, named: bool) -> Finding:
    name = table.relation.table
    if named:
        fix = "remove it from `tables`"
        if table.persistence == "u" and table.kind == "r":
            fix = f"ALTER TABLE {quote(table.relation.schema, table.relation.name)} SET LOGGED, or {fix}"
        return Finding("tables", Severity.ERROR, f"{name} is {reason} and cannot be captured", fix, name)
    return Finding("tables", Severity.OK, f"{name} is {reason} and is left out", None, name)
