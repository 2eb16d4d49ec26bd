"""What a running process says of its streams and targets, as the state store has it for `status`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from millstream.model import Json


@dataclass(frozen=True)
class CaptureReport:
    """What a running process says of a stream and of the capture of its source."""

    state: str = ""
    """starting | running | waiting | halted | stopped, as the capture's supervisor has it."""
    pid: int | None = None
    restarts: int = 0
    error: str | None = None
    hint: str | None = None
    source: Mapping[str, Any] = field(default_factory=dict)
    """What the capture process last said: its journal's end, and what `Source.status()` gave."""

    def to_json(self) -> Json:
        return asdict(self)


@dataclass(frozen=True)
class TargetReport:
    """What a running process says of the delivery to one target, counted since its start."""

    events: int = 0
    bytes: int = 0
    batches: int = 0
    retrying: str | None = None
    """Why the batch at hand could not be delivered yet; it is being tried again."""
    error: str | None = None
    hint: str | None = None
    verifying: str | None = None
    """How far the comparison with the source is, while there is one: nothing is delivered meanwhile."""
    startup: Mapping[str, Any] | None = None
    """How the delivery began, and why."""
    baseline: Mapping[str, Any] | None = None
    """How far the target's first rows are, while they come."""

    def to_json(self) -> Json:
        return asdict(self)
