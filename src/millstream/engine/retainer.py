"""Retention in the background: what the journal may forget goes a little at a time, beside capture."""

from __future__ import annotations

import time

from millstream.engine.capture_order import Control
from millstream.engine.retained import Tell
from millstream.journal.writer import JournalWriter
from millstream.model import SourceSpec
from millstream.observe import Level

LOOK_SECONDS = 1.0
AT_ONCE = 8
"""So many segments go at a time: removing one takes milliseconds, and capture waits meanwhile."""


class Retainer:
    """Applies the source's limits, and does what `millstream journal prune` asks. The capture loop's thread."""

    def __init__(self, spec: SourceSpec, control: Control, tell: Tell) -> None:
        self._spec = spec
        self._control = control
        self._tell = tell
        self._looked_at = float("-inf")

    def look(self, writer: JournalWriter) -> None:
        """About once a second, between two transactions."""
        clock = time.monotonic()
        if clock - self._looked_at < LOOK_SECONDS:
            return
        self._looked_at = clock
        pruned = writer.prune_as_requested()
        rule, lowest = self._spec.retention, self._control.lowest
        if rule is not None and lowest is not None:
            # Until the engine has said who needs what, nothing goes.
            pruned = writer.retain(rule, lowest, time.time(), AT_ONCE) or pruned
        if pruned is not None:
            self._tell(
                "capture.journal_pruned",
                f"the journal of source {self._spec.name} now begins after seq {pruned.seq}",
                Level.INFO,
                seq=pruned.seq,
                segment=pruned.segment,
            )
