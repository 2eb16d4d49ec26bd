"""The contract of a target, held against every implementation."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark import TaskContext
from pyspark.sql import SparkSession

from millstream.changelog import assemble
from millstream.embedded import EmbeddedPostgres
from millstream.errors import JournalCorrupt, TargetRefused, TargetUnavailable
from millstream.model import Relation, SeqRange
from millstream.targets.base import (
    ASKING,
    Attempt,
    Delivery,
    Lane,
    LaneBatch,
    Part,
    Receipt,
    Releasing,
    Target,
    TargetContext,
    TargetCursor,
)
from millstream.targets.lanes import sessions
from tests.fixtures.journals import shop_table
from tests.fixtures.postgres import Database, fresh_database
from tests.fixtures.stagers import check_nothing, killing
from tests.fixtures.target_cases import CASES, Case, DeltaCase, Found, PostgresCase
from tests.fixtures.tuples import OID, insert, journal_rows

ORDERS = shop_table("orders", OID)
CONTEXT = TargetContext("shop", "log", "journal-a", "aaaa", 1, "run-1")


@pytest.fixture(scope="module")
def one_database(postgres: EmbeddedPostgres) -> Iterator[Database]:
    """For all tests of the suite: creating a database takes longer than most of them."""
    with fresh_database(postgres) as made:
        yield made


@pytest.fixture(params=[*CASES, pytest.param("postgres", marks=pytest.mark.postgres)])
def case(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Case]:
    if request.param in CASES:
        yield CASES[request.param](tmp_path / "a target")
        return
    database: Database = request.getfixturevalue("one_database")
    yield PostgresCase(database)
    sessions.close_idle(database.uri, None)
    database.sql("DROP SCHEMA IF EXISTS _millstream CASCADE; DROP TABLE IF EXISTS orders, items")


@pytest.fixture
def staged(case: Case) -> Case:
    """Only for targets that stage first and publish then."""
    if case.make().capabilities.delivery is not Delivery.STAGED:
        pytest.skip("a lane does not stage")
    return case


@pytest.fixture
def lane(case: Case) -> Case:
    """Only for targets that write a batch in one transaction."""
    if case.make().capabilities.delivery is not Delivery.LANE:
        pytest.skip("not a lane")
    return case


def changes(first: int, count: int, relation: Relation = ORDERS) -> pa.RecordBatch:
    rows = journal_rows([insert(str(seq), f"body {seq}") for seq in range(first, first + count)], first)
    return assemble(rows, relation, 1, "aaaa")


def expected(first: int, last: int) -> Found:
    return [(seq, f"body {seq}") for seq in range(first, last + 1)]


def stage(target: Target, first: int, count: int, attempt: int = 0) -> list[Receipt]:
    """The work of a batch's task. A lane has delivered after it, and its receipts are counted elsewhere."""
    batches = iter([changes(first, count)] if count else [])
    stager = target.stager()
    if isinstance(stager, Lane):
        stager.deliver(lane_batch(first, count, batches))
        return []
    return list(stager.stage(ORDERS, 1, batches, Attempt(0, attempt)))


def lane_batch(first: int, count: int, batches: Iterator[pa.RecordBatch]) -> LaneBatch:
    span = SeqRange(first - 1, first + count - 1)
    return LaneBatch(span, span.end * 100 + 8, [Part(ORDERS, 1, batches)], lambda: None)


def deliver(target: Target, first: int, count: int, attempt: int = 0) -> None:
    """A whole batch, the driver's part included."""
    receipts = stage(target, first, count, attempt)
    end = first + count - 1
    target.publish(SeqRange(first - 1, end), end * 100 + 8, receipts)


def opened(case: Case, context: TargetContext = CONTEXT) -> Target:
    target = case.make()
    target.open(context)
    target.recover(target.cursor())
    return target


def test_a_new_target_has_no_cursor(case: Case) -> None:
    assert opened(case).cursor() is None


def test_what_is_delivered_is_seen_and_the_cursor_says_so(case: Case) -> None:
    target = opened(case)
    deliver(target, 1, 3)
    assert case.seen("public.orders") == expected(1, 3)
    assert target.cursor() == TargetCursor("journal-a", 1, 3, 308)


def test_what_is_staged_is_not_seen_before_it_is_published(staged: Case) -> None:
    target = opened(staged)
    receipts = stage(target, 1, 3)
    assert staged.seen("public.orders") == []
    target.publish(SeqRange(0, 3), 308, receipts)
    assert staged.seen("public.orders") == expected(1, 3)


def test_a_receipt_says_what_was_staged(staged: Case) -> None:
    (receipt,) = stage(opened(staged), 11, 4)
    assert (receipt.relation, receipt.table, receipt.rows) == (1, "public.orders", 4)
    assert (receipt.first_seq, receipt.last_seq) == (11, 14)
    assert receipt.bytes > 0
    assert len(json.dumps(receipt.detail)) < 1000


def test_a_lane_that_fails_half_way_has_written_nothing(lane: Case) -> None:
    target = opened(lane)
    deliver(target, 1, 3)

    def broken() -> Iterator[pa.RecordBatch]:
        yield changes(4, 5)
        raise JournalCorrupt("bad bytes")

    stager = target.stager()
    assert isinstance(stager, Lane)
    with pytest.raises(JournalCorrupt):
        stager.deliver(lane_batch(4, 9, broken()))
    assert lane.seen("public.orders") == expected(1, 3)
    deliver(target, 4, 9)
    assert lane.seen("public.orders") == expected(1, 12)


def test_a_lane_commits_nothing_that_was_not_read_whole(lane: Case) -> None:
    target = opened(lane)

    def incomplete() -> None:
        raise TargetRefused("rows are missing")

    stager = target.stager()
    assert isinstance(stager, Lane)
    batch = replace(lane_batch(1, 3, iter([changes(1, 2)])), check_complete=incomplete)
    with pytest.raises(TargetRefused, match="rows are missing"):
        stager.deliver(batch)
    assert lane.seen("public.orders") == []
    target.open(CONTEXT)
    assert target.cursor() is None


def test_a_lane_says_that_it_has_a_batch_already(lane: Case) -> None:
    stager = opened(lane).stager()
    assert isinstance(stager, Lane)
    assert stager.deliver(lane_batch(1, 3, iter([changes(1, 3)]))) is True
    assert stager.deliver(lane_batch(1, 3, iter([changes(1, 3)]))) is False
    assert lane.seen("public.orders") == expected(1, 3)


def test_a_lane_shows_a_transaction_of_two_tables_whole(lane: Case) -> None:
    target = opened(lane)
    items = shop_table("items", OID + 1)
    parts = [
        Part(ORDERS, 1, iter([changes(1, 2)])),
        Part(items, 2, iter([assemble(journal_rows([insert("9", "an item", oid=OID + 1)], 3), items, 2, "aaaa")])),
    ]
    stager = target.stager()
    assert isinstance(stager, Lane)
    stager.deliver(replace(lane_batch(1, 3, iter(())), parts=parts))
    assert lane.seen("public.orders") == expected(1, 2)
    assert lane.seen("public.items") == [(3, "an item")]


def test_a_table_of_another_stream_is_left_alone(lane: Case) -> None:
    deliver(opened(lane), 1, 3)
    with pytest.raises(TargetRefused, match="belongs to target log of stream shop"):
        deliver(opened(lane, replace(CONTEXT, stream="other")), 1, 3)
    assert lane.seen("public.orders") == expected(1, 3)


def baseline(target: Target, version: int, *bodies: str) -> bool:
    """All rows of a table at once, as before any change."""
    changes = assemble(journal_rows([insert(str(i), body) for i, body in enumerate(bodies, 1)]), ORDERS, 1, "aaaa")
    for name, value in (("_ms_op", "r"), ("_ms_seq", version)):
        at = changes.schema.names.index(name)
        same = pa.array([value] * len(bodies), changes.column(at).type)
        changes = changes.set_column(at, changes.schema.field(at), same)
    stager = target.stager()
    assert isinstance(stager, Lane)
    parts = [Part(ORDERS, 1, iter([changes]))]
    return stager.deliver(LaneBatch(SeqRange(version, version), version * 100 + 8, parts, lambda: None))


def test_a_baseline_is_written_once(lane: Case) -> None:
    target = opened(lane)
    assert baseline(target, 0, "one", "two") is True
    assert baseline(target, 0, "one", "two") is False
    target.publish(SeqRange(0, 0), 8, [])
    assert target.cursor() == TargetCursor("journal-a", 1, 0, 8)
    assert lane.seen("public.orders") == [(0, "one"), (0, "two")]
    deliver(target, 1, 3)
    assert (1, "body 1") in lane.seen("public.orders")


def test_a_stream_that_is_gone_leaves_its_tables_to_the_next(lane: Case) -> None:
    never = lane.make()
    assert isinstance(never, Releasing)
    never.release("shop", "log")
    old = opened(lane)
    deliver(old, 1, 5)
    never.release("shop", "log")
    never.release("shop", "log")
    assert lane.seen("public.orders") == expected(1, 5)
    following = replace(CONTEXT, stream="other", journal_id="journal-b")
    if isinstance(lane, DeltaCase):
        with pytest.raises(TargetRefused, match="belongs to target log of stream shop"):
            opened(lane, following)
        with pytest.raises(TargetRefused, match="delivered before it was deleted"):
            opened(lane, replace(CONTEXT, journal_id="journal-b"))
        return
    new = opened(lane, following)
    assert new.cursor() is None
    if getattr(lane, "write", "mirror") == "changelog":
        with pytest.raises(TargetRefused, match="has the changes of a stream that is gone"):
            deliver(new, 1, 2)
        return
    assert baseline(new, 0, "one", "two") is True
    assert lane.seen("public.orders") == [(0, "one"), (0, "two")]


def test_rows_that_a_stream_left_behind_are_older_than_any_change(lane: Case) -> None:
    if isinstance(lane, DeltaCase):
        pytest.skip("nobody takes over a directory")
    if getattr(lane, "write", "mirror") == "changelog":
        pytest.skip("a changelog is not taken over")
    target = lane.make()
    deliver(opened(lane), 1, 5)
    assert isinstance(target, Releasing)
    target.release("shop", "log")
    new = opened(lane, replace(CONTEXT, stream="other", journal_id="journal-b"))
    deliver(new, 1, 2)
    assert lane.seen("public.orders") == [*((-1, f"body {seq}") for seq in (3, 4, 5)), *expected(1, 2)]


def test_a_column_that_comes_later_is_added(lane: Case) -> None:
    target = opened(lane)
    deliver(target, 1, 2)
    wider = shop_table("orders", OID, "size")
    batch = assemble(journal_rows([insert("3", "body 3", "large")], 3), wider, 2, "aaaa")
    stager = target.stager()
    assert isinstance(stager, Lane)
    stager.deliver(replace(lane_batch(3, 1, iter(())), parts=[Part(wider, 2, iter([batch]))]))
    assert lane.seen("public.orders") == expected(1, 3)
    deliver(target, 4, 1)
    assert lane.seen("public.orders") == expected(1, 4)


def test_the_cursor_survives_the_process(case: Case) -> None:
    target = opened(case)
    deliver(target, 1, 3)
    target.close()
    assert opened(case, replace(CONTEXT, run_id="run-2")).cursor() == TargetCursor("journal-a", 1, 3, 308)


def test_publishing_twice_does_nothing_the_second_time(case: Case) -> None:
    target = opened(case)
    receipts = stage(target, 1, 3)
    target.publish(SeqRange(0, 3), 308, receipts)
    target.publish(SeqRange(0, 3), 308, receipts)
    deliver(target, 1, 3, attempt=1)
    assert case.seen("public.orders") == expected(1, 3)


def test_the_loser_of_two_attempts_is_never_seen(case: Case) -> None:
    target = opened(case)

    def try_until_it_is_free(attempt: int) -> list[Receipt]:
        while True:
            try:
                return stage(target, 1, 2000, attempt)
            except TargetUnavailable:
                continue

    with ThreadPoolExecutor(2) as pool:
        winner, _loser = pool.map(try_until_it_is_free, (1, 2))
    target.publish(SeqRange(0, 2000), 9, winner)
    assert case.seen("public.orders") == expected(1, 2000)
    target.recover(target.cursor())
    assert case.litter() == []


def test_batches_follow_each_other_without_a_gap(case: Case) -> None:
    target = opened(case)
    deliver(target, 1, 3)
    for start in (2, 4):
        with pytest.raises(TargetRefused, match=f"seq {start} does not follow seq 3"):
            deliver(target, start + 1, 9 - start)
    deliver(target, 4, 2)
    assert case.seen("public.orders") == expected(1, 5)


def test_an_old_epoch_cannot_write_after_a_new_one_has_opened(case: Case) -> None:
    old = opened(case)
    receipts = stage(old, 1, 3) if old.capabilities.delivery is Delivery.STAGED else []
    new = opened(case, replace(CONTEXT, epoch=2, run_id="run-2"))
    with pytest.raises(TargetRefused, match="may not write any more"):
        old.publish(SeqRange(0, 3), 308, receipts) if receipts else deliver(old, 1, 3)
    deliver(new, 1, 2)
    assert case.seen("public.orders") == expected(1, 2)
    with pytest.raises(TargetRefused, match="epoch 2 has taken over"):
        case.make().open(replace(CONTEXT, run_id="run-3"))


def test_an_older_run_of_the_same_epoch_is_fenced_too(case: Case) -> None:
    old = opened(case)
    receipts = stage(old, 1, 3) if old.capabilities.delivery is Delivery.STAGED else []
    opened(case, replace(CONTEXT, run_id="run-2"))
    with pytest.raises(TargetRefused, match="may not write any more"):
        old.publish(SeqRange(0, 3), 308, receipts) if receipts else deliver(old, 1, 3)
    assert case.seen("public.orders") == []


def test_asking_for_the_cursor_fences_nobody(case: Case) -> None:
    target = opened(case)
    deliver(target, 1, 3)
    asking = case.make()
    asking.open(replace(CONTEXT, epoch=ASKING, run_id="run-2"))
    assert asking.cursor() == TargetCursor("journal-a", 1, 3, 308)
    deliver(target, 4, 2)
    assert case.seen("public.orders") == expected(1, 5)


def test_another_stream_is_refused(staged: Case) -> None:
    opened(staged)
    with pytest.raises(TargetRefused, match="belongs to target log of stream shop"):
        staged.make().open(replace(CONTEXT, stream="other"))


def test_recover_removes_what_was_never_published(staged: Case) -> None:
    dead = opened(staged)
    deliver(dead, 1, 3)
    stage(dead, 4, 2)
    living = opened(staged, replace(CONTEXT, run_id="run-2"))
    assert staged.litter() == []
    deliver(living, 4, 1)
    assert staged.seen("public.orders") == expected(1, 4)


def test_a_new_incarnation_of_the_journal_goes_on_above(case: Case) -> None:
    deliver(opened(case), 1, 3)
    new = opened(case, replace(CONTEXT, journal_id="journal-b", epoch=2, run_id="run-2"))
    deliver(new, 101, 2)
    assert new.cursor() == TargetCursor("journal-b", 2, 102, 10208)
    assert case.seen("public.orders") == [*expected(1, 3), *expected(101, 102)]


def test_a_batch_whose_rows_are_all_left_out_moves_the_cursor(case: Case) -> None:
    target = opened(case)
    stager = target.stager()
    if isinstance(stager, Lane):
        stager.deliver(replace(lane_batch(1, 7, iter(())), parts=[]))
    target.publish(SeqRange(0, 7), 708, [])
    assert target.cursor() == TargetCursor("journal-a", 1, 7, 708)


def test_nothing_to_stage_is_no_receipt(staged: Case) -> None:
    assert stage(opened(staged), 1, 0) == []


def test_a_stager_can_be_sent_to_an_executor(case: Case) -> None:
    target = opened(case)
    stager = pickle.loads(pickle.dumps(target.stager()))  # noqa: S301 - our own
    if isinstance(stager, Lane):
        stager.deliver(lane_batch(1, 3, iter([changes(1, 3)])))
        receipts = []
    else:
        receipts = list(stager.stage(ORDERS, 1, iter([changes(1, 3)]), Attempt(0, 0)))
    target.publish(SeqRange(0, 3), 308, receipts)
    assert case.seen("public.orders") == expected(1, 3)


@pytest.mark.spark
@pytest.mark.parametrize("step", ["begin", "middle", "failpoint", "end"])
def test_a_worker_killed_while_it_works_leaves_nothing_behind(
    case: Case, spark: SparkSession, tmp_path: Path, step: str
) -> None:
    target = opened(case)
    if target.capabilities.delivery is Delivery.LANE and step in ("begin", "middle"):
        pytest.skip("tests of delivery kill lanes at each step, by content")
    stager = killing(target.stager(), case.failpoint if step == "failpoint" else step, str(tmp_path))
    pieces = [changes(first, 10) for first in (1, 11, 21)]

    relation = ORDERS

    def run(_: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        assert context is not None
        attempt = Attempt(context.partitionId(), context.taskAttemptId())
        receipts: Sequence[Receipt] = []
        if isinstance(stager, Lane):
            stager.deliver(LaneBatch(SeqRange(0, 30), 3008, [Part(relation, 1, iter(pieces))], check_nothing))
        else:
            receipts = stager.stage(relation, 1, iter(pieces), attempt)
        yield pa.RecordBatch.from_pydict({"receipt": [json.dumps(vars(receipt)) for receipt in receipts]})

    rows = spark.range(1).repartition(1).mapInArrow(run, "receipt string").collect()
    assert list(tmp_path.glob("*.fired")), "no worker was killed"
    target.publish(SeqRange(0, 30), 3008, [Receipt(**json.loads(row.receipt)) for row in rows])
    assert case.seen("public.orders") == expected(1, 30)
    opened(case, replace(CONTEXT, run_id="run-2"))
    assert case.litter() == []
