"""What all measurements have in common: one at a time on a machine, a quiet machine, turn and turn about.

with machine("capture", force=False) as load:     the machine's lock, and its load
    alternate(parts, repeat, baseline, ours)      runs, each checked
    result(...)                                   medians, and the lowest ratio
"""

from __future__ import annotations

import fcntl
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

from millstream.bench.mix import Part
from millstream.errors import BenchRefused
from millstream.model import Json

MOST_LOAD = 0.5
"""The one-minute load above which a figure would say more about the neighbours than about us."""
REPEAT = 3
LOCK = Path("/tmp" if Path("/tmp").is_dir() else tempfile.gettempdir()) / "millstream-bench.lock"  # noqa: S108


class Steps(Protocol):
    """Where a bench says what it is at. Called from one thread."""

    def plan(self, steps: int) -> None:
        """So many more steps will come."""

    def step(self, text: str) -> None:
        """The next one begins."""

    def note(self, text: str) -> None:
        """Something that a reader of the figures must know. Always shown."""


@dataclass(frozen=True)
class Settings:
    """How a bench shall run. None: the bench's own figure."""

    steps: Steps
    rows: int | None = None
    repeat: int = REPEAT
    seconds: float | None = None


@dataclass(frozen=True)
class Taken:
    """One run of one way: how long it took, and whether it gave what it should."""

    seconds: float
    equal: bool
    cpu_seconds: Json = field(default_factory=dict)
    """By process, where the way was watched."""
    extra: Json = field(default_factory=dict)


@dataclass(frozen=True)
class Run:
    """Both ways, one after the other, on the same changes."""

    part: str
    rows: int
    baseline_seconds: float
    seconds: float
    equal: bool
    cpu_seconds: Json
    extra: Json

    def to_json(self) -> Json:
        return {key: value for key, value in asdict(self).items() if value != {}}


Way = Callable[[Part], Taken]


@contextmanager
def machine(name: str, *, force: bool) -> Iterator[float]:
    """Hold the machine for a measurement; yields its load of the last minute. Raises BenchRefused.

    The lock is the kernel's, so it ends with the process. Others' processes are not stopped by it: it keeps two
    benches apart, and the load tells of everything else.
    """
    descriptor = _open_lock()
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = (
                os.pread(descriptor, 4096, 0).decode("utf-8", "replace").strip() or "a process that is just starting"
            )
            raise BenchRefused(
                f"another bench runs on this machine: {holder}", hint="wait for it; two at once measure each other"
            ) from None
        load = os.getloadavg()[0]
        if load > MOST_LOAD and not force:
            raise BenchRefused(
                f"the machine is busy: its load of the last minute is {load:.2f}, above {MOST_LOAD}",
                hint="wait until it is quiet; with --force the figures say that they were taken so",
            )
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{name}, process {os.getpid()}, since {datetime.now(UTC):%H:%M:%S} UTC\n".encode(), 0)
        yield load
    finally:
        os.close(descriptor)


def _open_lock() -> int:
    """Everybody's file: opened first and made only if it is missing, as sticky directories want it."""
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        try:
            return os.open(LOCK, flags)
        except FileNotFoundError:
            descriptor = os.open(LOCK, flags | os.O_CREAT, 0o666)
            os.fchmod(descriptor, 0o666)
            return descriptor
    except OSError as refused:
        raise BenchRefused(
            f"cannot open the lock {LOCK}: {refused.strerror}", hint=f"remove it: rm {LOCK}"
        ) from refused


def alternate(parts: Sequence[Part], settings: Settings, baseline: Way, ours: Way) -> list[Run]:
    """Baseline and ours by turns on each part. Who goes first changes too, so that neither always has it warm."""
    settings.steps.plan(2 * len(parts) * settings.repeat)
    runs = []
    for part in parts:
        for number in range(settings.repeat):
            taken: dict[str, Taken] = {}
            ways = [("baseline", baseline), ("ours", ours)]
            for name, way in ways if number % 2 == 0 else reversed(ways):
                settings.steps.step(f"{part.name}, {name}, {number + 1} of {settings.repeat}")
                taken[name] = way(part)
            theirs, own = taken["baseline"], taken["ours"]
            runs.append(
                Run(
                    part.name,
                    part.changes,
                    round(theirs.seconds, 4),
                    round(own.seconds, 4),
                    theirs.equal and own.equal,
                    own.cpu_seconds,
                    own.extra,
                )
            )
    return runs


def result(name: str, runs: Sequence[Run], *, baseline: str, must: float | None) -> Json:
    """The figures: changes per second over the whole mix, and the ratio of the part that did worst.

    A part's ratio is the median time of the baseline over the median of ours. `value` and `baseline_value` are
    all changes over the sum of those medians.
    """
    parts = [_part([run for run in runs if run.part == part]) for part in dict.fromkeys(run.part for run in runs)]
    rows = sum(part["rows"] for part in parts)
    ratio = min(part["ratio"] for part in parts)
    return {
        "name": name,
        "value": round(rows / sum(part["seconds"] for part in parts)),
        "unit": "changes/s",
        "baseline": baseline,
        "baseline_value": round(rows / sum(part["baseline_seconds"] for part in parts)),
        "ratio": ratio,
        "must": must,
        "reached": must is None or ratio >= must,
        "rows": rows,
        "equal": all(run.equal for run in runs),
        "parts": parts,
        "runs": [run.to_json() for run in runs],
    }


def _part(runs: Sequence[Run]) -> Json:
    theirs = statistics.median(run.baseline_seconds for run in runs)
    ours = statistics.median(run.seconds for run in runs)
    rows = runs[0].rows
    return {
        "part": runs[0].part,
        "rows": rows,
        "value": round(rows / ours),
        "baseline_value": round(rows / theirs),
        "ratio": round(theirs / ours, 3),
        "seconds": ours,
        "baseline_seconds": theirs,
        "spread": _spread([run.seconds for run in runs]),
        "baseline_spread": _spread([run.baseline_seconds for run in runs]),
    }


def _spread(seconds: Sequence[float]) -> float:
    """How far the slowest run lies above the fastest, as a share of the median."""
    return round((max(seconds) - min(seconds)) / statistics.median(seconds), 3)
