"""Comparisons in a process that runs streams: when they begin, who is held meanwhile, what whoever asked is told."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from millstream.config import load_streams
from millstream.config.definition import definition, from_definition
from millstream.engine import verifier
from millstream.engine.reload import RELOAD, AskedTables, table_waiting, waiting
from millstream.engine.running import Held
from millstream.engine.verifier import Order, Verifier
from millstream.engine.verify import Asked, Place, VerifyStopped
from millstream.engine.verify_report import TableVerdict, TargetVerdict, VerifyReport
from millstream.errors import ConfigError, MillstreamError, NotSupported, VerifyFailed
from millstream.model import BatchLimits, Json, Mode, SourceSpec, StreamSpec, TargetSpec
from millstream.state.memory import MemoryStateStore
from millstream.targets.base import Reader
from millstream.targets.lanes.lane import LaneTarget
from tests.fixtures.delivery import Watching
from tests.fixtures.engines import await_that

CHANGELOG = {"path": "copy.db", "write": "changelog"}
VERDICT = TargetVerdict("log", "files", 7, "0/7", (TableVerdict("public.t", 3, 3),), datetime.now(UTC), 0.1)


class Running:
    """As much of what runs as a comparison asks for, with one stream of two targets."""

    def __init__(self, root: Path, every_ms: int | None = None) -> None:
        targets = tuple(
            TargetSpec(name, "files", BatchLimits(1, 1, 1), options={"path": str(root / name)})
            for name in ("log", "other")
        )
        self.stream = StreamSpec(
            "shop", SourceSpec("shop", "postgres", "", None, ()), Mode.CDC, targets, verify_every_ms=every_ms
        )
        self.members = [SimpleNamespace(name="shop", spec=self.stream, ready=True, deliveries={"log": 1, "other": 1})]
        self.held: list[str] = []
        self.history: list[str] = []
        self.on_leaving: Any = None

    def spec(self, name: str) -> StreamSpec:
        return self.stream

    def hold(self, name: str, target: str) -> Held:
        self.held.append(target)
        self.history.append(target)
        (spec,) = [one for one in self.stream.targets if one.name == target]
        nothing: Any = None
        return Held(nothing, self.stream, spec, Place((), Path(), None))

    def say(self, name: str, target: str, text: str) -> None: ...

    def let_go(self, name: str, target: str) -> None:
        self.held.remove(target)


class Comparing:
    """Takes the place of a comparison on Spark."""

    wait = threading.Event()
    fail: MillstreamError | None = None

    def __init__(self, *arguments: Any) -> None:
        self.stopping: threading.Event = arguments[6]

    def run(self, asked: Asked) -> TargetVerdict:
        while not Comparing.wait.wait(0.01):
            if self.stopping.is_set():
                raise VerifyStopped
        if Comparing.fail:
            raise Comparing.fail
        return VERDICT


@pytest.fixture(autouse=True)
def comparing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(verifier, "TargetVerification", Comparing)
    monkeypatch.setattr(verifier, "SCHEDULE_SECONDS", 0.0)
    monkeypatch.setattr(Comparing, "wait", threading.Event())
    monkeypatch.setattr(Comparing, "fail", None)
    Comparing.wait.set()
    yield
    Comparing.wait.set()


def made(running: Running) -> tuple[Verifier, MemoryStateStore, Watching]:
    store, watching = MemoryStateStore(), Watching()
    stand_in: Any = running
    return Verifier(store, stand_in, watching), store, watching


def test_targets_are_held_one_after_another_and_the_answer_is_kept(tmp_path: Path) -> None:
    running, answers = Running(tmp_path), list[Json]()
    it, store, _ = made(running)
    it.submit(Order("shop", ("log", "other"), Asked(), answers.append))
    await_that(lambda: it.serve() or bool(answers))
    assert VerifyReport.from_json(answers[0]["result"]).equal
    assert (running.history, running.held) == (["log", "other"], [])
    assert sorted(store.verifications("shop")) == ["log", "other"]


def test_a_table_that_was_named_wrongly_does_not_replace_what_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = list[Json]()
    it, store, watching = made(Running(tmp_path))
    it.submit(Order("shop", ("log",), Asked(("public.t",)), answers.append))
    await_that(lambda: it.serve() or len(answers) == 1)
    monkeypatch.setattr(Comparing, "fail", ConfigError("the stream has no table public.nope"))
    it.submit(Order("shop", ("log",), Asked(("public.nope",)), answers.append))
    await_that(lambda: it.serve() or len(answers) == 2)
    assert answers[1]["error"]["message"] == "the stream has no table public.nope"
    known = store.verifications("shop")["log"]
    assert (known["equal"], known["only"], watching.of("verify.failed")) == (True, ["public.t"], [])


def test_a_stream_that_changes_gets_its_target_back_at_once(tmp_path: Path) -> None:
    running, answers = Running(tmp_path), list[Json]()
    it, _, _ = made(running)
    Comparing.wait.clear()
    for _ in range(2):
        it.submit(Order("shop", ("log",), Asked(), answers.append))
    await_that(lambda: it.serve() or bool(running.held))
    it.interrupt("bank")
    assert running.held == ["log"]
    running.on_leaving("shop")
    assert running.held == []
    assert [answer["error"]["kind"] for answer in answers] == ["RequestFailed"] * 2


def test_what_cannot_be_is_refused_before_a_delivery_ends_for_it(tmp_path: Path) -> None:
    running, answers = Running(tmp_path), list[Json]()
    it, _, _ = made(running)
    it.submit(Order("shop", ("log",), Asked(repair=True), answers.append))
    await_that(lambda: it.serve() or bool(answers))
    assert "target log keeps what has happened" in answers[0]["error"]["message"]
    assert running.history == []


def test_a_target_that_cannot_be_compared_keeps_no_other_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(_: LaneTarget) -> Reader:
        raise NotSupported("it cannot be compared")

    monkeypatch.setattr(LaneTarget, "reader", none)
    running, answers = Running(tmp_path), list[Json]()
    log, other = running.stream.targets
    running.stream = replace(running.stream, targets=(log, replace(other, kind="sqlite", options=CHANGELOG)))
    it, store, _ = made(running)
    it.submit(Order("shop", ("log", "other"), Asked(repair=True), answers.append, scheduled=True))
    await_that(lambda: it.serve() or bool(answers))
    report = VerifyReport.from_json(answers[0]["result"])
    assert [target.target for target in report.targets] == ["log"]
    assert "it cannot be compared" in report.failures["other"]
    assert not report.equal
    assert running.history == ["log"]
    assert store.verifications("shop")["other"]["equal"] is None


def test_a_target_without_its_baseline_is_left_to_it(tmp_path: Path) -> None:
    running, answers = Running(tmp_path), list[Json]()
    running.stream = replace(running.stream, mode=Mode.SNAPSHOT_THEN_CDC)
    it, _, _ = made(running)
    it.submit(Order("shop", ("log",), Asked(), answers.append))
    await_that(lambda: it.serve() or bool(answers))
    assert answers[0]["error"]["message"] == "target log has not got its baseline yet"
    running.stream = replace(running.stream, mode=Mode.SNAPSHOT)
    it.submit(Order("shop", ("log",), Asked(), answers.append))
    await_that(lambda: it.serve() or len(answers) == 2)
    assert "cannot be brought to a position of the source" in answers[1]["error"]["message"]
    assert running.history == []


def test_a_target_whose_tables_are_being_copied_is_left_to_it(tmp_path: Path) -> None:
    running, answers = Running(tmp_path, every_ms=3_600_000), list[Json]()
    it, store, _ = made(running)
    copying = {**waiting(AskedTables()), "resolved": True, "tables": {"public.t": table_waiting()}}
    store.save_note("shop", "log", RELOAD, copying)
    await_that(lambda: it.serve() or bool(store.verifications("shop")))
    assert running.history == ["other"], "the schedule waits for the copy"
    it.submit(Order("shop", ("log",), Asked(), answers.append))
    await_that(lambda: it.serve() or len(answers) == 1)
    assert answers[0]["error"]["message"] == "tables are still being copied to target log"
    it.submit(Order("shop", ("log",), Asked(("public.other",)), answers.append))
    await_that(lambda: it.serve() or len(answers) == 2)
    store.save_note("shop", "log", RELOAD, {**copying, "state": "done"})
    it.submit(Order("shop", ("log",), Asked(), answers.append))
    await_that(lambda: it.serve() or len(answers) == 3)
    assert ["result" in answer for answer in answers] == [False, True, True]


def test_no_answer_is_told_and_remembered(tmp_path: Path) -> None:
    running, answers = Running(tmp_path), list[Json]()
    it, store, watching = made(running)
    Comparing.fail = VerifyFailed("the journal did not come")
    it.submit(Order("shop", ("log",), Asked(), answers.append))
    await_that(lambda: it.serve() or bool(answers))
    assert answers[0]["error"]["kind"] == "VerifyFailed"
    found = store.verifications("shop")["log"]
    assert (found["equal"], found["error"]) == (None, "the journal did not come")
    assert [event.kind for event in watching.events] == ["verify.failed"]
    assert running.held == []


def test_a_schedule_compares_what_is_due_and_nothing_before(tmp_path: Path) -> None:
    running = Running(tmp_path, every_ms=3_600_000)
    it, store, _ = made(running)
    await_that(lambda: it.serve() or len(store.verifications("shop")) == 2)
    for _ in range(20):
        it.serve()
    assert running.history == ["log", "other"]
    long_ago = {**VERDICT.to_json(), "compared_at": datetime(2020, 1, 1, tzinfo=UTC).isoformat()}
    store.save_verification("shop", "other", long_ago)
    await_that(lambda: it.serve() or len(running.history) == 3)
    assert running.history[-1] == "other"


FILE = """
name: shop
source: {{kind: postgres, uri: "postgresql://app@localhost/shop", tables: [public.orders]}}
mode: cdc
verify: {every}
targets: [{{name: log, kind: files, path: log, format: parquet}}]
"""


def test_the_stream_file_says_how_often(tmp_path: Path) -> None:
    (tmp_path / "shop.yaml").write_text(FILE.format(every="every 30m"))
    (stream,) = load_streams([tmp_path / "shop.yaml"])
    assert stream.verify_every_ms == 1_800_000
    assert from_definition(definition(stream)) == stream


@pytest.mark.parametrize("every", ["1h", "hourly", "every", "every day", "every 10ms", "[1]"])
def test_another_word_is_refused(tmp_path: Path, every: str) -> None:
    (tmp_path / "shop.yaml").write_text(FILE.format(every=every))
    with pytest.raises(ConfigError, match="verify: "):
        load_streams([tmp_path / "shop.yaml"])
