"""When a batch is cut, and how slices travel as rows."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from millstream.journal import JournalReader
from millstream.journal.format import Slice
from millstream.model import BatchLimits, SeqRange
from millstream.sources.base import Block
from millstream.spark.slices import (
    HALF_BYTES,
    Pacer,
    SliceOptions,
    SlicePartition,
    SliceReader,
    backlog_bytes,
    from_rows,
    half_is_there,
    to_rows,
)
from tests.fixtures.journals import Journal, shop_table


def test_nothing_is_known_at_the_start_so_what_is_there_goes_at_once() -> None:
    assert Pacer(5000).due(0.0, full=False)


def test_pending_rows_wait_no_longer_than_max_ms() -> None:
    pacer = Pacer(5000)
    pacer.clear(10.0)
    assert not pacer.due(14.9, full=False)
    assert pacer.due(15.0, full=False)


def test_a_full_batch_goes_at_once() -> None:
    pacer = Pacer(5000)
    pacer.clear(10.0)
    assert pacer.due(10.0, full=True)


def test_many_changes_wait_for_more_while_more_come() -> None:
    pacer = Pacer(200)
    pacer.clear(10.0)
    pacer.look(10.2, 1000)
    assert pacer.due(10.25, full=False)
    assert not pacer.due(10.25, full=False, many=True)
    assert not pacer.due(10.25, full=True, many=True)
    # The journal stands still.
    pacer.look(10.5, 1000)
    assert pacer.due(10.5, full=False, many=True)
    # It has just come to where the source's log may end.
    pacer.look(10.6, 1500, covered=True)
    assert not pacer.due(10.6, full=False, many=True)
    assert pacer.due(10.64, full=False, many=True)
    # It grows, but that was long enough.
    pacer.look(11.0, 2000)
    assert pacer.due(11.0, full=False, many=True)


@pytest.mark.parametrize(("covered", "age"), [(True, 0.04), (False, 0.31)])
def test_what_came_while_a_batch_ran_has_been_waited_for_already(covered: bool, age: float) -> None:
    pacer = Pacer(200)
    pacer.clear(10.0)
    pacer.look(11.0, 1000, covered=covered, age=age)
    assert pacer.due(11.0, full=False, many=True)
    # The next look is at the same place.
    pacer.look(11.02, 1000, covered=covered, age=age + 0.02)
    assert pacer.due(11.02, full=False, many=True)
    young = Pacer(600)
    young.clear(10.4)
    young.look(11.0, 1000, covered=covered, age=age / 2)
    assert not young.due(11.0, full=False, many=True)


def between(now: float, *, left: int) -> Pacer:
    """A stretch was handed over whole at 10.1, and the next one is being read."""
    pacer = Pacer(200)
    pacer.clear(10.0)
    pacer.look(now, 1000, covered=True, age=now - 10.1, left=left)
    return pacer


@pytest.mark.parametrize("full", [False, True])
def test_a_batch_waits_for_the_next_stretch_of_a_backlog(full: bool) -> None:
    assert not between(10.2, left=1).due(10.2, full=full, many=True)
    assert not between(11.99, left=1 << 40).due(11.99, full=full, many=True)
    assert between(12.0, left=1 << 40).due(12.0, full=full, many=True), "but not for ever"
    assert between(10.2, left=1).due(10.2, full=True), "one that has no room for more does not"
    assert between(10.2, left=0).due(10.2, full=True, many=True), "nothing is left"


def test_a_batch_of_a_backlog_is_larger_but_not_without_limit() -> None:
    mib = 1 << 20
    assert [backlog_bytes(size * mib) // mib for size in (1, 16, 20, 32, 64)] == [8, 128, 128, 128, 256]


@pytest.mark.parametrize(
    ("size", "left", "goes"),
    [
        (HALF_BYTES, HALF_BYTES, True),
        (3 * HALF_BYTES, 2 * HALF_BYTES, True),
        (HALF_BYTES, HALF_BYTES + 1, False),
        (3 * HALF_BYTES, HALF_BYTES - 1, False),
        (3 * HALF_BYTES, 0, False),
    ],
    ids=["half", "more", "less than half", "too little is left", "nothing is left"],
)
def test_half_of_a_backlog_is_worth_a_batch_if_the_other_half_is(size: int, left: int, goes: bool) -> None:
    assert half_is_there(size, left) is goes


def test_a_stretch_is_not_cut_in_its_middle() -> None:
    pacer = Pacer(200)
    pacer.clear(10.0)
    pacer.look(11.5, 1000, left=1 << 30)
    assert not pacer.due(11.5, full=True, many=True)
    assert pacer.due(12.0, full=True, many=True)


def test_the_last_changes_of_a_backlog_wait_for_nothing() -> None:
    pacer = Pacer(200)
    pacer.look(11.4, 1000, left=1 << 20)
    pacer.clear(11.4)
    # A batch takes what there is, and meanwhile capture comes to the end of the log.
    pacer.look(12.0, 2000, left=0, age=0.01)
    assert pacer.due(12.0, full=True, many=True)
    assert pacer.due(12.0, full=False, many=True)
    # The next look is at the same place.
    pacer.look(12.02, 2000, left=0, age=0.03)
    assert pacer.due(12.02, full=False, many=True)


def test_what_comes_after_a_backlog_waits_for_more_again() -> None:
    pacer = Pacer(200)
    pacer.look(11.0, 1000, left=1 << 20)
    pacer.look(12.0, 2000, left=0)
    pacer.clear(12.0)
    pacer.look(12.25, 3000, left=0)
    assert not pacer.due(12.25, full=False, many=True)
    # And so does what is handed over while another stretch of the log is read.
    pacer.look(13.0, 4000, left=1 << 20)
    assert not pacer.due(13.0, full=False, many=True)


@pytest.mark.parametrize(("max_ms", "seconds"), [(0, 0.0), (1, 0.005), (60_000, 60.0)])
def test_how_long_many_changes_wait_follows_max_ms(max_ms: int, seconds: float) -> None:
    pacer = Pacer(max_ms)
    pacer.clear(0.0)
    pacer.look(seconds, 1000)
    assert pacer.due(seconds, full=False, many=True)
    assert not seconds or not pacer.due(seconds - 0.001, full=False, many=True)


def test_slices_travel_as_rows() -> None:
    slices = [
        Slice("j", 3, "00000001", 10, 20, 4_000_000_000, 7, 5, 11, 15),
        Slice("j", 3, "00000002.sealed", 0, 1 << 40, 0, 8, 1, 1 << 40, 1 << 41),
    ]
    span = SeqRange(10, 1 << 42)
    assert list(from_rows(to_rows(slices, span))) == [(one, span) for one in slices]


def test_options_travel_as_text() -> None:
    options = SliceOptions(("/a b", "s3://x"), 7, BatchLimits(1, 2, 3), 4, "/ready")
    assert SliceOptions.decode(options.encode()) == options


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    made = Journal.create(tmp_path / "journal")
    made.register(shop_table("orders", 1))
    return made


def reader(journal: Journal, start: int = 0, *, halves: bool = False, **limits: int) -> SliceReader:
    bounds = BatchLimits(**{"max_ms": 0, "max_bytes": 1 << 30, "max_events": 1 << 30, **limits})
    ready = str(journal.path / "ready")
    return SliceReader(SliceOptions(tuple(journal.locations), start, bounds, 4, ready, halves=halves))


def test_a_batch_starts_where_the_epoch_does(journal: Journal) -> None:
    assert reader(journal, start=17).initialOffset() == {"seq": 17}


def test_a_batch_ends_at_a_transaction(journal: Journal) -> None:
    for _ in range(5):
        journal.transaction([("public.orders", i, "x") for i in range(100)])
    planning = reader(journal, max_events=250)
    ends = [planning.latestOffset({"seq": start}, planning.getDefaultReadLimit()) for start in (0, 200, 400)]
    assert ends == [{"seq": 200}, {"seq": 400}, {"seq": 500}]


def test_a_transaction_larger_than_the_limits_is_one_batch(journal: Journal) -> None:
    journal.transaction([("public.orders", i, "x") for i in range(100)])
    planning = reader(journal, max_events=10, max_bytes=10)
    assert planning.latestOffset({"seq": 0}, planning.getDefaultReadLimit()) == {"seq": 100}


def test_who_is_behind_by_more_than_a_batch_gets_several_at_once(journal: Journal) -> None:
    for _ in range(20):
        journal.transaction([("public.orders", i, "x" * 100) for i in range(100)])
    size = JournalReader(journal.locations).plan_end(0, max_events=100, max_bytes=1 << 30)
    assert size is not None
    planning = reader(journal, max_bytes=size.bytes + size.bytes // 2)
    ends = [planning.latestOffset({"seq": start}, planning.getDefaultReadLimit())["seq"] for start in (0, 1200, 1900)]
    assert ends == [1200, 2000, 2000]
    events = reader(journal, max_bytes=size.bytes, max_events=250)
    assert events.latestOffset({"seq": 0}, events.getDefaultReadLimit()) == {"seq": 200}


@pytest.mark.parametrize(
    ("visible", "covered", "end"),
    [(2, False, 0), (20, False, 1600), (2, True, 200)],
    ids=["waits", "no room for more", "no more there"],
)
def test_there_is_no_batch_while_more_of_a_backlog_comes(
    journal: Journal, monkeypatch: pytest.MonkeyPatch, visible: int, covered: bool, end: int
) -> None:
    monkeypatch.setattr("millstream.spark.slices.LONGEST_POLL", 0.0)
    monkeypatch.setattr("millstream.spark.slices.STILL_COVERED", 0.0)
    for _ in range(visible):
        journal.transaction([("public.orders", i, "x" * 100) for i in range(100)])
    if covered:
        journal.writer.append(Block(progress=journal.position + 50))
        journal.commit()
    size = JournalReader(journal.locations).plan_end(0, max_events=100, max_bytes=1 << 30)
    assert size is not None
    planning = reader(journal, max_ms=60_000, max_bytes=2 * size.bytes)
    planning._pacer.clear(time.monotonic())
    assert planning.latestOffset({"seq": 0}, planning.getDefaultReadLimit()) == {"seq": end}


@pytest.mark.parametrize(("halves", "left", "end"), [(True, 30_000, 200), (True, 1 << 30, 0), (False, 30_000, 0)])
def test_half_of_a_backlog_goes_while_the_other_half_is_read(
    journal: Journal, monkeypatch: pytest.MonkeyPatch, halves: bool, left: int, end: int
) -> None:
    monkeypatch.setattr("millstream.spark.slices.LONGEST_POLL", 0.0)
    monkeypatch.setattr("millstream.spark.slices.HALF_BYTES", 20_000)
    for _ in range(2):
        journal.transaction([("public.orders", i, "x" * 100) for i in range(100)])
    journal.writer.append(Block(progress=journal.position + 50, left=left))
    journal.commit()
    planned = JournalReader(journal.locations).plan_end(0, max_events=1 << 30, max_bytes=1 << 30)
    assert planned is not None
    assert planned.bytes > 30_000
    planning = reader(journal, max_ms=60_000, max_bytes=20_000, halves=halves)
    planning._pacer.clear(time.monotonic())
    assert planning.latestOffset({"seq": 0}, planning.getDefaultReadLimit()) == {"seq": end}


def test_nothing_due_is_the_start_again(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millstream.spark.slices.LONGEST_POLL", 0.05)
    planning = reader(journal, max_ms=60_000)
    assert planning.latestOffset({"seq": 0}, planning.getDefaultReadLimit()) == {"seq": 0}
    journal.transaction([("public.orders", 1, "x")])
    assert planning.latestOffset({"seq": 0}, planning.getDefaultReadLimit()) == {"seq": 0}


def test_a_run_with_an_end_takes_what_was_there_at_its_start(journal: Journal) -> None:
    journal.transaction([("public.orders", 1, "x")])
    planning = reader(journal, max_ms=60_000)
    planning.prepareForTriggerAvailableNow()
    journal.transaction([("public.orders", 2, "x")])
    assert planning.latestOffset({"seq": 0}, planning.getDefaultReadLimit()) == {"seq": 1}
    assert planning.latestOffset({"seq": 1}, planning.getDefaultReadLimit()) == {"seq": 1}


def test_the_same_range_has_the_same_slices_however_often_it_is_planned(journal: Journal) -> None:
    journal.transaction([("public.orders", i, "x") for i in range(10)])
    journal.transaction([("public.orders", i, "x") for i in range(10)])
    planned = [reader(journal).partitions({"seq": 0}, {"seq": 20}) for _ in range(2)]
    assert [vars(one) for one in planned[0]] == [vars(one) for one in planned[1]]
    (only,) = planned[0]
    assert isinstance(only, SlicePartition)
    (rows,) = reader(journal).read(only)
    assert sum(rows["rows"].to_pylist()) == 20
