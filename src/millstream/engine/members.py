"""What runs in this process: streams, the captures of their sources, and the deliveries to their targets.

The control alone changes any of it. Whoever else looks gets copies of the lists.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from millstream.engine.captures import Capture
from millstream.engine.delivery import DeliveryQuery
from millstream.errors import MillstreamError
from millstream.model import StreamSpec, StreamState
from millstream.observe import Event, Level, Observer
from millstream.spark.tables import OwnTables
from millstream.state.base import StateStore


@dataclass
class Delivery:
    """A query that was started, and what it was told of the stream's tables."""

    query: DeliveryQuery
    tables: OwnTables | None


@dataclass
class Member:
    """A stream that runs here."""

    spec: StreamSpec
    deliveries: dict[str, Delivery] = field(default_factory=dict)
    unfit: dict[str, MillstreamError] = field(default_factory=dict)
    """Targets that could not even be made, and why: an option that is not known any more, a package that is missing."""
    ready: bool = False
    """Whether it was told that all targets deliver."""

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def queries(self) -> dict[str, DeliveryQuery]:
        """By target what was started."""
        return {name: one.query for name, one in list(self.deliveries.items())}

    def stop(self, targets: Iterable[str]) -> None:
        """End the delivery to these targets, as far as there is one. Returns when their batches have ended."""
        for target in list(targets):
            delivery = self.deliveries.get(target)
            if delivery is not None:
                delivery.query.stop()
                del self.deliveries[target]

    def note_unfit(self, target: str, failed: MillstreamError, observer: Observer) -> None:
        """A target could not be made: it is told, and not tried again before somebody asks for it."""
        self.unfit[target] = failed
        fields = {"error": type(failed).__name__, "hint": failed.hint}
        observer.on_event(Event("delivery.failed", failed.message, Level.ERROR, self.name, target, fields))

    def tell_ready(self, store: StateStore, observer: Observer) -> None:
        """Say it once, when every target that is not paused delivers, or has its copy."""
        states = {name: one.query.state for name, one in self.deliveries.items()}
        if len(states) == len(self.spec.targets) and set(states.values()) == {StreamState.COMPLETE}:
            self._tell_complete(observer)
            return
        ready = bool(states) and set(states.values()) == {StreamState.RUNNING}
        if ready and not self.ready:
            left = [target.name for target in self.spec.targets if target.name not in states]
            ready = all(is_paused(store, self.name, name) for name in left)
        if ready and not self.ready:
            message = f"stream {self.name} is ready: what is committed from now on is delivered"
            observer.on_event(Event("stream.ready", message, stream=self.name))
        self.ready = ready

    def _tell_complete(self, observer: Observer) -> None:
        if not self.ready:
            message = f"stream {self.name} is complete: every target has a copy of the tables"
            observer.on_event(Event("stream.complete", message, stream=self.name))
        self.ready = True


class Roster:
    """Every stream that runs here, by name, and every capture, by source."""

    def __init__(self) -> None:
        self.by_name: dict[str, Member] = {}
        self.by_source: dict[str, Capture] = {}
        self.held: dict[tuple[str, str], str] = {}
        """Targets that are being compared with their source, and how far that is: nothing is delivered to them."""

    @property
    def members(self) -> list[Member]:
        return list(self.by_name.values())

    @property
    def captures(self) -> list[Capture]:
        return list(self.by_source.values())

    @property
    def queries(self) -> list[DeliveryQuery]:
        return [query for member in self.members for query in member.queries.values()]

    def of(self, capture: Capture) -> list[Member]:
        """The streams that read its source."""
        return [member for member in self.members if member.spec.source.name == capture.source.name]

    def held_of(self, stream: str) -> dict[str, str]:
        """By target of the stream how far its comparison is."""
        return {target: text for (name, target), text in list(self.held.items()) if name == stream}


def is_paused(store: StateStore, stream: str, target: str) -> bool:
    """Whether this target was paused, alone or with its stream."""
    return not store.paused(stream).isdisjoint({"", target})
