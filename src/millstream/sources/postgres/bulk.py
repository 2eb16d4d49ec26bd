"""Reading the log in bulk: much faster than a stream, for a capture that is far behind.

A replication stream sends and polls once per message. Here the server hands over as much as a
temporary copy of the slot decodes in one call, by binary COPY. The copy lives in a session of its
own and is gone with it, whatever happens; the slot itself stays where the acknowledgements put it.
So after any error the journal's end alone says where to go on.

Each call decodes a stretch of the log, and starts to read it where the oldest transaction began
that was open: what lies between that place and the stretch is read again, though not sent again.
To read something again takes a tenth of the time that it takes to decode it. So a stretch is at least
as long as what is read again for it. The server keeps the result of a call in a temporary file, which
bounds the stretch, and sends nothing before the call is over: the first stretches are short, and so are
the last ones, since nobody has anything to do before the one, and the server has nothing to do after the
other.

A stream, when it begins, reads everything again that the slot still holds back, however little of it
it sends. So who has caught up may go on here for a while: the copy holds nothing back.

When the end of a stretch has arrived, the next call is sent before its rows are worked on: server
and capture are busy at the same time, without threads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from millstream.errors import SourceUnavailable
from millstream.failpoint import failpoint
from millstream.sources.base import Block
from millstream.sources.postgres.assemble import Assembler
from millstream.sources.postgres.call import Call, Run, call
from millstream.sources.postgres.connection import literal
from millstream.sources.postgres.descriptions import Descriptions
from millstream.sources.postgres.lsn import format_lsn
from millstream.sources.postgres.session import Refused, Session, Turns
from millstream.sources.postgres.waiting import turns

FIRST_BYTES = 8 << 20
"""The log of the first call: nobody has anything to do before its rows come. Each later one takes twice as much,"""
STRETCH_BYTES = 64 << 20
"""up to this, or more where much is read again for it,"""
LONGEST_BYTES = 512 << 20
"""and at most this;"""
SHORTEST_BYTES = 8 << 20
"""but near the end of the log it may be as short as this."""
RESULT_BYTES = 512 << 20
"""What the server may have to keep of one call, but for a single transaction that is larger."""
REREAD_BYTES = 4 * LONGEST_BYTES
"""When each call reads more than this again, that costs more than bulk reading saves."""
HELD_BYTES = 36 << 20
"""So much of a result is taken in before any of it is worked on."""

REST_SECONDS = 0.05
"""So long nothing is asked of a source that had nothing new."""
WORK_MEM = "64MB"
"""What the server may keep of a result in memory; the rest goes to a temporary file, which takes time."""

_MESSAGE_BYTES = 128
"""The size of a message before any was seen."""


class BulkRefused(Exception):
    """The source cannot be read in bulk now, for the reason given; it can be streamed."""


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


class BulkReader:
    """Reads through a copy of a slot. Owns the session. Not for threads."""

    def __init__(
        self,
        session: Session,
        assembler: Assembler,
        descriptions: Descriptions,
        slot: str,
        options: Mapping[str, str],
    ) -> None:
        """`options` are those of the output plugin, as a stream has them."""
        self._session = session
        self._assembler = assembler
        self._descriptions = descriptions
        self._slot = slot
        # Unique on the server while the session lives, and within the 63 bytes of a name.
        self._copy = f"{slot[:50]}_bulk_{session.connection.backend_pid}"
        self._options = ", ".join(literal(text) for option in options.items() for text in option)
        self._message_bytes = float(_MESSAGE_BYTES)
        self._usual = FIRST_BYTES
        self._call: Call | None = None
        self._left = 0
        self.place = Place(0, 0, 0, 0, 0)

    def open(self) -> Turns:
        """Make the copy and bring it to where the assembler is. Raises BulkRefused."""
        copy, goal = literal(self._copy), self._assembler.received
        try:
            yield from self._session.run(f"SET work_mem = {literal(WORK_MEM)}")
            yield from self._session.run(
                f"SELECT pg_copy_logical_replication_slot({literal(self._slot)}, {copy}, true)"
            )
            failpoint("bulk.copy_created")
            yield from self._locate()
            if self.place.position < goal:
                # Reads the log without decoding it, which is all that is needed to skip what we have.
                yield from self._session.run(f"SELECT pg_replication_slot_advance({copy}, '{format_lsn(goal)}')")
                yield from self._locate()
            failpoint("bulk.copy_advanced")
        except Refused as refused:
            raise BulkRefused(str(refused)) from None

    def blocks(self, enough: Callable[[int], bool], lingers: Callable[[], bool]) -> Iterator[Block]:
        """Blocks until `enough` says so of the distance to the log's end; it is asked when a call has ended.

        And then as long as `lingers` says so. At least every 100 ms. Nothing is left half done when the last
        block has come. Raises BulkRefused when a stream would be better, and SourceUnavailable when the session ends.
        """
        try:
            self._send()
            goes_on = True
            while goes_on:
                before = self.place.position
                held: deque[Run] = deque()
                yield from self._read(held)
                failpoint("bulk.chunk_read")
                behind = self.place.log_end - self.place.position
                close = enough(behind)
                # Who is going to stay need not finish with these rows before he asks for the next ones.
                stays = close and behind >= SHORTEST_BYTES // 4 and lingers()
                goes_on = before < self.place.position and (not close or stays)
                self._left = 0
                if goes_on:
                    self._send()
                yield from self._feed_held(held, self.place.position - before)
                yield replace(self._assembler.cover(self.place.position), left=self._left)
                failpoint("bulk.chunk_appended")
                if close and not goes_on and lingers():
                    goes_on = True
                    self._session.await_input(REST_SECONDS)
                    self._send()
        except Refused as refused:
            raise BulkRefused(str(refused)) from None
        finally:
            self._assembler.restart()
            self._descriptions.end_calls()

    def close(self) -> None:
        """End the session, and the copy with it. Idempotent."""
        if self._call is not None:
            self._call.close()
        self._session.close()

    # -- one call ----------------------------------------------------------------------------

    def _send(self) -> None:
        """Begin the next call, unless a stream, which reads everything once, would be faster."""
        reread = max(0, self.place.position - self.place.restart)
        if reread > REREAD_BYTES:
            raise BulkRefused(
                f"a transaction has been open for {reread >> 20} MiB of log, and each call reads them again"
            )
        self._left = max(0, self.place.log_end - self.place.position)
        upto = self.place.position + stretch_bytes(self._usual, reread, self.place.log_end - self.place.position)
        self._usual = min(2 * self._usual, STRETCH_BYTES)
        messages = int(RESULT_BYTES / self._message_bytes)
        self._call = call(
            self._session,
            "COPY (SELECT data FROM pg_logical_slot_get_binary_changes("
            f"{literal(self._copy)}, '{format_lsn(upto)}', {messages}, {self._options})) TO STDOUT (FORMAT binary)",
        )

    def _read(self, held: deque[Run]) -> Iterator[Block]:
        """Take in the result of the call: what is too much to be held is worked on at once."""
        size = messages = 0
        for run in self._call.runs() if self._call is not None else ():
            if run is None:
                yield Block(left=self._left)
                continue
            if not messages:
                self._descriptions.begin_call()
            held.append(run)
            size, messages = size + run.size, messages + run.messages
            while not run.last and sum(one.size for one in held) > HELD_BYTES:
                yield from self._feed(held.popleft(), self._left)
        if messages:
            self._message_bytes = max(size / messages, 16.0)
        yield from turns(self._locate())

    def _feed_held(self, held: deque[Run], stretch: int) -> Iterator[Block]:
        """Work on what has come of a stretch of so many bytes of log. Of it, too, something is left until the end."""
        size = rest = sum(run.size for run in held)
        while held:
            rest -= held[0].size
            yield from self._feed(held.popleft(), self._left + stretch * rest // max(1, size))

    def _feed(self, run: Run, left: int) -> Iterator[Block]:
        for block in self._assembler.feed(run.frames(self.place.clock)):
            yield replace(block, behind=True, left=left)

    # -- the copy ----------------------------------------------------------------------------

    def _locate(self) -> Turns:
        self.place = _place((yield from self._session.run(self._where())))

    def _where(self) -> str:
        return (
            "SELECT (confirmed_flush_lsn - '0/0')::int8, (restart_lsn - '0/0')::int8, "
            "(pg_current_wal_flush_lsn() - '0/0')::int8, "
            f"(SELECT (restart_lsn - '0/0')::int8 FROM pg_replication_slots WHERE slot_name = {literal(self._slot)}), "
            "(extract(epoch FROM clock_timestamp() - timestamptz '2000-01-01 00:00:00+00') * 1000000)::int8 "
            f"FROM pg_replication_slots WHERE slot_name = {literal(self._copy)}"
        )


def stretch_bytes(usual: int, reread: int, left: int) -> int:
    """How much of the log the next call decodes, which reads `reread` bytes of it again and finds `left` new ones.

    The rows of the last stretch are worked on while the server has nothing to do. So what is left is not taken at
    once but half of it, and half of the rest, unless much more would be read again for it than there is to decode.
    """
    stretch = min(max(usual, reread), LONGEST_BYTES)
    return min(stretch, max(SHORTEST_BYTES, left // 2)) if reread <= 3 * left else stretch


def _place(rows: list[tuple[str | None, ...]]) -> Place:
    if len(rows) != 1:
        raise SourceUnavailable("the temporary copy of the slot is gone")
    return Place(*(int(value or 0) for value in rows[0]))
