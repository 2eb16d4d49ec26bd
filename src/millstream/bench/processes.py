"""Processor time of processes, from /proc: who spent how much of a run."""

from __future__ import annotations

import os
from pathlib import Path

from millstream.demo.engine import descendants

_TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> float:
    """What a process has used so far, with its threads and the children it has outlived; 0 when it is gone."""
    try:
        fields = (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / _TICKS


def engine_cpu() -> dict[str, float]:
    """By kind, what this process and those below it have used so far."""
    found = {"driver": cpu_seconds(os.getpid())}
    for pid in descendants(os.getpid()):
        kind = _kind(pid)
        if kind is not None:
            found[kind] = found.get(kind, 0.0) + cpu_seconds(pid)
    return found


def spent(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """The difference, to hundredths of a second."""
    return {kind: round(used - before.get(kind, 0.0), 2) for kind, used in after.items()}


def _kind(pid: int) -> str | None:
    try:
        command = (Path("/proc") / str(pid) / "cmdline").read_bytes().decode("utf-8", "replace")
    except OSError:
        return None
    if "capture_process" in command:
        return "capture"
    if "java" in command.split("\0")[0]:
        return "jvm"
    # The server belongs to us too, and is counted by its own word on who serves capture. Its programs lie below a
    # directory of Python's.
    program = Path(command.split("\0")[0]).name
    return "workers" if program.startswith("python") and "guard.py" not in command else None


class Meter:
    """Processor time of a process and everything below it, from when it is made, whoever comes and goes meanwhile.

    A process that ends takes its account along, or hands it to its parent: so each is looked at again and again
    (`look`), and counts by what it had used itself when it was last seen.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._kinds: dict[int, str] = {}
        self._last: dict[int, float] = {}
        self.look()
        self._first = dict(self._last)

    def look(self) -> None:
        """See who is there, and what each has used."""
        for pid in (self._pid, *descendants(self._pid)):
            used = _own_seconds(pid)
            if used is not None:
                self._last[pid] = used
                self._kinds.setdefault(pid, "driver" if pid == self._pid else _kind(pid) or "others")

    def spent(self) -> dict[str, float]:
        """Seconds by kind, up to the last look."""
        found: dict[str, float] = {}
        for pid, used in self._last.items():
            kind = self._kinds[pid]
            found[kind] = found.get(kind, 0.0) + used - self._first.get(pid, 0.0)
        return {kind: round(seconds, 2) for kind, seconds in found.items()}


def _own_seconds(pid: int) -> float | None:
    """What a process has used itself, without its children; None when it is gone."""
    try:
        fields = (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return sum(map(int, fields[11:13])) / _TICKS


def tree_memory(pid: int) -> int:
    """Bytes that a process and everything below it take, each page divided among those who share it (PSS)."""
    return sum(_proportional(one) for one in (pid, *descendants(pid)))


def _proportional(pid: int) -> int:
    try:
        text = (Path("/proc") / str(pid) / "smaps_rollup").read_text()
    except OSError:  # it has ended
        return 0
    return sum(int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith("Pss:"))
