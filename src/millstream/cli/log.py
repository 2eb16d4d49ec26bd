"""The log, as observers: one line per event, for people or for machines."""

from __future__ import annotations

import json
import threading
from datetime import UTC
from typing import Protocol

from millstream.observe import Event, Level


class Writer(Protocol):
    """Where lines go."""

    def write(self, text: str, /) -> object: ...

    def flush(self) -> object: ...


class Log:
    """`21:04:05.123 INFO    shop/log  epoch 2 opened at seq 1,204`, from `level` on. Times are UTC.

    Who it is about: stream and target, else the source, else `-`.
    """

    def __init__(self, out: Writer, level: Level = Level.INFO) -> None:
        self._out = out
        self._level = level
        self._lock = threading.Lock()

    def on_event(self, event: Event) -> None:
        if event.level >= self._level:
            self.line(self.format(event))

    def line(self, text: str) -> None:
        """Write one line, whole, whatever other threads write."""
        with self._lock:
            self._out.write(text + "\n")
            self._out.flush()

    def format(self, event: Event) -> str:
        at = event.at.astimezone(UTC)
        who = "/".join(part for part in (event.stream, event.target) if part) or event.fields.get("source", "-")
        hint = event.fields.get("hint")
        message = event.message + (f" ({hint})" if hint and str(hint) not in event.message else "")
        return f"{at:%H:%M:%S}.{at.microsecond // 1000:03d} {event.level.name:<7} {who}  {message}"


class JsonLog(Log):
    """One JSON object per event and line: at, level, kind, stream, target, message, fields."""

    def format(self, event: Event) -> str:
        return json.dumps(
            {
                "at": event.at.isoformat(),
                "level": event.level.name,
                "kind": event.kind,
                "stream": event.stream,
                "target": event.target,
                "message": event.message,
                "fields": dict(event.fields),
            },
            default=str,
        )
