"""What a running `millstream run` shows: a live table on a terminal, a line now and then elsewhere.

Totals and rates are counted from the events of delivery; states and lags are the same that
`millstream status` gives. Both displays run on a thread of their own, and end with their block.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Self

from millstream.cli.log import Log
from millstream.cli.output import console, how_far, seconds
from millstream.engine.home import Home
from millstream.engine.status import home_status
from millstream.engine.stream_status import TargetStatus
from millstream.errors import MillstreamError
from millstream.observe import Event, counted

if TYPE_CHECKING:
    from rich.console import Group

WINDOW = 10.0
"""Seconds over which a rate is taken."""

SHOWN_TABLES = 12

_ROWS = ("delivery.batch", "snapshot.finished")
"""Events that tell of rows a target got: of a batch of changes, and of all tables at its beginning."""

Key = tuple[str, str]


class Delivered:
    """What one target got since the start. Written by one thread at a time."""

    def __init__(self) -> None:
        self.rows = 0
        self.tables: Counter[str] = Counter()
        self._recent: deque[tuple[float, int]] = deque()

    def add(self, rows: int, tables: dict[str, int], now: float) -> None:
        self.rows += rows
        self.tables.update(tables)
        self._recent.append((now, rows))
        self._forget(now)

    def rate(self, now: float) -> float:
        """Rows a second over the last `WINDOW` seconds."""
        self._forget(now)
        return sum(rows for _, rows in self._recent) / WINDOW

    def _forget(self, now: float) -> None:
        while self._recent and self._recent[0][0] < now - WINDOW:
            self._recent.popleft()


class Progress:
    """An observer that adds up what is delivered, and asks the home for the rest."""

    def __init__(self, home: Home, clock: Callable[[], float] = time.monotonic) -> None:
        self._home = home
        self._clock = clock
        self._lock = threading.Lock()
        self._delivered: dict[Key, Delivered] = {}

    def on_event(self, event: Event) -> None:
        if event.kind in _ROWS and event.stream and event.target:
            with self._lock:
                delivered = self._delivered.setdefault((event.stream, event.target), Delivered())
                delivered.add(event.fields["rows"], event.fields["tables"], self._clock())

    def rows(self, key: Key) -> tuple[int, float]:
        """Total and rate of one target."""
        with self._lock:
            delivered = self._delivered.get(key)
            return (delivered.rows, delivered.rate(self._clock())) if delivered else (0, 0.0)

    def tables(self) -> Counter[str]:
        """Rows per table, over all targets."""
        with self._lock:
            return sum((one.tables for one in self._delivered.values()), Counter[str]())

    def targets(self) -> list[tuple[Key, TargetStatus]]:
        """Every target of the home with its status; empty while the home is being set up."""
        try:
            streams = home_status(self._home, table_lags=False).streams
        except MillstreamError:
            return []
        return [((stream.name, target.name), target) for stream in streams for target in stream.targets]

    def line(self, key: Key, status: TargetStatus) -> str:
        """`shop/log: running, 1,204 rows/s, 300 behind (0.4 s), 120,000 rows`"""
        rows, rate = self.rows(key)
        behind = "-" if status.lag_events is None else f"{status.lag_events:,}"
        return (
            f"{'/'.join(key)}: {_state(status)}, {rate:,.0f} rows/s, {behind} behind "
            f"({seconds(status.lag_seconds)}), {counted(rows, 'row')}"
        )


def _state(status: TargetStatus) -> str:
    """With how far its first rows are, while they come."""
    state = status.state.value
    return state if status.baseline is None else f"{state} ({how_far(status.baseline)})"


class _Ticker:
    """Calls `tick` every so many seconds on a thread of its own, while its block runs."""

    def __init__(self, interval: float) -> None:
        self._interval = interval
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name=type(self).__name__, daemon=True)

    def tick(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(self._interval):
            self.tick()


class Summary(_Ticker):
    """A line per target every 10 s, but only when something moved: a quiet stream has a quiet log."""

    def __init__(self, progress: Progress, log: Log, interval: float = 10.0) -> None:
        super().__init__(interval)
        self._progress = progress
        self._log = log
        self._last: dict[Key, tuple[int, str]] = {}

    def tick(self) -> None:
        for key, status in self._progress.targets():
            now = (self._progress.rows(key)[0], _state(status))
            if self._last.get(key, (0, now[1])) != now:
                self._log.line(self._progress.line(key, status))
            self._last[key] = now


class LiveDisplay(_Ticker):
    """A table that is drawn anew twice a second. What is written to it appears above the table."""

    def __init__(self, progress: Progress, interval: float = 0.5) -> None:
        from rich.live import Live

        super().__init__(interval)
        self._progress = progress
        self._console = console(stderr=True)
        self._live = Live(console=self._console, auto_refresh=False, transient=False)

    def write(self, text: str) -> None:
        self._console.print(text, end="")

    def flush(self) -> None:
        """Nothing is held back."""

    def __enter__(self) -> Self:
        self._live.start()
        return super().__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, value, trace)
        self.tick()
        self._live.stop()

    def tick(self) -> None:
        self._live.update(self.render(), refresh=True)

    def render(self) -> Group:
        from rich.console import Group
        from rich.table import Table

        targets = Table(box=None, padding=(0, 2, 0, 0))
        for name in ("target", "state", "rows/s", "behind", "oldest", "rows"):
            targets.add_column(name, justify="left" if name in ("target", "state") else "right")
        for key, status in self._progress.targets():
            rows, rate = self._progress.rows(key)
            behind = "-" if status.lag_events is None else f"{status.lag_events:,}"
            lag = seconds(status.lag_seconds)
            targets.add_row("/".join(key), _state(status), f"{rate:,.0f}", behind, lag, f"{rows:,}")
        tables = Table(box=None, padding=(0, 2, 0, 0))
        tables.add_column("table")
        tables.add_column("rows", justify="right")
        counted = self._progress.tables()
        for name, count in counted.most_common(SHOWN_TABLES):
            tables.add_row(name, f"{count:,}")
        if len(counted) > SHOWN_TABLES:
            tables.add_row(f"and {len(counted) - SHOWN_TABLES} more", "")
        return Group(targets, tables) if counted else Group(targets)
