"""A target that is refused or cannot be reached: it alone stops, or comes back by itself."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from py4j.protocol import Py4JNetworkError

from millstream import Engine, StreamSpec, StreamState, TargetSpec
from millstream.config.definition import definition
from millstream.engine import batches, running
from millstream.engine.replay import Replay
from millstream.errors import NotReady, SparkEnded, TargetUnavailable
from millstream.model import SeqRange
from millstream.targets import open_target
from millstream.targets.base import Receipt, Target
from millstream.testing import Script
from tests.fixtures.delivery import Watching
from tests.fixtures.engines import QUICK, await_that, delivered, stream
from tests.fixtures.inprocess import FakeSpark
from tests.unit.test_delivery import failing

ONE = {"public.orders": [(1, "one")]}


def test_a_refused_target_stops_alone_and_says_why(engine: Engine, script: Script, tmp_path: Path) -> None:
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / "copy").write_text("in the way")
    engine.start()
    engine.upsert_stream(stream(script, tmp_path, targets="copy log"))
    with pytest.raises(NotReady, match=r"has failed: target copy: .*shop/copy"):
        engine.await_ready("shop", 120)
    await_that(lambda: engine.get_status("shop").targets[1].state is StreamState.RUNNING)
    script.insert("public.orders", id=1, note="one")
    await_that(lambda: delivered(tmp_path) == ONE)
    await_that(lambda: engine.get_status("shop").targets[1].state is StreamState.RUNNING)
    status = engine.get_status("shop")
    copy, log = status.targets
    assert (status.state, copy.state) == (StreamState.FAILED, StreamState.FAILED)
    assert (copy.errors_last_hour, log.errors_last_hour, log.last_error) == (1, 0, None)
    assert copy.error == copy.last_error == status.last_error
    # The way is free again: a person says so.
    (tmp_path / "shop" / "copy").unlink()
    engine.resume("shop", "copy")
    await_that(lambda: delivered(tmp_path, target="copy") == ONE)
    assert engine.await_ready("shop", 120).targets[0].error is None


class Slow:
    """A target whose batches take as long as the test wants."""

    def __init__(self, inner: Target, entered: threading.Event, may_end: threading.Event) -> None:
        self._inner = inner
        self._entered = entered
        self._may_end = may_end

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def publish(self, range: SeqRange, end_position: int, receipts: Sequence[Receipt]) -> None:
        self._entered.set()
        assert self._may_end.wait(240)
        self._inner.publish(range, end_position, receipts)


def slow_copies(monkeypatch: pytest.MonkeyPatch, *, may_end: threading.Event) -> threading.Event:
    """From now on batches to targets named `copy` wait for `may_end`. Returns what is set when one does."""
    entered = threading.Event()

    def opened(spec: TargetSpec) -> Target:
        made = open_target(spec)
        return Slow(made, entered, may_end) if spec.name == "copy" else made  # type: ignore[return-value]

    monkeypatch.setattr(running, "open_target", opened)
    return entered


def test_a_pause_that_waits_for_its_batch_holds_up_no_other_request(
    engine: Engine, script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end = threading.Event()
    entered = slow_copies(monkeypatch, may_end=may_end)
    other = Engine(engine.home)
    engine.start()
    engine.upsert_streams([stream(script, tmp_path, targets="copy"), stream(script, tmp_path, "bank")])
    for name in ("shop", "bank"):
        engine.await_ready(name, 120)
    script.insert("public.orders", id=1, note="one")
    assert entered.wait(60)
    with ThreadPoolExecutor(2) as beside:
        waiting = [beside.submit(one.pause, "shop", "copy") for one in (engine, other)]
        await_that(lambda: engine.get_status("shop").state is StreamState.PAUSED)
        # From this process, and from another one as well.
        engine.pause("bank")
        other.resume("bank")
        await_that(lambda: delivered(tmp_path, "bank") == ONE)
        assert not any(one.done() for one in waiting)
        may_end.set()
        for one in waiting:
            one.result(60)
    assert delivered(tmp_path, target="copy") == ONE
    script.insert("public.orders", id=2, note="two")
    await_that(lambda: len(delivered(tmp_path, "bank")["public.orders"]) == 2)
    assert delivered(tmp_path, target="copy") == ONE
    # What came last holds, however long the pause before it took.
    engine.resume("shop")
    await_that(lambda: len(delivered(tmp_path, target="copy")["public.orders"]) == 2)


def choosy(script: Script, root: Path) -> StreamSpec:
    """A stream to a database file that takes no `bad` note."""
    with closing(sqlite3.connect(root / "copy.db")) as db:
        columns = "(id INTEGER PRIMARY KEY, note TEXT CHECK (note <> 'bad'), _ms_seq INTEGER)"
        db.execute(f'CREATE TABLE "public.orders" {columns}')
    copy = TargetSpec("copy", "sqlite", QUICK, options={"path": str(root / "copy.db")})
    return replace(stream(script, root), targets=(copy,))


REQUESTS: dict[str, Callable[[Engine], object]] = {
    "replay": lambda engine: engine.replay("shop", 1, "copy"),
    "retry": lambda engine: [one.outcome for one in engine.retry_letters([1])],
    "delete": lambda engine: engine.delete_stream("shop")["targets"],
}
ANSWERS = {"retry": ["rejected"], "delete": {"copy": "released"}}


@pytest.mark.parametrize("request_", REQUESTS)
def test_what_waits_for_a_batch_holds_up_no_other_request(
    engine: Engine, script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request_: str
) -> None:
    may_end, other = threading.Event(), Engine(engine.home)
    may_end.set()
    entered = slow_copies(monkeypatch, may_end=may_end)
    engine.start()
    engine.upsert_streams([choosy(script, tmp_path), stream(script, tmp_path, "bank")])
    for name in ("shop", "bank"):
        engine.await_ready(name, 120)
    script.insert("public.orders", id=1, note="bad")
    await_that(lambda: [one.id for one in engine.dead_letters("shop")] == [1])
    await_that(lambda: engine.get_status("shop").targets[0].lag_events == 0)
    may_end.clear()
    entered.clear()
    script.insert("public.orders", id=2, note="two")
    assert entered.wait(60)
    act = REQUESTS[request_]
    with ThreadPoolExecutor(1) as beside:
        # Of another process, which the one that runs the home answers.
        waiting = beside.submit(act, other)
        try:
            await_that(lambda: any(thread.name == "stop" for thread in threading.enumerate()))
            engine.pause("bank")
            other.resume("bank")
            await_that(lambda: len(delivered(tmp_path, "bank")["public.orders"]) == 2)
            assert not waiting.done()
        finally:
            may_end.set()
        answer = waiting.result(120)
    assert answer == ANSWERS.get(request_)
    if request_ == "delete":
        assert [one.name for one in engine.list_streams()] == ["bank"]
        return
    # What was ended for it goes on.
    script.insert("public.orders", id=3, note="three")
    with closing(sqlite3.connect(tmp_path / "copy.db")) as db:
        rows = 'SELECT id, note FROM "public.orders" ORDER BY id'
        await_that(lambda: db.execute(rows).fetchall() == [(2, "two"), (3, "three")])


def test_a_request_that_fails_after_its_batch_lets_the_delivery_go_on(
    engine: Engine, script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end = threading.Event()
    entered = slow_copies(monkeypatch, may_end=may_end)
    engine.start()
    engine.upsert_stream(stream(script, tmp_path, targets="copy"))
    engine.await_ready("shop", 120)
    script.insert("public.orders", id=1, note="one")
    assert entered.wait(60)
    with ThreadPoolExecutor(1) as beside:
        waiting = beside.submit(engine.replay, "shop", 1, "copy")
        try:
            await_that(lambda: any(thread.name == "stop" for thread in threading.enumerate()))
            monkeypatch.setattr(Replay, "check", refused)
        finally:
            may_end.set()
        with pytest.raises(NotReady, match="not now"):
            waiting.result(120)
    script.insert("public.orders", id=2, note="two")
    await_that(lambda: len(delivered(tmp_path, target="copy")["public.orders"]) == 2)


def refused(_: Replay) -> None:
    raise NotReady("not now")


def test_a_pause_returns_when_the_batch_at_hand_has_ended(
    engine: Engine, script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end, paused = threading.Event(), threading.Event()
    entered = slow_copies(monkeypatch, may_end=may_end)

    def pause() -> None:
        engine.pause("shop", "copy")
        paused.set()

    engine.start()
    engine.upsert_stream(stream(script, tmp_path, targets="copy log"))
    engine.await_ready("shop", 120)
    script.insert("public.orders", id=1, note="one")
    assert entered.wait(120)
    threading.Thread(target=pause, daemon=True).start()
    await_that(lambda: engine.get_status("shop").targets[0].state is StreamState.PAUSED)
    script.insert("public.orders", id=2, note="two")
    await_that(lambda: delivered(tmp_path) == {"public.orders": [(1, "one"), (2, "two")]})
    await_that(lambda: engine.get_status("shop").targets[1].lag_events == 0)
    assert not paused.is_set()
    assert delivered(tmp_path, target="copy") == {}
    may_end.set()
    assert paused.wait(120)
    assert delivered(tmp_path, target="copy") == ONE
    assert engine.get_status("shop").targets[0].seq == 1


@pytest.mark.parametrize("said", [Py4JNetworkError("no answer"), ConnectionRefusedError("nobody listens")])
def test_an_engine_whose_spark_is_gone_ends_at_once_and_says_so(
    engine: Engine,
    script: Script,
    tmp_path: Path,
    watching: Watching,
    monkeypatch: pytest.MonkeyPatch,
    said: Exception,
) -> None:
    engine.start()
    engine.upsert_stream(stream(script, tmp_path, targets="copy log"))
    engine.await_ready("shop", 120)

    def lost(*_: object) -> None:
        raise said

    monkeypatch.setattr(FakeSpark, "isStopped", lost)
    monkeypatch.setattr(batches, "run_batch", lost)
    script.insert("public.orders", id=1, note="one")
    await_that(lambda: not engine.is_running)
    assert isinstance(engine.failure, SparkEnded)
    (told,) = watching.of("engine.failed")
    assert told.message == "the engine stops: Spark has ended, and with it all deliveries"
    with pytest.raises(SparkEnded):
        engine.await_ready("shop", 120)


def test_a_target_that_cannot_be_made_any_more_fails_alone(engine: Engine, script: Script, tmp_path: Path) -> None:
    """A home may outlive the version, or the packages, that its streams were made with."""
    shop = stream(script, tmp_path, targets="copy log")
    engine.upsert_stream(shop)
    store = engine.home.open_state()
    described = definition(shop)
    described["targets"][0]["options"]["colour"] = "blue"
    store.put_stream("shop", described)
    store.close()
    with engine:
        with pytest.raises(NotReady, match="target copy: target copy: colour: Extra inputs"):
            engine.await_ready("shop", 120)
        script.insert("public.orders", id=1, note="one")
        await_that(lambda: delivered(tmp_path) == ONE)
        engine.upsert_stream(shop)
        await_that(lambda: delivered(tmp_path, target="copy") == ONE)


def test_a_target_that_cannot_be_reached_comes_back_by_itself(
    engine: Engine, script: Script, tmp_path: Path, watching: Watching, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened(spec: TargetSpec) -> Target:
        target = open_target(spec)
        gone = failing(TargetUnavailable("gone"), TargetUnavailable("still gone"))
        return gone(target) if spec.name == "copy" else target

    monkeypatch.setattr(running, "open_target", opened)
    engine.start()
    engine.upsert_stream(stream(script, tmp_path, targets="copy log"))
    engine.await_ready("shop", 120)
    script.insert("public.orders", id=1, note="one")
    await_that(lambda: delivered(tmp_path) == ONE)
    await_that(lambda: delivered(tmp_path, target="copy") == ONE)
    watching.wait_for(lambda: bool([e for e in watching.events if e.kind == "delivery.recovered"]))
    retries = [event.fields["delay_ms"] for event in watching.of("delivery.retry")]
    assert 250 <= retries[0] <= 500 <= retries[1] <= 1000, "it waits twice as long each time, with jitter"
    status = engine.await_ready("shop", 120)
    assert (status.errors_last_hour, status.targets[0].state) == (2, StreamState.RUNNING)
    assert "still gone" in (status.last_error or "")


def test_a_target_that_was_paused_takes_what_the_other_one_has_decoded(
    engine: Engine, script: Script, tmp_path: Path
) -> None:
    shelf = tmp_path / "home" / "spark" / "decoded"
    shelf.mkdir(parents=True)
    (shelf / "left.arrow").write_bytes(b"by a process that was killed")
    rows = [(number, f"note {number}") for number in range(3000)]
    with engine:
        engine.upsert_stream(stream(script, tmp_path, targets="log copy"))
        engine.await_ready("shop", 120)
        assert list(shelf.iterdir()) == []
        engine.pause("shop", "copy")
        with script.transaction() as transaction:
            for number, note in rows:
                transaction.insert("public.orders", id=number, note=note)
        await_that(lambda: delivered(tmp_path) == {"public.orders": rows})
        assert len(list(shelf.glob("*.arrow"))) == 1
        engine.resume("shop", "copy")
        await_that(lambda: delivered(tmp_path, target="copy") == {"public.orders": rows})
        await_that(lambda: not list(shelf.iterdir()))


def test_one_target_alone_has_nobody_to_share_with(engine: Engine, script: Script, tmp_path: Path) -> None:
    with engine:
        engine.upsert_stream(stream(script, tmp_path))
        engine.await_ready("shop", 120)
        assert not (tmp_path / "home" / "spark" / "decoded").exists()
