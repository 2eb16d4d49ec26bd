"""What delivery decides when targets fail, cursors differ and journals are not what they were."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from py4j.protocol import Py4JError

from millstream.engine import batch, batches, delivery
from millstream.engine.batch import collected
from millstream.engine.opening import Opened
from millstream.engine.retrying import ONCE_TRIES
from millstream.errors import (
    JournalCorrupt,
    JournalMismatch,
    MillstreamError,
    OutOfRange,
    SparkEnded,
    TargetRefused,
    TargetUnavailable,
)
from millstream.journal import JournalReader
from millstream.model import BatchLimits, Retention, SeqRange, StreamState
from millstream.spark.slices import SliceOptions
from millstream.spark.stage import describe
from millstream.state.base import EpochRecord
from millstream.targets.base import Receipt, Target
from tests.fixtures.delivery import Bench, hardly_wait
from tests.fixtures.inprocess import FakeSpark, InProcessQuery
from tests.fixtures.journals import Journal, delivered, shop_table

TWENTY = BatchLimits(max_ms=0, max_bytes=1 << 30, max_events=20)


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr(delivery, "SliceQuery", InProcessQuery)
    hardly_wait(monkeypatch)
    return Bench(FakeSpark(), tmp_path, new_journal(tmp_path / "journal"))  # type: ignore[arg-type]


def new_journal(path: Path, first_seq: int = 1, incarnation: int = 1) -> Journal:
    journal = Journal.create(path, first_seq=first_seq, incarnation=incarnation)
    journal.register(shop_table("orders", 100))
    return journal


def trade(journal: Journal, transactions: int = 3) -> None:
    for number in range(transactions):
        journal.transaction([("public.orders", i, f"{number}-{i}") for i in range(10)])


class Failing:
    """A target whose `publish` fails as told, before or after it did its work."""

    def __init__(self, inner: Target, errors: list[Exception], *, after: bool = False) -> None:
        self._inner = inner
        self._errors = errors
        self._after = after

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def publish(self, range: SeqRange, end_position: int, receipts: Sequence[Receipt]) -> None:
        if self._after:
            self._inner.publish(range, end_position, receipts)
        if self._errors:
            raise self._errors.pop(0)
        if not self._after:
            self._inner.publish(range, end_position, receipts)


def failing(*errors: Exception, after: bool = False) -> Callable[[Target], Target]:
    return lambda target: Failing(target, list(errors), after=after)  # type: ignore[return-value]


def run(bench: Bench, wrap: Callable[[Target], Target]) -> delivery.DeliveryQuery:
    query = bench.query(once=True, wrap=wrap)
    query.start()
    assert query.wait(120)
    return query


@pytest.mark.parametrize(
    ("kind", "write", "deliveries", "processors", "halves"),
    [
        ("files", None, 1, 3, True),
        ("files", None, 1, 2, False),
        ("files", None, 2, 3, False),
        ("sqlite", None, 1, 3, False),
        ("sqlite", "changelog", 1, 3, True),
    ],
)
def test_half_of_a_backlog_may_go_early_where_a_processor_is_idle_and_no_row_is_written_twice_for_it(
    bench: Bench,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    write: str | None,
    deliveries: int,
    processors: int,
    halves: bool,
) -> None:
    asked: list[bool] = []

    class Asked(InProcessQuery):
        def __init__(self, spark: FakeSpark, name: str, options: SliceOptions, *others: Any, once: bool) -> None:
            super().__init__(spark, name, options, *others, once=once)
            asked.append(options.halves)

    monkeypatch.setattr(delivery, "SliceQuery", Asked)
    monkeypatch.setattr("os.cpu_count", lambda: processors)
    bench.kind, bench.deliveries = kind, deliveries
    bench.options = {"path": str(bench.log)} | ({"write": write} if write else {})
    trade(bench.journal)
    assert bench.deliver_all().error is None
    assert asked == [halves]


def test_a_target_that_cannot_be_reached_is_tried_again(bench: Bench) -> None:
    trade(bench.journal)
    query = run(bench, failing(TargetUnavailable("gone for now"), TargetUnavailable("still gone")))
    assert (query.state, query.error, query.status()["retrying"]) == (StreamState.STOPPED, None, None)
    assert [event.fields["failures"] for event in bench.watching.of("delivery.retry")] == [1, 2]
    assert delivered(bench.log) == bench.journal.written


def test_a_run_with_an_end_gives_up_at_last(bench: Bench) -> None:
    trade(bench.journal)
    query = run(bench, failing(*(TargetUnavailable("gone") for _ in range(100))))
    assert (query.state, str(query.error)) == (StreamState.FAILED, "gone")
    assert len(bench.watching.of("delivery.retry")) == ONCE_TRIES


def test_a_publish_that_failed_after_its_work_is_not_done_twice(bench: Bench) -> None:
    trade(bench.journal)
    run(bench, failing(TargetUnavailable("the answer was lost"), after=True))
    assert delivered(bench.log) == bench.journal.written
    assert bench.cursor is not None
    assert bench.cursor.seq == bench.journal.last_seq
    assert len(bench.commits()) == 1


def test_a_target_that_refuses_stops_and_says_why(bench: Bench) -> None:
    trade(bench.journal)
    query = run(bench, failing(TargetRefused("never", hint="give up")))
    assert (query.state, query.done) == (StreamState.FAILED, True)
    assert isinstance(query.error, TargetRefused)
    (event,) = bench.watching.of("delivery.failed")
    assert (event.message, event.fields["hint"]) == ("never", "give up")
    assert delivered(bench.log) == {}
    bench.deliver_all()
    assert delivered(bench.log) == bench.journal.written


def test_an_unexpected_error_is_named_by_its_class_alone(bench: Bench) -> None:
    trade(bench.journal)
    query = run(bench, failing(KeyError("a user's value")))
    assert query.state is StreamState.FAILED
    assert "KeyError" in str(query.error)
    assert "user" not in str(query.error) + str(bench.watching.events)


def test_a_lost_worker_is_tried_again_but_a_lost_spark_is_not(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    trade(bench.journal)
    lost = [Py4JError("a worker"), Py4JError("another")]

    def run_batch(*arguments: object) -> object:
        if lost:
            raise lost.pop()
        return batch.run_batch(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(batches, "run_batch", run_batch)
    assert bench.deliver_all().error is None
    assert delivered(bench.log) == bench.journal.written
    trade(bench.journal)
    lost += [Py4JError("everything")]
    monkeypatch.setattr(FakeSpark, "isStopped", lambda _: True)
    query = bench.deliver_all()
    assert query.state is StreamState.FAILED
    assert isinstance(query.error, SparkEnded)


def test_batches_that_come_again_are_skipped(bench: Bench) -> None:
    trade(bench.journal, transactions=4)
    bench.deliver_all(TWENTY)
    before = bench.commits()
    assert len(before) == 2
    (bench.checkpoints / "1" / "commits" / "1").unlink()
    bench.deliver_all(TWENTY)
    assert bench.commits() == before
    assert bench.epochs() == [(1, 0, "first start")]


def test_a_batch_across_the_cursor_means_a_new_epoch_there(bench: Bench) -> None:
    trade(bench.journal, transactions=4)
    bench.deliver_all(TWENTY)
    trade(bench.journal)
    for kind in ("commits", "offsets"):
        (bench.checkpoints / "1" / kind / "1").unlink()
    bench.deliver_all()
    assert delivered(bench.log) == bench.journal.written
    assert [(epoch, start) for epoch, start, _ in bench.epochs()] == [(1, 0), (2, 40)]
    assert [path.name for path in bench.checkpoints.iterdir() if path.is_dir()] == ["2"]


def test_a_query_that_does_not_start_twice_gets_a_new_epoch(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    class Unstartable(InProcessQuery):
        def wait(self) -> Exception | None:
            self.reached_journal = self._checkpoint.name != "1"
            return super().wait() if self.reached_journal else OSError("metadata")

    trade(bench.journal)
    bench.deliver_all()
    monkeypatch.setattr(delivery, "SliceQuery", Unstartable)
    trade(bench.journal)
    assert bench.deliver_all().error is None
    assert delivered(bench.log) == bench.journal.written
    assert bench.epochs()[-1] == (2, 30, "Spark's checkpoint cannot be read")


def test_a_batch_beyond_the_cursor_halts(bench: Bench) -> None:
    trade(bench.journal)
    bench.deliver_all()
    trade(bench.journal)
    (bench.checkpoints / "1" / "offsets" / "0").write_text(json.dumps({"seq": 40}))
    query = bench.deliver_all()
    assert isinstance(query.error, JournalMismatch)
    assert "rows would be lost" in query.error.message
    assert len(bench.commits()) == 1


def test_a_lost_state_store_is_filled_from_the_target(bench: Bench) -> None:
    trade(bench.journal)
    bench.deliver_all()
    bench.store.delete_stream("shop")
    bench.deliver_all()
    assert bench.cursor is not None
    assert (bench.cursor.seq, bench.cursor.epoch) == (30, 2)
    assert delivered(bench.log) == bench.journal.written


def test_a_target_that_went_back_gets_again_what_it_lost(bench: Bench) -> None:
    trade(bench.journal, transactions=4)
    bench.deliver_all(TWENTY)
    (bench.log / "_millstream/commits" / f"{40:020d}.json").unlink()
    bench.deliver_all()
    assert delivered(bench.log) == bench.journal.written
    assert bench.epochs()[-1] == (2, 20, "the target is behind the saved cursor")


def test_another_journal_halts_before_a_row_is_written(bench: Bench) -> None:
    trade(bench.journal)
    bench.deliver_all()
    other = new_journal(bench.root / "other")
    trade(other, transactions=9)
    query = bench.deliver_all(journal=other)
    assert query.state is StreamState.FAILED
    assert isinstance(query.error, JournalMismatch)
    assert delivered(bench.log) == bench.journal.written
    assert len(bench.commits()) == 1


def test_an_older_copy_of_the_journal_halts_before_a_row_is_written(bench: Bench) -> None:
    trade(bench.journal)
    bench.deliver_all()
    # The same id, but other transactions: as after a restore that went on by itself.
    header = (bench.journal.path / "journal.json").read_bytes()
    copy = new_journal(bench.root / "copy")
    copy.writer.close()
    (copy.path / "journal.json").write_bytes(header)
    query = bench.deliver_all(journal=copy)
    assert isinstance(query.error, MillstreamError)
    assert query.state is StreamState.FAILED
    assert len(bench.commits()) == 1


def test_a_rebased_journal_leaves_out_what_was_delivered(bench: Bench) -> None:
    trade(bench.journal)
    bench.deliver_all()
    cursor = bench.cursor
    assert cursor is not None
    again = new_journal(bench.root / "again", first_seq=1001, incarnation=2)
    trade(again, transactions=5)
    journal_id = again.writer.header.journal_id
    bench.store.open_epoch(
        EpochRecord("shop", "log", 2, journal_id, 1000, cursor.position, "re-based", datetime.now(UTC))
    )
    query = bench.deliver_all(journal=again)
    assert query.error is None
    new = {seq: change for seq, change in again.written.items() if seq > 1030}
    assert delivered(bench.log) == {**bench.journal.written, **new}
    last = bench.watching.of("delivery.batch")[-1]
    assert (last.fields["rows"], last.fields["skipped"]) == (20, 30)


def test_a_damaged_segment_stops_the_target_and_nothing_is_published(bench: Bench) -> None:
    trade(bench.journal)
    (segment,) = (bench.journal.path / "segments").glob("*.arrows")
    raw = bytearray(segment.read_bytes())
    raw[len(raw) // 2] ^= 1
    segment.write_bytes(raw)
    query = bench.deliver_all()
    assert isinstance(query.error, JournalCorrupt)
    assert query.state is StreamState.FAILED
    assert bench.commits() == []


def test_receipts_that_do_not_add_up_are_never_published(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    trade(bench.journal)
    monkeypatch.setattr("millstream.engine.batch.collected", lambda rows: collected(rows[:0]))
    query = bench.deliver_all()
    assert "0 rows staged and 0 left out of the 30" in str(query.error)
    assert bench.commits() == []


def rows_with(*errors: Exception) -> list[dict[str, object]]:
    return [{"error": json.dumps(described(error)), "table": None, "skipped": 0} for error in errors]


def described(error: Exception) -> dict[str, object]:
    def fail() -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        fail()
    return describe(caught.value)  # type: ignore[arg-type]


def test_a_task_names_its_error_and_the_one_that_cannot_be_retried_counts() -> None:
    with pytest.raises(JournalCorrupt, match="bad bytes"):
        collected(rows_with(TargetUnavailable("full"), JournalCorrupt("bad bytes")))  # type: ignore[arg-type]


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), MemoryError()])
def test_a_task_without_room_is_tried_again(error: Exception) -> None:
    with pytest.raises(TargetUnavailable):
        collected(rows_with(error))  # type: ignore[arg-type]


def test_a_stranger_s_error_loses_its_words() -> None:
    with pytest.raises(TargetRefused, match=r"a task failed: ValueError at test_delivery\.py") as caught:
        collected(rows_with(ValueError("secret row")))  # type: ignore[arg-type]
    assert "secret" not in str(caught.value)


@pytest.fixture
def small(bench: Bench, tmp_path: Path) -> Bench:
    """A delivery from a journal of many small segments."""
    journal = Journal.create(tmp_path / "small", segment_bytes=2000)
    journal.register(shop_table("orders", 100))
    bench.journal = journal
    return bench


def prune(journal: Journal, seq: int) -> int:
    """Remove everything up to this seq, whoever needs it; returns the first seq that is left."""
    journal.seal()
    journal.writer.retain(Retention(bytes=1), seq, 0.0, most=1000)
    return JournalReader(journal.locations).first_seq()


def test_what_was_delivered_can_be_pruned(small: Bench) -> None:
    trade(small.journal, 10)
    small.deliver_all(TWENTY)
    assert prune(small.journal, 100) > 60
    trade(small.journal, 3)
    small.deliver_all(TWENTY)
    assert delivered(small.log) == small.journal.written


@pytest.mark.parametrize("while_running", [False, True])
def test_a_target_past_which_the_journal_was_pruned_halts_and_says_what_to_do(
    small: Bench, while_running: bool
) -> None:
    trade(small.journal, 3)
    small.deliver_all(TWENTY)
    before = dict(small.journal.written)
    trade(small.journal, 10)
    query = small.query(once=True)
    opened = query._opening.open

    def pruned_after_opening(reason: str | None) -> Opened:
        made = opened(reason)
        prune(small.journal, 100)
        return made

    if while_running:
        query._opening.open = pruned_after_opening  # type: ignore[method-assign]
    else:
        prune(small.journal, 100)
    query.start()
    assert query.wait(120)
    first = JournalReader(small.journal.locations).first_seq()
    assert query.state is StreamState.NEEDS_RELOAD
    assert small.store.needs_reload("shop") == {"log": query.error.message if query.error else ""}
    assert isinstance(query.error, OutOfRange)
    assert f"begins at {'seq ' if while_running else ''}{first}" in query.error.message
    assert "new target" in (query.error.hint or "")
    assert delivered(small.log) == before, "nothing is skipped, nothing is delivered past the gap"
