"""The frame of the benches: one at a time, on a quiet machine, by turns, medians, and content that counts."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from millstream.bench import BENCHES, Bench, frame, mix
from millstream.bench.frame import BASELINE, OURS, Round, Settings, Taken, alternate, machine, result
from millstream.cli.app import app
from millstream.errors import BenchRefused
from tests.fixtures.steps import Quiet


@pytest.fixture(autouse=True)
def own_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lock of the test's own, on a machine that is quiet."""
    monkeypatch.setattr(frame, "LOCK", tmp_path / "bench.lock")
    monkeypatch.setattr(os, "getloadavg", lambda: (0.1, 0.1, 0.1))


def of(part: str, theirs: float, ours: float, *, equal: bool = True) -> Round:
    return Round(part, 1000, {BASELINE: Taken(theirs, equal=True), OURS: Taken(ours, equal)})


def test_a_second_bench_is_refused_and_told_who_runs() -> None:
    with (
        machine("capture", force=False),
        pytest.raises(BenchRefused, match=f"capture, process {os.getpid()}"),
        machine("drain", force=True),
    ):
        pass
    with machine("drain", force=False) as load:
        assert load == 0.1


def test_a_busy_machine_is_refused_unless_forced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (0.51, 0.1, 0.1))
    monkeypatch.setattr(frame, "STAT", tmp_path / "missing")
    with pytest.raises(BenchRefused, match=r"0\.51"), machine("capture", force=False):
        pass
    with machine("capture", force=True) as load:
        assert load == 0.51


def test_a_machine_that_was_busy_a_minute_ago_is_not_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Idle processors, whatever the average still says; and busy ones, though the average is higher."""
    monkeypatch.setattr(os, "getloadavg", lambda: (1.9, 0.1, 0.1))
    monkeypatch.setattr(frame, "STAT", tmp_path / "stat")
    monkeypatch.setattr(frame, "LOOK_SECONDS", 0.05)
    frame.STAT.write_text("cpu  100 0 50 9000 20 0 0 0 0 0\ncpu0 100 0 50 9000 20 0 0 0 0 0\n")
    with machine("capture", force=False) as load:
        assert load == 0.0
    monkeypatch.undo()
    worked = frame._busy_seconds()
    while frame._busy_seconds() == worked:
        sum(range(10_000))
    assert frame._busy_seconds() > worked


def test_a_lock_that_somebody_else_made_is_used_as_it_is() -> None:
    frame.LOCK.touch(0o666)
    with machine("capture", force=False):
        assert frame.LOCK.read_text().startswith("capture, process")


def test_a_link_is_no_lock(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").touch()
    frame.LOCK.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BenchRefused, match="cannot open the lock"), machine("capture", force=False):
        pass


def test_both_ways_take_turns_and_the_first_turn_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame, "_stolen_seconds", lambda: 0.0)
    order: list[str] = []

    def way(name: str) -> Any:
        def run(part: mix.Part) -> Taken:
            order.append(f"{name} {part.transaction}")
            return Taken(1.0, equal=True)

        return run

    steps = Quiet()
    ways = {BASELINE: way("theirs"), OURS: way("ours")}
    rounds = alternate(mix.parts(150)[:2], Settings(steps, repeat=2), ways)
    assert order == ["theirs 1", "ours 1", "ours 1", "theirs 1", "theirs 20", "ours 20", "ours 20", "theirs 20"]
    assert len(rounds) == 4
    assert steps.said[0] == "8 steps"


class Host:
    """Takes so many of ten seconds of each run from the two processors. Its clock is that of the runs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, takes: list[float]) -> None:
        self._takes = iter(takes)
        self._stolen = self._now = 0.0
        monkeypatch.setattr(frame, "_stolen_seconds", lambda: self._stolen)
        monkeypatch.setattr(frame.time, "monotonic", lambda: self._now)
        monkeypatch.setattr(frame.os, "cpu_count", lambda: 2)

    def run(self, part: mix.Part) -> Taken:
        taken = next(self._takes)
        self._stolen += taken
        self._now += 10.0
        return Taken(3.0 + taken, equal=taken != 7.0, extra={"batches": 4})


@pytest.mark.parametrize(
    ("takes", "seconds", "extra"),
    [
        ([1.0], 4.0, {"stolen": 0.05}),
        ([4.0, 0.0], 3.0, {"stolen": 0.0, "disturbed": [7.0]}),
        ([5.0, 3.0, 4.0], 6.0, {"stolen": 0.15, "disturbed": [8.0, 7.0]}),
    ],
)
def test_a_run_whose_processors_the_host_has_taken_is_taken_again(
    monkeypatch: pytest.MonkeyPatch, takes: list[float], seconds: float, extra: dict[str, Any]
) -> None:
    steps, host = Quiet(), Host(monkeypatch, takes)
    (round_,) = alternate(mix.parts(150)[:1], Settings(steps, repeat=1), {OURS: host.run})
    taken = round_.taken[OURS]
    assert (taken.seconds, taken.equal, taken.extra) == (seconds, True, {"batches": 4, **extra})
    assert taken.first_seconds == 3.0 + takes[0]
    assert [said for said in steps.said if "once more" in said] == [
        f"1-row transactions, ours, 1 of 1: the host took {share * 5:.0f}% of the processors; once more"
        for share in takes[:-1]
    ]


def test_a_disturbed_run_must_have_been_right_too(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch, [7.0, 0.0])
    (round_,) = alternate(mix.parts(150)[:1], Settings(Quiet(), repeat=1), {OURS: host.run})
    assert not round_.taken[OURS].equal


def test_medians_count_and_the_lowest_ratio() -> None:
    rounds = [of("a", 4.0, 1.0), of("a", 2.0, 9.0), of("a", 3.0, 2.0), *[of("b", 1.0, 2.0)] * 3]
    found = result("capture", rounds, baseline="another", must=0.5)
    assert [part["ratio"] for part in found["parts"]] == [1.5, 0.5]
    assert [part["spread"] for part in found["parts"]] == [4.0, 0.0]
    assert (found["ratio"], found["reached"], found["rows"]) == (0.5, True, 2000)
    assert (found["value"], found["baseline_value"]) == (500, 500)
    assert [run["seconds"] for run in found["runs"]] == [1.0, 9.0, 2.0, 2.0, 2.0, 2.0]
    assert not result("capture", rounds, baseline="another", must=0.6)["reached"]


def test_the_result_tells_the_ratio_without_runs_that_were_taken_again() -> None:
    again = Round("a", 1000, {BASELINE: Taken(4.0, True, first_seconds=3.0), OURS: Taken(2.0, True, first_seconds=6.0)})
    found = result("capture", [again, of("b", 4.0, 1.0)], baseline="another", must=None)
    assert (found["ratio"], found["ratio_of_first_tries"]) == (2.0, 0.5)
    assert [part["ratio_of_first_tries"] for part in found["parts"]] == [0.5, 4.0]


def test_one_wrong_run_makes_all_of_it_wrong() -> None:
    rounds = [of("a", 1.0, 1.0), of("a", 1.0, 1.0, equal=False), of("a", 1.0, 1.0)]
    assert result("capture", rounds, baseline="another", must=None)["equal"] is False


def test_the_mix_is_three_thirds_of_whole_transactions() -> None:
    assert [(part.transaction, part.changes) for part in mix.parts(800_000)] == [
        *((1, 270_000), (20, 270_000), (5_000, 270_000))
    ]
    assert [(part.transaction, part.changes) for part in mix.parts(100)] == [(1, 50), (20, 50), (50, 50)]


def stand_in(monkeypatch: pytest.MonkeyPatch, *, equal: bool) -> None:
    def run(settings: Settings) -> dict[str, Any]:
        settings.steps.note("something to know")
        return result("capture", [of("a", 1.0, 2.0, equal=equal)], baseline="another", must=0.95)

    stand_ins = {"capture": Bench(run, "nothing", frozenset({"rows", "repeat"}))}
    monkeypatch.setattr("millstream.bench.BENCHES", {**BENCHES, **stand_ins})


def test_wrong_content_ends_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, equal=False)
    done = CliRunner().invoke(app, ["bench", "capture", "--json"])
    assert done.exit_code == 1
    assert json.loads(done.stdout)["equal"] is False
    done = CliRunner().invoke(app, ["bench", "capture"])
    assert done.exit_code == 1
    assert "NOT EQUAL" in done.stdout


def test_json_has_the_result_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, equal=True)
    done = CliRunner().invoke(app, ["bench", "capture", "--json", "--force"])
    assert done.exit_code == 0
    found = json.loads(done.stdout)
    wanted = {"name", "value", "unit", "baseline", "baseline_value", "ratio", "runs", "rows", "equal"}
    assert wanted <= set(found)
    assert (found["forced"], found["load"]) == (True, 0.1)
    assert "something to know" in done.stderr


def test_the_table_says_what_must_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, equal=True)
    done = CliRunner().invoke(app, ["bench", "capture"])
    assert "0.95, not reached" in done.stdout
    assert "another" in done.stdout


def test_an_option_that_means_nothing_to_a_bench_is_refused() -> None:
    done = CliRunner().invoke(app, ["bench", "decode", "--repeat", "2"])
    assert done.exit_code == 2
    assert "--repeat means nothing to decode" in done.stderr
    assert CliRunner().invoke(app, ["bench", "nonsense"]).exit_code == 2
