"""Tries in vain: how long a delivery waits after one, when it gives up, and what others are told meanwhile."""

from __future__ import annotations

import threading

from millstream.engine.backoff import Backoff
from millstream.engine.delivery_errors import kind_of
from millstream.engine.letters import Tell
from millstream.errors import MillstreamError
from millstream.observe import Level

ONCE_TRIES = 8
"""How often a run with an end tries in vain (for about a minute) before it fails; one without an end never gives up."""


class Retrying:
    """The tries of one delivery. `why` can be read from any thread."""

    def __init__(self, stopping: threading.Event, tell: Tell, *, once: bool) -> None:
        self._stopping = stopping
        self._tell = tell
        self._once = once
        self.why: str | None = None
        """Why it is tried again at the moment."""

    def is_enough(self, backoff: Backoff) -> bool:
        """Whether the next failure is the last."""
        return self._once and backoff.attempts >= ONCE_TRIES

    def wait(self, backoff: Backoff, failure: Exception | None) -> bool:
        """Tell why, and wait before the next try. False when the delivery was stopped meanwhile."""
        delay = backoff.next()
        self.why = failure.message if isinstance(failure, MillstreamError) else kind_of(failure)
        fields = {"error": type(failure).__name__, "delay_ms": round(delay * 1000), "failures": backoff.attempts}
        self._tell("delivery.retry", f"{self.why}; trying again in {delay:.1f} s", Level.WARNING, fields)
        return not self._stopping.wait(delay)

    def recovered(self, backoff: Backoff, seq: int) -> None:
        """It was delivered up to there. Told if there was a try in vain before."""
        if self.why is not None:
            fields = {"failures": backoff.attempts}
            self._tell("delivery.recovered", f"delivers again, up to seq {seq}", Level.INFO, fields)
        self.why = None
