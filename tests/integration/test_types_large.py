"""Values of many megabytes go all the way; what the server cannot send halts, with everything before it kept."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from millstream import changelog
from millstream.journal import JournalReader, rows
from millstream.model import SeqRange
from tests.fixtures.capture import Captured, captured
from tests.fixtures.postgres import Database

pytestmark = [pytest.mark.postgres, pytest.mark.timeout(600)]

MIB = 1 << 20

LARGE = bool(os.environ.get("MILLSTREAM_TYPE_LARGE"))
"""Whether to try what takes gigabytes of memory and minutes."""

only_large = pytest.mark.skipif(not LARGE, reason="takes gigabytes: MILLSTREAM_TYPE_LARGE=1")

SETUP = "CREATE TABLE t (id int PRIMARY KEY, v text, raw bytea, list int[])"


def changes(capture: Captured) -> Iterator[pa.RecordBatch]:
    """The changelog of the table, decoded as a delivery does it: a piece at a time."""
    reader = JournalReader([str(capture.journal)])
    head = reader.head()
    assert head is not None
    for batch in rows(reader, SeqRange(0, head.seq)):
        of_table = batch.filter(pc.greater(batch["relation"], 0))
        for piece in changelog.pieces(of_table):
            relation = piece["relation"][0].as_py()
            yield changelog.assemble(piece, reader.relation(relation), relation, "0123456789ab")


def through_parquet(capture: Captured, path: Path) -> Iterator[pa.Table]:
    for number, batch in enumerate(changes(capture)):
        file = path / f"{number}.parquet"
        pq.write_table(pa.Table.from_batches([batch]), file)
        yield pq.read_table(file)
        file.unlink()


@pytest.mark.parametrize("size", [72, pytest.param(300, marks=only_large), pytest.param(1000, marks=only_large)])
def test_a_large_value_arrives_whole(size: int, database: Database, tmp_path: Path) -> None:
    database.sql(SETUP)
    length = size * MIB
    with captured(database, tmp_path / "journal") as capture:
        capture.await_state("running")
        database.sql("INSERT INTO t VALUES (1, 'before')")
        database.sql(f"INSERT INTO t (id, v) VALUES (2, 'é' || repeat('x', {length - 2}))")
        database.sql("UPDATE t SET id = 3 WHERE id = 2")
        database.sql(f"INSERT INTO t (id, raw) VALUES (4, convert_to(repeat('y', {8 * MIB}), 'UTF8'))")
        database.sql("INSERT INTO t (id, list) SELECT 5, array_agg(n) FROM generate_series(1, 1000000) n")
        capture.await_log_end(300)
    found = [row for table in through_parquet(capture, tmp_path) for row in _rows(table)]
    assert [row["id"] for row in found] == [1, 2, 3, 4, 5]
    assert [found[0]["v"].as_py(), found[2]["v"].as_py(), found[3]["v"].as_py()] == ["before", None, None]
    assert found[1]["v"].as_buffer() == pa.py_buffer("é".encode() + b"x" * (length - 2))
    assert found[3]["raw"].as_buffer() == pa.py_buffer(b"y" * (8 * MIB))
    assert found[4]["list"].values.equals(pa.array(np.arange(1, 1_000_001, dtype=np.int32)))


def _rows(table: pa.Table) -> Iterator[dict[str, Any]]:
    for at in range(table.num_rows):
        yield {"id": table["id"][at].as_py(), **{name: table[name][at] for name in ("v", "raw", "list")}}


@only_large
def test_a_row_that_the_server_cannot_send_halts_and_says_so(database: Database, tmp_path: Path) -> None:
    database.sql(SETUP)
    with captured(database, tmp_path / "journal") as capture:
        capture.await_state("running")
        database.sql("INSERT INTO t VALUES (1, 'before')")
        database.sql(f"INSERT INTO t (id, raw) VALUES (2, convert_to(repeat('y', {600 * MIB}), 'UTF8'))")
        capture.await_state("halted", 300)
        (halted,) = [event for event in capture.events if event.kind == "capture.halted"]
        assert "larger than 1 GB" in halted.message
        assert "journal rebase" in halted.fields["hint"]
    assert [row["id"] for batch in changes(capture) for row in batch.select(["id"]).to_pylist()] == [1]
