"""Tables in chunks: planned by their pages or their keys, read by binary COPY under an exported snapshot.

Ranges of ctid hold within one snapshot only (rows move), so such chunks are of no use after it; those of a key are
(`ranges`). The driver plans (`plan_chunks`), tasks on executors read (`read_chunk`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import UTC, datetime

import pyarrow as pa

from millstream.errors import SourceHalted, SourceUnavailable
from millstream.model import Json, Relation, SourceSpec
from millstream.observe import counted
from millstream.sources.base import Chunk, SnapshotPlan, Wanted
from millstream.sources.postgres import catalog
from millstream.sources.postgres.connection import Connection, connect, connect_session, literal, translated
from millstream.sources.postgres.copied import select_list
from millstream.sources.postgres.copying import copied
from millstream.sources.postgres.options import PostgresOptions
from millstream.sources.postgres.pace import Pace
from millstream.sources.postgres.patterns import Pattern, parse_patterns
from millstream.sources.postgres.ranges import Leaf, chunks_by_key, cut_by_key, range_conditions, whole
from millstream.sources.postgres.session import Refused, Session
from millstream.sources.postgres.waiting import awaited
from millstream.sources.postgres.within import source_condition

CHUNK_BYTES = 64 << 20
"""So much of a table is one chunk."""
LOCK_SECONDS = 60
"""So long a table that somebody has locked is waited for: the snapshot holds back the server's own cleaning."""

_GONE_STATES = ("42703", "42P01", "55000", "22023")
"""A column, a table or the snapshot that is no longer there."""

_PUBLISHED = """
    SELECT c.oid::int8, {filter} FROM pg_publication_tables p
    JOIN pg_namespace n ON n.nspname = p.schemaname
    JOIN pg_class c ON c.relnamespace = n.oid AND c.relname = p.tablename
    WHERE p.pubname = ANY (%s)"""

# Their files are those of the snapshot: who was rewritten after it, even before this was asked, has another one.
_LEAVES = """
    SELECT t.root, n.nspname, c.relname, c.oid::int8, c.relfilenode::int8, coalesce(pg_relation_size(c.oid), 0)::int8,
        coalesce(pg_table_size(c.oid), 0)::int8, greatest(c.reltuples, 0)::int8, current_setting('block_size')::int8
    FROM (
        SELECT c.oid::int8 AS root, c.oid AS leaf FROM pg_class c
        WHERE c.oid = ANY (%(oids)s::int8[]::oid[]) AND c.relkind = 'r'
        UNION ALL
        SELECT c.oid::int8, tree.relid FROM pg_class c, pg_partition_tree(c.oid) tree
        WHERE c.oid = ANY (%(oids)s::int8[]::oid[]) AND c.relkind = 'p' AND tree.isleaf) t
    JOIN pg_class c ON c.oid = t.leaf JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE c.relkind = 'r' AND c.relpersistence = 'p' ORDER BY 1, 2, 3"""


@dataclass(frozen=True)
class Planned:
    """The chunks of all tables, how many rows they have by the server's own estimate, which are cut by their key."""

    chunks: tuple[Chunk, ...]
    rows: int
    ranges: dict[str, Json]


def plan_chunks(
    control: Connection,
    spec: SourceSpec,
    options: PostgresOptions,
    snapshot: str,
    before: Mapping[int, str | None] | None,
    wanted: Wanted | None = None,
) -> Planned:
    """What is read under a snapshot.

    Every table has a chunk, an empty one too: so a target learns of it. `before` is what was `published` before the
    snapshot was asked for: raises SourceUnavailable if that is not what is published now. None: nothing is published
    for this, and the options alone say which columns and rows are read.
    """
    relations, filters = described(control, spec, options, before, wanted)
    with translated("planning the snapshot"), control.transaction():
        control.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
        control.execute(f"SET TRANSACTION SNAPSHOT {literal(snapshot)}".encode())
        tables: dict[int, list[Leaf]] = {}
        for row in control.execute(_LEAVES.encode(), {"oids": list(relations)}).fetchall():
            tables.setdefault(row[0], []).append(Leaf.of(row))
        parts = set() if wanted is None else {root for root in tables if relations[root].table in wanted.within}
        few = {
            leaf.oid
            for root in parts
            for leaf in tables[root]
            if _estimated_bytes(control, leaf, filters[root]) <= CHUNK_BYTES
        }
        ranges = {} if wanted is None else _ranges(control, relations, filters, tables, wanted)
    chunks: list[Chunk] = []
    for root, leaves in tables.items():
        relation, condition = relations[root], filters[root]
        if relation.table in ranges:
            chunks += chunks_by_key(relation, leaves, ranges[relation.table])
        else:
            by_pages = (_chunks_of(relation, leaf, condition, at_once=leaf.oid in few) for leaf in leaves)
            chunks += (chunk for each in by_pages for chunk in each)
    return Planned(tuple(chunks), sum(leaf.rows for leaves in tables.values() for leaf in leaves), ranges)


def _ranges(
    control: Connection,
    relations: Mapping[int, Relation],
    filters: Mapping[int, str | None],
    tables: Mapping[int, Sequence[Leaf]],
    wanted: Wanted,
) -> dict[str, Json]:
    """Of the tables that are wanted whole, and can be cut by their keys, how they are."""
    found: dict[str, Json] = {}
    for root, leaves in tables.items():
        relation = relations[root]
        if wanted.ranges is not None and relation.table not in wanted.within:
            known = wanted.ranges.get(relation.table)
            cut = cut_by_key(control, relation, leaves, filters[root], known, CHUNK_BYTES)
            found |= {} if cut is None else {relation.table: cut}
    return found


def table_bytes(spec: SourceSpec) -> int:
    """How large the tables are that the source's patterns name, with their long values."""
    with connect(spec, PostgresOptions.of(spec)) as control:
        oids = [table.relation.oid for table in catalog.select(control, spec.tables).tables]
        with translated("looking how large the tables are"):
            rows = control.execute(_LEAVES.encode(), {"oids": oids}).fetchall()
    return sum(Leaf.of(row).size for row in rows)


def table_names(spec: SourceSpec) -> list[str]:
    """The tables that the source's patterns name."""
    with connect(spec, PostgresOptions.of(spec)) as control:
        return [relation.table for relation in catalog.relations(control, spec.tables)]


def _estimated_bytes(control: Connection, leaf: Leaf, condition: str | None) -> int:
    """How much of a table has rows for which the condition holds, by the server's own estimate."""
    asked = f"EXPLAIN (FORMAT JSON) SELECT 1 FROM ONLY {leaf.name} WHERE {condition}"
    ((plans,),) = control.execute(asked.encode()).fetchall()
    return int(leaf.size * min(1.0, plans[0]["Plan"]["Plan Rows"] / max(1, leaf.rows)))


def described(
    control: Connection,
    spec: SourceSpec,
    options: PostgresOptions,
    before: Mapping[int, str | None] | None,
    wanted: Wanted | None,
) -> tuple[dict[int, Relation], Mapping[int, str | None]]:
    """The tables to read, by oid, and which of their rows. See `plan_chunks`."""
    selected = chosen(catalog.select(control, spec.tables).tables, wanted)
    if wanted is not None and wanted.all:
        selected = [table for table in selected if table.relation.oid in (before or {})]
    asked = [table.relation.oid for table in selected]
    filters: Mapping[int, str | None]
    if before is None:
        found, filters = _by_options(selected, options)
    else:
        filters = published(control, options)
        missing = [oid for oid in asked if oid not in filters or oid not in before or filters[oid] != before[oid]]
        if missing:
            _refuse_partitions(control, [table for table in selected if table.relation.oid in missing], filters)
            raise SourceUnavailable(f"{counted(len(missing), 'table')} not in the publication yet")
        found = [table.relation for table in catalog.tables_by_oid(control, asked, options.publications)]
    relations = {relation.oid: replace(relation, types=options.types.chosen) for relation in found}
    within = wanted.within if wanted is not None else {}
    ranged = {
        oid: f"({filters[oid] or 'true'}) AND {source_condition(within[relation.table])}"
        for oid, relation in relations.items()
        if relation.table in within
    }
    return relations, {**filters, **ranged}


def chosen(tables: Sequence[catalog.Table], wanted: Wanted | None) -> list[catalog.Table]:
    """Those of the tables that are wanted."""
    if wanted is None or wanted.all:
        return list(tables)
    meant, excluded = (parse_patterns(each) if each else [] for each in (wanted.patterns, wanted.excluded))

    def matches(patterns: Sequence[Pattern], relation: Relation) -> bool:
        return any(pattern.matches(relation.schema, relation.name) for pattern in patterns)

    return [
        one
        for one in tables
        if one.relation.table in wanted.names or (matches(meant, one.relation) and not matches(excluded, one.relation))
    ]


def _refuse_partitions(
    control: Connection, missing: Sequence[catalog.Table], published_now: Mapping[int, str | None]
) -> None:
    """Raise SourceHalted for a partition whose changes come under the name of a table above it: it never joins."""
    for table in missing:
        above = [oid for oid in table.ancestors if oid in published_now]
        roots = [found.relation.table for found in catalog.tables_by_oid(control, above)] if above else []
        if roots:
            raise SourceHalted(
                f"{table.relation.table} is a partition of {roots[0]}, which another stream of this source names: its "
                f"changes come as those of {roots[0]}",
                hint=f"name {roots[0]} in this stream too; a filter can leave the other partitions' rows out",
            )


def _by_options(
    selected: Sequence[catalog.Table], options: PostgresOptions
) -> tuple[list[Relation], dict[int, str | None]]:
    """The tables with the columns that the options leave them, and which of their rows these let through."""
    relations = []
    for table in selected:
        relation, listed = table.relation, options.columns.get(table.relation.table)
        if listed is not None:
            left = tuple(column for column in relation.columns if column.name in listed)
            key = relation.key if set(relation.key) <= set(listed) else ()
            primary = relation.primary_key if set(relation.primary_key) <= set(listed) else ()
            relation = replace(relation, columns=left, key=key, primary_key=primary)
        relations.append(relation)
    return relations, {relation.oid: options.rows.get(relation.table) for relation in relations}


def read_chunk(spec: SourceSpec, plan: SnapshotPlan, chunk: Chunk) -> Iterator[pa.LargeBinaryArray]:
    """The rows of a chunk as the relation's decoder takes them (op READ), some megabytes at a time.

    Raises SourceUnavailable when the snapshot is gone or the table was changed under it: the baseline then
    starts again. SourceHalted when the snapshot is older than it may become.
    """
    if chunk.rows is not None:
        yield from chunk.rows
        return
    if plan.held_until is not None and datetime.now(UTC) >= plan.held_until:
        raise SourceHalted(
            f"the snapshot is as old as max_snapshot_age allows, and not all of {chunk.relation.table} is read",
            hint="raise max_snapshot_age: what cannot be read by ranges of its key is read under one snapshot",
        )
    options, pace = PostgresOptions.of(spec), Pace(plan.rate)
    with closing(Session(connect_session(spec, options))) as session:
        try:
            awaited(session.run("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"))
            awaited(session.run(f"SET TRANSACTION SNAPSHOT {literal(plan.token)}"))
            _lock(session, chunk)
            for rows in copied(session, statement_of(chunk)):
                pace.hold(rows.nbytes)
                yield rows
        except Refused as refused:
            if refused.sqlstate in _GONE_STATES:
                raise SourceUnavailable(
                    f"{chunk.relation.table} cannot be read under this snapshot: {refused}"
                ) from None
            grant = "grant the right to read the table; where it has row security, BYPASSRLS too"
            hint = grant if refused.sqlstate == "42501" else None
            raise SourceHalted(f"reading {chunk.relation.table}: {refused}", hint=hint) from None


def published(control: Connection, options: PostgresOptions) -> dict[int, str | None]:
    """The tables of our publications, and which of their rows are published."""
    filters = "p.rowfilter" if control.info.server_version >= 150000 else "NULL"
    with translated("reading the publications"):
        rows = control.execute(_PUBLISHED.format(filter=filters).encode(), (list(options.publications),)).fetchall()
    return {int(oid): condition for oid, condition in rows}


def whole_table(relation: Relation, leaf: str, oid: int, condition: str | None) -> Chunk:
    """All of a table as one chunk; its file is still to be told."""
    return Chunk(relation, whole(leaf, oid, None, condition), 0)


def _chunks_of(relation: Relation, leaf: Leaf, condition: str | None, *, at_once: bool = False) -> Iterator[Chunk]:
    """`at_once`: the condition leaves so few rows that an index finds them faster than pages are read."""
    parts = 1 if at_once else leaf.parts(CHUNK_BYTES)
    step = max(1, -(-leaf.pages // parts))
    about = whole(leaf.name, leaf.oid, leaf.filenode, condition)
    for begin in range(0, max(leaf.pages, 1), step):
        last = begin + step >= leaf.pages
        yield Chunk(relation, {**about, "begin": begin, "end": None if last else begin + step}, leaf.size // parts)


def _lock(session: Session, chunk: Chunk) -> None:
    """Keep the table from being rewritten, and see that it was not since the chunk was planned.

    A rewrite takes the rows out of the sight of older snapshots: they would be missing without a word.
    """
    awaited(session.run(f"SET LOCAL lock_timeout = '{LOCK_SECONDS}s'"))
    try:
        awaited(session.run(f"LOCK TABLE ONLY {chunk.what['leaf']} IN ACCESS SHARE MODE"))
    except Refused as refused:
        if refused.sqlstate != "55P03":
            raise
        raise SourceUnavailable(
            f"{chunk.relation.table} has been locked by somebody else for {LOCK_SECONDS} s",
            hint="see pg_locks; a lock without a process is that of a prepared transaction (pg_prepared_xacts)",
        ) from None
    if not holds_still(session, chunk):
        raise SourceUnavailable(f"{chunk.relation.table} was rewritten or replaced while it was read")


def holds_still(session: Session, chunk: Chunk) -> bool:
    """Whether a table that is locked is the one that the snapshot has."""
    what = chunk.what
    found = awaited(session.run(f"SELECT {literal(what['leaf'])}::regclass::oid, pg_relation_filenode({what['oid']})"))
    return found == [(str(what["oid"]), str(what["filenode"]))]


def statement_of(chunk: Chunk) -> str:
    """What copies a chunk's rows."""
    what = chunk.what
    conditions = range_conditions(what) or [f"ctid >= '({what['begin']},0)'"]
    conditions += [] if what["end"] is None else [f"ctid < '({what['end']},0)'"]
    conditions += [f"({what['condition']})"] if what["condition"] else []
    return (
        f"COPY (SELECT {select_list(chunk.relation)} FROM ONLY {what['leaf']} "
        f"WHERE {' AND '.join(conditions)}) TO STDOUT (FORMAT binary)"
    )
