"""Reads the log in the way that suits its distance: a stream when close, bulk when far behind.

Far behind is measured from what has been read to the end of the source's log, never by what the
slot holds back: that is large whenever a target stands still. Bulk reading begins at
`catch_up_behind` and ends at a quarter of it.

While bulk reading goes on there is no replication connection: a stream that nobody reads would
hold up a shutdown of the server, and would not move the slot's restart position. Acknowledgements
go through a `SlotMover` meanwhile.

A stream first reads again what the slot holds back. After a catch-up that is everything that no target has yet,
and to read it would take the server from what is being delivered. So bulk reading goes on beside the log's end until
the slot has followed, but not for long: a target may be paused.

Whatever keeps the source from being read in bulk is told, and it is streamed instead; bulk reading
is tried again after a while.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Final

from psycopg.pq.abc import PGconn

from millstream.config.units import format_duration
from millstream.errors import SourceHalted, SourceUnavailable
from millstream.failpoint import failpoint
from millstream.model import Json
from millstream.observe import Event, Level
from millstream.sources.base import Block
from millstream.sources.postgres.assemble import Assembler
from millstream.sources.postgres.bulk import BulkReader, BulkRefused
from millstream.sources.postgres.capture import Replication, SlotBusy
from millstream.sources.postgres.descriptions import Descriptions
from millstream.sources.postgres.options import PostgresOptions
from millstream.sources.postgres.pgoutput import ProtocolError
from millstream.sources.postgres.session import Session
from millstream.sources.postgres.slot_mover import SlotMover
from millstream.sources.postgres.waiting import turns

LOOK_SECONDS: Final = 1.0
"""How often a stream looks how far behind it is."""
RETRY_SECONDS: Final = 60.0
"""How long bulk reading is left alone after it was refused; twice as long after each further refusal,"""
RETRY_SECONDS_MOST: Final = 3600.0
"""at most so long."""

HANDOVER_SECONDS: Final = 10.0
"""How long a stream waits for the slot while another session still has it."""

LINGER_SECONDS: Final = 30.0
"""How long bulk reading waits for the slot to follow before it gives way to a stream,"""
LINGER_BYTES: Final = 16 << 20
"""which reads so much again in a moment."""


class Reading:
    """Everything after a position, for ever. Owns the connections that it opens or is given. Not for threads."""

    def __init__(
        self,
        options: PostgresOptions,
        assembler: Assembler,
        descriptions: Descriptions,
        *,
        stream: PGconn,
        open_stream: Callable[[int], PGconn],
        open_session: Callable[[], Session],
        open_reader: Callable[[], Session],
        log_end: Callable[[], int],
        status_seconds: float,
        tell: Callable[[Event], None],
    ) -> None:
        """`stream` is a replication connection for which going on from the assembler's position was checked.

        `open_stream` gives another such one for a later position, `open_session` a plain session, `open_reader` one
        for reading in bulk, on a connection for replication if there is one, and `log_end` the end of the source's log.
        """
        self._options = options
        self._assembler = assembler
        self._descriptions = descriptions
        self._stream: PGconn | None = stream
        self._open_stream = open_stream
        self._open_session = open_session
        self._open_reader = open_reader
        self._log_end = log_end
        self._status_seconds = status_seconds
        self._tell = tell
        self._plugin = options.plugin_options(stream.server_version)
        self._plugin_streaming = options.stream_options(stream.server_version)
        self._replication: Replication | None = None
        self._bulk: BulkReader | None = None
        self._mover: SlotMover | None = None
        self._mode = "streaming"
        self._acked = self._sent = 0
        self._refused: str | None = None
        self._refusals = 0
        self._retry_at = float("-inf")
        self._looked_at = float("-inf")
        self._linger_until = float("-inf")
        self._near = False

    def blocks(self) -> Iterator[Block]:
        """Blocks for ever, at least every 100 ms, in one mode after the other."""
        far_behind = self._is_far_behind()
        try:
            while True:
                if far_behind:
                    yield from self._read_in_bulk()
                yield from self._read_stream()
                far_behind = True
        except ProtocolError as broken:
            raise SourceHalted(str(broken), hint="the server speaks another protocol than it agreed to") from broken

    def acknowledge(self, position: int) -> None:
        """Let the server forget what is at or before `position`."""
        self._acked = max(self._acked, position)
        if self._replication is not None:
            self._replication.acknowledge(self._acked)

    def status(self, log_end: int) -> Json:
        """The mode, how far behind it is, and why bulk reading is not used though it may be wanted."""
        return {
            "mode": self._mode,
            "behind_bytes": max(0, log_end - self._assembler.reached),
            "bulk_refused": self._refused,
        }

    def close(self) -> None:
        """Send the last acknowledgement if it can be sent, and let go of everything. Idempotent."""
        self._close_bulk()
        self._close_stream()

    # -- streaming ---------------------------------------------------------------------------

    def _read_stream(self) -> Iterator[Block]:
        """Stream until capture is far behind."""
        start = self._assembler.received
        stream = self._stream if self._stream is not None else self._open_stream(start)
        self._stream = stream
        self._replication = replication = Replication(stream, self._assembler, status_seconds=self._status_seconds)
        replication.acknowledge(self._acked)
        yield from self._start(replication, start)
        # The server first reads what the slot holds back. To judge it before that is over would make us go
        # from one way of reading to the other without ever getting on.
        yield from replication.blocks(lambda: self._assembler.received > start and self._is_far_behind())
        self._close_stream()

    def _start(self, replication: Replication, position: int) -> Iterator[Block]:
        """Begin to stream. The session that read the slot before is closed, but the server may not know it yet."""
        deadline = time.monotonic() + HANDOVER_SECONDS
        while True:
            try:
                replication.start(self._options.slot, position, self._plugin_streaming)
                return
            except SlotBusy as busy:
                if time.monotonic() >= deadline:
                    raise SourceUnavailable(str(busy), hint="another session reads the slot: end it") from None
            replication.rest()
            yield Block()

    def _is_far_behind(self) -> bool:
        now = time.monotonic()
        if self._options.catch_up == "streaming" or now < self._retry_at or now - self._looked_at < LOOK_SECONDS:
            return False
        self._looked_at = now
        return self._log_end() - self._assembler.reached >= self._options.catch_up_behind

    # -- bulk --------------------------------------------------------------------------------

    def _read_in_bulk(self) -> Iterator[Block]:
        """Read in bulk until capture is close; after a refusal, not for a while."""
        self._close_stream()
        self._mode = "bulk"
        self._near = False
        self._linger_until = time.monotonic() + LINGER_SECONDS
        slot, start = self._options.slot, self._assembler.received
        self._say("source.bulk_started", f"slot {slot} is read in bulk: far behind the end of the log", position=start)
        self._mover = mover = SlotMover(self._open_session, slot, self._sent)
        try:
            yield from self._bulk_blocks(mover)
            self._refused, self._refusals = None, 0
        except BulkRefused as refused:
            self._give_up(str(refused))
        if self._bulk is not None:
            self._bulk.close()
        yield from turns(mover.settle())
        self._close_bulk()
        self._mode = "streaming"
        self._say("source.bulk_ended", f"slot {slot} is streamed again", position=self._assembler.received)
        failpoint("bulk.switched_to_stream")

    def _bulk_blocks(self, mover: SlotMover) -> Iterator[Block]:
        self._bulk = bulk = BulkReader(
            self._open_reader,
            self._assembler,
            self._descriptions,
            self._options.slot,
            self._plugin,
            self._options.catch_up_sessions,
            self._say_alone,
        )
        for block in chain(turns(bulk.open()), bulk.blocks(self._is_close, self._lingers)):
            yield block
            mover.turn(self._acked, near=self._near and not block.left)
        if mover.refused is not None:
            raise BulkRefused(f"the slot cannot be moved meanwhile: {mover.refused}")

    def _is_close(self, behind: int) -> bool:
        """Whether bulk reading can end; it must when what is acknowledged would be held back by it."""
        self._near = behind <= self._options.catch_up_behind // 4
        close = self._is_stuck() or self._near
        if not close:
            self._linger_until = time.monotonic() + LINGER_SECONDS
        return close

    def _lingers(self) -> bool:
        """Whether a stream would read much again, and there is hope that it will be less."""
        if self._bulk is None or self._is_stuck() or time.monotonic() >= self._linger_until:
            return False
        return self._bulk.place.position - self._bulk.place.held_from > LINGER_BYTES

    def _is_stuck(self) -> bool:
        return self._mover is not None and self._mover.refused is not None

    def _give_up(self, reason: str) -> None:
        pause = min(RETRY_SECONDS * 2**self._refusals, RETRY_SECONDS_MOST)
        self._refused, self._refusals, self._retry_at = reason, self._refusals + 1, time.monotonic() + pause
        again = format_duration(round(pause) * 1000)
        self._say(
            "source.bulk_refused",
            f"the source cannot be read in bulk: {reason}; streaming instead, next attempt in {again}",
            Level.WARNING,
            reason=reason,
            retry_seconds=pause,
        )

    def _say_alone(self, reason: str) -> None:
        self._say(
            "source.bulk_alone",
            f"no further session can read beside the others: {reason}",
            Level.WARNING,
            reason=reason,
        )

    # -- ends --------------------------------------------------------------------------------

    def _close_stream(self) -> None:
        replication, self._replication = self._replication, None
        stream, self._stream = self._stream, None
        if replication is not None:
            replication.finish()
            self._sent = max(self._sent, replication.acknowledged)
        elif stream is not None:
            stream.finish()

    def _close_bulk(self) -> None:
        bulk, self._bulk = self._bulk, None
        mover, self._mover = self._mover, None
        if bulk is not None:
            bulk.close()
        if mover is not None:
            self._sent = max(self._sent, mover.moved)
            mover.close()

    def _say(self, kind: str, message: str, level: Level = Level.INFO, **fields: object) -> None:
        self._tell(Event(kind, message, level, fields=fields))
