"""What is in doubt of a mirror's changes, as the state store has it: see `repair` and `targets.rejects`."""

from __future__ import annotations

from millstream.engine.repair import Repair
from millstream.state.base import Doubt, StateStore
from millstream.targets.rejects import Held


def doubts(store: StateStore, stream: str, target: str) -> tuple[Held, ...]:
    """What is in doubt, as tasks must know it."""
    found = store.doubts(stream, target)
    return tuple(Held(one.event_id, one.seq, one.table, one.key, one.until) for one in found)


def remember_doubts(store: StateStore, stream: str, target: str, outcome: Repair) -> None:
    """Write down, before they are delivered, which changes will be in doubt after their batch."""
    lasting = [
        Doubt(stream, target, one.table, one.event_id, one.seq, one.key, one.until)
        for one in outcome.lasting
        if one.key is not None and one.until is not None
    ]
    if lasting:
        store.add_doubts(lasting)
