from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from millstream.engine.home import Home
from millstream.errors import ConfigError, HomeLocked

HOLDER = """
import sys
from millstream.engine.home import Home
with Home(sys.argv[1]).lock():
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that owns the home `tmp_path / "home"` until its standard input ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path / "home")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def test_the_home_is_the_option_then_the_environment_then_the_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MILLSTREAM_HOME", raising=False)
    assert Home.locate().path == tmp_path / ".millstream"
    monkeypatch.setenv("MILLSTREAM_HOME", str(tmp_path / "env"))
    assert Home.locate().path == tmp_path / "env"
    assert Home.locate("option").path == tmp_path / "option"
    assert list(tmp_path.iterdir()) == []


def test_a_home_is_private(tmp_path: Path) -> None:
    home = Home(tmp_path / "a" / "home")
    with home.lock():
        home.open_state().close()
    modes = {p.name: p.stat().st_mode & 0o777 for p in home.path.iterdir()}
    assert modes == {"run.lock": 0o600, "state.db": 0o600, "journals": 0o700, "checkpoints": 0o700, "spark": 0o700}
    assert home.path.stat().st_mode & 0o777 == 0o700


def test_every_part_has_its_place(tmp_path: Path) -> None:
    home = Home(tmp_path)
    assert home.state_path == tmp_path / "state.db"
    assert home.journal_path("shop") == tmp_path / "journals" / "shop"
    assert home.checkpoint_path("shop", "log") == tmp_path / "checkpoints" / "shop" / "log"
    assert home.spark_path == tmp_path / "spark"
    with pytest.raises(ConfigError, match=r"'\.\./etc' is no name"):
        home.journal_path("../etc")


def test_a_second_process_is_told_who_owns_the_home(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    home = Home(tmp_path / "home")
    with pytest.raises(HomeLocked) as raised, home.lock():
        pass
    assert f"process {holder.pid} on {socket.gethostname()}, started 20" in raised.value.message
    assert f"kill {holder.pid}" in (raised.value.hint or "")
    owner = home.owner()
    assert owner is not None
    assert owner.pid == holder.pid


def test_the_lock_of_a_killed_process_is_gone_with_it(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    home = Home(tmp_path / "home")
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert home.owner() is None
    with home.lock() as owner:
        assert owner.pid == os.getpid()
        assert home.owner() == owner
    assert home.owner() is None


def test_a_child_that_outlives_the_owner_does_not_hold_its_lock(tmp_path: Path) -> None:
    home = Home(tmp_path)
    with home.lock():
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert home.owner() is None
    child.communicate(b"\n")


def test_asking_for_the_owner_never_keeps_a_process_from_starting(tmp_path: Path) -> None:
    home = Home(tmp_path).create()
    with home.lock():
        pass
    done = threading.Event()

    def ask() -> None:
        while not done.is_set():
            home.owner()

    asking = [threading.Thread(target=ask) for _ in range(2)]
    for thread in asking:
        thread.start()
    try:
        for _ in range(200):
            with home.lock():
                pass
    finally:
        done.set()
        for thread in asking:
            thread.join()


def test_nobody_owns_a_home_that_does_not_exist(tmp_path: Path) -> None:
    assert Home(tmp_path / "nothing").owner() is None
    assert not (tmp_path / "nothing").exists()


def test_a_home_that_cannot_be_made_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot create the home .*file/home"):
        Home(tmp_path / "file" / "home").create()
