"""How long to wait before trying again."""

from __future__ import annotations

import random


class Backoff:
    """Doubles from `first` to `limit` seconds, with jitter, so that those who failed together do not return so."""

    def __init__(self, first: float = 0.5, limit: float = 30.0) -> None:
        self._first = first
        self._limit = limit
        self.attempts = 0

    def next(self) -> float:
        """Seconds to wait now: between half and all of what this attempt allows."""
        allowed = min(self._limit, self._first * 2.0 ** min(self.attempts, 30))
        self.attempts += 1
        return allowed * random.uniform(0.5, 1.0)  # noqa: S311 - not for secrets

    def reset(self) -> None:
        """It worked: the next failure starts from the beginning."""
        self.attempts = 0
