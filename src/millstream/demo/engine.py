"""The engine as the demo and the chaos tests run it: a process of its own that can be killed whole."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

SHORT_LIVED_JVM = {"JDK_JAVA_OPTIONS": "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"}
"""Spark's Java process only schedules here, and lives for seconds: it need not compile itself for months of work."""


class Engine:
    """`millstream run` on a stream file, started and killed as often as one likes."""

    def __init__(self, stream_file: Path, home: Path, log: Path) -> None:
        self.stream_file = stream_file
        self.home = home
        self.log = log
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def started(self) -> bool:
        return self._process is not None

    @property
    def pid(self) -> int:
        if self._process is None:
            raise RuntimeError("the engine was not started")
        return self._process.pid

    def start(self, *options: str, environment: Mapping[str, str] | None = None) -> None:
        command = [sys.executable, "-m", "millstream", "run", str(self.stream_file), "--home", str(self.home), *options]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**SHORT_LIVED_JVM, **os.environ, **(environment or {})},
            )

    def stop(self, timeout: float = 60.0, by: signal.Signals = signal.SIGTERM) -> int:
        """SIGTERM, as a service manager sends it, or SIGINT, as Ctrl-C does; returns the exit code."""
        if self.running:
            os.kill(self.pid, by)
        return self.wait(timeout)

    def wait(self, timeout: float) -> int:
        if self._process is None:
            raise RuntimeError("the engine was not started")
        return self._process.wait(timeout)

    def kill(self) -> int:
        """kill -9 of the engine and everything it started: driver, JVM, Python workers, capture."""
        victims = [self.pid, *descendants(self.pid)]
        for pid in victims:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.wait(30)
        return len(victims)


def descendants(pid: int) -> list[int]:
    """Every process below `pid`, whatever its session or process group."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            parent = _parent(entry)
            if parent is not None:
                children.setdefault(parent, []).append(int(entry.name))
    found: list[int] = []
    waiting = [pid]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found


def _parent(entry: Path) -> int | None:
    try:
        # The name in the second field may hold spaces and parentheses: the last one closes it.
        return int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return None
