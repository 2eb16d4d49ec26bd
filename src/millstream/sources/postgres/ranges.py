"""Tables cut by their keys, so that another snapshot can go on with the ranges that are left.

Places of rows (ctid) mean nothing in another snapshot: an update moves a row. A key does, if its order is the same for
ever: that of numbers, uuids, times and bytes is; of texts, only that of the collation "C" (the others change with the
server's libraries). A row whose key changes is in the log with both its keys.

Where the ranges begin is told by a sample of the table's pages, which costs a small part of reading it. Ranges of about
the same size are all that is needed, so it does not matter what the sample missed.

A plan holds for the very table that it was made for: the same columns, the same rows of it published, the same
partitions, each in the same file. Whatever rewrites a table gives it another file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from millstream.model import Json, Relation
from millstream.sources.base import Chunk
from millstream.sources.postgres.connection import Connection, literal
from millstream.sources.postgres.patterns import quote

SAMPLE_PAGES: Final = 16
"""So many pages are looked at for each range,"""
SAMPLE_PAGES_MOST: Final = 1 << 16
"""and so many for all of a table."""

_ORDERED: Final = frozenset({20, 21, 23, 26, 1700, 2950, 17, 1082, 1114, 1184})
"""int8, int2, int4, oid, numeric, uuid, bytea, date, timestamp, timestamptz"""
_TEXTS: Final = frozenset({25, 1042, 1043})
"""text, char(n), varchar"""

_COLLATIONS = """
    SELECT a.attname, CASE WHEN co.collname = 'default' AND {provider} THEN d.datcollate ELSE co.collname END
    FROM pg_attribute a JOIN pg_collation co ON co.oid = a.attcollation, pg_database d
    WHERE a.attrelid = %(oid)s::int8::oid AND a.attname = ANY (%(names)s) AND d.datname = current_database()"""


@dataclass(frozen=True)
class Leaf:
    """A table, or a partition, that has rows of its own, as the snapshot has it."""

    root: int
    name: str
    """As statements write it."""
    oid: int
    filenode: int
    size: int
    """With its long values."""
    pages: int
    rows: int
    """By the server's estimate."""
    block: int

    @classmethod
    def of(cls, row: Sequence[Any]) -> Leaf:
        root, schema, name, oid, filenode, main, size, rows, block = row
        return cls(root, quote(schema, name), oid, filenode, size, -(-main // block), rows, block)

    def parts(self, chunk_bytes: int) -> int:
        """Into how many chunks it is cut: by all of its bytes, of which its pages may be the smaller part."""
        return max(1, -(-self.size // chunk_bytes))


def cut_by_key(
    control: Connection,
    relation: Relation,
    leaves: Sequence[Leaf],
    condition: str | None,
    known: Json | None,
    chunk_bytes: int,
) -> Json | None:
    """How a table is cut by its key, `known` if that still holds; None if it has no fit key, or is one chunk.

    In a transaction of the snapshot that the ranges are for.
    """
    key = _key(relation)
    if not key or not _ordered(control, relation, key):
        return None
    about: Json = {"relation": relation.fingerprint(), "key": list(key), "condition": condition}
    files = [[leaf.oid, leaf.filenode] for leaf in leaves]
    if known is not None and known["about"] == about and [each[:2] for each in known["leaves"]] == files:
        return known
    if sum(leaf.parts(chunk_bytes) for leaf in leaves) < 2:
        return None
    bounds = [_bounds(control, leaf, key, leaf.parts(chunk_bytes)) for leaf in leaves]
    return {"about": about, "leaves": [[*file, found] for file, found in zip(files, bounds, strict=True)]}


def chunks_by_key(relation: Relation, leaves: Sequence[Leaf], plan: Json) -> Iterator[Chunk]:
    """The chunks of a table that is cut by its key."""
    for leaf, (_, _, bounds) in zip(leaves, plan["leaves"], strict=True):
        about = whole(leaf.name, leaf.oid, leaf.filenode, plan["about"]["condition"])
        if not bounds:
            yield Chunk(relation, about, leaf.size)
            continue
        for low, high in zip([None, *bounds], [*bounds, None], strict=True):
            part = {"key": plan["about"]["key"], "from": low, "to": high}
            yield Chunk(relation, {**about, **part}, leaf.size // (len(bounds) + 1))


def whole(leaf: str, oid: int, filenode: int | None, condition: str | None) -> Json:
    """What a chunk is that has all rows of a table."""
    return {"leaf": leaf, "oid": oid, "filenode": filenode, "begin": 0, "end": None, "condition": condition}


def range_conditions(what: Mapping[str, Any]) -> list[str]:
    """The conditions that a range's rows meet; none for a chunk that is no range."""
    if "key" not in what:
        return []
    names = ", ".join(quote(name) for name in what["key"])
    ends = ((">=", what["from"]), ("<", what["to"]))
    return [f"({names}) {sign} ({', '.join(map(literal, end))})" for sign, end in ends if end is not None]


def _key(relation: Relation) -> tuple[str, ...]:
    return relation.primary_key or (relation.key if relation.identity == "i" else ())


def _ordered(control: Connection, relation: Relation, key: Sequence[str]) -> bool:
    types = {column.name: column.base_type_oid or column.type_oid for column in relation.columns}
    if any(types.get(name) not in _ORDERED | _TEXTS for name in key):
        return False
    texts = [name for name in key if types[name] in _TEXTS]
    if texts and relation.encoding != "UTF8":
        return False  # any bytes, which a plan cannot hold
    provider = "d.datlocprovider = 'c'" if control.info.server_version >= 150000 else "true"
    asked = {"oid": relation.oid, "names": texts}
    rows = control.execute(_COLLATIONS.format(provider=provider).encode(), asked).fetchall() if texts else []
    return {name for name, collation in rows if collation in ("C", "POSIX")} == set(texts)


def _bounds(control: Connection, leaf: Leaf, key: Sequence[str], parts: int) -> list[list[str]]:
    """The keys at which ranges begin, but the first."""
    if parts < 2 or not leaf.pages:
        return []
    names = ", ".join(quote(name) for name in key)
    texts = ", ".join(f"format('%s', {quote(name)})" for name in key)
    percent = min(100.0, 100.0 * min(SAMPLE_PAGES * parts, SAMPLE_PAGES_MOST) / leaf.pages)
    sample = (
        f"SELECT {names}, row_number() OVER (ORDER BY {names}) AS _ms_n, count(*) OVER () AS _ms_all "
        f"FROM ONLY {leaf.name} TABLESAMPLE SYSTEM ({percent:.6f}) REPEATABLE (1)"
    )
    # The row after each part of the sample, but the last.
    begins = f"_ms_n > 1 AND (_ms_n - 1) * {parts} / _ms_all > (_ms_n - 2) * {parts} / _ms_all"
    found = control.execute(f"SELECT {texts} FROM ({sample}) s WHERE {begins} ORDER BY _ms_n".encode()).fetchall()
    return [list(row) for row in found]
