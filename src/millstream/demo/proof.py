"""Proof that a delivered changelog and its source are equal, with the database as the judge.

The folded rows are loaded into a temporary table that is made like the source's own, and Postgres
compares the two as multisets of its own row texts: no value passes through a comparison of ours.
Beside the rows, the changelog itself is checked: no gap, no duplicate, transactions whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
import pyarrow as pa
from psycopg import sql


@dataclass(frozen=True)
class TableProof:
    """One table: how many rows each side has, and how many stand on one side only."""

    table: str
    changes: int
    source_rows: int
    folded_rows: int
    missing: int
    extra: int

    @property
    def equal(self) -> bool:
        return self.missing == 0 and self.extra == 0 and self.source_rows == self.folded_rows


@dataclass(frozen=True)
class LogProof:
    """The changelog as a whole: its seqs, event ids and transactions."""

    changes: int
    first_seq: int
    last_seq: int
    distinct_seqs: int
    distinct_events: int
    transactions: int
    broken_transactions: int

    @property
    def exact(self) -> bool:
        dense = self.changes == 0 or self.last_seq - self.first_seq + 1 == self.changes
        unique = self.distinct_seqs == self.changes and self.distinct_events == self.changes
        return dense and unique and self.broken_transactions == 0


def compare_table(
    connection: psycopg.Connection, table: str, columns: Sequence[str], rows: Iterable[Mapping[str, Any]], changes: int
) -> TableProof:
    """Load `rows` beside `table` and let Postgres count what differs. Leaves nothing behind."""
    source = sql.SQL(".").join(map(sql.Identifier, table.split(".", 1)))
    names = sql.SQL(", ").join(map(sql.Identifier, columns))
    with connection.transaction(force_rollback=True), connection.cursor() as cursor:
        cursor.execute("SET LOCAL TimeZone = 'UTC'")
        cursor.execute(sql.SQL("CREATE TEMP TABLE folded AS SELECT {} FROM {} LIMIT 0").format(names, source))
        with cursor.copy(sql.SQL("COPY folded ({}) FROM STDIN").format(names)) as copy:
            for row in rows:
                copy.write_row([row[name] for name in columns])
        counts = []
        for left, right in ((source, sql.SQL("folded")), (sql.SQL("folded"), source)):
            cursor.execute(
                sql.SQL(
                    "SELECT (SELECT count(*) FROM {left}), count(*) FROM ("
                    "SELECT t::text FROM (SELECT {names} FROM {left}) t EXCEPT ALL "
                    "SELECT t::text FROM (SELECT {names} FROM {right}) t) difference"
                ).format(left=left, right=right, names=names)
            )
            counts.append(cursor.fetchone() or (0, 0))
    (source_rows, missing), (folded_rows, extra) = counts
    return TableProof(table, changes, source_rows, folded_rows, missing, extra)


def plain_rows(folded: pa.Table, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Rows as Postgres takes them: values without a home in their type come back as their text."""
    for row in folded.to_pylist():
        special = dict(row.get("_ms_special") or ())
        yield {name: special.get(name, row[name]) for name in columns}
