"""Kill -9 at each step of what is done to streams: the next command goes on, and nothing is lost or left."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import pytest
from typer.testing import CliRunner

from millstream import Checkpoint, Engine, StreamState
from millstream.cli.app import app
from millstream.errors import UnknownStream
from millstream.testing import Script
from tests.chaos.rig import failpoints
from tests.fixtures.engines import await_that, delivered, stream
from tests.unit.test_ddl import AFTER, BEFORE, fill, gated

DELETION = (
    *("engine.deletion_begun", "engine.source_removed", "engine.targets_released"),
    *("engine.checkpoints_removed", "engine.journal_removed", "engine.stream_forgotten"),
)
OTHERS = (
    *("engine.stream_saved", "engine.pause_saved", "engine.resume_saved"),
    *("engine.request_done", "engine.patterns_saved", "engine.replay_saved"),
)


@dataclass
class Managing:
    """Has things done to the home by other processes."""

    server: subprocess.Popen[str]
    home: Path
    started: list[int] = field(default_factory=list)

    def start(self, *do: str, at: str | None = None) -> int:
        """A process that does this, to be killed at a failpoint. Returns its pid."""
        self.started.append(self._ask({"home": str(self.home), "at": at, "do": do}))
        return self.started[-1]

    def end_of(self, pid: int) -> int:
        """Its exit code, once it has ended."""
        self.started.remove(pid)
        return self._ask({"await": pid})

    def kill_at(self, step: str, *do: str) -> None:
        assert self.end_of(self.start(*do, at=step)) == -signal.SIGKILL, step

    def close(self) -> None:
        for pid in list(self.started):
            os.kill(pid, signal.SIGTERM)
            self.end_of(pid)

    def _ask(self, what: dict[str, object]) -> int:
        assert self.server.stdin is not None
        assert self.server.stdout is not None
        self.server.stdin.write(json.dumps(what) + "\n")
        self.server.stdin.flush()
        return int(self.server.stdout.readline())


@pytest.fixture(scope="module")
def server() -> Iterator[subprocess.Popen[str]]:
    """Forks the processes: it imports everything once."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.fixtures.managing"],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    yield process
    process.communicate(timeout=120)


@pytest.fixture
def managing(tmp_path: Path, server: subprocess.Popen[str]) -> Iterator[Managing]:
    made = Managing(server, tmp_path / "home")
    yield made
    made.close()


def test_every_step_of_the_engine_is_killed_here() -> None:
    assert set(DELETION) | set(OTHERS) == {name for name in failpoints() if name.startswith("engine.")}


def test_a_deletion_that_was_killed_anywhere_goes_on_with_the_next_command(
    engine: Engine, script: Script, tmp_path: Path, managing: Managing
) -> None:
    shop = stream(script, tmp_path)
    with engine:
        engine.upsert_stream(shop)
        engine.await_ready("shop", 120)
        script.insert("public.orders", id=1, note="delivered")
        await_that(lambda: engine.get_status("shop").events_replicated == 1)
    home, slot = engine.home.path, tmp_path / "script" / "slot-main.json"
    kept, kept_slot = tmp_path / "kept", slot.read_text()
    shutil.copytree(home, kept)
    owner, kept_owner = tmp_path / "shop" / "log" / "_millstream" / "owner.json", ""
    kept_owner = owner.read_text()
    for step in DELETION:
        shutil.rmtree(home)
        shutil.copytree(kept, home)
        slot.write_text(kept_slot)
        owner.write_text(kept_owner)
        managing.kill_at(step, "delete", "shop")
        with pytest.raises(UnknownStream):
            engine.pause("shop")
        assert engine.list_streams() == [], step
        assert not slot.exists(), step
        assert not engine.home.journal_path("main").exists(), step
        assert not (home / "checkpoints" / "shop").exists(), step
        assert '"released": true' in owner.read_text(), step
        assert delivered(tmp_path) == {"public.orders": [(1, "delivered")]}, step
    # A new life under the same name, at another place, has nothing of the old one.
    with engine:
        engine.upsert_stream(stream(script, tmp_path, targets="fresh"))
        engine.await_ready("shop", 120)
        script.insert("public.orders", id=2, note="new")
        await_that(lambda: delivered(tmp_path, target="fresh") == {"public.orders": [(2, "new")]})
        await_that(lambda: engine.get_status("shop").events_replicated == 1)


def test_a_gate_holds_through_kills_of_the_engine_and_of_who_decides(
    engine: Engine, script: Script, tmp_path: Path, managing: Managing
) -> None:
    gated(engine, script, tmp_path, targets="log")
    engine.stop()
    fill(script)
    managing.kill_at("delivery.gate_reached", "run")
    assert delivered(tmp_path) == BEFORE
    assert engine.ddl_event("shop", 4).state == "pending"
    managing.kill_at("state.ddl_decided", "command", "ddl", "approve", "shop", "4")
    assert engine.ddl_event("shop", 4).state == "approved"
    with engine:
        await_that(lambda: delivered(tmp_path) == AFTER)
        await_that(lambda: engine.ddl_event("shop", 4).state == "applied")


def test_streams_and_pauses_survive_a_kill_of_the_command_and_of_the_engine(
    engine: Engine, script: Script, tmp_path: Path, managing: Managing
) -> None:
    managing.kill_at("engine.stream_saved", "upsert")
    assert engine.list_streams() == [stream(script, tmp_path)]
    managing.kill_at("engine.pause_saved", "pause", "shop")
    assert engine.get_status("shop").state is StreamState.PAUSED
    managing.kill_at("engine.resume_saved", "resume", "shop")
    assert engine.get_status("shop").state is StreamState.CREATED

    # The engine dies before its first capture.
    managing.kill_at("engine.patterns_saved", "run")

    # The engine dies over what it was asked: whoever asked does it himself, and nothing is delivered twice.
    process = managing.start("run", at="engine.pause_saved")
    engine.await_ready("shop", 120)
    script.insert("public.orders", id=1, note="one")
    await_that(lambda: delivered(tmp_path) == {"public.orders": [(1, "one")]})
    engine.pause("shop")
    assert managing.end_of(process) == -signal.SIGKILL
    assert engine.get_status("shop").state is StreamState.PAUSED
    process = managing.start("run", at="engine.request_done")
    await_that(lambda: engine.home.owner() is not None)
    script.insert("public.orders", id=2, note="two")
    engine.resume("shop")
    assert managing.end_of(process) == -signal.SIGKILL
    with engine:
        await_that(lambda: delivered(tmp_path) == {"public.orders": [(1, "one"), (2, "two")]})


def test_a_replay_that_was_killed_leaves_nothing_out_and_nothing_twice(
    engine: Engine, script: Script, tmp_path: Path, managing: Managing
) -> None:
    every = {"public.orders": [(id_, "again") for id_ in range(1, 5)]}
    with engine:
        engine.upsert_stream(stream(script, tmp_path))
        engine.await_ready("shop", 120)
        for id_ in range(1, 5):
            script.insert("public.orders", id=id_, note="again")
            await_that(lambda id_=id_: engine.get_status("shop").events_replicated == id_)  # type: ignore[misc]
    managing.kill_at("files.rewound", "replay", "shop")
    commits = tmp_path / "shop" / "log" / "_millstream" / "commits"
    assert len(list(commits.iterdir())) == 3, "one batch was taken back, then came the kill"
    managing.kill_at("engine.replay_saved", "replay", "shop")
    assert list(commits.iterdir()) == []
    with engine:
        await_that(lambda: engine.get_status("shop").events_replicated == 8)
        assert delivered(tmp_path) == every
        engine.replay("shop", Checkpoint(1, 0, datetime.now(UTC)))
        await_that(lambda: engine.get_status("shop").events_replicated == 12)
    assert delivered(tmp_path) == every


def test_the_command_reaches_a_run_from_another_process(
    engine: Engine, script: Script, tmp_path: Path, managing: Managing
) -> None:
    engine.upsert_stream(stream(script, tmp_path))
    process = managing.start("command", "run", "--quiet")
    engine.await_ready("shop", 120)
    home = ["--home", str(engine.home.path)]
    began = time.monotonic()
    done = CliRunner().invoke(app, ["pause", "shop", "--target", "log", *home])
    assert (done.stdout, done.exit_code) == ("shop/log: paused\n", 0)
    assert time.monotonic() - began < 60, "nobody waited in vain"
    script.insert("public.orders", id=1, note="one")
    await_that(lambda: engine.get_status("shop").lag_events == 1)
    assert CliRunner().invoke(app, ["resume", "shop", *home]).exit_code == 0
    await_that(lambda: delivered(tmp_path) == {"public.orders": [(1, "one")]})
    done = CliRunner().invoke(app, ["replay", "shop", "--from-seq", "1", "--json", *home])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["targets"]["log"]["from_seq"] == 0
    await_that(lambda: engine.get_status("shop").events_replicated == 2)
    assert delivered(tmp_path) == {"public.orders": [(1, "one")]}
    engine.upsert_stream(stream(script, tmp_path, "bank", tables=("public.items",)))
    engine.await_ready("bank", 120)
    wrong = CliRunner().invoke(app, ["delete", "shoop", *home])
    assert (wrong.exit_code, wrong.stdout) == (2, "")
    assert "did you mean shop?" in wrong.stderr
    locked = CliRunner().invoke(app, ["run", *home])
    assert locked.exit_code == 1
    assert f"in use by process {process} on" in locked.stderr
    for name, source in (("shop", "in use by bank"), ("bank", "removed")):
        done = CliRunner().invoke(app, ["delete", name, "--json", *home])
        assert json.loads(done.stdout) == {"stream": name, "source": source, "targets": {"log": "released"}}
    assert engine.list_streams() == []
    assert script.confirmed("main") is None
    owner = engine.home.owner()
    assert owner is not None, "it goes on without a stream"
    assert owner.pid == process
    os.kill(process, signal.SIGTERM)
    assert managing.end_of(process) == 0
