"""The demo: what it says at the end is what happened, and in its short form it comes to that end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

import pytest
from typer.testing import CliRunner

from millstream.cli.app import app
from millstream.config import load_streams
from millstream.demo.play import STREAM_FILE, Outcome, Play
from millstream.demo.shop import TABLES
from millstream.engine.verify_report import TableVerdict, TargetVerdict, VerifyReport
from millstream.model import Mode


def outcome(extra: int) -> Outcome:
    table = TableVerdict("public.orders", 10, 10 + extra, extra=extra, keys=('{"id":1}',) if extra else ())
    verdict = TargetVerdict("lake", "delta", 7, "0/7", (table,), datetime.now(UTC), 0.1)
    return Outcome(5, 7, 1.0, 3, VerifyReport("shop", (verdict,)))


@pytest.mark.parametrize("extra", [0, 1])
def test_the_exit_code_says_whether_all_is_equal_and_what_is_not_is_left_for_a_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, extra: int
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(Play, "perform", lambda _: outcome(extra))
    ended = CliRunner().invoke(app, ["demo", "--json", "--seed", "7"])
    assert ended.exit_code == extra
    said = json.loads(ended.stdout)
    assert (said["equal"], said["seed"], said["changes"], said["killed_processes"]) == (not extra, 7, 7, 3)
    assert len(list(tmp_path.iterdir())) == extra
    monkeypatch.setattr(Play, "perform", lambda _: outcome(extra))
    ended = CliRunner().invoke(app, ["demo"])
    assert ("NOT EQUAL" if extra else "EQUAL: every row of every table") in ended.stdout


def test_the_demos_stream_is_one_that_a_stream_file_can_say(tmp_path: Path) -> None:
    file = tmp_path / "shop.yaml"
    places = {name: json.dumps(str(tmp_path / name)) for name in ("log", "lake")}
    uri = "postgresql://postgres@127.0.0.1:5432"
    file.write_text(STREAM_FILE.format(uri=f"{uri}/shop", copy=f"{uri}/copy", **places))
    (stream,) = load_streams([file])
    assert stream.mode is Mode.SNAPSHOT_THEN_CDC
    assert [(target.name, target.kind) for target in stream.targets] == [
        ("log", "files"),
        ("lake", "delta"),
        ("copy", "postgres"),
    ]


@pytest.mark.skipif("MILLSTREAM_DEMO" not in os.environ, reason="`make demo-short` plays it")
@pytest.mark.timeout(300)
def test_the_demo_ends_with_every_table_equal_at_every_target() -> None:
    command = [sys.executable, "-m", "millstream", "demo", "--seconds", "4", "--seed", "7", "--json"]
    played = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert played.returncode == 0, played.stderr[-4000:]
    said = json.loads(played.stdout)
    assert said["equal"] is True
    assert said["transactions"] > 0
    assert said["changes"] > 0
    assert said["killed_processes"] > 0
    assert sorted(target["target"] for target in said["targets"]) == ["copy", "lake", "log"]
    for target in said["targets"]:
        assert len(target["tables"]) == len(TABLES)
        assert sum(table["target_rows"] for table in target["tables"]) > 0
