"""How fast a chunk is read, where the source is not to be asked for all it can give."""

from __future__ import annotations

import time


class Pace:
    """Of one chunk. What is handed on is never more than its rate allows since the beginning. Not for threads."""

    def __init__(self, rate: int | None) -> None:
        """`rate` in bytes a second; None: as fast as it goes."""
        self._rate = rate
        self._began = time.monotonic()
        self._taken = 0

    def hold(self, size: int) -> None:
        """Wait until so many bytes more may be handed on. The server waits too, once the connection is full."""
        if self._rate is None:
            return
        self._taken += size
        ahead = self._began + self._taken / self._rate - time.monotonic()
        if ahead > 0:
            time.sleep(ahead)
