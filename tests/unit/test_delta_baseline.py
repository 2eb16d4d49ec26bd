"""A baseline into Delta that is killed between its tables' commits: the next one is of another snapshot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from millstream.changelog import assemble
from millstream.model import BatchLimits, Relation, SeqRange, TargetSpec
from millstream.targets import open_target
from millstream.targets.base import Lane, LaneBatch, Part, TargetContext
from millstream.targets.directory import OwnDirectory
from tests.fixtures.journals import shop_table
from tests.fixtures.tuples import insert, journal_rows

ORDERS, ITEMS = shop_table("orders", 7001), shop_table("items", 7002)
CONTEXT = TargetContext("shop", "lake", "journal-a", "aaaa", 1, "run-1")


class Killed(Exception):
    pass


def part(relation: Relation, number: int, ids: Sequence[int]) -> Part:
    rows = journal_rows([insert(str(each), "x", oid=relation.oid) for each in ids], seq=pa.array([7] * len(ids)))
    return Part(relation, number, iter([assemble(rows, relation, number, "aaaa")] if ids else []))


def baseline(path: Path, write: str, run: int, orders: Sequence[int], items: Sequence[int]) -> None:
    spec = TargetSpec("lake", "delta", BatchLimits(1, 1, 1), options={"path": str(path), "write": write})
    target = open_target(spec)
    target.open(replace(CONTEXT, epoch=run, run_id=f"run-{run}"))
    lane = target.stager()
    assert isinstance(lane, Lane)
    parts = [part(ORDERS, 1, orders), part(ITEMS, 2, items)]
    lane.deliver(LaneBatch(SeqRange(7, 7), 100, parts, lambda: None))


def ids(path: Path, table: str) -> list[int]:
    return sorted(DeltaTable(str(path / table)).to_pyarrow_table()["id"].to_pylist())


@pytest.mark.parametrize("write", ["mirror", "changelog"])
def test_rows_of_the_snapshot_that_was_given_up_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: str
) -> None:
    def die(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(OwnDirectory, "write_commit", die)
        with pytest.raises(Killed):
            baseline(tmp_path, write, 1, [1, 2], [5])
    baseline(tmp_path, write, 2, [1, 3], [])
    assert ids(tmp_path, "public.orders") == [1, 3]
    assert ids(tmp_path, "public.items") == []
