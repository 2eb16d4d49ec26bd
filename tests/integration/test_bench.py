"""The benches in short form: what they say was measured was done, and what is wrong is seen."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from millstream.bench import capture, content, frame, mix, recvlogical
from millstream.bench.mix import Part
from millstream.bench.rig import Backlog, Rig, rig
from millstream.cli.app import app

pytestmark = pytest.mark.postgres

FEW = Part(20, 300)


@pytest.fixture(scope="module")
def made() -> Iterator[Rig]:
    """A server with a small backlog."""
    with rig((FEW,)) as one:
        yield one


@pytest.fixture
def backlog(made: Rig) -> Backlog:
    return made.of(FEW)


def bench(*arguments: str) -> tuple[int, Any]:
    done = CliRunner().invoke(app, ["bench", *arguments, "--json", "--force"], catch_exceptions=False)
    return done.exit_code, json.loads(done.stdout)


def test_the_load_is_the_mix_it_says(backlog: Backlog) -> None:
    assert backlog.reference.operations == {"I": 180, "U": 90, "D": 30}
    with backlog.connect() as connection:
        for table in mix.TABLES:
            found = connection.execute(
                f"SELECT count(*), min(id), max(id), count(*) FILTER (WHERE pg_column_size(note) > 2000), "
                f"count(*) FILTER (WHERE status = 'touched') FROM {table}".encode()
            ).fetchone()
            # Seven cycles: 42 rows in, the first seven out again, of 3 to 23 those that are left touched.
            assert found == (35, 8, 42, 2, 16)


def test_the_servers_sync_as_servers_do(backlog: Backlog) -> None:
    with backlog.connect() as connection:
        shown = [connection.execute(f"SHOW {name}".encode()).fetchone() for name in ("fsync", "synchronous_commit")]
    assert shown == [("on",), ("on",)]


def test_the_baseline_is_checked(made: Rig, backlog: Backlog) -> None:
    assert recvlogical.drain(backlog, made.directory / "out").equal
    wrong = replace(backlog, reference=replace(backlog.reference, lines="00"))
    assert not recvlogical.drain(wrong, made.directory / "out").equal


def test_a_journal_that_lacks_or_changes_anything_is_not_equal(made: Rig, backlog: Backlog) -> None:
    assert capture.drain(made, backlog).equal
    journal = made.directory / "run" / "journal"
    assert content.journal_equals(journal, backlog)
    for field in ("rows", "transactions"):
        assert not content.journal_equals(
            journal, replace(backlog, reference=replace(backlog.reference, **{field: ""}))
        )
    assert not content.journal_equals(backlog.directory / "journal", backlog)


def test_capture_gives_the_whole_object(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame, "LOCK", tmp_path / "lock")
    monkeypatch.setattr(capture, "parts", lambda rows: (Part(1, 50),))
    code, found = bench("capture", "--rows", "150", "--repeat", "1")
    assert code == 0
    assert (found["name"], found["unit"], found["baseline"]) == ("capture", "changes/s", "pg_recvlogical to a file")
    assert (found["rows"], found["equal"], found["forced"]) == (50, True, True)
    (run,) = found["runs"]
    assert run["seconds"] > 0
    assert run["baseline_seconds"] > 0
    assert set(run["cpu_seconds"]) == {"server", "capture"}
    assert found["ratio"] == pytest.approx(run["baseline_seconds"] / run["seconds"], rel=0.01)
