"""What went wrong with a stream is remembered beside its state, so that it can be told after the process is gone."""

from __future__ import annotations

from contextlib import suppress

from millstream.errors import StateError
from millstream.observe import Event, Observer
from millstream.state.base import Fault, StateStore

KINDS = frozenset(
    {
        *("delivery.retry", "delivery.failed"),
        *("capture.unavailable", "capture.failed", "capture.halted", "capture.crashed", "capture.disk_full"),
    }
)
"""The events that count as errors of a stream. Those of a capture are errors of every stream on its source."""


class FaultLog:
    """An observer that writes faults down and hands every event on."""

    def __init__(self, store: StateStore, observer: Observer) -> None:
        self._store = store
        self._observer = observer

    def on_event(self, event: Event) -> None:
        if event.kind in KINDS:
            # Where the store itself is broken, whoever needs it says so.
            with suppress(StateError):
                for stream in self._streams(event):
                    self._store.add_fault(Fault(stream, event.target or "", event.kind, event.message, event.at))
        self._observer.on_event(event)

    def _streams(self, event: Event) -> list[str]:
        if event.stream is not None:
            return [event.stream]
        source, names = event.fields.get("source"), self._store.list_streams()
        return [name for name in names if (self._store.get_stream(name) or {})["source"]["name"] == source]
