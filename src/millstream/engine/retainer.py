"""Retention in the background: what the journal may forget goes a little at a time, beside capture."""

from __future__ import annotations

import time

from millstream.engine.capture_order import Control
from millstream.engine.retained import Tell
from millstream.errors import SourceHalted
from millstream.journal.writer import JournalWriter
from millstream.model import OnFull, Retention, SourceSpec
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
        self.full = False
        """Whether the journal is at its limit, targets need what is in it, and capture shall wait for them."""

    def look(self, writer: JournalWriter) -> None:
        """About once a second, between two transactions."""
        clock = time.monotonic()
        if clock - self._looked_at < LOOK_SECONDS:
            return
        self._looked_at = clock
        pruned = writer.prune_as_requested()
        rule, lowest = self._rule(), self._control.lowest
        if rule is not None and lowest is not None:
            # Until the engine has said who needs what, nothing goes.
            pruned = writer.retain(rule, lowest, time.time(), AT_ONCE) or pruned
            self._hold_to_limit(writer)
        if pruned is not None:
            self._tell(
                "capture.journal_pruned",
                f"the journal of source {self._spec.name} now begins after seq {pruned.seq}",
                Level.INFO,
                seq=pruned.seq,
                segment=pruned.segment,
            )

    def _rule(self) -> Retention | None:
        """What goes when nobody needs it: what retention says, and whatever is beyond the journal's limit."""
        rule, limit = self._spec.retention, self._spec.journal
        if limit is None:
            return rule
        bytes_ = limit.max_bytes if rule is None or rule.bytes is None else min(rule.bytes, limit.max_bytes)
        return Retention(rule.age_ms if rule else None, bytes_)

    def _hold_to_limit(self, writer: JournalWriter) -> None:
        """Do what the source says about a journal that targets keep too large. Raises SourceHalted for `error`."""
        limit, delivered = self._spec.journal, self._control.delivered
        self.full = False
        if limit is None or delivered is None or delivered >= writer.head.seq or writer.size <= limit.max_bytes:
            return
        if limit.on_full is OnFull.BLOCK:
            self.full = True
        elif limit.on_full is OnFull.ERROR:
            raise SourceHalted(
                f"the journal of source {self._spec.name} takes {writer.size} bytes, its limit is {limit.max_bytes}, "
                "and targets still need what is in it: on_full is error",
                hint="let the targets catch up, raise max_bytes, or choose on_full: block; then resume the stream",
            )
        else:
            dropped = writer.retain(Retention(bytes=limit.max_bytes), None, time.time(), AT_ONCE)
            if dropped is not None:
                self._tell(
                    "capture.journal_dropped",
                    f"the journal of source {self._spec.name} was at its limit of {limit.max_bytes} bytes: changes up "
                    f"to seq {dropped.seq} are gone, though a target does not have them",
                    Level.WARNING,
                    seq=dropped.seq,
                )
