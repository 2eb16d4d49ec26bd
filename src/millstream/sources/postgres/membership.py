"""What a publication holds, what we left in it, and the difference between the two.

A publication that Millstream made carries a comment: `millstream` and, as JSON, the publication as
it was left. The comment is written in the transaction that changes the publication, so it is the
memory of what should be there: a table taken out and put back behind our back (whose changes in
between are lost) has another entry OID than the comment says.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from millstream.model import Json
from millstream.sources.postgres.connection import Connection, translated

MARK = "millstream"
MAIN_OPERATIONS = ("insert", "update", "delete", "truncate")
INSERT_OPERATIONS = ("insert", "truncate")

_PUBLICATIONS = """
    SELECT p.pubname, p.oid::int8, pg_has_role(p.pubowner, 'USAGE'), p.puballtables, p.pubviaroot,
        array_remove(ARRAY[CASE WHEN p.pubinsert THEN 'insert' END, CASE WHEN p.pubupdate THEN 'update' END,
            CASE WHEN p.pubdelete THEN 'delete' END, CASE WHEN p.pubtruncate THEN 'truncate' END], NULL),
        {generated}, {schemas}, obj_description(p.oid, 'pg_publication'),
        (SELECT json_agg(json_build_object('table', c.oid::int8, 'schema', n.nspname, 'name', c.relname,
            'entry', pr.oid::int8, 'columns', {columns}, 'filter', {filter}, 'filter_columns', {filter_columns})
            ORDER BY c.oid)
        FROM pg_publication_rel pr JOIN pg_class c ON c.oid = pr.prrelid
        JOIN pg_namespace n ON n.oid = c.relnamespace WHERE pr.prpubid = p.oid)
    FROM pg_publication p WHERE p.pubname = ANY (%s)"""

_COLUMN_NAMES = """(SELECT json_agg(a.attname ORDER BY a.attnum) FROM pg_attribute a
    WHERE a.attrelid = c.oid AND a.attnum = ANY (pr.prattrs::int2[]))"""

_FILTER_COLUMNS = r"""(SELECT json_agg(DISTINCT a.attname)
    FROM regexp_matches(pr.prqual::text, ':varattno (\d+)', 'g') used
    JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum = used[1]::int2)"""


@dataclass(frozen=True)
class Member:
    """A table in a publication. `entry` is the OID of the membership itself, new with each ADD."""

    table: int
    schema: str
    name: str
    entry: int
    columns: tuple[str, ...] | None = None
    filter: str | None = None
    """The row filter as the server writes it."""
    filter_columns: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        return f"{self.schema}.{self.name}"


@dataclass(frozen=True)
class Publication:
    """A publication as the catalog has it. `asked_rows` are the row filters as the user wrote them."""

    name: str
    oid: int
    owned: bool
    all_tables: bool
    via_root: bool
    operations: tuple[str, ...]
    generated: str
    """`s` when stored generated columns are published, `n` when not, empty before Postgres 18."""
    schemas: tuple[str, ...]
    members: tuple[Member, ...]
    ours: bool = False
    left: Publication | None = None
    """As Millstream left it, from the comment; None when there is no record."""
    asked_rows: Mapping[str, str] = field(default_factory=dict)

    def comment(self, asked_rows: Mapping[str, str]) -> str:
        """The mark and the record to leave on the publication."""
        bare = replace(self, left=None, asked_rows={})
        return f"{MARK} {json.dumps({'left': asdict(bare), 'rows': dict(asked_rows)}, separators=(',', ':'))}"

    @classmethod
    def from_json(cls, value: Json) -> Publication:
        members = tuple(_member(m) for m in value["members"])
        lists = {name: tuple(value[name]) for name in ("operations", "schemas")}
        return cls(**{**value, **lists, "members": members})


def read_publications(conn: Connection, names: Sequence[str]) -> dict[str, Publication]:
    """The publications of these names that exist, with membership, options, filters and lists."""
    version = conn.info.server_version
    query = _PUBLICATIONS.format(
        generated="p.pubgencols::text" if version >= 180000 else "''",
        schemas="ARRAY(SELECT s.nspname::text FROM pg_publication_namespace pn JOIN pg_namespace s "
        "ON s.oid = pn.pnnspid WHERE pn.pnpubid = p.oid ORDER BY 1)"
        if version >= 150000
        else "'{}'::text[]",
        columns=_COLUMN_NAMES if version >= 150000 else "NULL",
        filter="pg_get_expr(pr.prqual, pr.prrelid)" if version >= 150000 else "NULL",
        filter_columns=_FILTER_COLUMNS if version >= 150000 else "NULL",
    )
    with translated("reading the publications"):
        rows = conn.execute(query.encode(), (list(names),)).fetchall()
    return {row[0]: _publication(row) for row in rows}


def drift(expected: Publication, actual: Publication | None, gone: Collection[int] = ()) -> list[str]:
    """Every difference that may have cost changes, one sentence each.

    `gone` holds OIDs of tables that no longer exist under any name: those cannot have changed.
    """
    name = expected.name
    if actual is None:
        return [f"publication {name} does not exist any more"]
    if actual.oid != expected.oid:
        return [f"publication {name} was dropped and created again"]
    found = []
    for what in ("all_tables", "via_root", "operations", "generated", "schemas"):
        if getattr(expected, what) != getattr(actual, what):
            found.append(f"publication {name}: {what} was {getattr(expected, what)}, is {getattr(actual, what)}")
    before, after = ({member.table: member for member in state.members} for state in (expected, actual))
    for oid, member in before.items():
        now = after.get(oid)
        if now is None:
            if oid not in gone:
                found.append(f"table {member.title} is no longer in publication {name}")
        elif now.entry != member.entry:
            # A new list or filter always comes with a new entry; the reverse look would take a renamed column for one.
            same = (now.columns, now.filter) == (member.columns, member.filter)
            what = "was taken out and put back" if same else "has another column list or row filter"
            found.append(f"table {member.title} {what} in publication {name}")
    found += [f"table {after[oid].title} was added to publication {name}" for oid in after if oid not in before]
    return found


def check_drift(
    conn: Connection, expected: Mapping[str, Publication], actual: Mapping[str, Publication] | None = None
) -> list[str]:
    """Compare the publications with what they should be. Empty when nothing has changed.

    `actual` are the publications as they were just read; without it they are read now.
    """
    if actual is None:
        actual = read_publications(conn, list(expected))
    gone = gone_tables(conn, [member for publication in expected.values() for member in publication.members])
    return [said for name, state in expected.items() for said in drift(state, actual.get(name), gone)]


def gone_tables(conn: Connection, members: Sequence[Member]) -> set[int]:
    """The OIDs of those that were dropped and not created again under their name."""
    with translated("looking for dropped tables"):
        rows = conn.execute(
            "SELECT m.oid FROM unnest(%s::int8[], %s::text[], %s::text[]) m(oid, schema, name) "
            "WHERE NOT EXISTS (SELECT FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace "
            "WHERE c.oid = m.oid::oid OR (n.nspname = m.schema AND c.relname = m.name))",
            ([m.table for m in members], [m.schema for m in members], [m.name for m in members]),
        ).fetchall()
    return {oid for (oid,) in rows}


def _publication(row: tuple[Any, ...]) -> Publication:
    name, oid, owned, all_tables, via_root, operations, generated, schemas, comment, members = row
    ours, left, rows = _recorded(comment)
    return Publication(
        name=name,
        oid=oid,
        owned=owned,
        all_tables=all_tables,
        via_root=via_root,
        operations=tuple(operations),
        generated=generated,
        schemas=tuple(schemas),
        members=tuple(_member(m) for m in members or []),
        ours=ours,
        left=left,
        asked_rows=rows,
    )


def _member(value: Mapping[str, Any]) -> Member:
    return Member(
        table=value["table"],
        schema=value["schema"],
        name=value["name"],
        entry=value["entry"],
        columns=tuple(value["columns"]) if value["columns"] is not None else None,
        filter=value["filter"],
        filter_columns=tuple(value["filter_columns"] or ()),
    )


def _recorded(comment: str | None) -> tuple[bool, Publication | None, Mapping[str, str]]:
    mark, _, record = (comment or "").partition(" ")
    if mark != MARK:
        return False, None, {}
    try:
        value = json.loads(record)
        return True, Publication.from_json(value["left"]), value["rows"]
    except (ValueError, KeyError, TypeError):
        # The bare mark is how a person says: this is ours, and what is in it now is right.
        return True, None, {}
