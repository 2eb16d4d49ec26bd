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
    # The server belongs to us too, and is counted by its own word on who serves capture.
    return "workers" if "python" in command.split("\0")[0] and "guard.py" not in command else None
