"""The lines between engine and capture process: complete, bounded, never in the way."""

from __future__ import annotations

import io
import json
import os
import sys
import threading
from pathlib import Path

import pytest

from millstream.engine import capture_process
from millstream.engine.capture_order import CaptureOrder, Control, Rebase
from millstream.engine.capture_process import KEPT_EVENTS, NoPandas, Voice, listen
from millstream.engine.supervisor import _error, _event
from millstream.errors import JournalFull, SourceHalted
from millstream.model import AckPolicy, OnLimit, Retention, SourceSpec
from millstream.observe import Event, Level

SPEC = SourceSpec(
    "shop",
    "postgres",
    "postgresql://h/d",
    "env:PW",
    ("a.b", "c.*"),
    AckPolicy.JOURNALED,
    5,
    OnLimit.HOLD,
    {"slot": "s"},
    Retention(age_ms=7, bytes=9),
)


@pytest.fixture(autouse=True)
def time_for_last_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here somebody listens, on a machine that may be loaded."""
    monkeypatch.setattr(capture_process, "LAST_WORDS_SECONDS", 120.0)


def test_an_order_survives_the_way_as_json() -> None:
    for order in (
        CaptureOrder(SPEC, Path("/a b/journal"), expect_journal=True, rebase=Rebase(7, 2, 99)),
        CaptureOrder(SPEC, Path("journal")),
    ):
        assert CaptureOrder.from_json(json.loads(json.dumps(order.to_json()))) == order


def test_what_the_engine_says_counts_and_its_silence_stops() -> None:
    control = Control()
    lines = ['{"ack": 5}', '{"ack": 3, "planned_before": 1.5}', '{"lowest": 0}', '{"ack": null, "stop": false}']
    listen(lines, control)
    assert (control.ack, control.planned_before, control.stopping.is_set()) == (5, 1.5, True)
    assert control.lowest == 0


def test_nothing_is_heard_after_a_stop() -> None:
    control = Control()
    listen(['{"stop": true}', '{"ack": 9}'], control)
    assert (control.ack, control.stopping.is_set()) == (None, True)


def test_events_are_all_said_and_of_statuses_the_last() -> None:
    all_said = threading.Event()

    class Slow(io.StringIO):
        def write(self, text: str) -> int:
            assert all_said.wait(120)
            return super().write(text)

    out = Slow()
    voice = Voice(out)
    for number in range(20):
        voice.event(Event("a.b", "m", fields={"n": number}))
        voice.status({"state": "running", "n": number})
    all_said.set()
    voice.close()
    said = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [one["event"]["fields"]["n"] for one in said if "event" in one] == list(range(20))
    statuses = [one["status"]["n"] for one in said if "status" in one]
    assert statuses[-1] == 19
    assert len(statuses) <= 2


def test_the_voice_is_woken_for_what_must_be_said_and_not_for_each_status(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()

    class Slow(io.StringIO):
        def write(self, text: str) -> int:
            assert go_on.wait(120)
            return super().write(text)

    woken = []
    out = Slow()
    voice = Voice(out)
    wake = voice._changed.notify
    monkeypatch.setattr(voice._changed, "notify", lambda: (woken.append(1), wake()))
    voice.status({"state": "running", "n": -1})
    for number in range(100):
        voice.status({"state": "running", "n": number})
    seen = len(woken)
    voice.status({"state": "waiting", "n": 100})
    assert len(woken) == seen + 1
    go_on.set()
    voice.close()
    assert seen <= 2, "once for the first, and once more if that was taken meanwhile"
    said = [json.loads(line)["status"] for line in out.getvalue().splitlines()]
    assert said[-1] == {"state": "waiting", "n": 100}


def test_an_engine_that_does_not_read_stops_nobody() -> None:
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as out:
        voice = Voice(out)
        for _ in range(3 * KEPT_EVENTS):  # far more than a pipe holds
            voice.event(Event("a.b", "m" * 1000))
        drained: list[str] = []
        with os.fdopen(reading) as lines:
            reader = threading.Thread(target=lambda: drained.extend(lines))
            reader.start()
            voice.close()
            out.close()
            reader.join()
    kinds = [json.loads(line)["event"]["kind"] for line in drained]
    assert "capture.events_dropped" in kinds
    assert len(kinds) < 3 * KEPT_EVENTS


def test_an_engine_that_is_gone_stops_nobody() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    out = os.fdopen(writing, "w")
    voice = Voice(out)
    voice.event(Event("a.b", "m"))
    voice.close()
    with pytest.raises(BrokenPipeError):
        out.close()


def test_an_event_and_its_error_are_what_they_were() -> None:
    out = io.StringIO()
    voice = Voice(out)
    told = Event("capture.halted", "no slot", Level.ERROR, fields={"error": "JournalFull", "hint": "make room"})
    voice.event(told)
    voice.close()
    heard = _event(json.loads(out.getvalue())["event"])
    assert heard == told
    error = _error(heard)
    assert (type(error), error.message, error.hint) == (JournalFull, "no slot", "make room")
    assert type(_error(Event("a.b", "m", fields={"error": "ZeroDivisionError"}))) is SourceHalted


def test_pandas_is_refused_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", [NoPandas(), *sys.meta_path])
    monkeypatch.delitem(sys.modules, "pandas", raising=False)
    monkeypatch.delitem(sys.modules, "this", raising=False)
    with pytest.raises(ModuleNotFoundError):
        __import__("pandas")
    assert __import__("colorsys")
