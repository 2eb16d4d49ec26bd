"""Several runs of the benches, and their table."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from millstream.bench import ALL, BENCHES, runs
from millstream.cli.app import app


def found(name: str, ratio: float, **more: Any) -> dict[str, Any]:
    figures = {"value": 1000 * ratio, "unit": "changes/s", "baseline": "another", "baseline_value": 1000, "must": 0.95}
    return {"name": name, **figures, "ratio": ratio, "reached": ratio >= 0.95, "equal": True, "forced": False, **more}


def test_each_bench_is_a_process_and_each_run_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        asked.append(command[4:])
        name = " ".join(command[4:-2])
        return subprocess.CompletedProcess(command, 0, json.dumps(found(name, 1.0 + len(asked), forced=True)))

    monkeypatch.setattr(subprocess, "run", run)
    file = tmp_path / "lines"
    assert runs.main([str(file), "--runs", "2", "--only", "capture", "--force"]) == 0
    three = [["capture"], ["capture", "--bulk"], ["capture", "--bulk", "--open-transaction"]]
    assert [command[:-2] for command in asked] == three * 2
    assert all(command[-2:] == ["--json", "--force"] for command in asked)
    assert len(file.read_text().splitlines()) == 6
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + 3
    assert lines[2].startswith("| `capture` | 2 (forced) | 3,500 (2,000 to 5,000) changes/s | 1,000 (1,000 to 1,000)")
    assert "| 3.5 (2 to 5) | 0.95 | 2 of 2 | equal |" in lines[2]
    assert runs.main([str(file), "--table"]) == 0
    assert capsys.readouterr().out.splitlines() == lines


def test_a_bench_without_a_figure_and_one_with_wrong_content_end_with_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "lines"
    file.write_text("")
    monkeypatch.setattr(subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 1, ""))
    assert runs.main([str(file), "--runs", "1", "--only", "lookup", "--force"]) == 1
    assert file.read_text() == ""
    file.write_text(json.dumps(found("capture", 1.0, equal=False)) + "\n")
    assert runs.main([str(file), "--table"]) == 1


def test_rivals_and_percentiles_are_in_the_table() -> None:
    rival = found("drain", 4.5, must=4, baseline="Debezium 3, embedded")
    latency = found("latency", 0.1, p99=590.4, unit="ms p50", value=400.0)
    table = runs.markdown([found("drain", 1.6, rivals=[rival]), latency]).splitlines()
    assert [line.split(" | ")[0] for line in table[2:]] == ["| `drain`", "| drain beside Debezium 3", "| `latency`"]
    assert "400 ms p50; 590 ms p99" in table[4]


def test_every_bench_of_all_is_a_command_that_is_understood() -> None:
    for name, options in ALL:
        assert set(options) <= BENCHES[name].options
        wrong = CliRunner().invoke(app, ["bench", name, *runs.flags(options), "--rows", "0"])
        assert "Invalid value for '--rows'" in wrong.stderr, wrong.stderr


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("drain", "--target", "sqlite"), "drain knows no target sqlite"),
        (("drain", "--keys", "many"), "no number"),
        (("quiet", "--target", "delta"), "--target means nothing to quiet"),
        (("drain", "--keys", "1M"), "--keys is for mirrors"),
    ],
)
def test_what_a_bench_does_not_know_is_refused(
    given: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("millstream.bench.frame.LOCK", tmp_path / "lock")
    done = CliRunner().invoke(app, ["bench", *given, "--force"])
    assert done.exit_code != 0
    assert said in done.stderr + str(done.exception)
