"""Kill -9 at each step of what is done to streams: the next command goes on, and nothing is lost or left."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from millstream import Engine, StreamState
from millstream.errors import UnknownStream
from millstream.testing import Script
from tests.chaos.rig import failpoints
from tests.fixtures.engines import await_that, delivered, stream

DELETION = (
    *("engine.deletion_begun", "engine.source_removed", "engine.targets_released"),
    *("engine.checkpoints_removed", "engine.journal_removed", "engine.stream_forgotten"),
)
OTHERS = ("engine.stream_saved", "engine.pause_saved", "engine.resume_saved", "engine.request_done")

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def managing(tmp_path: Path) -> Iterator[Start]:
    """Starts processes that manage the home, to be killed at a failpoint."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str, at: str = "") -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.fixtures.managing", str(tmp_path / "home"), *arguments],
            cwd=Path(__file__).parents[2],
            env={**os.environ, "MILLSTREAM_FAILPOINT": at},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.communicate(timeout=30)  # the end of its input: an engine then stops what it started


def killed(process: subprocess.Popen[str]) -> bool:
    process.wait(30)
    return process.returncode == -signal.SIGKILL


def running(managing: Start, at: str = "") -> subprocess.Popen[str]:
    process = managing("run", at=at)
    assert process.stdout is not None
    assert process.stdout.readline() == "running\n"
    return process


def test_every_step_of_the_engine_is_killed_here() -> None:
    assert set(DELETION) | set(OTHERS) == {name for name in failpoints() if name.startswith("engine.")}


def test_a_deletion_that_was_killed_anywhere_goes_on_with_the_next_command(
    engine: Engine, script: Script, tmp_path: Path, managing: Start
) -> None:
    shop = stream(script, tmp_path)
    with engine:
        engine.upsert_stream(shop)
        engine.await_ready("shop", 20)
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
        assert killed(managing("delete", "shop", at=step)), step
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
        engine.await_ready("shop", 20)
        script.insert("public.orders", id=2, note="new")
        await_that(lambda: delivered(tmp_path, target="fresh") == {"public.orders": [(2, "new")]})
        assert engine.get_status("shop").events_replicated == 1


def test_a_stream_that_was_just_saved_is_there_after_a_kill(
    engine: Engine, script: Script, tmp_path: Path, managing: Start
) -> None:
    assert killed(managing("upsert", at="engine.stream_saved"))
    assert engine.list_streams() == [stream(script, tmp_path)]
    engine.upsert_stream(stream(script, tmp_path))
    with engine:
        engine.await_ready("shop", 20)


def test_pauses_survive_a_kill_of_the_command_and_of_the_engine(
    engine: Engine, script: Script, tmp_path: Path, managing: Start
) -> None:
    engine.upsert_stream(stream(script, tmp_path))
    assert killed(managing("pause", "shop", at="engine.pause_saved"))
    assert engine.get_status("shop").state is StreamState.PAUSED
    assert killed(managing("resume", "shop", at="engine.resume_saved"))
    assert engine.get_status("shop").state is StreamState.CREATED

    # The engine dies over what it was asked: whoever asked does it himself, and nothing is delivered twice.
    process = running(managing, at="engine.pause_saved")
    engine.await_ready("shop", 20)
    script.insert("public.orders", id=1, note="one")
    await_that(lambda: delivered(tmp_path) == {"public.orders": [(1, "one")]})
    engine.pause("shop")
    assert killed(process)
    assert engine.get_status("shop").state is StreamState.PAUSED
    process = running(managing, at="engine.request_done")
    script.insert("public.orders", id=2, note="two")
    engine.resume("shop")
    assert killed(process)
    with engine:
        await_that(lambda: delivered(tmp_path) == {"public.orders": [(1, "one"), (2, "two")]})


def test_another_process_is_obeyed_within_a_second(
    engine: Engine, script: Script, tmp_path: Path, managing: Start
) -> None:
    process = running(managing)
    engine.upsert_stream(stream(script, tmp_path))
    assert engine.await_ready("shop", 20).state in (StreamState.RUNNING, StreamState.CATCHING_UP)
    engine.pause("shop", "log")
    assert engine.get_status("shop").state is StreamState.PAUSED
    engine.resume("shop", "log")
    engine.await_ready("shop", 20)
    script.insert("public.orders", id=1, note="one")
    await_that(lambda: delivered(tmp_path) == {"public.orders": [(1, "one")]})
    with pytest.raises(UnknownStream, match=r"did you mean shop\?"):
        engine.delete_stream("shoop")
    assert engine.delete_stream("shop") == {"stream": "shop", "source": "removed", "targets": {"log": "released"}}
    assert engine.list_streams() == []
    assert script.confirmed("main") is None
    assert process.poll() is None
