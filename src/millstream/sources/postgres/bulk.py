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

One process of the server decodes for one session. So several sessions, each with a copy of its own, decode stretches
that follow each other, at the same time; they are handed on in the order of the log. Where a call gave less than its
stretch, those behind it are of no use, and their sessions are ended.

A stream, when it begins, reads everything again that the slot still holds back, however little of it
it sends. So who has caught up may go on here for a while: the copy holds nothing back.

When the end of a stretch has arrived, the session's next call is sent before its rows are worked on: server
and capture are busy at the same time, without threads.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from millstream.errors import SourceError
from millstream.failpoint import failpoint
from millstream.sources.base import Block
from millstream.sources.postgres.assemble import Assembler
from millstream.sources.postgres.call import Run
from millstream.sources.postgres.descriptions import Descriptions
from millstream.sources.postgres.session import Refused, Session, Turns
from millstream.sources.postgres.slot_copy import Place, SlotCopy, Stretch
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
"""So much of a result is taken in before any of it is worked on, if its session has another call to go to."""

BESIDE_BYTES = 16 << 20
"""Another session is opened for so much of the log that no call is at yet,"""
NEXT_BYTES = 8 << 20
"""and one that is open gets a stretch of it if it is so much."""

REST_SECONDS = 0.05
"""A source that had nothing new is asked so often whether its log has grown."""
LONGEST_REST_SECONDS = 1.0
"""So long it may rest although it has something new,"""
LONG_REREAD_BYTES = 64 << 20
"""namely if a call would read so much again, and for so little."""

_PAGE_BYTES = 8192
_MESSAGE_BYTES = 128
"""The size of a message before any was seen."""


class BulkRefused(Exception):
    """The source cannot be read in bulk now, for the reason given; it can be streamed."""


class BulkReader:
    """Reads through copies of a slot, each in a session of its own. Owns the sessions. Not for threads."""

    def __init__(
        self,
        open_session: Callable[[], Session],
        assembler: Assembler,
        descriptions: Descriptions,
        slot: str,
        options: Mapping[str, str],
        sessions: int = 1,
        alone: Callable[[str], None] = lambda reason: None,
    ) -> None:
        """`options` are those of the output plugin, as a stream has them.

        So many `sessions` read at the same time, at most; `alone` is told why it cannot be more than there are.
        """
        self._open_session = open_session
        self._assembler = assembler
        self._descriptions = descriptions
        self._slot = slot
        self._options = options
        self._wanted = sessions
        self._alone = alone
        self._message_bytes = float(_MESSAGE_BYTES)
        self._usual = FIRST_BYTES
        self._idle: list[SlotCopy] = []
        self._sent: deque[SlotCopy] = deque()
        """Those that are at a call, in the order of the log."""
        self._left = 0
        self.place = Place(0, 0, 0, 0, 0)
        """Where reading has come to: everything up to its position has been handed on, or is about to be."""

    def open(self) -> Turns:
        """Make the copy and bring it to where the assembler is. Raises BulkRefused."""
        try:
            copy = self._copy()
        except SourceError as error:
            raise BulkRefused(error.message) from None
        try:
            yield from copy.create(self._slot)
            yield from copy.advance(self._assembler.received)
            failpoint("bulk.copy_advanced")
        except Refused as refused:
            raise BulkRefused(str(refused)) from None
        self.place = copy.place

    def blocks(self, enough: Callable[[int], bool], lingers: Callable[[], bool]) -> Iterator[Block]:
        """Blocks until `enough` says so of the distance to the log's end; it is asked when a call has ended.

        And then as long as `lingers` says so. At least every 100 ms. Nothing is left half done when the last
        block has come. Raises BulkRefused when a stream would be better, and SourceUnavailable when the session ends.
        """
        try:
            yield from turns(self._send())
            goes_on = True
            while self._sent:
                if goes_on:
                    yield from turns(self._join())
                copy = self._sent.popleft()
                before = self.place.position
                held: deque[Run] = deque()
                yield from self._read(copy, held)
                failpoint("bulk.chunk_read")
                behind = self.place.log_end - self.place.position
                close = enough(behind)
                # Who is going to stay need not finish with these rows before he asks for the next ones.
                stays = close and behind >= SHORTEST_BYTES // 4 and lingers()
                goes_on = goes_on and before < self.place.position and (not close or stays)
                if goes_on:
                    yield from turns(self._send())
                self._note_left()
                yield from self._feed_held(held, self.place.position - before)
                yield replace(self._assembler.cover(self.place.position), left=self._left)
                # Another session goes on: whatever it may give once more has come out.
                self._assembler.restart()
                failpoint("bulk.chunk_appended")
                if close and not self._sent:
                    yield from self._rest(copy, lingers)
                    goes_on = lingers()
                    if goes_on:
                        yield from turns(self._send())
        except Refused as refused:
            raise BulkRefused(str(refused)) from None
        finally:
            self._assembler.restart()
            self._descriptions.end_calls()

    def _rest(self, copy: SlotCopy, lingers: Callable[[], bool]) -> Iterator[Block]:
        """Wait until there is something to read, and it is worth what would be read again for it."""
        began = time.monotonic()
        worth_it = False
        while lingers() and not worth_it:
            copy.session.await_input(REST_SECONDS)
            yield from turns(copy.locate())
            self.place = copy.place
            yield Block()
            worth_it = is_worth_a_call(self.place, time.monotonic() - began)

    def close(self) -> None:
        """End the sessions, and the copies with them. Idempotent."""
        for copy in (*self._sent, *self._idle):
            self._end(copy)

    # -- calls -------------------------------------------------------------------------------

    def _copy(self) -> SlotCopy:
        copy = SlotCopy(self._open_session(), self._slot, self._options)
        self._idle.append(copy)
        return copy

    def _send(self) -> Turns:
        """Give each session that is idle a stretch of its own, one at least; end those for which there is none."""
        for copy in sorted(self._idle, key=lambda copy: copy.place.position, reverse=True):
            if not self._sent or self._untouched() >= NEXT_BYTES:
                yield from self._begin(copy)
            else:
                self._end(copy)
        self._note_left()

    def _join(self) -> Turns:
        """Open further sessions while the others are at work, if there is work for them."""
        while len(self._sent) < self._wanted and self._untouched() >= BESIDE_BYTES:
            copy = None
            try:
                copy = self._copy()
                # It is where the other one was when its call began, or behind that.
                yield from copy.create(self._sent[-1].name)
            except (Refused, SourceError) as refused:
                self._wanted = len(self._sent)
                self._alone(str(refused))
                if copy is not None:
                    self._end(copy)
                return
            failpoint("bulk.session_joined")
            yield from self._begin(copy)

    def _begin(self, copy: SlotCopy) -> Turns:
        """Begin the next call, unless a stream, which reads everything once, would be faster."""
        reread = max(0, copy.place.position - copy.place.restart)
        if reread > REREAD_BYTES:
            raise BulkRefused(
                f"a transaction has been open for {reread >> 20} MiB of log, and each call reads them again"
            )
        begin = max(self._touched(), copy.place.position)
        if begin > copy.place.position:
            # To move the copy may read as much again as the call itself does, and the other one reads again, too.
            reread = 2 * (begin - copy.place.restart)
        end = _between_records(begin + stretch_bytes(self._usual, reread, self.place.log_end - begin))
        self._usual = min(2 * self._usual, STRETCH_BYTES)
        if begin <= self.place.log_end:
            # The server would believe whatever it is told, and leave out what is not written yet.
            yield from copy.skip(begin)
        copy.send(Stretch(begin, end), int(RESULT_BYTES / self._message_bytes))
        self._idle.remove(copy)
        self._sent.append(copy)

    def _touched(self) -> int:
        """How far calls reach that have been read or sent."""
        return self._sent[-1].stretch.end if self._sent else self.place.position

    def _untouched(self) -> int:
        """How much of the log is known that no call is at."""
        return self.place.log_end - self._touched()

    def _goes_again(self, copy: SlotCopy) -> bool:
        """Whether there will be a stretch to speak of for a session that comes to the end of its call."""
        return self.place.log_end - max(self._touched(), copy.stretch.end) >= NEXT_BYTES

    def _note_left(self) -> None:
        self._left = max(0, self.place.log_end - self.place.position) if self._sent else 0

    def _end(self, copy: SlotCopy) -> None:
        copy.close()
        (self._idle if copy in self._idle else self._sent).remove(copy)

    def _read(self, copy: SlotCopy, held: deque[Run]) -> Iterator[Block]:
        """Take in the result of the call: what is too much to be held is worked on at once."""
        self._idle.append(copy)
        most = HELD_BYTES if self._goes_again(copy) else 0
        size = messages = 0
        for run in copy.call.runs() if copy.call is not None else ():
            if run is None:
                yield Block(left=self._left)
                continue
            if not messages:
                self._descriptions.begin_call()
            held.append(run)
            size, messages = size + run.size, messages + run.messages
            while not run.last and sum(one.size for one in held) > most:
                yield from self._feed(held.popleft(), self._left)
        if messages:
            self._message_bytes = max(size / messages, 16.0)
        yield from turns(copy.locate())
        self.place = copy.place
        if self._sent and self._sent[0].stretch.begin > self.place.position:
            # The call has ended before its stretch did: what lies between is in none of the others.
            for late in tuple(self._sent):
                self._end(late)

    def _feed_held(self, held: deque[Run], stretch: int) -> Iterator[Block]:
        """Work on what has come of a stretch of so many bytes of log. Of it, too, something is left until the end."""
        size = rest = sum(run.size for run in held)
        while held:
            rest -= held[0].size
            yield from self._feed(held.popleft(), self._left + stretch * rest // max(1, size))

    def _feed(self, run: Run, left: int) -> Iterator[Block]:
        for block in self._assembler.feed(run.frames(self.place.clock)):
            yield replace(block, behind=True, left=left)


def stretch_bytes(usual: int, reread: int, left: int) -> int:
    """How much of the log the next call decodes, which reads `reread` bytes of it again and finds `left` new ones.

    The rows of the last stretch are worked on while the server has nothing to do. So what is left is not taken at
    once but a little more than half of it, and so of the rest, unless much more would be read again for it than there
    is to decode. The last stretch is the shorter one: its call begins later, and its rows are what is waited for.
    """
    stretch = min(max(usual, reread * 5 // 4), LONGEST_BYTES)
    return min(stretch, max(SHORTEST_BYTES, left * 4 // 7)) if reread <= 3 * left else stretch


def is_worth_a_call(place: Place, rested: float) -> bool:
    """Whether a source that has rested for so many seconds is asked for what is new in its log.

    It is if that takes as long to decode as what is read again for it takes to read (a tenth of the time). A little is
    asked for after a rest that is the longer the more is read again.
    """
    new, reread = place.log_end - place.position, max(0, place.position - place.restart)
    long_enough = LONGEST_REST_SECONDS * min(1.0, reread / LONG_REREAD_BYTES)
    return new > 0 and (10 * new >= reread or rested >= long_enough)


def _between_records(position: int) -> int:
    """A place near by that lies in a record of the log, or where one ends and the next begins.

    So the last record of one call and the first one of the next are never the same. Where a page begins, its head
    lies between two records: one call would take the second because the first ended before, the other because it
    begins behind.
    """
    return position // _PAGE_BYTES * _PAGE_BYTES + _PAGE_BYTES // 2
