"""How slices are shared out over tasks."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from millstream.journal.format import Slice
from millstream.spark.partition import TASK_BYTES, share_out

MIB = 1 << 20


def piece(relation: int, first: int, rows: int, length: int, offset: int | None = None) -> Slice:
    at = first * 1000 if offset is None else offset
    return Slice("j", 1, "00000001", at, length, 0, relation, rows, first, first + rows - 1)


def test_no_slices_are_no_tasks() -> None:
    assert share_out([], 8) == []


def test_a_small_batch_is_one_task_in_order_of_relation_and_seq() -> None:
    slices = [piece(2, 1, 10, 1000), piece(1, 11, 10, 1000), piece(2, 21, 10, 1000)]
    assert share_out(slices, 8) == [[slices[1], slices[0], slices[2]]]


def test_a_large_relation_is_spread_in_runs_that_follow_each_other() -> None:
    slices = [piece(1, 1 + 100 * i, 100, 8 * MIB) for i in range(8)]
    assert share_out(slices, 4) == [slices[0:2], slices[2:4], slices[4:6], slices[6:8]]


def test_a_target_that_cannot_share_gets_one_task() -> None:
    slices = [piece(1, 1 + 100 * i, 100, 64 * MIB) for i in range(8)]
    assert share_out(slices, 1) == [slices]


def test_bytes_that_many_relations_share_count_once() -> None:
    shared = [piece(relation, relation, 1, TASK_BYTES, offset=0) for relation in range(1, 101)]
    assert len(share_out(shared, 8)) == 1


@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(0, 1000), st.integers(1, 64 * MIB)), max_size=60),
    st.integers(1, 16),
)
def test_every_slice_is_in_one_task_and_relations_stay_in_order(
    shapes: list[tuple[int, int, int]], parallelism: int
) -> None:
    slices = [piece(relation, 1 + 1000 * i, rows, size) for i, (relation, rows, size) in enumerate(shapes)]
    runs = share_out(slices, parallelism)
    flat = [one for run in runs for one in run]
    assert sorted(flat, key=lambda s: s.first_seq) == slices
    assert len(runs) <= parallelism
    assert all(runs)
    assert all((a.relation, a.first_seq) < (b.relation, b.first_seq) for a, b in pairwise(flat))
