"""Whether what arrived is what the source has: by the server's own digests, and by folding the changelog."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from io import BytesIO
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq

from millstream.bench.mix import TABLES
from millstream.bench.recvlogical import EPOCH_2000_US
from millstream.bench.rig import Backlog, Connection
from millstream.demo.proof import check_log
from millstream.fold import Inconsistent, fold
from millstream.journal import JournalReader, open_slice
from millstream.model import SeqRange

STEP = 50_000


def journal_equals(journal: Path, backlog: Backlog) -> bool:
    """Every row message, in order, byte for byte, and every transaction's position, time and id."""
    rows, transactions, count = hashlib.sha256(), hashlib.sha256(), 0
    for batch in _in_order(journal, SeqRange(backlog.warm, backlog.goal)):
        count += batch.num_rows
        rows.update(_bytes(batch.column("payload")))
        transactions.update(_begins(batch))
    reference = backlog.reference
    return (count, rows.hexdigest(), transactions.hexdigest()) == (
        reference.changes,
        reference.rows,
        reference.transactions,
    )


def changelog_equals(directory: Path, connection: Connection, changes: int) -> bool:
    """Every change once, dense and in whole transactions; and folded, every row of every table as it is now."""
    parts = {table: _read(directory / table) for table in TABLES}
    log = check_log([part for tables in parts.values() for part in tables])
    if not log.exact or log.changes != changes:
        return False
    try:
        return all(_table_equals(connection, table, tables) for table, tables in parts.items())
    except Inconsistent:
        return False


def lake_equals(directory: Path, connection: Connection, tables: Sequence[str] = TABLES) -> bool:
    """Whether Delta mirrors have the rows that the tables have now, value by value."""
    from deltalake import DeltaTable

    for table in tables:
        found = DeltaTable(str(directory / table)).to_pyarrow_table()
        found = found.select([name for name in found.column_names if not name.startswith("_ms_")])
        expected = source_rows(connection, table, found.schema)
        if not found.sort_by("id").combine_chunks().equals(expected.combine_chunks()):
            return False
    return True


def copies_equal(source: Connection, copy: Connection, tables: Sequence[str] = TABLES) -> bool:
    """Whether tables of two databases have the same rows, by the servers' own text of all of the source's columns."""
    return all(
        _digest(source, table, names) == _digest(copy, table, names) for table, names in _columns(source, tables)
    )


def _columns(connection: Connection, tables: Sequence[str]) -> Iterator[tuple[str, str]]:
    for table in tables:
        row = connection.execute(
            "SELECT string_agg(quote_ident(attname), ', ' ORDER BY attnum) FROM pg_attribute "
            "WHERE attrelid = to_regclass(%s) AND attnum > 0 AND NOT attisdropped",
            (table,),
        ).fetchone()
        assert row is not None  # noqa: S101 - an aggregate has a row
        yield table, row[0]


def _digest(connection: Connection, table: str, names: str) -> str:
    """SHA-256 of a table's rows in order of their key; of nothing, if there is no such table."""
    found = hashlib.sha256()
    with connection.cursor() as cursor:
        cursor.execute("SET TimeZone = 'UTC'")
        if cursor.execute("SELECT to_regclass(%s) IS NOT NULL", (table,)).fetchone() != (True,):
            return ""
        with cursor.copy(f"COPY (SELECT {names} FROM {table} ORDER BY id) TO STDOUT".encode()) as copy:
            for block in copy:
                found.update(block)
    return found.hexdigest()


def _in_order(journal: Path, backlog: SeqRange) -> Iterator[pa.RecordBatch]:
    """The rows of the backlog by seq, some at a time. Nothing when the journal does not end where it should."""
    locations = [str(journal)]
    reader = JournalReader(locations)
    head = reader.head()
    if head is None or head.seq != backlog.end:
        return
    for start in range(backlog.start, backlog.end, STEP):
        span = SeqRange(start, min(start + STEP, backlog.end))
        batch = pa.concat_batches([open_slice(piece, locations, span) for piece in reader.slices(span)])
        yield batch.take(pc.sort_indices(batch.column("seq")))


def _bytes(payload: pa.LargeBinaryArray) -> memoryview:
    """All values one after another, as they lie in memory."""
    offsets = np.frombuffer(payload.buffers()[1], np.int64, len(payload) + 1, payload.offset * 8)
    return memoryview(payload.buffers()[2])[int(offsets[0]) : int(offsets[-1])]


def _begins(batch: pa.RecordBatch) -> bytes:
    """The Begin messages of the transactions that start in this batch, without their tag."""
    first = batch.filter(pc.equal(batch.column("tx_index"), 0))
    begins = np.empty(first.num_rows, np.dtype([("position", ">i8"), ("time", ">i8"), ("id", ">i4")]))
    begins["position"] = first.column("commit_position").to_numpy()
    begins["time"] = first.column("commit_ts").cast(pa.int64()).to_numpy() - EPOCH_2000_US
    begins["id"] = first.column("txid").to_numpy()
    return begins.tobytes()


def _read(directory: Path) -> list[pa.Table]:
    return [pq.ParquetFile(file).read() for file in sorted(directory.glob("*.parquet"))]


def _table_equals(connection: Connection, table: str, changes: list[pa.Table]) -> bool:
    if not changes:
        return False
    folded = fold(changes, ("id",))
    expected = source_rows(connection, table, folded.schema.remove(folded.schema.get_field_index("_ms_special")))
    found = folded.select(expected.column_names).sort_by("id").combine_chunks()
    return bool(found.equals(expected.combine_chunks()))


def source_rows(connection: Connection, table: str, schema: pa.Schema) -> pa.Table:
    """The table as it is now, read through Postgres's own text, in the types that were delivered."""
    text = BytesIO()
    with connection.cursor() as cursor:
        cursor.execute("SET TimeZone = 'UTC'")
        names = ", ".join(
            f"to_char({f.name}, 'YYYY-MM-DD HH24:MI:SS.US')" if pa.types.is_timestamp(f.type) else f.name
            for f in schema
        )
        with cursor.copy(f"COPY (SELECT {names} FROM {table} ORDER BY id) TO STDOUT (FORMAT csv)".encode()) as copy:
            for block in copy:
                text.write(block)
    plain = pa.schema([f.with_type(pa.timestamp("us")) if pa.types.is_timestamp(f.type) else f for f in schema])
    text.seek(0)
    read = pyarrow.csv.read_csv(
        text,
        read_options=pyarrow.csv.ReadOptions(column_names=plain.names),
        convert_options=pyarrow.csv.ConvertOptions(
            column_types=plain, strings_can_be_null=True, true_values=["t"], false_values=["f"]
        ),
    )
    return read.cast(schema)
