"""A stream that comes back while a paused target makes the server keep a lot of log: new rows must not wait for it.

`make reconnect` runs it with 5 GB (MILLSTREAM_WAL_GB).
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psycopg
import pytest

from millstream.bench.rig import await_true
from millstream.embedded import EmbeddedPostgres
from millstream.engine.capture_order import CaptureOrder
from millstream.engine.supervisor import Supervisor
from millstream.journal import JournalReader
from millstream.model import OnLimit, SourceSpec
from millstream.observe import Observers

GIGABYTES = float(os.environ.get("MILLSTREAM_WAL_GB", "0"))
WITHIN = 60.0
"""Seconds from the start of capture to the first new row in the journal."""

pytestmark = [
    pytest.mark.postgres,
    pytest.mark.timeout(300 + 300 * GIGABYTES),
    pytest.mark.skipif(GIGABYTES == 0, reason="means something with gigabytes of log: `make reconnect` runs it"),
]

# Rows of 2 KB that do not compress: the log is large, and the number of changes is not.
ROWS = """INSERT INTO item (v) SELECT string_agg(md5(random()::text || k), '') FROM generate_series(1, 2000) g,
    generate_series(1, 60) k GROUP BY g"""


def seq(journal: Path) -> int:
    if not (journal / "head").exists():
        return -1
    head = JournalReader([str(journal)]).head()
    return head.seq if head else -1


def test_new_rows_come_soon_though_much_log_is_kept_for_a_paused_target(server_dir: Path, tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    with (
        EmbeddedPostgres(server_dir / "data", settings={"max_wal_size": "4GB"}) as server,
        psycopg.connect(server.uri(), autocommit=True) as connection,
    ):
        connection.execute("CREATE TABLE item (id bigserial PRIMARY KEY, v text)")
        connection.execute("ALTER TABLE item ALTER v SET STORAGE EXTERNAL")
        connection.execute("SET synchronous_commit = off")
        # Nothing is ever acknowledged, as while a target is paused.
        spec = SourceSpec("shop", "postgres", server.uri(), None, ("public.*",), options={"slot": "shop"})
        order = CaptureOrder(replace(spec, max_source_wal=1 << 40, on_limit=OnLimit.HOLD), journal)
        with capturing(order):
            await_true(lambda: seq(journal) >= 0, "the journal is there", seconds=60)
            rows = write_log(connection, int(GIGABYTES * 1e9))
            await_true(lambda: seq(journal) >= rows, "capture has all of it", every=0.1)
        for _ in range(2):
            assert kept(connection) >= GIGABYTES * 1e9
            connection.execute("INSERT INTO item (v) VALUES ('new')")
            rows += 1
            began = time.monotonic()
            with capturing(order):
                await_true(lambda goal=rows: seq(journal) >= goal, "a new row", seconds=5 * WITHIN)  # type: ignore[misc]
                took = time.monotonic() - began
            print(f"{GIGABYTES:g} GB of log kept: the first new row came after {took:.1f} s")
            assert took < WITHIN


@contextmanager
def capturing(order: CaptureOrder) -> Iterator[None]:
    capture = Supervisor(order, Observers())
    capture.start()
    try:
        yield
    finally:
        capture.stop()


def write_log(connection: psycopg.Connection, size: int) -> int:
    """So many bytes of log; returns the number of rows."""
    rows, before = 0, kept(connection)
    while kept(connection) - before < size:
        connection.execute(ROWS.encode())
        rows += 2000
    return rows


def kept(connection: psycopg.Connection) -> int:
    """Bytes of log that the server keeps for the slot."""
    row = connection.execute(
        "SELECT (pg_current_wal_insert_lsn() - restart_lsn)::int8 FROM pg_replication_slots WHERE slot_name = 'shop'"
    ).fetchone()
    assert row is not None
    return int(row[0])
