"""Who still needs a journal: the targets of all streams that the home knows on its source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from millstream.engine.replay import UNFINISHED
from millstream.journal import Header
from millstream.snapshots import RESTORE, UNDONE
from millstream.state.base import StateStore


@dataclass(frozen=True)
class Holder:
    """A target, and the seq up to which it needs nothing from the journal any more."""

    stream: str
    target: str
    seq: int

    def __str__(self) -> str:
        return f"{self.stream}/{self.target} (at seq {self.seq})"


def holders(store: StateStore, source: str, header: Header) -> list[Holder]:
    """Every target of every stream on this source, running or not, the one that is furthest behind first.

    One that must begin anew needs nothing. One that has no cursor in this journal yet needs all of it. The others
    need it from the start of their last batch on: Spark may ask for that once more after a crash.
    """
    found = []
    for stream in store.list_streams():
        definition = store.get_stream(stream) or {}
        if definition.get("source", {}).get("name") != source:
            continue
        gone, replays = store.needs_reload(stream), store.replays(stream)
        restores = store.notes(stream, RESTORE)
        for target in definition["targets"]:
            if target["name"] in gone:
                continue
            history = store.cursor_history(stream, target["name"], 2)
            # After a replay the target is before where it was.
            known = [*history, *filter(None, [store.get_cursor(stream, target["name"])])]
            here = [cursor.seq for cursor in known if cursor.journal_id == header.journal_id]
            replay = replays.get(target["name"])
            if replay is not None and replay["state"] in UNFINISHED:
                here.append(replay["from_seq"])
            restore = restores.get(target["name"])
            if restore is not None and restore["state"] in UNDONE:
                here.append(restore["seq"])
            behind = not history or history[0].journal_id != header.journal_id
            found.append(Holder(stream, target["name"], header.first_seq - 1 if behind else min(here)))
    return sorted(found, key=lambda holder: holder.seq)


def delivered(store: StateStore, source: str, header: Header) -> int:
    """The seq up to which every target that can go on has the changes."""
    cursors = []
    for holder in holders(store, source, header):
        cursor = store.get_cursor(holder.stream, holder.target)
        here = cursor is not None and cursor.journal_id == header.journal_id
        cursors.append(cursor.seq if cursor is not None and here else header.first_seq - 1)
    return min(cursors, default=header.first_seq - 1)


def lowest(found: Sequence[Holder], header: Header) -> int:
    """The seq up to which nobody needs anything; with no target at all everything is kept."""
    return found[0].seq if found else header.first_seq - 1
