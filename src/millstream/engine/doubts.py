"""What is in doubt of a mirror's changes, as the state store has it: see `repair` and `targets.rejects`.

Every batch takes it along to its tasks, and nobody looks after it: it ends by itself, when the target comes to where
the rows were read. A target that is far behind may have more of it than a batch should carry. Then rows are no longer
told apart: their tables are in doubt, which costs a look at the source for each change that takes a row of theirs
to another key and leaves out a value.
"""

from __future__ import annotations

from collections.abc import Sequence

from millstream.engine.repair import Repair
from millstream.state.base import Doubt, StateStore
from millstream.targets.rejects import EVERY_ROW, Held

MOST_DOUBTS = 5_000
"""So many rows of a target are told apart: with these a batch takes some 30 ms longer."""


def doubts(store: StateStore, stream: str, target: str) -> tuple[Held, ...]:
    """What is in doubt, as tasks must know it."""
    found = store.doubts(stream, target)
    return tuple(Held(one.event_id, one.seq, one.table, one.key, one.until) for one in found)


def few(found: Sequence[Held]) -> Sequence[Held]:
    """What is in doubt; where that is too much, its tables, from the first of their changes to the last end."""
    if len(found) <= MOST_DOUBTS:
        return found
    tables: dict[str, list[Held]] = {}
    for one in found:
        tables.setdefault(one.table, []).append(one)
    return [
        Held(
            f"{EVERY_ROW}{table}",
            min(one.seq for one in some),
            table,
            EVERY_ROW,
            max(one.until for one in some if one.until is not None),
        )
        for table, some in tables.items()
    ]


def remember_doubts(store: StateStore, stream: str, target: str, outcome: Repair) -> None:
    """Write down, before they are delivered, which changes will be in doubt after their batch."""
    lasting = [one for one in outcome.lasting if one.key is not None and one.until is not None]
    if not lasting:
        return
    known = {one.event_id: one for one in (*doubts(store, stream, target), *lasting)}
    if len(known) > MOST_DOUBTS:
        store.set_doubts(stream, target, _remembered(stream, target, few(list(known.values()))))
    else:
        store.add_doubts(_remembered(stream, target, lasting))


def _remembered(stream: str, target: str, held: Sequence[Held]) -> list[Doubt]:
    return [
        Doubt(stream, target, one.table, one.event_id, one.seq, one.key, one.until)
        for one in held
        if one.key is not None and one.until is not None
    ]
