"""The benches in short form: what they say was measured was done, and what is wrong is seen."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from typer.testing import CliRunner

from millstream.bench import capture, content, debezium, drain, frame, mix, recvlogical
from millstream.bench.frame import Settings
from millstream.bench.mix import Part
from millstream.bench.rig import PUBLICATION, Backlog, Rig, rig
from millstream.cli.app import app
from millstream.errors import BenchFailed
from tests.fixtures.steps import Quiet

# What capture costs is told by the name of its process.
pytestmark = [pytest.mark.postgres, pytest.mark.own_capture]

FEW = Part(20, 300)


@pytest.fixture(scope="module")
def made() -> Iterator[Rig]:
    """A server with a small backlog."""
    with rig((FEW,)) as one:
        yield one


@pytest.fixture
def backlog(made: Rig) -> Backlog:
    return made.of(FEW)


@pytest.fixture(autouse=True)
def own_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame, "LOCK", tmp_path / "lock")


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


def test_the_file_of_the_baseline_is_read_transaction_by_transaction(backlog: Backlog) -> None:
    with backlog.connect() as connection:
        messages = connection.execute(
            "SELECT data FROM pg_logical_slot_peek_binary_changes('base', NULL, NULL, 'proto_version', '1', "
            "'publication_names', %s)",
            (PUBLICATION,),
        ).fetchall()
    data = b"".join(message + b"\n" for (message,) in messages)
    found = list(recvlogical.transactions(data))
    assert [one.changes for one in found] == [20] * 15
    assert found[-1].end == len(data) - 1
    assert found == sorted(found, key=lambda one: one.commit_us)
    assert list(recvlogical.transactions(data[:-1])) == found[:-1]
    with pytest.raises(ValueError, match="no message"):
        list(recvlogical.transactions(b"x" + data))


def test_a_journal_that_lacks_or_changes_anything_is_not_equal(made: Rig, backlog: Backlog) -> None:
    taken = capture.drain(made, backlog, capture.STREAMING)
    assert (taken.equal, taken.extra) == (True, {"modes": []})
    journal = made.directory / "run" / "journal"
    assert content.journal_equals(journal, backlog)
    for field in ("rows", "transactions"):
        assert not content.journal_equals(
            journal, replace(backlog, reference=replace(backlog.reference, **{field: ""}))
        )
    assert not content.journal_equals(backlog.directory / "journal", backlog)


def test_in_bulk_the_journal_is_the_same(made: Rig, backlog: Backlog) -> None:
    taken = capture.drain(made, backlog, capture.BULK)
    assert taken.equal
    assert taken.extra["modes"][0] == "bulk"


def test_capture_gives_the_whole_object(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "parts", lambda rows: (Part(1, 50),))
    code, found = bench("capture", "--rows", "150", "--repeat", "1", "--open-transaction")
    assert code == 0
    assert found["name"] == "capture --open-transaction"
    assert (found["unit"], found["baseline"]) == ("changes/s", "pg_recvlogical to a file")
    assert (found["rows"], found["equal"], found["forced"]) == (50, True, True)
    (run,) = found["runs"]
    assert run["seconds"] > 0
    assert run["baseline_seconds"] > 0
    assert set(run["cpu_seconds"]) == {"server", "capture"}
    assert found["ratio"] == pytest.approx(run["baseline_seconds"] / run["seconds"], rel=0.01)


@pytest.mark.spark
def test_drain_is_checked_to_the_last_row(
    made: Rig, backlog: Backlog, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def same(*_: object) -> Iterator[Rig]:
        yield made

    monkeypatch.setattr(drain, "parts", lambda rows: (FEW,))
    monkeypatch.setattr(drain, "rig", same)
    monkeypatch.setattr(drain, "warm_up", lambda *_: None)
    monkeypatch.setattr(debezium, "missing", lambda: None)
    monkeypatch.setattr(debezium, "name", lambda: "Debezium")
    stand_in(tmp_path, monkeypatch, r"2000000000\t3500000000\t180\t90\t30")
    code, found = bench("drain", "--repeat", "1")
    assert code == 0
    assert (found["name"], found["rows"], found["equal"], found["must"]) == ("drain", 300, True, 1.5)
    (rival,) = found["rivals"]
    assert (rival["baseline"], rival["must"], rival["equal"]) == ("Debezium", 4, True)
    assert rival["runs"][0]["baseline_first_seconds"] == 2.0
    (run,) = found["runs"]
    assert {"server", "capture", "jvm", "driver"} <= set(run["cpu_seconds"])
    assert "trouble" not in run
    assert set(found["profile"]["task"]) == {"read", "decode", "write"}
    assert all(spent > 0 for spent in found["profile"]["task"].values())
    lake = made.directory / "run" / "lake1"
    with backlog.connect() as connection:
        assert content.changelog_equals(lake, connection, backlog.goal)
        assert not content.changelog_equals(lake, connection, backlog.goal + 1)
        with connection.transaction(force_rollback=True):
            connection.execute("UPDATE bench.mix3 SET weight = weight + 1 WHERE id = 20")
            assert not content.changelog_equals(lake, connection, backlog.goal)
        max((lake / "bench.mix2").glob("*.parquet")).unlink()
        assert not content.changelog_equals(lake, connection, backlog.goal)


@pytest.mark.spark
def test_fanout_waits_for_every_target(made: Rig, backlog: Backlog, spark: SparkSession) -> None:
    taken = drain.drain(made, backlog, 2)
    assert taken.equal
    commits = [sorted((made.directory / "run" / f"lake{n}" / "_millstream" / "commits").iterdir()) for n in (1, 2)]
    assert {found[-1].name for found in commits} == {f"{backlog.goal:020d}.json"}


@pytest.mark.spark
def test_latency_is_seen_from_outside(spark: SparkSession) -> None:
    code, found = bench("latency", "--seconds", "0.5", "--repeat", "1")
    assert code == 0
    assert (found["name"], found["rows"], found["equal"]) == ("latency", 500, True)
    (run,) = found["runs"]
    assert 0 < run["p50"] <= run["p99"] <= run["max"]
    assert 0 < run["baseline_p50"] <= run["baseline_p99"]
    assert found["value"] == found["p50"] == run["p50"]
    assert found["must"] == "p50 400 ms, p99 1000 ms"


def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
    """A Java that answers each order with the same line."""

    class Java:
        home = tmp_path

    java = tmp_path / "bin" / "java"
    java.parent.mkdir(exist_ok=True)
    java.write_text(f"#!/bin/sh\nwhile read -r order; do printf '{answer}\\n'; done\n")
    java.chmod(0o755)
    monkeypatch.setattr(debezium, "find_java", Java)


def test_debezium_counts_by_operation(backlog: Backlog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path, monkeypatch, r"2000000000\t3500000000\t180\t90\t30")
    with debezium.Debezium(tmp_path / "log") as process:
        taken = process.drain(backlog)
    assert (taken.seconds, taken.equal, taken.extra) == (3.5, True, {"first_seconds": 2.0})
    stand_in(tmp_path, monkeypatch, r"2000000000\t3500000000\t180\t90\t31")
    with debezium.Debezium(tmp_path / "log") as process:
        assert not process.drain(backlog).equal
    stand_in(tmp_path, monkeypatch, r"error\tno such slot")
    with pytest.raises(BenchFailed, match="no such slot"), debezium.Debezium(tmp_path / "log") as process:
        process.drain(backlog)


def test_debezium_is_left_out_aloud(made: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(debezium, "_BUILT", tmp_path / "nothing")
    assert "bench/debezium/build" in (debezium.missing() or "")
    steps = Quiet()
    assert drain._rival(made, Settings(steps), ExitStack()) == {}
    assert steps.said == [f"Debezium is left out: {debezium.missing()}"]
