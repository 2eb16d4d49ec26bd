"""Looks at the catalog from time to time, and holds what is different against what the log has told."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

import numpy as np

from millstream.model import Json, Op, Relation
from millstream.registry.kinds import Kind
from millstream.sources.base import Block, Found, Look, Told
from millstream.sources.postgres import looks, telling
from millstream.sources.postgres.connection import Connection, translated
from millstream.sources.postgres.options import PostgresOptions
from millstream.sources.postgres.pgoutput import HEARTBEAT_PREFIX
from millstream.sources.postgres.telling import Heard


@dataclass(frozen=True)
class _Waiting:
    """A look that is different from the one before. What the log tells up to its position decides what it means."""

    state: Json
    begun: int
    """The log's end before the catalog was read: what was committed later may not be in it."""
    position: int
    """The log's end after that: nothing that was committed later is in it."""
    at: datetime


@dataclass
class Watcher:
    """One connection's looks. A look is compared when the log has come to where it ended when the look was taken."""

    conn: Connection
    options: PostgresOptions
    patterns: Sequence[str]
    last: Json | None
    """The last look handed out: `state`, `position`, `at`; at first what the journal has, with what was `told`."""
    _unsure: dict[int, set[int]] = field(default_factory=dict)
    """By table the ids of those of its descriptions that the catalog could not complete,"""
    _doubted: set[int] = field(default_factory=set)
    """and the tables that got such a one since the last look."""
    _looked_at: float = float("-inf")
    _waiting: _Waiting | None = None
    _tables: dict[int, int] = field(default_factory=dict)
    """By the journal's id of a description the number of its table."""
    _truncated: dict[tuple[int, int], int] = field(default_factory=dict)
    """(table, transaction) of the truncates that the last look may not have seen, with their commit positions."""
    _events: list[Json] = field(default_factory=list)
    """What the trigger has told since the last look, or what that may not have seen,"""
    _now: Json = field(default_factory=dict)
    """and the last look after it."""

    def __post_init__(self) -> None:
        if self.last is not None:
            self._events = list(self.last.get("told", ()))
            self._now = telling.folded(self.last["state"], self._events)

    def recall(self, descriptions: Sequence[Relation]) -> None:
        """What the journal has. What a process that was killed did not come to tell is doubted still."""
        for id, one in enumerate(descriptions, start=1):
            if not one.enriched:
                self._unsure.setdefault(one.oid, set()).add(id)
        if self.last is not None:
            seen = self.last["state"]["unsure"]
            self._doubted |= {oid for oid, ids in self._unsure.items() if len(ids) > seen.get(str(oid), 0)}

    def describe(self, id: int, relation: Relation) -> None:
        """Rows with this id have this description."""
        self._tables[id] = relation.oid
        if not relation.enriched:
            self._unsure.setdefault(relation.oid, set()).add(id)
            self._doubted.add(relation.oid)

    def hear(self, block: Block) -> None:
        """Note the truncates of a block."""
        if block.rows is None:
            return
        op = block.rows.column("op")
        codes = np.frombuffer(op.buffers()[1], np.uint8)[op.offset : op.offset + len(op)]
        for at in np.flatnonzero(codes == Op.TRUNCATE).tolist():
            names = ("relation", "txid", "commit_position")
            relation, txid, position = (block.rows.column(name)[at].as_py() for name in names)
            self._truncated[self._tables.get(relation, 0), txid] = position

    def tell(self, heard: Sequence[Heard]) -> tuple[Told, ...]:
        """What the trigger has told, in order, and means for the captured tables; what means nothing is left out."""
        if self.last is None:
            return ()
        told: list[Told] = []
        for one in heard:
            if telling.visible(one.event, self.last["state"].get("snapshot")):
                continue  # a journal begins with a look, which may be younger than what comes first
            said = [each for before in told if before.position == one.position for each in before.found]
            found: list[Found] = []
            for each in telling.happened(self.conn, self._now, one.event):
                # Each partition of a table that is written anew tells it.
                if each not in said and each not in found:
                    found.append(each)
            self._now = telling.applied(self._now, one.event)
            self._events.append(one.event)
            told.append(Told(one.position, one.at, one.event, tuple(found)))
        positions = {one.position for one in told if one.found}
        return tuple(one for one in told if one.position in positions)

    def look(self, received: int) -> Look | None:
        """A look that the journal shall keep, if there is one by now. `received`: how far the log has come."""
        clock = time.monotonic()
        if self._waiting is None and clock - self._looked_at >= self.options.watch_interval / 1000:
            self._looked_at = clock
            self._take()
        waiting = self._waiting
        if waiting is None or (self.last is not None and received < waiting.position):
            return None
        self._waiting = None
        # What it has not seen for sure is the same on both sides.
        unseen = [one for one in self._events if not telling.visible(one, waiting.state["snapshot"])]
        since = self.last["position"] if self.last is not None else waiting.position
        before = self._now if self.last is not None else waiting.state
        found = looks.compare(self.conn, before, telling.folded(waiting.state, unseen), self._truncated)
        found += looks.doubts(waiting.state, self._doubted - {one.oid for one in found if one.kind == Kind.REWRITE})
        self._doubted.clear()
        self._forget(waiting.begun)
        state = {**waiting.state, "unsure": self._counts()}
        self.last = {"state": state, "position": waiting.begun, "at": waiting.at.isoformat()}
        self._events, self._now = unseen, telling.folded(state, unseen)
        return Look(state, since, waiting.position, waiting.at, tuple(found), tuple(unseen))

    def _counts(self) -> Json:
        return {str(oid): len(ids) for oid, ids in self._unsure.items()}

    def _forget(self, position: int) -> None:
        """What was truncated before a look is in it."""
        self._truncated = {one: commit for one, commit in self._truncated.items() if commit >= position}

    def _take(self) -> None:
        """Read the catalog. If nothing is different there is nothing to wait for, and to keep."""
        begun = self._log_end()
        state = {**looks.read(self.conn, self.options.publications, self.patterns), "unsure": self._counts()}
        position = self._log_end()
        same = self.last is not None and {**state, "snapshot": None} == {**self.last["state"], "snapshot": None}
        if self.last is not None and same and not self._doubted and not self._events:
            self.last = {**self.last, "position": begun}
            self._forget(begun)
            return
        self._waiting = _Waiting(state, begun, position, datetime.now(UTC))
        if self.last is not None and self.options.heartbeat_interval:
            # So that the log comes to that position soon, also where nobody writes.
            with translated("writing a heartbeat"):
                self.conn.execute("SELECT pg_logical_emit_message(false, %s, '')", (HEARTBEAT_PREFIX,))

    def _log_end(self) -> int:
        with translated("asking for the end of the log"):
            # What is visible may not be flushed yet, where commits do not wait for that.
            row = self.conn.execute("SELECT (pg_current_wal_insert_lsn() - '0/0')::int8").fetchone()
        return int(row[0]) if row else 0
