"""One transaction of millions of rows, from the source to every kind of lake: exact, and small in every process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pyarrow.compute as pc
import pyarrow.dataset as ds
import pytest
from deltalake import DeltaTable

from tests.fixtures.memory import watched
from tests.fixtures.postgres import Database
from tests.integration.test_capture_large import copy

ROWS = int(os.environ.get("MILLSTREAM_LARGE_ROWS", "0"))

pytestmark = [
    pytest.mark.postgres,
    pytest.mark.spark,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(ROWS == 0, reason="takes minutes, and gigabytes of disk: `make large` runs it"),
]

LIMITS_KB = {"capture": 350_000, "python": 1_100_000, "java": 1_000_000}
"""With the pages of files that a process has mapped. Five million rows were seen to take 298 MB, 877 MB (the worker
that writes Delta tables: about as much as for two million) and 416 MB."""

STREAM = """
name: shop
source:
  {{kind: postgres, uri: "{uri}", tables: [public.t], slot: {slot}, protocol: {protocol}, catch_up: {catch_up}}}
mode: cdc
targets:
  - {{name: log, kind: files, path: "{root}/log"}}
  - {{name: lake, kind: delta, path: "{root}/lake"}}
  - {{name: past, kind: delta, path: "{root}/past", write: scd2}}
"""


def run(file: Path, home: Path) -> dict[str, int]:
    command = [sys.executable, "-m", "millstream", "run", str(file), "--home", str(home), "--once"]
    with subprocess.Popen(command) as process, watched(process.pid) as watch:
        assert process.wait() == 0
    return watch.most(LIMITS_KB)


@pytest.mark.parametrize(("protocol", "catch_up"), [(1, "auto"), (4, "streaming")])
def test_a_transaction_of_millions_of_rows_is_exact_and_takes_little_memory(
    database: Database, tmp_path: Path, protocol: int, catch_up: str
) -> None:
    database.sql("CREATE TABLE t (id int PRIMARY KEY, v text)")
    file = tmp_path / "shop.yaml"
    said = {"uri": database.uri, "slot": database.name, "root": tmp_path, "protocol": protocol, "catch_up": catch_up}
    file.write_text(STREAM.format(**said))
    run(file, tmp_path / "home")
    copy(database, ROWS)
    most = run(file, tmp_path / "home")
    sys.stderr.write(f"\nprotocol {protocol}: {most}\n")
    total = ROWS * (ROWS - 1) // 2
    log = ds.dataset([str(path) for path in (tmp_path / "log").rglob("*.parquet")])
    changes = log.to_table(columns=["id", "_ms_tx_index", "_ms_position"])
    assert changes.num_rows == ROWS
    assert pc.count_distinct(changes["id"]).as_py() == ROWS
    assert pc.all(pc.equal(changes["id"], changes["_ms_tx_index"])).as_py()
    assert pc.count_distinct(changes["_ms_position"]).as_py() == 1
    for name in ("lake", "past"):
        rows = DeltaTable(str(tmp_path / name / "public.t")).to_pyarrow_dataset().to_table(columns=["id", "v"])
        assert (rows.num_rows, pc.sum(rows["id"]).as_py()) == (ROWS, total)
        assert pc.count_distinct(rows["id"]).as_py() == ROWS
        assert pc.count_distinct(rows["v"]).as_py() == 1
    assert {kind: kb for kind, kb in most.items() if kb > LIMITS_KB[kind]} == {}
