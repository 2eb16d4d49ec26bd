"""Proof that a delivered changelog and its source are equal, with the database as the judge.

The folded rows are loaded into a temporary table that is made like the source's own, and Postgres
compares the two as multisets of its own row texts: no value passes through a comparison of ours.
Beside the rows, the changelog itself is checked: no gap, no duplicate, transactions whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from psycopg import sql

from millstream.engine.home import Home
from millstream.fold import fold
from millstream.journal import JournalReader
from millstream.model import Relation


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


def prove_locally(uri: str, home: Home, stream: str, path: Path) -> tuple[LogProof, list[TableProof]]:
    """Prove the changelog below `path`, in this process."""
    directories = sorted(entry for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith("_"))
    log = check_log([changes for directory in directories for changes in read_changes(directory)])
    relations = latest_relations(home, stream)
    proofs = []
    with psycopg.connect(uri, autocommit=True) as connection:
        for table in _published(connection):
            directory = path / table
            if table in relations and directory in directories:
                relation = relations[table]
                columns = [column.name for column in relation.columns]
                rows = plain_rows(fold(read_changes(directory), relation.key), columns)
                changes = sum(part.num_rows for part in read_changes(directory))
                proofs.append(compare_table(connection, table, columns, rows, changes))
            else:
                source_rows = _count(connection, table)
                proofs.append(TableProof(table, 0, source_rows, 0, missing=source_rows, extra=0))
    return log, proofs


def read_changes(directory: Path) -> list[pa.Table]:
    """Every Parquet file of one table. `ParquetFile` and not the directory: schemas may differ."""
    return [pq.ParquetFile(file).read() for file in sorted(directory.glob("*.parquet"))]


def latest_relations(home: Home, stream: str) -> dict[str, Relation]:
    """The newest description of each table that the journal knows."""
    reader = JournalReader([str(home.journal_path(stream))])
    return {relation.table: relation for _, relation in sorted(reader.relations().items())}


def check_log(parts: Sequence[pa.Table]) -> LogProof:
    """Look at all changes of all tables at once: seqs, event ids, transactions."""
    names = ["_ms_seq", "_ms_event_id", "_ms_position", "_ms_tx_index"]
    if not parts:
        return LogProof(0, 0, 0, 0, 0, 0, 0)
    log = pa.concat_tables([part.select(names) for part in parts])
    counts = log.group_by("_ms_position").aggregate([("_ms_tx_index", "count"), ("_ms_tx_index", "max")])
    whole = pc.equal(counts["_ms_tx_index_count"], pc.add(counts["_ms_tx_index_max"], 1))
    seqs = pc.min_max(log["_ms_seq"]).as_py()
    return LogProof(
        changes=log.num_rows,
        first_seq=seqs["min"],
        last_seq=seqs["max"],
        distinct_seqs=pc.count_distinct(log["_ms_seq"]).as_py(),
        distinct_events=pc.count_distinct(log["_ms_event_id"]).as_py(),
        transactions=counts.num_rows,
        broken_transactions=counts.num_rows - pc.sum(whole).as_py(),
    )


def _count(connection: psycopg.Connection, table: str) -> int:
    name = sql.SQL(".").join(map(sql.Identifier, table.split(".", 1)))
    row = connection.execute(sql.SQL("SELECT count(*) FROM {}").format(name)).fetchone()
    return int(row[0]) if row else 0


def _published(connection: psycopg.Connection) -> list[str]:
    """Every table of the shop, whether or not anything was delivered for it."""
    found = connection.execute("SELECT schemaname || '.' || tablename FROM pg_tables WHERE schemaname = 'public'")
    return sorted(name for (name,) in found.fetchall())
