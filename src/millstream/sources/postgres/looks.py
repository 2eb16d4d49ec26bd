"""What happens to captured tables without a word in the log, found by comparing two looks at the catalog.

`publish_via_partition_root` sends nothing when one partition is truncated, attached, detached or dropped, and nobody is
told what a table looks like that an ALTER has written anew. The catalog tells: a table that was truncated or written
anew is in another file, and one that was altered has other entries of its columns.

    read(conn, publications, patterns)    -> State: the captured tables, their files and their partitions, now
    compare(conn, before, now, truncated) -> what is different, as far as no change of the log has told it

A state is JSON: `tables` by number, each with `name`, `file`, `stamp` (of its columns' entries) and `parts` by number
(None for a table without partitions), each of these `[name, file, stamp, joined, xid]`; `others`, tables that the
patterns name and that are not captured; the `patterns`; and a `snapshot` that is not younger than any of it.
A `file` is None where a table is being written anew: it is known when the trigger tells it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from millstream.model import Json
from millstream.registry.kinds import Kind
from millstream.sources.base import Found
from millstream.sources.postgres.connection import Connection, translated
from millstream.sources.postgres.patterns import parse_patterns

STAMP = """(SELECT md5(string_agg(a.attnum || ' ' || a.xmin, ',' ORDER BY a.attnum)) FROM pg_attribute a
    WHERE a.attrelid = {table} AND a.attnum > 0)"""
"""Another one when an entry of a column is."""

JOINED = """(SELECT string_agg(i.xmin::text, ',' ORDER BY i.inhrelid) FROM pg_partition_ancestors({leaf}) above
    JOIN pg_inherits i ON i.inhrelid = above::oid)"""
"""By which transactions a partition, and what it is a partition of, came to where they are."""

_TABLES = f"""
    SELECT c.oid::int8, n.nspname || '.' || c.relname, c.relkind = 'p', c.relfilenode::int8,
        {STAMP.format(table="c.oid")}
    FROM pg_publication_rel pr JOIN pg_publication p ON p.oid = pr.prpubid AND p.pubname = ANY (%s)
    JOIN pg_class c ON c.oid = pr.prrelid JOIN pg_namespace n ON n.oid = c.relnamespace"""

_PARTS = f"""
    SELECT root::int8, leaf.oid::int8, n.nspname || '.' || leaf.relname, leaf.relfilenode::int8,
        {STAMP.format(table="leaf.oid")},
        {JOINED.format(leaf="leaf.oid")},
        leaf.xmin::text::int8
    FROM unnest(%s::int8[]::oid[]) root CROSS JOIN LATERAL pg_partition_tree(root) tree
    JOIN pg_class leaf ON leaf.oid = tree.relid JOIN pg_namespace n ON n.oid = leaf.relnamespace
    WHERE tree.isleaf AND leaf.relkind = 'r' AND leaf.relpersistence = 'p'"""

# As `catalog.select` chooses tables, which describes them too: that is more than a look each minute needs.
_NAMED = """
    WITH named AS (
        SELECT c.oid, n.nspname, c.relname, c.relispartition
        FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
        WHERE c.relkind IN ('r', 'p') AND c.relpersistence = 'p'
        AND n.nspname !~ '^pg_' AND n.nspname <> 'information_schema'
        AND EXISTS (SELECT FROM unnest(%s::text[], %s::text[]) p(s, t) WHERE n.nspname LIKE p.s AND c.relname LIKE p.t))
    SELECT oid::int8, nspname || '.' || relname FROM named
    WHERE NOT (relispartition AND EXISTS (SELECT FROM pg_partition_ancestors(named.oid) above
        JOIN named root ON root.oid = above::oid AND root.oid <> named.oid))"""

# Made as a partition of what was where it is before: then all of its rows are in the log. Each column of a table that
# is attached is written down anew; one of a table that was made as a partition may be as it was made, like `tableoid`.
_FILLED = """
    SELECT leaf.oid::int8 FROM unnest(%s::int8[]::oid[]) leaf(oid)
    JOIN pg_attribute made ON made.attrelid = leaf.oid AND made.attname = 'tableoid'
    WHERE pg_relation_size(leaf.oid) > 0 AND NOT (
        EXISTS (SELECT FROM pg_attribute a WHERE a.attrelid = leaf.oid AND a.attnum > 0 AND NOT a.attisdropped
            AND a.xmin = made.xmin AND a.cmin = made.cmin)
        AND NOT EXISTS (SELECT FROM pg_partition_ancestors(leaf.oid) above
            JOIN pg_inherits i ON i.inhrelid = above::oid AND i.inhrelid <> leaf.oid
            WHERE age(i.xmin) <= age(made.xmin)))"""


def read(conn: Connection, publications: Sequence[str], patterns: Sequence[str]) -> Json:
    """What is there now."""
    with translated("looking at the catalog"):
        # First: whatever of it is not to be seen in this snapshot may be to be seen in the catalog all the same.
        snapshot = conn.execute("SELECT pg_current_snapshot()::text").fetchone()
        tables: dict[str, Json] = {
            str(oid): {"name": name, "file": file, "stamp": stamp, "parts": {} if partitioned else None}
            for oid, name, partitioned, file, stamp in conn.execute(_TABLES.encode(), (list(publications),)).fetchall()
        }
        roots = [int(oid) for oid, one in tables.items() if one["parts"] is not None]
        for root, leaf, *facts in conn.execute(_PARTS.encode(), (roots,)).fetchall() if roots else ():
            tables[str(root)]["parts"][str(leaf)] = facts
        wanted = parse_patterns(patterns)
        chosen = [one.schema for one in wanted], [one.name for one in wanted]
        named = conn.execute(_NAMED.encode(), chosen).fetchall()
    others = {str(oid): name for oid, name in named if str(oid) not in tables}
    state = {"tables": tables, "others": others, "patterns": list(patterns)}
    return {**state, "snapshot": snapshot[0] if snapshot else None}


def compare(
    conn: Connection, before: Json, now: Json, truncated: Collection[tuple[int, int]] = frozenset()
) -> list[Found]:
    """What has happened between two looks. `truncated`: (table, transaction) of the truncates that the log has told."""
    was, are = _parts_of(before), _parts_of(now)
    there = _existing(conn, [int(oid) for oid in before["tables"] if oid not in now["tables"]])
    there |= _existing(conn, [leaf for table, leaf in was - are])
    full = filled(conn, [leaf for table, leaf in are - was])
    found = list(_created(before, now))
    for oid, one in before["tables"].items():
        same = now["tables"].get(oid)
        if same is None:
            # One that still exists was taken out of the publication, which halts capture.
            found += [] if int(oid) in there else [Found(Kind.DROP_TABLE, one["name"], int(oid))]
        elif one["parts"] is None or same["parts"] is None:
            if _rewritten(one, same):
                found.append(Found(Kind.REWRITE, same["name"], int(oid), copies=True))
        else:
            found += _parts(int(oid), one["parts"], same, there, full, truncated)
    return found


def doubts(now: Json, tables: Collection[int]) -> list[Found]:
    """Tables of which the catalog could not tell what they were when they were altered; not those that are gone."""
    known = now["tables"]
    return [Found(Kind.MAYBE_ALTER, known[str(oid)]["name"], oid, copies=True) for oid in tables if str(oid) in known]


def _created(before: Json, now: Json) -> Iterator[Found]:
    """Tables that the same patterns did not name before: they have rows that no change has brought."""
    if before["patterns"] != now["patterns"]:
        return  # somebody has asked for them, and says himself whether their rows are wanted
    known = {*before["tables"], *before["others"]}
    named = {**now["others"], **{oid: one["name"] for oid, one in now["tables"].items()}}
    for oid, name in named.items():
        if oid not in known:
            yield Found(Kind.CREATE_TABLE, name, int(oid), copies=True)


def _parts(
    table: int,
    before: Json,
    now: Json,
    there: Collection[int],
    full: Collection[int],
    truncated: Collection[tuple[int, int]],
) -> Iterator[Found]:
    """What has happened to the partitions of a table."""
    name, rewritten = now["name"], False
    for leaf, facts in before.items():
        if leaf not in now["parts"]:
            kind = Kind.PARTITION_DETACHED if int(leaf) in there else Kind.PARTITION_DROPPED
            yield Found(kind, name, table, facts[0], copies=True)
    for leaf, (part, file, stamp, joined, xid) in now["parts"].items():
        if leaf not in before:
            yield Found(Kind.PARTITION_ATTACHED, name, table, part, copies=int(leaf) in full)
            continue
        _, file_before, stamp_before, joined_before, _ = before[leaf]
        if joined != joined_before:
            # It was away in between: what was written to it then is in no log.
            yield Found(Kind.PARTITION_ATTACHED, name, table, part, copies=True)
        elif file_before in (file, None):
            continue
        elif stamp != stamp_before:
            rewritten = True
        elif (table, xid) not in truncated:
            yield Found(Kind.PARTITION_TRUNCATED, name, table, part, copies=True)
    if rewritten:
        yield Found(Kind.REWRITE, name, table, copies=True)


def _rewritten(before: Json, now: Json) -> bool:
    """Truncating a table, which the log tells, and VACUUM FULL leave the columns alone."""
    return bool(before["file"] not in (now["file"], None) and before["stamp"] != now["stamp"])


def _parts_of(state: Json) -> set[tuple[int, int]]:
    """All partitions: the table's number, and the partition's."""
    return {(int(table), int(leaf)) for table, one in state["tables"].items() for leaf in one["parts"] or ()}


def _existing(conn: Connection, oids: Sequence[int]) -> set[int]:
    if not oids:
        return set()
    with translated("looking for dropped tables"):
        rows = conn.execute(
            "SELECT oid::int8 FROM pg_class WHERE oid = ANY (%s::int8[]::oid[])", (list(oids),)
        ).fetchall()
    return {oid for (oid,) in rows}


def filled(conn: Connection, leaves: Sequence[int]) -> set[int]:
    """Those of these partitions that may have had rows before they came."""
    if not leaves:
        return set()
    with translated("looking at partitions"):
        rows = conn.execute(_FILLED.encode(), (list(leaves),)).fetchall()
    return {oid for (oid,) in rows}
