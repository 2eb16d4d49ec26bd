"""A temporary copy of a slot, and the session that it lives in: read in calls, each a stretch of the log.

The copy is gone with its session, whatever happens. Several of them can read one log side by side, each call another
stretch: one that begins behind where its copy stands first moves the copy there. That reads the log without decoding
it and takes a tenth of the time; or, on a connection for replication, it is told to the server as one does who has
received everything up to there, which takes no time at all. The call itself reads again what lies before its stretch,
in both ways.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from millstream.errors import SourceUnavailable
from millstream.failpoint import failpoint
from millstream.sources.postgres.call import Call, call
from millstream.sources.postgres.connection import literal
from millstream.sources.postgres.lsn import format_lsn
from millstream.sources.postgres.pgoutput import status_update
from millstream.sources.postgres.session import Session, Turns

SKIPPED_BYTES = 256 << 20
"""More than this is read when a copy is moved over it: that may move the place, too, from which calls read. If it does
not, nothing is lost but the reading. What a call reads again it keeps, transaction by transaction, until it sees that
they are not wanted, and in files of the server where they are large."""
WORK_MEM = "64MB"
"""What the server may keep of a result in memory; the rest goes to a temporary file, which takes time."""


@dataclass(frozen=True)
class Place:
    """Where the copy of the slot is, and the source with it."""

    position: int
    """Everything that ends at or before it has been read."""
    restart: int
    """Where the next call begins to read."""
    log_end: int
    held_from: int
    """Where a stream of the slot itself would begin to read."""
    clock: int
    """The server's clock, as it counts microseconds."""


@dataclass(frozen=True)
class Stretch:
    """A piece of the log that one call decodes: every transaction whose commit record begins in it.

    A call ends with the first record that ends at or behind `end`: all that begin before it have been read by then.
    One that begins at a position leaves out the transactions whose commit record begins before it. So two calls, of
    which one begins where the other ends, leave out nothing, as long as the first one has come to its end.
    """

    begin: int
    end: int


class SlotCopy:
    """Owns the session. One call at a time. Not for threads."""

    def __init__(self, session: Session, slot: str, options: Mapping[str, str]) -> None:
        """`slot` is the one that the stream reads; `options` are those of the output plugin, as a stream has them."""
        self.session = session
        self._slot = slot
        # Unique on the server while the session lives, and within the 63 bytes of a name.
        self.name = f"{slot[:50]}_bulk_{session.connection.backend_pid}"
        self._options = ", ".join(literal(text) for option in options.items() for text in option)
        self._stream_options = ", ".join(f"{name} {literal(value)}" for name, value in options.items())
        self.call: Call | None = None
        self.stretch = Stretch(0, 0)
        """What the last call was sent for."""
        self.place = Place(0, 0, 0, 0, 0)

    def create(self, origin: str) -> Turns:
        """Make the copy, of the slot itself or of another copy of it. Raises Refused."""
        yield from self.session.run(f"SET work_mem = {literal(WORK_MEM)}")
        yield from self.session.run(
            f"SELECT pg_copy_logical_replication_slot({literal(origin)}, {literal(self.name)}, true)"
        )
        failpoint("bulk.copy_created")
        yield from self.locate()

    def advance(self, goal: int) -> Turns:
        """Bring the copy to a position: reads the log without decoding it. Raises Refused."""
        if self.place.position < goal:
            yield from self.session.run(f"SELECT {self._moved_to(goal)}")
            yield from self.locate()

    def skip(self, goal: int) -> Turns:
        """Bring the copy to a position without reading the log, where that is possible and better. Raises Refused.

        What lies between has been read by another copy. `send` does what is not done here.
        """
        if self.session.replicates and self.place.position < goal <= self.place.restart + SKIPPED_BYTES:
            update = status_update(written=goal, flushed=goal, unix_us=time.time_ns() // 1000)
            start = f'START_REPLICATION SLOT "{self.name}" LOGICAL {format_lsn(goal)} ({self._stream_options})'
            yield from self.session.tell_position(start, update)
            failpoint("bulk.copy_skipped")
            yield from self.locate()

    def locate(self) -> Turns:
        """Look where the copy is now. Raises SourceUnavailable when it is gone."""
        rows = yield from self.session.run(self._where())
        if len(rows) != 1:
            raise SourceUnavailable("the temporary copy of the slot is gone")
        self.place = Place(*(int(value or 0) for value in rows[0]))

    def send(self, stretch: Stretch, messages: int) -> None:
        """Begin to decode a stretch that does not begin before where the copy stands; so many messages, or few more."""
        slot = literal(self.name)
        if stretch.begin > self.place.position:
            # As an argument it is done before the call that it is an argument of.
            slot = f"(SELECT slot_name FROM {self._moved_to(stretch.begin)})"
        self.stretch = stretch
        self.call = call(
            self.session,
            "COPY (SELECT data FROM pg_logical_slot_get_binary_changes("
            f"{slot}, '{format_lsn(stretch.end)}', {messages}, {self._options})) TO STDOUT (FORMAT binary)",
        )

    def close(self) -> None:
        """End the session, and the copy with it. Idempotent."""
        if self.call is not None:
            self.call.close()
        self.session.close()

    def _moved_to(self, position: int) -> str:
        return f"pg_replication_slot_advance({literal(self.name)}, '{format_lsn(position)}')"

    def _where(self) -> str:
        return (
            "SELECT (confirmed_flush_lsn - '0/0')::int8, (restart_lsn - '0/0')::int8, "
            "(pg_current_wal_flush_lsn() - '0/0')::int8, "
            f"(SELECT (restart_lsn - '0/0')::int8 FROM pg_replication_slots WHERE slot_name = {literal(self._slot)}), "
            "(extract(epoch FROM clock_timestamp() - timestamptz '2000-01-01 00:00:00+00') * 1000000)::int8 "
            f"FROM pg_replication_slots WHERE slot_name = {literal(self.name)}"
        )
