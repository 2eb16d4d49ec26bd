"""Partitions that leave a captured table, or come to it: rows that go and come without a word in the log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from millstream.observe import Event, Level
from millstream.sources.postgres.connection import Connection, translated

Leaves = Mapping[str, Mapping[int, str]]
"""By partitioned table its partitions, by number, with their names."""

_LEAVES = """
    SELECT n.nspname || '.' || c.relname, leaf.oid::int8, ln.nspname || '.' || leaf.relname
    FROM pg_publication_rel pr
    JOIN pg_publication p ON p.oid = pr.prpubid AND p.pubname = ANY (%s)
    JOIN pg_class c ON c.oid = pr.prrelid AND c.relkind = 'p' JOIN pg_namespace n ON n.oid = c.relnamespace
    LEFT JOIN LATERAL pg_partition_tree(c.oid) tree ON tree.isleaf AND tree.relid <> c.oid
    LEFT JOIN pg_class leaf ON leaf.oid = tree.relid LEFT JOIN pg_namespace ln ON ln.oid = leaf.relnamespace"""


def read_leaves(conn: Connection, publications: Sequence[str]) -> Leaves:
    """The partitions of all captured tables now."""
    with translated("looking at partitions"):
        rows = conn.execute(_LEAVES, (list(publications),)).fetchall()
    found: dict[str, dict[int, str]] = {}
    for table, oid, name in rows:
        known = found.setdefault(table, {})
        if oid is not None:
            known[oid] = name
    return found


def told(before: Leaves, now: Leaves) -> list[Event]:
    """What is different, for those who have to do something about it. Tables that came or went are no affair of it."""
    return [event for table in before if table in now for event in _of_table(table, before[table], now[table])]


def _of_table(table: str, before: Mapping[int, str], now: Mapping[int, str]) -> list[Event]:
    gone = sorted(name for oid, name in before.items() if oid not in now)
    come = sorted(name for oid, name in now.items() if oid not in before)
    events = []
    if gone:
        message = f"{', '.join(gone)} is no partition of {table} any more: targets still have its rows"
        fix = f"copy the table anew: millstream reload NAME --table {table}"
        fields = {"table": table, "partitions": gone, "fix": fix}
        events.append(Event("source.partition_gone", message, Level.WARNING, fields=fields))
    if come:
        message = f"{', '.join(come)} is a partition of {table} now: rows that it had before are not in targets"
        fix = f"if it had rows, copy the table anew: millstream reload NAME --table {table}"
        events.append(Event("source.partition_come", message, fields={"table": table, "partitions": come, "fix": fix}))
    return events
