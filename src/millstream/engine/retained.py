"""How much log a source keeps because targets have not got it yet, and what is done beyond the limit.

The limit is the source's `max_source_wal`, and never more than half of what the source can still
keep before it would give up on us. Beyond it `on_limit` decides: release (acknowledge what the
journal has, so that the source is safe while targets are behind), hold, or stop.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Mapping
from typing import Any, Protocol

from millstream.errors import SourceHalted
from millstream.model import Json, OnLimit, SourceSpec
from millstream.observe import Level

REMIND_SECONDS = 60.0
_REMEMBERED = 64


class Tell(Protocol):
    """Reports one event."""

    def __call__(self, kind: str, message: str, level: Level = ..., **fields: object) -> None: ...


class SourceLog:
    """Watches what the source keeps. `look` is called about once a second."""

    def __init__(self, spec: SourceSpec, tell: Tell) -> None:
        self._spec = spec
        self._tell = tell
        self._ends: list[int] = []
        self._status: Json = {}
        self._reminded_at = float("-inf")
        self.release = 0
        """To be acknowledged though targets do not have it; a journal end, or 0."""
        self.released = 0
        """How often the limit made us acknowledge what a target did not have."""
        self.over_limit = False

    def committed(self, end: int) -> None:
        """Remember a position that may be acknowledged; only some of them, well apart."""
        if not self._ends or end - self._ends[-1] >= self._spec.max_source_wal // _REMEMBERED:
            self._ends.append(end)
            del self._ends[: -2 * _REMEMBERED]

    def look(self, status: Mapping[str, Any], *, acked: int, end: int) -> None:
        """Take the source's own status and apply the limit. Raises SourceHalted for `on_limit: stop`.

        Of the status three fields count: `log_end` and `confirmed` (positions), and `safe_bytes` (how
        much more log can be kept, None: no bound).
        """
        self._status = dict(status)
        if "log_end" not in status:
            return
        limit = self._spec.max_source_wal
        if status.get("safe_bytes") is not None:
            limit = min(limit, max(int(status["safe_bytes"]), 0) // 2)
        log_end = int(status["log_end"])
        confirmed = max(acked, int(status.get("confirmed") or 0))
        kept = log_end - confirmed
        was, self.over_limit = self.over_limit, kept > limit
        if not self.over_limit:
            return
        if self._spec.on_limit is OnLimit.STOP:
            raise SourceHalted(
                f"source {self._spec.name} keeps {kept} bytes of log for targets that are behind; "
                f"the limit is {limit} and on_limit is stop",
                hint="let the targets catch up, raise max_source_wal, or choose on_limit: release",
            )
        if self._spec.on_limit is OnLimit.RELEASE and end > confirmed:
            self.release = self._first_end(log_end - limit, end)
            self.released += 1
        self._remind(kept, limit, entered=not was)

    def to_json(self) -> Json:
        """The source's own status, and what the limit did."""
        return {**self._status, "over_limit": self.over_limit, "released": self.released}

    def _first_end(self, wanted: int, end: int) -> int:
        """The lowest remembered journal end that is enough, else the journal's end itself."""
        at = bisect_left(self._ends, wanted)
        return max(self.release, self._ends[at] if at < len(self._ends) else end)

    def _remind(self, kept: int, limit: int, *, entered: bool) -> None:
        now = time.monotonic()
        if not entered and now - self._reminded_at < REMIND_SECONDS:
            return
        self._reminded_at = now
        released = self._spec.on_limit is OnLimit.RELEASE
        done = (
            "acknowledging what the journal has: until the targets catch up, only the journal's disk holds it"
            if released
            else "holding it, as on_limit says"
        )
        self._tell(
            "capture.log_released" if released else "capture.log_held",
            f"source {self._spec.name} keeps {kept} bytes of log for targets that are behind, "
            f"more than the limit of {limit}: {done}",
            Level.WARNING,
            kept_bytes=kept,
            limit_bytes=limit,
        )
