"""What people see while the demo runs: the phase, the load, and how far each target is."""

from __future__ import annotations

import time
from collections import deque
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from millstream.demo.shop import Tally
from millstream.engine.stream_status import StreamStatus

_STYLES = {"running": "green", "catching_up": "yellow", "paused": "magenta", "failed": "red", "snapshot": "cyan"}


class Picture:
    """A live picture on a terminal; elsewhere a line for each phase."""

    def __init__(self, console: Console, tally: Tally) -> None:
        self._console = console
        self._tally = tally
        self._phase = ""
        self._rates: deque[tuple[float, int]] = deque(maxlen=20)
        self._live = Live(console=console, refresh_per_second=4) if console.is_terminal else None

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, phase: str, status: StreamStatus | None) -> None:
        if phase != self._phase:
            self._phase = phase
            self._console.print(f"[cyan]•[/] {phase}", highlight=False, soft_wrap=True)
        if self._live is not None:
            self._live.update(self._picture(status))

    def _picture(self, status: StreamStatus | None) -> Group:
        captured = (status.source.end_seq if status else None) or 0
        self._rates.append((time.monotonic(), captured))
        (first, low), (last, high) = self._rates[0], self._rates[-1]
        rate = (high - low) / (last - first) if last > first else 0.0
        head = Text(
            f"  {self._tally.transactions:,} transactions · {captured:,} changes captured · {rate:,.0f} changes/s",
            style="bold",
        )
        return Group(head, self._targets(status))

    def _targets(self, status: StreamStatus | None) -> Table:
        table = Table(box=None, padding=(0, 2, 0, 2), header_style="dim")
        for name in ("target", "state", "rows and changes", "behind"):
            table.add_column(name, justify="right" if name in ("rows and changes", "behind") else "left", no_wrap=True)
        for target in status.targets if status else ():
            behind = "-" if target.lag_events is None else f"{target.lag_events:,}"
            state = Text(target.state.value, _STYLES.get(target.state.value, ""))
            table.add_row(f"{target.name} ({target.kind})", state, f"{target.events_replicated:,}", behind)
        return table
