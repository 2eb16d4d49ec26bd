"""Moves the slot by SQL while no stream is there to acknowledge through.

Advancing a slot reads the log from where the slot restarts, so it is done now and then, and never
so often that it takes more than a fraction of the time. While capture is behind the server has enough
to do; when it is not a stream waits for the slot to follow.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from millstream.failpoint import failpoint
from millstream.sources.postgres.connection import literal
from millstream.sources.postgres.lsn import format_lsn
from millstream.sources.postgres.session import TURN_SECONDS, Refused, Session, Turns

MOVE_SECONDS: Final = 5.0
"""The shortest time between two moves,"""
NEAR_SECONDS: Final = 2.0
"""when capture has read the log to its end this (and so long since it has: the last changes are on their way then),"""
MOVE_SHARE: Final = 10
"""and so many times what the last one took."""
_PASSES: Final = ("55006", "57014")
"""The stream that we have just closed is not gone yet; a move was given up."""


class SlotMover:
    """Brings one slot to what was acknowledged. Its session is opened when first needed. Not for threads."""

    def __init__(self, connect: Callable[[], Session], slot: str, moved: int) -> None:
        """The server knows of `moved` already."""
        self._connect = connect
        self._slot = slot
        self._session: Session | None = None
        self._moved = moved
        self._moving: int | None = None
        self._sent_at = 0.0
        self.refused: str | None = None
        """Why the slot cannot be moved, once that has turned out."""
        self._moved_at = self._far_at = time.monotonic()
        self._took = 0.0

    @property
    def moved(self) -> int:
        """What the server was last told that it may forget."""
        return self._moved

    def turn(self, acked: int, *, near: bool) -> None:
        """Begin or end a move if one is due. Waits for nothing. `near`: capture is at the log's end."""
        now = time.monotonic()
        self._far_at = self._far_at if near else now
        if self._moving is not None:
            self._end()
            return
        due_at = self._moved_at + MOVE_SECONDS
        if near:
            due_at = min(due_at, max(self._moved_at, self._far_at) + NEAR_SECONDS)
        if acked > self._moved and now >= max(due_at, self._moved_at + MOVE_SHARE * self._took):
            self._begin(acked)

    def settle(self) -> Turns:
        """Give up what is under way, and wait until the slot is free for a stream."""
        session = self._session
        if session is not None and self._moving is not None:
            session.cancel()
        while self._moving is not None:
            self._end()
            if self._moving is not None and session is not None and not session.await_input(TURN_SECONDS):
                yield
        self.close()

    def close(self) -> None:
        """Give up what is under way. Idempotent."""
        session, self._session, self._moving = self._session, None, None
        if session is not None:
            session.close()

    def _begin(self, acked: int) -> None:
        if self._session is None:
            self._session = self._connect()
        name, position = literal(self._slot), literal(format_lsn(acked))
        # To advance a slot to where it is already, or to before it, is an error.
        self._session.send(
            f"SELECT pg_replication_slot_advance(slot_name, {position}) FROM pg_replication_slots "
            f"WHERE slot_name = {name} AND confirmed_flush_lsn < {position}"
        )
        self._moving, self._sent_at = acked, time.monotonic()

    def _end(self) -> None:
        if self._session is None or self._moving is None:
            return
        try:
            if not self._session.finished():
                return
            self._moved = self._moving
            failpoint("bulk.slot_moved")
        except Refused as refused:
            if refused.sqlstate not in _PASSES:
                self.refused = str(refused)
        self._moving = None
        self._moved_at = time.monotonic()
        self._took = self._moved_at - self._sent_at
