"""What the event trigger tells of tables, held against the last look at the catalog.

Where the trigger is installed, each command that does something to tables writes an event into the log, in its own
transaction. So it is known where it happened, and the next look has nothing to find.

An event is JSON: its transaction's `xid` and, as far as they concern it,

    tables    captured tables that were altered, or got a partition: `oid`, `whole` (whether it is the table itself that
              was altered, else one below it), `name`, `file`, `stamp`, and `parts` as in a look: all of them if `whole`
    others    tables by number that are not captured, and that the patterns name
    gone      numbers of tables that were dropped, captured or not
    rewrite   a table that is written anew: `oid`, `whose` (itself, and what it is a partition of) and `reason`, a mask

    happened(conn, state, event)  -> what the event means for the tables of a look
    applied(state, event)         -> the look after it. Pure; once more it changes nothing
    visible(event, snapshot)      whether a look that was taken in this snapshot has it
    Ears                          keeps events until their transaction comes out
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import reduce

from millstream.model import Json
from millstream.registry.kinds import Kind
from millstream.sources.base import Block, Found
from millstream.sources.postgres import looks
from millstream.sources.postgres.connection import Connection

REASONS = {1: "logged or unlogged", 2: "default of a column", 4: "type of a column"}
"""Why a table is written anew so that rows may be others. What only moves them (another access method) is none."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True)
class Heard:
    """An event, with its transaction's commit position, and when that was committed."""

    position: int
    at: datetime
    event: Json


@dataclass
class Ears:
    """Events of transactions that have not come out. One is known by its place: who hears it again has it once."""

    _held: dict[tuple[int, int], Heard] = field(default_factory=dict)

    def hear(self, place: int, event: Json, position: int, at_us: int) -> None:
        """`place`: where the message is in the log; `position`: the commit of its transaction."""
        at = _EPOCH + timedelta(microseconds=at_us)
        self._held[position, place] = Heard(position, at, {**event, "position": position})

    def take(self, block: Block) -> list[Heard]:
        """The events of transactions that end with this block, or in it, in their order."""
        if not self._held or block.open_transaction:
            return []
        end = block.progress or 0
        if block.rows is not None and block.rows.num_rows:
            end = max(end, block.rows.column("resume_position")[-1].as_py())
        out = sorted(key for key in self._held if key[0] < end)
        return [self._held.pop(key) for key in out]


def visible(event: Json, snapshot: str | None) -> bool:
    """Whether what a transaction did was to be seen in a snapshot (`xmin:xmax:running,...`); None: nobody knows."""
    if snapshot is None:
        return False
    xid = int(event["xid"])
    _, end, running = snapshot.split(":")
    return xid < int(end) and xid not in {int(one) for one in running.split(",") if one}


def folded(state: Json, events: Iterable[Json]) -> Json:
    """A look after some events."""
    return reduce(applied, events, state)


def applied(state: Json, event: Json) -> Json:
    """A look after an event. What is different in the catalog without having been told stays as it was, to be found."""
    gone = {str(oid) for oid in event.get("gone", ())}
    tables = {oid: _without(one, gone) for oid, one in state["tables"].items() if oid not in gone}
    others = {oid: name for oid, name in state["others"].items() if oid not in gone}
    if "rewrite" in event:
        moving = event["rewrite"]["oid"]
        for oid in event["rewrite"]["whose"]:
            if str(oid) in tables:
                tables[str(oid)] = _moving(tables[str(oid)], oid == moving, str(moving))
    for told in event.get("tables", ()):
        old = tables.get(str(told["oid"]))
        # One that no look has seen yet: the next one says what it is.
        if old is not None:
            tables[str(told["oid"])] = _altered(old, told)
    new = {oid: name for oid, name in event.get("others", {}).items() if oid not in tables}
    return {**state, "tables": tables, "others": {**others, **new}}


def _without(table: Json, gone: set[str]) -> Json:
    if not table["parts"] or gone.isdisjoint(table["parts"]):
        return table
    return {**table, "parts": {leaf: facts for leaf, facts in table["parts"].items() if leaf not in gone}}


def _moving(table: Json, itself: bool, leaf: str) -> Json:
    """A table that is being written anew, or one of its partitions: the file is not known."""
    if itself:
        return {**table, "file": None}
    if not table["parts"] or leaf not in table["parts"]:
        return table
    part, _, *facts = table["parts"][leaf]
    return {**table, "parts": {**table["parts"], leaf: [part, None, *facts]}}


def _altered(old: Json, told: Json) -> Json:
    """A table as it was told. Files are left as they were: if one is another, a look has to find why."""
    parts = old["parts"]
    if told["parts"] is not None:
        before = parts or {}
        parts = {} if told["whole"] else dict(before)
        for leaf, (part, file, stamp, joined, xid) in told["parts"].items():
            was = before.get(leaf)
            known = was[1] if was is not None and was[3] == joined else None
            parts[leaf] = [part, file if known is None else known, stamp, joined, xid]
    if not told["whole"]:
        return {**old, "parts": parts}
    file = told["file"] if old["file"] is None else old["file"]
    return {"name": told["name"], "file": file, "stamp": told["stamp"], "parts": parts}


def happened(conn: Connection, state: Json, event: Json) -> Iterator[Found]:
    """What an event means for the tables of a look that is from before it."""
    yield from _dropped(state["tables"], {str(oid) for oid in event.get("gone", ())})
    if "rewrite" in event:
        yield from _rewritten(state["tables"], event["rewrite"])
    for told in event.get("tables", ()):
        old = state["tables"].get(str(told["oid"]))
        if old is not None and old["parts"] is not None and told["parts"] is not None:
            yield from _moved(conn, old["parts"], told)
    for oid, name in event.get("others", {}).items():
        if oid not in state["tables"] and oid not in state["others"]:
            yield Found(Kind.CREATE_TABLE, name, int(oid), copies=True)


def _dropped(tables: Json, gone: set[str]) -> Iterator[Found]:
    for oid, one in tables.items() if gone else ():
        if oid in gone:
            yield Found(Kind.DROP_TABLE, one["name"], int(oid))
            continue
        for leaf in gone.intersection(one["parts"] or ()):
            yield Found(Kind.PARTITION_DROPPED, one["name"], int(oid), one["parts"][leaf][0], copies=True)


def _rewritten(tables: Json, told: Json) -> Iterator[Found]:
    reason = ", ".join(word for bit, word in REASONS.items() if told["reason"] & bit)
    for oid in told["whose"] if reason else ():
        if str(oid) in tables:
            yield Found(Kind.REWRITE, tables[str(oid)]["name"], oid, copies=True, reason=reason)


def _moved(conn: Connection, before: Json, told: Json) -> Iterator[Found]:
    """Partitions that came and went. One that was dropped was told as gone, before this."""
    table, parts = (told["name"], told["oid"]), told["parts"]
    if told["whole"]:
        for leaf, facts in before.items():
            if leaf not in parts:
                yield Found(Kind.PARTITION_DETACHED, *table, facts[0], copies=True)
    full = looks.filled(conn, [int(leaf) for leaf in parts if leaf not in before])
    for leaf, (part, _, _, joined, _) in parts.items():
        if leaf not in before or before[leaf][3] != joined:
            away = leaf in before
            yield Found(Kind.PARTITION_ATTACHED, *table, part, copies=away or int(leaf) in full)
