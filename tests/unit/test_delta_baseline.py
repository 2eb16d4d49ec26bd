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
from millstream.targets.base import Lane, LaneBatch, Part, Target, TargetContext
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


def opened(path: Path, write: str, run: int) -> Target:
    spec = TargetSpec("lake", "delta", BatchLimits(1, 1, 1), options={"path": str(path), "write": write})
    target = open_target(spec)
    target.open(replace(CONTEXT, epoch=run, run_id=f"run-{run}"))
    return target


def baseline(path: Path, write: str, run: int, orders: Sequence[int], items: Sequence[int]) -> None:
    lane = opened(path, write, run).stager()
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


def test_a_baseline_that_never_came_to_its_end_is_gone_when_the_stream_goes_on_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(OwnDirectory, "write_commit", die)
        with pytest.raises(Killed):
            baseline(tmp_path, "mirror", 1, [1, 2], [5])
    target = opened(tmp_path, "mirror", 2)
    target.recover(target.cursor())
    lane = target.stager()
    assert isinstance(lane, Lane)

    def change(id: int) -> Part:
        rows = journal_rows([insert(str(id), "x", oid=ORDERS.oid)], seq=pa.array([8]))
        return Part(ORDERS, 1, iter([assemble(rows, ORDERS, 1, "aaaa")]))

    lane.deliver(LaneBatch(SeqRange(7, 8), 101, [change(9)], lambda: None))
    assert ids(tmp_path, "public.orders") == [9]
    assert ids(tmp_path, "public.items") == []
    # What was published stays, whatever its tables end with.
    target = opened(tmp_path, "mirror", 3)
    target.recover(target.cursor())
    assert ids(tmp_path, "public.orders") == [9]
