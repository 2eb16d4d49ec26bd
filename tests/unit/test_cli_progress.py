from __future__ import annotations

import io
import threading
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from rich.console import Console

from millstream.cli.log import Log
from millstream.cli.output import how_far
from millstream.cli.progress import LiveDisplay, Progress, Summary
from millstream.engine.home import Home
from millstream.engine.stream_status import TargetStatus
from millstream.model import StreamState
from millstream.observe import Event, Level


def target(state: StreamState = StreamState.RUNNING) -> TargetStatus:
    return TargetStatus(
        *("log", "files", state, 1, 5, "0/1", 1300, 0.42, None, 5, 9, 1, None, None, None),
        *(None, 5, 9, 0, None, 0, ()),
    )


class Known(Progress):
    """Progress whose home always says the same."""

    def __init__(self, now: list[float]) -> None:
        super().__init__(Home("/nowhere"), clock=lambda: now[0])
        self.state = StreamState.RUNNING

    def targets(self) -> list[tuple[tuple[str, str], TargetStatus]]:
        return [(("shop", "log"), target(self.state))]


def batch(rows: int, **tables: int) -> Event:
    named = {f"public.{name}": count for name, count in tables.items()}
    return Event("delivery.batch", "", Level.DEBUG, "shop", "log", {"rows": rows, "tables": named})


def test_rates_are_taken_over_the_last_ten_seconds() -> None:
    now = [100.0]
    progress = Known(now)
    progress.on_event(batch(500, orders=500))
    now[0] = 105.0
    progress.on_event(batch(1500, orders=500, items=1000))
    assert progress.rows(("shop", "log")) == (2000, 200.0)
    now[0] = 111.0
    assert progress.rows(("shop", "log")) == (2000, 150.0)
    now[0] = 200.0
    assert progress.rows(("shop", "log")) == (2000, 0.0)
    assert progress.rows(("bank", "log")) == (0, 0.0)
    assert progress.tables() == {"public.orders": 1000, "public.items": 1000}


def test_the_rows_of_a_baseline_count() -> None:
    progress = Known([0.0])
    tables = {"public.orders": 40, "public.items": 2}
    progress.on_event(Event("snapshot.finished", "", Level.INFO, "shop", "log", {"rows": 42, "tables": tables}))
    progress.on_event(batch(8, orders=8))
    assert progress.rows(("shop", "log"))[0] == 50
    assert progress.tables() == {"public.orders": 48, "public.items": 2}


def test_other_events_are_not_counted() -> None:
    progress = Known([0.0])
    progress.on_event(Event("delivery.retry", "x", Level.WARNING, "shop", "log", {"rows": 7}))
    assert progress.rows(("shop", "log")) == (0, 0.0)


def test_a_home_that_is_being_set_up_has_no_targets_yet(tmp_path: Path) -> None:
    assert Progress(Home(tmp_path / "none")).targets() == []
    (tmp_path / "state.db").write_text("not a database yet")
    assert Progress(Home(tmp_path)).targets() == []


def test_a_summary_line_appears_only_when_something_moved() -> None:
    out = io.StringIO()
    progress = Known([0.0])
    summary = Summary(progress, Log(out))
    summary.tick()
    assert out.getvalue() == ""
    progress.on_event(batch(12345, orders=12345))
    summary.tick()
    summary.tick()
    assert out.getvalue() == "shop/log: running, 1,234 rows/s, 1,300 behind (0.4 s), 12,345 rows\n"
    progress.state = StreamState.FAILED
    summary.tick()
    assert out.getvalue().splitlines()[1].startswith("shop/log: failed, ")


def test_a_summary_line_says_how_far_first_rows_are() -> None:
    far = {"tables": 3, "tables_done": 1, "chunks": 12, "done": 3, "rows_per_second": 1500, "seconds_left": 300.0}
    line = Known([0.0]).line(("shop", "log"), replace(target(StreamState.SNAPSHOT), baseline=far))
    left = "1 of 3 tables, 3 of 12 chunks, 1,500 rows/s, about 5 min left"
    assert line == f"shop/log: snapshot ({left}), 0 rows/s, 1,300 behind (0.4 s), 0 rows"


def test_first_rows_begin_before_there_is_a_plan_of_them() -> None:
    none = {"done": 0, "rows_per_second": None, "seconds_left": None}
    assert how_far({**none, "tables": 0, "tables_done": 0, "chunks": None}) == "begins"
    assert how_far({**none, "tables": 1, "tables_done": 0, "chunks": 0}) == "0 of 1 table, begins"
    assert how_far({**none, "chunks": 1}) == "0 of 1 chunk"


def test_the_summary_runs_by_itself_and_ends_with_its_block() -> None:
    written = threading.Event()

    class Out(io.StringIO):
        def write(self, text: str) -> int:
            written.set()
            return super().write(text)

    progress = Known([0.0])
    progress.on_event(batch(1, orders=1))
    before = set(threading.enumerate())
    with Summary(progress, Log(Out()), interval=0.01):
        assert written.wait(60)
    assert set(threading.enumerate()) <= before


def test_the_live_display_shows_targets_and_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    terminal = Console(file=out, force_terminal=True, width=100, color_system=None)
    monkeypatch.setattr("millstream.cli.progress.console", lambda **_: terminal)
    progress = Known([0.0])
    progress.on_event(batch(30, **{f"t{n:02}": n for n in range(1, 16)}))
    with LiveDisplay(progress, interval=60) as display:
        Log(display).on_event(Event("x", "capture started", at=datetime(2026, 1, 1, 12, tzinfo=UTC)))
    shown = out.getvalue()
    assert "12:00:00.000 INFO    -  capture started\n" in shown
    lines = [line.split() for line in shown[shown.rindex("target ") :].splitlines()]
    assert lines[1] == ["shop/log", "running", "3", "1,300", "0.4", "s", "30"]
    assert lines[3] == ["public.t15", "15"]
    assert ["and", "3", "more"] in lines


def test_the_log_writes_whole_lines_from_many_threads() -> None:
    out = io.StringIO()
    log = Log(out)
    threads = [threading.Thread(target=lambda n=n: [log.line(f"{n}" * 50) for _ in range(50)]) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(out.getvalue().splitlines()) == sorted(f"{n}" * 50 for n in range(4) for _ in range(50))
