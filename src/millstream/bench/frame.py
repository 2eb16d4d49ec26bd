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
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from millstream.bench.mix import Part
from millstream.errors import BenchRefused
from millstream.model import Json

MOST_LOAD = 0.5
"""The load above which a figure would say more about the neighbours than about us."""
LOOK_SECONDS = 3.0
"""How long the processors are watched where the average cannot tell a busy machine from one that was busy."""
STAT = Path("/proc/stat")
MOST_STOLEN = 0.05
"""The share of the processors' time that the host of a virtual machine may take away during a run. Above it the run"""
AGAIN = 2
"""is taken again, so often at most, and the one counts that lost least: who needs all processors feels it most."""
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
    bulk: bool = False
    open_transaction: bool = False
    debezium: bool = True
    target: str = "files"
    keys: int | None = None


@dataclass(frozen=True)
class Taken:
    """One run of one way: how long it took, and whether it gave what it should."""

    seconds: float
    equal: bool
    cpu_seconds: Mapping[str, float] = field(default_factory=dict)
    """By process, where the way was watched."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """What else the run has to say; goes into the result as it is."""
    first_seconds: float | None = None
    """How long the first try took, where another one counts."""


@dataclass(frozen=True)
class Round:
    """All ways, one after the other, on the same changes."""

    part: str
    rows: int
    taken: Mapping[str, Taken]


Way = Callable[[Part], Taken]

OURS, BASELINE = "ours", "baseline"


@contextmanager
def machine(name: str, *, force: bool) -> Iterator[float]:
    """Hold the machine for a measurement; yields its load. Raises BenchRefused.

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
        load = load_now()
        if load > MOST_LOAD and not force:
            raise BenchRefused(
                f"the machine is busy: its load is {load:.2f}, above {MOST_LOAD}",
                hint="wait until it is quiet; with --force the figures say that they were taken so",
            )
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{name}, process {os.getpid()}, since {datetime.now(UTC):%H:%M:%S} UTC\n".encode(), 0)
        yield load
    finally:
        os.close(descriptor)


def load_now() -> float:
    """How many processors others keep busy: the average of the last minute, or less if they have just stopped.

    The average still tells of a bench that has ended a minute after it. So if it is high the processors are watched
    for a moment.
    """
    average = os.getloadavg()[0]
    if average <= MOST_LOAD or not STAT.exists():
        return average
    before, began = _busy_seconds(), time.monotonic()
    time.sleep(LOOK_SECONDS)  # a measuring window, not a wait for something
    return min(average, (_busy_seconds() - before) / (time.monotonic() - began))


def _busy_seconds() -> float:
    """Processor seconds since the start of the machine that were neither idle nor spent waiting for a disk."""
    ticks = [int(field) for field in STAT.read_text().splitlines()[0].split()[1:9]]
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")


def _stolen_seconds() -> float:
    """Processor seconds since the start of the machine that its host gave to others while there was work here."""
    if not STAT.exists():
        return 0.0
    return int(STAT.read_text().splitlines()[0].split()[8]) / os.sysconf("SC_CLK_TCK")


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


def alternate(parts: Sequence[Part], settings: Settings, ways: Mapping[str, Way]) -> list[Round]:
    """Every way by turns on each part. Who goes first changes too, so that none always finds it warm."""
    settings.steps.plan(len(ways) * len(parts) * settings.repeat)
    rounds = []
    for part in parts:
        for number in range(settings.repeat):
            taken: dict[str, Taken] = {}
            first = number % len(ways)
            for name in (*list(ways)[first:], *list(ways)[:first]):
                turn = f"{part.name}, {name}, {number + 1} of {settings.repeat}"
                settings.steps.step(turn)
                taken[name] = _undisturbed(ways[name], part, turn, settings.steps)
            rounds.append(Round(part.name, part.changes, taken))
    return rounds


def _undisturbed(way: Way, part: Part, turn: str, steps: Steps) -> Taken:
    """A run during which the machine had its processors; the least disturbed of some, where there is none.

    It says how much was `stolen`, and has the seconds of the others (`disturbed`). All of them must have been right.
    """
    tried: list[tuple[float, Taken]] = []
    while True:
        before, began = _stolen_seconds(), time.monotonic()
        taken = way(part)
        stolen = (_stolen_seconds() - before) / ((time.monotonic() - began) * (os.cpu_count() or 1))
        tried.append((stolen, taken))
        if stolen <= MOST_STOLEN or len(tried) > AGAIN:
            break
        steps.note(f"{turn}: the host took {stolen:.0%} of the processors; once more")
    stolen, best = min(tried, key=lambda one: one[0])
    others = [round(taken.seconds, 4) for _, taken in tried if taken is not best]
    told = {"stolen": round(stolen, 3)} | ({"disturbed": others} if others else {})
    return replace(
        best,
        equal=all(taken.equal for _, taken in tried),
        extra={**best.extra, **told},
        first_seconds=tried[0][1].seconds,
    )


def result(name: str, rounds: Sequence[Round], *, baseline: str, must: float | None, against: str = BASELINE) -> Json:
    """The figures: changes per second over the whole mix, and the ratio of the part that did worst.

    A part's ratio is the median time of the way `against` over the median of ours. `value` and `baseline_value`
    are all changes over the sum of those medians. `baseline` is that way's name for people. `ratio_of_first_tries` is
    what the ratio would be if no run were taken again.
    """
    names = dict.fromkeys(one.part for one in rounds)
    parts = [_part([one for one in rounds if one.part == part], against) for part in names]
    rows = sum(part["rows"] for part in parts)
    ratio = min(part["ratio"] for part in parts)
    return {
        "name": name,
        "value": round(rows / sum(part["seconds"] for part in parts)),
        "unit": "changes/s",
        "baseline": baseline,
        "baseline_value": round(rows / sum(part["baseline_seconds"] for part in parts)),
        "ratio": ratio,
        "ratio_of_first_tries": min(part["ratio_of_first_tries"] for part in parts),
        "must": must,
        "reached": must is None or ratio >= must,
        "rows": rows,
        "equal": all(one.taken[way].equal for one in rounds for way in (OURS, against)),
        "parts": parts,
        "runs": [_run(one, against) for one in rounds],
    }


def _run(one: Round, against: str) -> Json:
    ours, theirs = one.taken[OURS], one.taken[against]
    run: Json = {
        "part": one.part,
        "rows": one.rows,
        "baseline_seconds": round(theirs.seconds, 4),
        "seconds": round(ours.seconds, 4),
        "equal": ours.equal and theirs.equal,
    }
    if ours.cpu_seconds:
        run["cpu_seconds"] = ours.cpu_seconds
    return run | dict(ours.extra) | {f"baseline_{key}": value for key, value in theirs.extra.items()}


def _part(rounds: Sequence[Round], against: str) -> Json:
    taken = [one.taken[OURS] for one in rounds]
    ours = [one.seconds for one in taken]
    theirs = [one.taken[against].seconds for one in rounds]
    middle, their_middle, rows = statistics.median(ours), statistics.median(theirs), rounds[0].rows
    return {
        "part": rounds[0].part,
        "rows": rows,
        "value": round(rows / middle),
        "baseline_value": round(rows / their_middle),
        "ratio": round(their_middle / middle, 3),
        "ratio_of_first_tries": round(_first([one.taken[against] for one in rounds]) / _first(taken), 3),
        "seconds": round(middle, 4),
        "baseline_seconds": round(their_middle, 4),
        "spread": _spread(ours),
        "baseline_spread": _spread(theirs),
    }


def _first(taken: Sequence[Taken]) -> float:
    """The median of the first tries."""
    return statistics.median(one.seconds if one.first_seconds is None else one.first_seconds for one in taken)


def _spread(seconds: Sequence[float]) -> float:
    """How far the slowest run lies above the fastest, as a share of the median."""
    return round((max(seconds) - min(seconds)) / statistics.median(seconds), 3)
