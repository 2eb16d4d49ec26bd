"""A disk that is full under one target: it waits, the others flow, and afterwards nothing is missing."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import duckdb
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from millstream import Engine, StreamState, TargetSpec, TargetStatus
from millstream.testing import Script
from tests.fixtures.delivery import hardly_wait
from tests.fixtures.disks import Disk, mounted
from tests.fixtures.engines import QUICK, await_that, delivered, stream

NOTE = "n" * 500
ROWS = 300
"""In a transaction."""

Rows = list[tuple[int, str]]


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    hardly_wait(monkeypatch)
    with mounted(tmp_path / "disk", "4m") as made:
        yield made


def in_sqlite(path: Path) -> Rows:
    with closing(sqlite3.connect(path)) as db:
        return db.execute('SELECT id, note FROM "public.orders" ORDER BY id').fetchall()


def in_duckdb(path: Path) -> Rows:
    with closing(duckdb.connect(str(path))) as db:
        return db.execute("SELECT id, note FROM public.orders ORDER BY id").fetchall()


def in_delta(path: Path) -> Rows:
    rows = DeltaTable(str(path / "public.orders")).to_pyarrow_table().sort_by("id")
    return list(zip(rows["id"].to_pylist(), rows["note"].to_pylist(), strict=True))


def in_files(path: Path) -> Rows:
    found: Rows = []
    for file in (path / "public.orders").glob("*.parquet"):
        rows = pq.read_table(file, partitioning=None)
        found += zip(rows["id"].to_pylist(), rows["note"].to_pylist(), strict=True)
    return sorted(found)


READERS = {"sqlite": in_sqlite, "duckdb": in_duckdb, "delta": in_delta, "files": in_files}


def test_a_full_disk_holds_up_nobody_else_and_is_waited_out(
    engine: Engine, script: Script, disk: Disk, tmp_path: Path
) -> None:
    made = stream(script, tmp_path, targets="log")
    copies = [TargetSpec(kind, kind, QUICK, options={"path": str(disk.path / kind)}) for kind in READERS]
    expected: Rows = []

    def trade(first: int) -> None:
        rows = [(first + n, f"{first + n} {NOTE}") for n in range(ROWS)]
        with script.transaction() as transaction:
            for id_, note in rows:
                transaction.insert("public.orders", id=id_, note=note)
        expected.extend(rows)
        await_that(lambda: delivered(tmp_path).get("public.orders") == expected)

    def on_disk() -> list[TargetStatus]:
        return [target for target in engine.get_status("shop").targets if target.name != "log"]

    engine.start()
    engine.upsert_stream(replace(made, targets=(*made.targets, *copies)))
    engine.await_ready("shop", 120)
    script.insert("public.orders", id=0, note="first")
    expected.append((0, "first"))
    await_that(lambda: all(target.events_replicated == 1 for target in on_disk()))
    disk.fill("ballast", leave=8 << 10)
    trade(1000)
    await_that(lambda: all(target.retrying for target in on_disk()))
    trade(2000)
    assert [target.error for target in on_disk()] == [None] * len(READERS)
    assert not {target.state for target in on_disk()} - {StreamState.RUNNING, StreamState.CATCHING_UP}
    (disk.path / "ballast").unlink()
    disk.resize("64m")
    await_that(lambda: all(target.events_replicated == len(expected) for target in on_disk()))
    engine.stop()
    assert {kind: read(disk.path / kind) == expected for kind, read in READERS.items()} == dict.fromkeys(READERS, True)
