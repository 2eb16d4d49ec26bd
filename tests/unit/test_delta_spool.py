"""What a Delta target keeps of a batch before it commits: on disk, and not in memory as well."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from millstream.changelog import assemble
from millstream.model import SeqRange
from millstream.targets.base import LaneBatch, Part
from millstream.targets.deltas.spool import spool
from millstream.targets.lanes import runs
from tests.fixtures.tuples import insert, journal_rows, relation

RUNS, ROWS = 30, 100
TEXT = "x" * 10_000


def test_a_batch_takes_no_more_memory_than_a_run_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "RUN_ROWS", ROWS)
    orders = relation(("id", 23), ("note", 25), key=["id"])

    def batches() -> Iterator[pa.RecordBatch]:
        for number in range(RUNS):
            first = number * ROWS + 1
            changes = [insert(str(first + row), TEXT) for row in range(ROWS)]
            yield assemble(journal_rows(changes, first), orders, 1, "aaaa")

    before = pa.total_allocated_bytes()
    batch = LaneBatch(SeqRange(0, RUNS * ROWS), 1, [Part(orders, 1, batches())], lambda: None)
    (spooled,) = spool(batch, tmp_path, messages=False)
    assert len(spooled.runs) == RUNS
    assert pa.total_allocated_bytes() - before < 3 * ROWS * len(TEXT)
    found = [read().changes for read in spooled.runs]
    assert [row for run in found for row in run["_ms_seq"].to_pylist()] == list(range(1, RUNS * ROWS + 1))
    assert {text for run in found for text in run["note"].unique().to_pylist()} == {TEXT}
