"""The benches of mirrors and of whole engines, in short form: each comes to its figures, and checks its content."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from millstream import Engine
from millstream.bench import (
    content,
    frame,
    isolation,
    keyed,
    latency,
    mirrors,
    mix,
    quiet,
    snapshot,
    stream,
    subscription,
    tables,
)
from millstream.bench.apart import Apart
from millstream.bench.keyed import Keyed
from millstream.bench.live import another_server, fresh_database
from millstream.bench.mix import ROUND, TABLES, Part
from millstream.bench.proxy import Proxy
from millstream.bench.rig import Rig, rig
from millstream.cli.app import app
from millstream.config import load_streams
from millstream.embedded import EmbeddedPostgres
from millstream.engine.home import Home
from millstream.errors import ConfigError

pytestmark = [
    pytest.mark.own_capture,
    pytest.mark.postgres,
    pytest.mark.skipif("MILLSTREAM_REHEARSE" not in os.environ, reason="takes two minutes: `make rehearse` runs it"),
]

FEW = Part(20, 2_000)
KEYS = keyed.LEAST


@pytest.fixture(autouse=True)
def own_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame, "LOCK", tmp_path / "lock")


def bench(*arguments: str) -> Any:
    done = CliRunner().invoke(app, ["bench", *arguments, "--json", "--force"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert {"name", "value", "unit", "baseline", "baseline_value", "ratio", "must", "runs", "rows"} <= set(found)
    assert found["equal"] is True
    return found


@pytest.fixture(scope="module")
def other() -> Iterator[EmbeddedPostgres]:
    """A server for copies."""
    with ExitStack() as stack:
        yield another_server(stack)


@pytest.fixture(scope="module")
def made(other: EmbeddedPostgres) -> Iterator[Rig]:
    with rig((FEW,), load=Keyed(KEYS), at_base=partial(subscription.template, other)) as one:
        yield one


@pytest.fixture
def same_servers(made: Rig, other: EmbeddedPostgres, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the benches start is there already."""

    @contextmanager
    def same(*_: object, **__: object) -> Iterator[Rig]:
        yield made

    monkeypatch.setattr(mirrors, "parts", lambda rows: (FEW,))
    for warmed in (mirrors, snapshot):
        monkeypatch.setattr(warmed, "warm_up", lambda *_: None)
    monkeypatch.setattr(mirrors, "rig", same)
    for module in (mirrors, latency, tables, isolation, snapshot):
        monkeypatch.setattr(module, "another_server", lambda _: other)
    for module in (latency, tables, isolation, quiet, snapshot):
        monkeypatch.setattr(module, "EmbeddedPostgres", lambda *_, **__: nullcontext(other))


@pytest.fixture
def played(no_spark: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark's part played in this process, and batches that come soon: what both cost is not what is tested here."""
    given = stream.stream_file

    def sooner(path: Path, uri: str, options: Any, targets: dict[str, Any], **more: Any) -> Path:
        soon = {name: {"batch": {"max_ms": 100}, **one} for name, one in targets.items()}
        return given(path, uri, options, soon, **more)

    monkeypatch.setattr(stream, "stream_file", sooner)
    monkeypatch.setattr(tables, "stream_file", sooner)
    monkeypatch.setattr(stream, "session", lambda _: nullcontext())
    for module in (quiet, tables):
        monkeypatch.setattr(module, "apart", inside)


class Here:
    """The process of an engine that runs in this one."""

    pid, running = os.getpid(), True


@contextmanager
def inside(file: Path, directory: Path) -> Iterator[Apart]:
    """Instead of a process of its own an engine in this one, on the Spark session that is there."""
    home = Home(directory / "home").create()
    with Engine(home.path) as engine:
        engine.upsert_streams(load_streams([file]))
        yield Apart(Here(), home)  # type: ignore[arg-type]


def test_the_load_keeps_the_number_of_keys(made: Rig) -> None:
    backlog = made.of(FEW)
    assert backlog.reference.operations == {"I": 400, "U": 1_200, "D": 400}
    assert backlog.warm == KEYS - 2 * keyed.AWAY * len(TABLES) + ROUND
    with backlog.connect() as connection:
        for table in TABLES:
            found = connection.execute(
                f"SELECT count(*), count(*) FILTER (WHERE status = 'touched') > 100, max(id) FROM {table}".encode()
            ).fetchone()
            assert found == (KEYS // len(TABLES) - 2 * keyed.AWAY, True, 1_882)


@pytest.mark.parametrize("keys", [100, keyed.LEAST + 1])
def test_a_number_of_keys_that_will_not_do_is_refused(keys: int) -> None:
    with pytest.raises(ConfigError, match=f"{keys} keys"):
        Keyed(keys)


@pytest.mark.usefixtures("played", "same_servers")
@pytest.mark.parametrize("target", ["delta", "postgres"])
def test_a_drain_into_mirrors(target: str) -> None:
    found = bench("drain", "--target", target, "--keys", "10k", "--repeat", "1")
    assert found["name"] == f"drain --target {target} --keys 10000"
    assert (found["rows"], found["keys"]) == (2_000, 10_000)
    assert found["must"] == {"delta": 0.7, "postgres": 1.0}[target]
    (run,) = found["runs"]
    assert run["seconds"] > 0
    assert run["baseline_seconds"] > 0
    assert "trouble" not in run


def test_a_wrong_row_of_a_copy_is_seen(made: Rig, other: EmbeddedPostgres) -> None:
    with made.of(FEW).connect() as source, fresh_database(other, "wrong", template="before_20") as (copy, _):
        assert not content.copies_equal(source, copy)  # it is from before the backlog
        with fresh_database(other, "second") as (second, _):
            second.execute(mix.tables().encode())
            assert not content.copies_equal(copy, second)
            for table in TABLES:
                subscription.copy_rows(copy, second, table)
            assert content.copies_equal(copy, second)
            second.execute("UPDATE bench.mix3 SET weight = weight + 1 WHERE id = 900")
            assert not content.copies_equal(copy, second)
            second.execute("DROP TABLE bench.mix3")
            assert not content.copies_equal(copy, second)


@pytest.mark.usefixtures("played", "same_servers")
def test_latency_into_a_database() -> None:
    found = bench("latency", "--target", "postgres", "--seconds", "0.5", "--repeat", "1")
    assert (found["name"], found["rows"]) == ("latency --target postgres", 500)
    (run,) = found["runs"]
    assert 0 < run["p50"] <= run["p99"] <= run["max"]
    assert found["must"] == "p50 500 ms, p99 1500 ms"


@pytest.mark.usefixtures("played", "same_servers")
@pytest.mark.parametrize("target", ["delta", "postgres"])
def test_many_tables(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "TABLES", tables.TABLES[:20])
    monkeypatch.setattr(tables, "ROUND", 2)
    found = bench("tables", "--target", target, "--seconds", "1")
    # Ten changes a second of each.
    assert (found["name"], found["rows"]) == (f"tables --target {target}", 200)
    (run,) = found["runs"]
    assert 0 < run["p50"] <= run["p99"] == found["value"]
    assert run["memory_bytes"] > 50_000_000
    assert (run["files"] is None) == (target == "postgres")


@pytest.mark.usefixtures("played", "same_servers")
@pytest.mark.parametrize("target", ["files", "postgres"])
def test_all_rows_of_a_table(target: str) -> None:
    found = bench("snapshot", "--target", target, "--rows", "3000", "--repeat", "1")
    assert found["name"] == ("snapshot" if target == "files" else "snapshot --target postgres")
    assert (found["rows"], found["unit"]) == (3_000, "rows/s")
    assert found["must"] == {"files": 0.8, "postgres": 1.0}[target]
    (run,) = found["runs"]
    assert run["seconds"] > 0
    assert run["baseline_seconds"] > 0


def test_a_wrong_row_or_index_of_a_snapshot_is_seen(other: EmbeddedPostgres) -> None:
    with fresh_database(other, "one") as (one, _), fresh_database(other, "two") as (two, _):
        for each in (one, two):
            each.execute(mix.schema().encode())
            each.execute("SELECT bench.put(1, 1, 100)")
        assert snapshot.copied_equal(one, two)
        two.execute("UPDATE bench.mix1 SET price = price + 1 WHERE id = 7")
        assert not snapshot.copied_equal(one, two)
        one.execute("UPDATE bench.mix1 SET price = price + 1 WHERE id = 7")
        assert snapshot.copied_equal(one, two)
        two.execute("CREATE INDEX ON bench.mix1 (customer)")
        assert not snapshot.copied_equal(one, two)


@pytest.mark.usefixtures("played", "same_servers")
def test_a_quiet_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quiet, "SETTLE_SECONDS", 0.0)
    found = bench("quiet", "--seconds", "1")
    assert found["name"] == "quiet"
    (run,) = found["runs"]
    assert run["seconds"] == pytest.approx(1, abs=0.5)
    assert {"driver", "capture"} <= set(run["cpu_seconds"])
    assert 0 < found["value"] < 200


@pytest.mark.spark
@pytest.mark.usefixtures("spark", "same_servers")
def test_a_target_that_hangs_and_a_slow_one_hold_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolation, "apart", inside)
    monkeypatch.setattr(isolation, "ANSWER_SECONDS", 1.0)
    found = bench("isolation", "--seconds", "1")
    (run,) = found["runs"]
    assert run["behind_meanwhile"] == ["hangs", "slow"]


def test_a_bad_line_holds_answers_back_and_loses_none() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        Proxy(*server.getsockname()) as proxy,
        socket.create_connection(("127.0.0.1", proxy.port)) as client,
        server.accept()[0] as behind,
    ):
        client.sendall(b"asked")
        assert behind.recv(100) == b"asked"
        proxy.stall()
        behind.sendall(b"answered")
        client.settimeout(0.1)
        with pytest.raises(TimeoutError):
            client.recv(100)
        proxy.release()
        client.settimeout(5)
        assert client.recv(100) == b"answered"
