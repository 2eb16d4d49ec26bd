"""Who writes to a target: its batches and copies of its tables, one after another."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

LOOK_SECONDS = 0.1


class Turns:
    """Whoever wants to write gets in line, so that a long row of short steps keeps nobody out."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._line: deque[object] = deque()

    @contextmanager
    def taken(self, stopping: threading.Event) -> Iterator[bool]:
        """Wait for the turn and have it. False when `stopping` was set first: then nothing may be written."""
        ticket = object()
        with self._changed:
            self._line.append(ticket)
            while self._line[0] is not ticket and not stopping.is_set():
                self._changed.wait(LOOK_SECONDS)
            mine = self._line[0] is ticket
        try:
            yield mine
        finally:
            with self._changed:
                self._line.remove(ticket)
                self._changed.notify_all()
