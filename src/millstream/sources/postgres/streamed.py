"""Transactions that the server sends before they commit (pgoutput protocol 2 and newer), kept until they do.

A server whose `logical_decoding_work_mem` is full sends what it has of a transaction in blocks, from StreamStart to
StreamStop, instead of writing it to its own disk; blocks of several transactions, and whole transactions that
have committed meanwhile, come in turns. What becomes of such a transaction is told at its end: StreamCommit with the
positions and the time that Begin and Commit have otherwise, or StreamAbort. An abort can be that of a
subtransaction, whose changes then go: every message of a block says which (sub)transaction it is of.

Here a transaction's changes are kept, in memory up to a budget that all of them share, beyond it in a spool of its own,
and come out with StreamCommit as if they had come with it: the same rows, numbers and positions as of an unstreamed
transaction. Tables that are described within a block are known by that transaction alone until it commits, and
registered when a row of theirs comes out. Nothing of this matters after a crash: the server sends a transaction again,
from its beginning, to who has not acknowledged its end.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millstream.failpoint import failpoint
from millstream.model import Relation
from millstream.sources.base import CAPTURED, Block
from millstream.sources.postgres import pgoutput as wire
from millstream.sources.postgres.assemble import (
    BUDGET,
    OPS,
    ROWS,
    Assembler,
    Hear,
    column,
    integers,
    messages_of_ddl,
    payloads,
    row_messages,
)
from millstream.sources.postgres.pgoutput import Frames, Ints, ProtocolError
from millstream.sources.postgres.spool import Spool

_CUTS = np.zeros(256, dtype=np.bool_)
_CUTS[[wire.STREAM_START, wire.STREAM_STOP, wire.STREAM_COMMIT, wire.STREAM_ABORT]] = True
_WITH_XID = np.zeros(256, dtype=np.bool_)
_WITH_XID[[wire.INSERT, wire.UPDATE, wire.DELETE, wire.TRUNCATE, wire.MESSAGE, wire.RELATION, wire.TYPE]] = True
_KNOWN = _CUTS | _WITH_XID
_KNOWN[[wire.ORIGIN, wire.KEEPALIVE]] = True

KEPT = pa.schema(
    [
        pa.field("op", pa.uint8(), nullable=False),
        pa.field("relation", pa.int32(), nullable=False),
        pa.field("xid", pa.int64(), nullable=False),
        pa.field("payload", pa.large_binary(), nullable=False),
    ]
)
"""Changes of a transaction that is still open. `relation` counts its own descriptions of tables, from 1; 0: none.

What tells of an altered table is kept in its place, as TOLD: whether it counts shows with the commit as well.
"""
TOLD = -1

_MOST_ROWS = np.iinfo(np.int32).max


@dataclass
class _Open:
    """A transaction that has not ended: its changes, and the tables as it has described them."""

    xid: int
    spool: Spool
    parts: list[pa.RecordBatch] = field(default_factory=list)
    held_bytes: int = 0
    described: list[Relation] = field(default_factory=list)
    known: dict[int, int] = field(default_factory=dict)
    """By OID the number of its last description."""
    registered: dict[int, int] = field(default_factory=dict)
    """By number the ids of descriptions of which a row has come out."""
    aborted: list[int] = field(default_factory=list)
    """Subtransactions whose changes do not count."""

    def keep(self, rows: pa.RecordBatch) -> None:
        self.parts.append(rows)
        self.held_bytes += rows.nbytes

    def spill(self) -> None:
        """Write what is held in memory behind what is in the spool."""
        for part in pa.Table.from_batches(self.parts).combine_chunks().to_batches():
            self.spool.write(part)
        self.parts.clear()
        self.held_bytes = 0

    def drain(self) -> Iterator[pa.RecordBatch]:
        """Everything that was kept and was not aborted, in order."""
        gone = np.unique(np.array(self.aborted, dtype=np.int64))
        for source in (self.spool.drain(), self.parts):
            for part in source:
                xid = np.frombuffer(part.column("xid").buffers()[1], np.int64, len(part), part.column("xid").offset * 8)
                dead = np.isin(xid, gone) if len(gone) else np.zeros(len(part), dtype=np.bool_)
                living = part.take(integers(np.flatnonzero(~dead))) if dead.any() else part
                if len(living):
                    yield living

    def describe(self, relation: Relation) -> None:
        self.described.append(relation)
        self.known[relation.oid] = len(self.described)

    def lookup(self, oid: Ints) -> npt.NDArray[np.int32]:
        """The number of each table's description; a logical message has none."""
        numbers, inverse = np.unique(oid, return_inverse=True)
        found = [0 if each == 0 else self.known.get(each, -1) for each in numbers.tolist()]
        if -1 in found:
            raise ProtocolError("the server sent a change of a table that it had not described in this transaction")
        return np.array(found, dtype=np.int32)[inverse]


class StreamedAssembler(Assembler):
    """An `Assembler` for protocols in which transactions can come before they commit."""

    def __init__(
        self,
        start: int,
        register: Callable[[Relation], int],
        spool: Spool,
        *,
        budget: int = BUDGET,
        hear: Hear | None = None,
    ) -> None:
        super().__init__(start, register, spool, budget=budget, hear=hear)
        self._streams: dict[int, _Open] = {}
        self._current: _Open | None = None
        self._reached = start

    @property
    def reached(self) -> int:
        return max(self._reached, self.received)

    def feed(self, frames: Frames) -> Iterator[Block]:
        cuts = np.flatnonzero(_CUTS[frames.tag])
        if not len(cuts) and self._current is None:
            yield from super().feed(frames)
            return
        keepalives: list[wire.Keepalive] = []
        begin = 0
        for cut in [*cuts.tolist(), len(frames)]:
            if cut > begin:
                yield from self._between(frames.part(begin, cut), keepalives)
            if cut < len(frames):
                yield from self._turn(frames, cut)
            begin = cut + 1
        self.keepalives = keepalives
        # Nothing may have come to its end, and the caller wants to be heard of.
        yield Block()

    def discard(self) -> None:
        super().discard()
        for one in self._streams.values():
            one.spool.clear()
        self._streams.clear()
        self._current = None

    # -- blocks of a stream ------------------------------------------------------------------

    def _between(self, frames: Frames, keepalives: list[wire.Keepalive]) -> Iterator[Block]:
        """Messages without one that begins or ends anything of a stream."""
        if self._current is not None:
            self._keep(self._current, frames)
            self._bound()
            # What such a one covers is told by the next one outside.
            keepalives += [
                wire.parse_keepalive(frames.payload(at)) for at in np.flatnonzero(frames.tag == wire.KEEPALIVE).tolist()
            ]
            return
        yield from super().feed(frames)
        keepalives += self.keepalives

    def _turn(self, frames: Frames, at: int) -> Iterator[Block]:
        """One of the four messages between blocks and around them."""
        tag = int(frames.tag[at])
        if (tag == wire.STREAM_STOP) != (self._current is not None) or self.in_transaction:
            raise ProtocolError("the server sent parts of a streamed transaction out of order")
        if frames.clock is None:
            self._reached = max(self._reached, frames.position(at))
        if tag == wire.STREAM_STOP:
            self._current = None
            failpoint("streamed.kept")
        elif tag == wire.STREAM_START:
            xid, first = wire.parse_stream_start(frames.payload(at))
            if first == (xid in self._streams):
                raise ProtocolError("the server sent a streamed transaction from its middle, or twice")
            self._current = self._streams.setdefault(xid, _Open(xid, self._spool.another(KEPT)))
        elif tag == wire.STREAM_ABORT:
            self._abort(*wire.parse_stream_abort(frames.payload(at)))
        else:
            yield from self._commit(wire.parse_stream_commit(frames.payload(at)))

    def _keep(self, stream: _Open, frames: Frames) -> None:
        """The changes of a piece of a block, without the numbers of their subtransactions in front."""
        if not _KNOWN[frames.tag].all():
            unknown = chr(frames.tag[~_KNOWN[frames.tag]][0])
            raise ProtocolError(f"the server sent a message of an unknown kind {unknown!r}")
        plain, xid = frames.without_xid(_WITH_XID[frames.tag])
        messages, oid = row_messages(plain, ROWS[plain.tag])
        numbers = np.zeros(len(oid), dtype=np.int32)
        done = 0
        for described in np.flatnonzero(plain.tag == wire.RELATION).tolist():
            upto = int(np.searchsorted(messages, described))
            numbers[done:upto] = stream.lookup(oid[done:upto])
            done = upto
            stream.describe(wire.parse_relation(plain.payload(described)))
        numbers[done:] = stream.lookup(oid[done:])
        numbers[messages_of_ddl(plain)[messages]] = TOLD
        if len(messages):
            columns = [
                column("op", OPS[plain.tag[messages]]),
                column("relation", numbers),
                integers(xid[messages]),
                payloads(plain, messages),
            ]
            stream.keep(pa.RecordBatch.from_arrays(columns, schema=KEPT))

    def _bound(self) -> None:
        """Keep what is in memory of all transactions within the budget: the largest ones go to disk."""
        while sum(one.held_bytes for one in self._streams.values()) > self._budget:
            max(self._streams.values(), key=lambda one: one.held_bytes).spill()

    # -- ends of a stream --------------------------------------------------------------------

    def _abort(self, xid: int, subtransaction: int) -> None:
        stream = self._streams.get(xid)
        if stream is None:
            return
        if subtransaction != xid:
            stream.aborted.append(subtransaction)
            return
        stream.spool.clear()
        del self._streams[xid]

    def _commit(self, end: wire.StreamCommit) -> Iterator[Block]:
        stream = self._streams.pop(end.xid, None)
        if stream is None or end.resume_position <= end.commit_position:
            raise ProtocolError("the server committed a streamed transaction that it had not sent")
        last = None
        if end.resume_position > self._start:
            last = yield from self._released(stream, end)
        stream.spool.clear()
        self._remember(stream)
        before, self.received = self.received, max(self.received, end.resume_position)
        progress = self.received if last is None and self.received > before else None
        yield Block(last, progress=progress)

    def _released(self, stream: _Open, end: wire.StreamCommit) -> Generator[Block, None, pa.RecordBatch | None]:
        """The changes of a transaction that has committed, as those of an unstreamed one; the last are returned."""
        count, waiting = 0, None
        for part in stream.drain():
            rows = self._numbered(self._heard(part, stream, end), stream, end, count)
            if not len(rows):
                continue
            count += len(rows)
            if count > _MOST_ROWS:
                raise ProtocolError("a transaction has more changes than can be numbered")
            if waiting is not None:
                yield Block(waiting, open_transaction=True)
                failpoint("streamed.released")
            waiting = rows
        return waiting

    def _heard(self, part: pa.RecordBatch, stream: _Open, end: wire.StreamCommit) -> pa.RecordBatch:
        """The rows, their tables registered in the order in which they come, and what tells of these before them."""
        numbers = _descriptions(part)
        told = np.flatnonzero(numbers == TOLD)
        begin = 0
        for at in [*told.tolist(), len(part)]:
            used, first = np.unique(numbers[begin:at], return_index=True)
            for number in used[np.argsort(first)].tolist():
                if number > 0 and number not in stream.registered:
                    stream.registered[number] = self._describe(stream.described[number - 1])
            if at < len(part):
                when = end.commit_ts + wire.UNIX_OF_2000_US
                self._hear(part.column("payload")[at].as_py(), end.commit_position, when)
            begin = at + 1
        return part.take(integers(np.flatnonzero(numbers != TOLD))) if len(told) else part

    def _numbered(self, part: pa.RecordBatch, stream: _Open, end: wire.StreamCommit, count: int) -> pa.RecordBatch:
        ids = np.zeros(len(stream.described) + 1, dtype=np.int32)
        for number, registered in stream.registered.items():
            ids[number] = registered
        same = np.ones(len(part), dtype=np.int64)
        columns = [
            column("tx_index", np.arange(count, count + len(part))),
            part.column("op"),
            column("commit_position", same * end.commit_position),
            column("resume_position", same * end.resume_position),
            column("commit_ts", same * (end.commit_ts + wire.UNIX_OF_2000_US)),
            column("txid", same * end.xid),
            column("relation", ids[_descriptions(part)]),
            part.column("payload"),
        ]
        return pa.RecordBatch.from_arrays(columns, schema=CAPTURED)

    def _remember(self, stream: _Open) -> None:
        """From now on the server takes it that these tables are known."""
        for number in stream.known.values():
            if number not in stream.registered:
                self._promise(stream.described[number - 1])


def _descriptions(part: pa.RecordBatch) -> npt.NDArray[np.int32]:
    held = part.column("relation")
    return np.frombuffer(held.buffers()[1], np.int32, len(held), held.offset * 4)
