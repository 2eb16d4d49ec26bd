"""What Millstream tells about itself while it works.

The library never logs. It hands structured events to observers; logs, progress displays, metrics
and the console are observers. An event never carries a secret or a value of a user's row.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Protocol


def counted(count: int, what: str) -> str:
    """So many of something, in words of an event or a result: 1 row, 1,204 rows."""
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


class Level(enum.IntEnum):
    """How much an event matters to a person. The numbers are those of `logging`."""

    DEBUG = 10
    INFO = 20
    WARNING = 30
    ERROR = 40


@dataclass(frozen=True)
class Event:
    """One thing that happened. `kind` is `room.what` in snake case; `fields` are JSON values."""

    kind: str
    message: str
    level: Level = Level.INFO
    stream: str | None = None
    target: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    at: datetime = field(default_factory=lambda: datetime.now(UTC))


class Observer(Protocol):
    """Receives events. Called from any thread, in the order things happened on that thread.

    Must return soon and must not raise: whatever it raises is swallowed by `Observers`, because
    a broken display must never stop replication.
    """

    def on_event(self, event: Event) -> None: ...


class Observers:
    """Hands each event to every observer, in the order they were given."""

    def __init__(self, observers: Iterable[Observer] = ()) -> None:
        self._observers = list(observers)

    def add(self, observer: Observer) -> None:
        self._observers.append(observer)

    def on_event(self, event: Event) -> None:
        for observer in self._observers:
            try:
                observer.on_event(event)
            except Exception as broken:  # noqa: BLE001 - see the Observer contract
                if observer in self._observers:
                    self._observers.remove(observer)
                self.on_event(
                    Event(
                        "observer.failed", f"an observer failed and was removed: {type(broken).__name__}", Level.ERROR
                    )
                )
