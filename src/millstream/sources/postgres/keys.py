"""Single rows of a table, read once more: what an update left out is in them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing

import pyarrow as pa

from millstream.errors import SourceHalted, SourceUnavailable
from millstream.model import Relation, SourceSpec
from millstream.sources.base import KeyRows
from millstream.sources.postgres.connection import connect_session, literal
from millstream.sources.postgres.copied import select_list
from millstream.sources.postgres.copying import copied
from millstream.sources.postgres.options import PostgresOptions
from millstream.sources.postgres.patterns import quote
from millstream.sources.postgres.session import Refused, Session
from millstream.sources.postgres.waiting import awaited

SEEN_SECONDS = 10.0
"""So long it is waited for a transaction that is in the log, and not seen yet."""

_XIDS = 1 << 32


def read_keys(
    spec: SourceSpec, relation: Relation, names: Sequence[str], keys: Sequence[Sequence[str]], txids: Sequence[int]
) -> KeyRows:
    """The rows that have these keys (columns `names`, values as text) now, as the relation's decoder takes them.

    Raises SourceError when the source cannot be asked, or the table is not as the relation describes it any more.
    """
    table = quote(relation.schema, relation.name)
    columns = ", ".join(quote(name) for name in names)
    wanted = ", ".join(f"({', '.join(literal(value) for value in key)})" for key in keys)
    # Rows of tables that inherit from it are theirs; those of its partitions are its own.
    own = (
        f"tableoid = {literal(table)}::regclass "
        f"OR EXISTS (SELECT FROM pg_partitioned_table WHERE partrelid = {literal(table)}::regclass)"
    )
    rest = f"FROM {table} WHERE ({columns}) IN ({wanted}) AND ({own}) ORDER BY {columns}"
    with closing(Session(connect_session(spec, PostgresOptions.of(spec)))) as session:
        try:
            _begin(session, txids)
            rows = list(copied(session, f"COPY (SELECT {select_list(relation)} {rest}) TO STDOUT (FORMAT binary)"))
            writers = awaited(session.run(f"SELECT xmin {rest}"))
            ((until,),) = awaited(session.run("SELECT (pg_current_wal_insert_lsn() - '0/0')::int8"))
        except Refused as refused:
            raise SourceHalted(f"reading rows of {relation.table}: {refused}") from None
    payload = pa.concat_arrays(rows) if rows else pa.array([], pa.large_binary())
    return KeyRows(payload, [int(xmin or 0) for (xmin,) in writers], int(until or 0))


def _begin(session: Session, txids: Sequence[int]) -> None:
    """Begin a transaction that sees these.

    What is committed is in the log first, and seen a moment later: after a synchronous standby has it, if there is one.
    """
    deadline = time.monotonic() + SEEN_SECONDS
    while True:
        awaited(session.run("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"))
        ((snapshot,),) = awaited(session.run("SELECT pg_current_snapshot()"))
        if all(_sees(snapshot or "", txid) for txid in txids):
            return
        awaited(session.run("ROLLBACK"))
        if time.monotonic() > deadline:
            raise SourceUnavailable("a transaction that is in the source's log is not to be seen there")
        awaited(session.run("SELECT pg_sleep(0.05)"))


def _sees(snapshot: str, txid: int) -> bool:
    """Whether a transaction, of which 32 bits are known and that it has ended, counts as ended in a snapshot."""
    _, first_unseen, running = snapshot.split(":")
    if (txid - int(first_unseen)) % _XIDS < _XIDS >> 1:
        return False
    return txid % _XIDS not in {int(xid) % _XIDS for xid in running.split(",") if xid}
