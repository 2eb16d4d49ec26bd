"""The contract of a target, held against every implementation."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark import TaskContext
from pyspark.sql import SparkSession

from millstream.changelog import assemble
from millstream.errors import TargetRefused
from millstream.model import Relation, SeqRange
from millstream.targets.base import ASKING, Attempt, Receipt, Target, TargetContext, TargetCursor
from millstream.targets.files import FilesOptions, FilesTarget
from tests.fixtures.journals import shop_table
from tests.fixtures.stagers import KillingStager
from tests.fixtures.tuples import OID, insert, journal_rows

ORDERS = shop_table("orders", OID)
CONTEXT = TargetContext("shop", "log", "journal-a", "aaaa", 1, "run-1")

Found = list[tuple[int, str]]
"""What a reader of the target sees of a table: (seq, body) in the order it finds them."""


class Case(Protocol):
    """How the suite makes a target and looks at it from outside."""

    def make(self) -> Target: ...

    def seen(self, table: str) -> Found: ...

    def litter(self) -> list[str]:
        """What is there though no batch lists it."""


@dataclass
class FilesCase:
    path: Path

    def make(self) -> Target:
        return FilesTarget(FilesOptions(path=self.path))

    def seen(self, table: str) -> Found:
        found: Found = []
        for path in sorted((self.path / table).glob("*.parquet")):
            rows = pq.read_table(path, partitioning=None)
            found += zip(rows["_ms_seq"].to_pylist(), rows["body"].to_pylist(), strict=True)
        return found

    def litter(self) -> list[str]:
        commits = [json.loads(path.read_text()) for path in (self.path / "_millstream/commits").glob("*")]
        listed = {file["path"] for commit in commits for file in commit["files"]}
        files = {str(path.relative_to(self.path)) for path in self.path.rglob("*.parquet")}
        return sorted(files - listed)


CASES = {"files": FilesCase}


@pytest.fixture(params=sorted(CASES))
def case(request: pytest.FixtureRequest, tmp_path: Path) -> Case:
    made: Case = CASES[request.param](tmp_path / "a target")
    return made


def changes(first: int, count: int, relation: Relation = ORDERS) -> pa.RecordBatch:
    rows = journal_rows([insert(str(seq), f"body {seq}") for seq in range(first, first + count)], first)
    return assemble(rows, relation, 1, "aaaa")


def expected(first: int, last: int) -> Found:
    return [(seq, f"body {seq}") for seq in range(first, last + 1)]


def stage(target: Target, first: int, count: int, attempt: int = 0) -> list[Receipt]:
    batches = iter([changes(first, count)])
    return list(target.stager().stage(ORDERS, 1, batches, Attempt(0, attempt)))


def opened(case: Case, context: TargetContext = CONTEXT) -> Target:
    target = case.make()
    target.open(context)
    target.recover(target.cursor())
    return target


def test_a_new_target_has_no_cursor(case: Case) -> None:
    assert opened(case).cursor() is None


def test_what_is_staged_is_not_seen_before_it_is_published(case: Case) -> None:
    target = opened(case)
    receipts = stage(target, 1, 3)
    assert case.seen("public.orders") == []
    target.publish(SeqRange(0, 3), 308, receipts)
    assert case.seen("public.orders") == expected(1, 3)
    assert target.cursor() == TargetCursor("journal-a", 1, 3, 308)


def test_a_receipt_says_what_was_staged(case: Case) -> None:
    (receipt,) = stage(opened(case), 11, 4)
    assert (receipt.relation, receipt.table, receipt.rows) == (1, "public.orders", 4)
    assert (receipt.first_seq, receipt.last_seq) == (11, 14)
    assert receipt.bytes > 0
    assert len(json.dumps(receipt.detail)) < 1000


def test_the_cursor_survives_the_process(case: Case) -> None:
    target = opened(case)
    target.publish(SeqRange(0, 3), 308, stage(target, 1, 3))
    target.close()
    assert opened(case, replace(CONTEXT, run_id="run-2")).cursor() == TargetCursor("journal-a", 1, 3, 308)


def test_publishing_twice_does_nothing_the_second_time(case: Case) -> None:
    target = opened(case)
    receipts = stage(target, 1, 3)
    target.publish(SeqRange(0, 3), 308, receipts)
    target.publish(SeqRange(0, 3), 308, receipts)
    again = stage(target, 1, 3, attempt=1)
    target.publish(SeqRange(0, 3), 308, again)
    assert case.seen("public.orders") == expected(1, 3)


def test_the_loser_of_two_attempts_is_never_seen(case: Case) -> None:
    target = opened(case)
    with ThreadPoolExecutor(2) as pool:
        winner, _loser = pool.map(lambda attempt: stage(target, 1, 2000, attempt), (1, 2))
    target.publish(SeqRange(0, 2000), 9, winner)
    assert case.seen("public.orders") == expected(1, 2000)
    target.recover(target.cursor())
    assert case.litter() == []


def test_batches_follow_each_other_without_a_gap(case: Case) -> None:
    target = opened(case)
    target.publish(SeqRange(0, 3), 308, stage(target, 1, 3))
    for start in (2, 4):
        with pytest.raises(TargetRefused, match=f"seq {start} does not follow seq 3"):
            target.publish(SeqRange(start, 9), 908, stage(target, start + 1, 9 - start))
    target.publish(SeqRange(3, 5), 508, stage(target, 4, 2))
    assert case.seen("public.orders") == expected(1, 5)


def test_an_old_epoch_cannot_publish_after_a_new_one_has_opened(case: Case) -> None:
    old = opened(case)
    receipts = stage(old, 1, 3)
    new = opened(case, replace(CONTEXT, epoch=2, run_id="run-2"))
    with pytest.raises(TargetRefused, match="may not write any more"):
        old.publish(SeqRange(0, 3), 308, receipts)
    new.publish(SeqRange(0, 2), 208, stage(new, 1, 2))
    assert case.seen("public.orders") == expected(1, 2)
    with pytest.raises(TargetRefused, match="epoch 2 has taken over"):
        case.make().open(replace(CONTEXT, run_id="run-3"))


def test_an_older_run_of_the_same_epoch_is_fenced_too(case: Case) -> None:
    old = opened(case)
    receipts = stage(old, 1, 3)
    opened(case, replace(CONTEXT, run_id="run-2"))
    with pytest.raises(TargetRefused, match="may not write any more"):
        old.publish(SeqRange(0, 3), 308, receipts)


def test_asking_for_the_cursor_fences_nobody(case: Case) -> None:
    target = opened(case)
    target.publish(SeqRange(0, 3), 308, stage(target, 1, 3))
    asking = case.make()
    asking.open(replace(CONTEXT, epoch=ASKING, run_id="run-2"))
    assert asking.cursor() == TargetCursor("journal-a", 1, 3, 308)
    target.publish(SeqRange(3, 5), 508, stage(target, 4, 2))
    assert case.seen("public.orders") == expected(1, 5)


def test_another_stream_is_refused(case: Case) -> None:
    opened(case)
    with pytest.raises(TargetRefused, match="belongs to target log of stream shop"):
        case.make().open(replace(CONTEXT, stream="other"))


def test_recover_removes_what_was_never_published(case: Case) -> None:
    dead = opened(case)
    dead.publish(SeqRange(0, 3), 308, stage(dead, 1, 3))
    stage(dead, 4, 2)
    living = opened(case, replace(CONTEXT, run_id="run-2"))
    assert case.litter() == []
    living.publish(SeqRange(3, 4), 408, stage(living, 4, 1))
    assert case.seen("public.orders") == expected(1, 4)


def test_a_new_incarnation_of_the_journal_goes_on_above(case: Case) -> None:
    old = opened(case)
    old.publish(SeqRange(0, 3), 308, stage(old, 1, 3))
    new = opened(case, replace(CONTEXT, journal_id="journal-b", epoch=2, run_id="run-2"))
    new.publish(SeqRange(100, 102), 508, stage(new, 101, 2))
    assert new.cursor() == TargetCursor("journal-b", 2, 102, 508)
    assert case.seen("public.orders") == [*expected(1, 3), *expected(101, 102)]


def test_a_batch_whose_rows_are_all_left_out_moves_the_cursor(case: Case) -> None:
    target = opened(case)
    target.publish(SeqRange(0, 7), 708, [])
    assert target.cursor() == TargetCursor("journal-a", 1, 7, 708)


def test_nothing_to_stage_is_no_receipt(case: Case) -> None:
    assert list(opened(case).stager().stage(ORDERS, 1, iter(()), Attempt(0, 0))) == []


@pytest.mark.spark
@pytest.mark.parametrize("step", ["begin", "middle", "files.staged", "end"])
def test_a_worker_killed_while_it_stages_leaves_nothing_behind(
    case: Case, spark: SparkSession, tmp_path: Path, step: str
) -> None:
    target = opened(case)
    stager = KillingStager(target.stager(), step, str(tmp_path))
    pieces = [changes(first, 10) for first in (1, 11, 21)]

    relation = ORDERS

    def run(_: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        assert context is not None
        attempt = Attempt(context.partitionId(), context.taskAttemptId())
        receipts = stager.stage(relation, 1, iter(pieces), attempt)
        yield pa.RecordBatch.from_pydict({"receipt": [json.dumps(vars(receipt)) for receipt in receipts]})

    rows = spark.range(1).repartition(1).mapInArrow(run, "receipt string").collect()
    assert list(tmp_path.glob("*.fired")), "no worker was killed"
    target.publish(SeqRange(0, 30), 3008, [Receipt(**json.loads(row.receipt)) for row in rows])
    assert case.seen("public.orders") == expected(1, 30)
    opened(case, replace(CONTEXT, run_id="run-2"))
    assert case.litter() == []
