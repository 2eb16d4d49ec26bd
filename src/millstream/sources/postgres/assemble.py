"""From framed messages to blocks of whole transactions, in commit order.

The server sends a transaction when it has committed, from Begin to Commit with nothing between,
so at most one is open at a time, here as on the wire. Its rows are held back until Commit tells
the end position: in memory up to a budget, beyond it in the spool.

A logical message outside a transaction is a transaction of its own. Its position on the wire is
the end of its log record, which is also where the next record starts: a commit record may follow
at once. So the end is its `resume_position` (the server sends a message again only to those who
start before its record), and the byte before the end, at which no record ever starts, is its
`commit_position`: unique, and in order between the commits around it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute  # `take` would import it, half a second late

from millstream.model import Op, Relation
from millstream.sources.base import CAPTURED, Block
from millstream.sources.postgres import pgoutput as wire
from millstream.sources.postgres.pgoutput import Frames, Ints, ProtocolError
from millstream.sources.postgres.spool import Spool

BUDGET = 16 << 20
"""Bytes of an uncommitted transaction that are kept in memory."""

_ROW, _MARK, _QUIET = 1, 2, 3
_CLASS = np.zeros(256, dtype=np.uint8)
_CLASS[[wire.INSERT, wire.UPDATE, wire.DELETE, wire.TRUNCATE, wire.MESSAGE]] = _ROW
_CLASS[[wire.BEGIN, wire.COMMIT]] = _MARK
_CLASS[[wire.RELATION, wire.TYPE, wire.ORIGIN, wire.KEEPALIVE]] = _QUIET

ROWS = _CLASS == _ROW
"""By tag whether a message is of rows, and"""
OPS = np.zeros(256, dtype=np.uint8)
OPS[wire.INSERT] = Op.CREATE
OPS[wire.UPDATE] = Op.UPDATE
OPS[wire.DELETE] = Op.DELETE
OPS[wire.TRUNCATE] = Op.TRUNCATE
OPS[wire.MESSAGE] = Op.MESSAGE
"""by tag the operation of its rows."""

_NUMPY: dict[str, type[np.generic]] = {"tx_index": np.int32, "op": np.uint8, "relation": np.int32}
_RESUME = CAPTURED.get_field_index("resume_position")


Hear = Callable[[bytes, int, int], None]
"""Is given a message of the event trigger, and its transaction's commit position and time in Unix microseconds."""


@dataclass(frozen=True)
class _Open:
    """A transaction whose Commit has not arrived."""

    commit_position: int
    commit_ts: int
    txid: int
    rows: int


@dataclass(frozen=True)
class _Transactions:
    """The transactions that a run of messages touches, the open one of the run before included."""

    first_message: Ints
    last_message: Ints
    """Shorter by one than the others when the last transaction is still open."""
    commit_position: Ints
    commit_ts: Ints
    txid: Ints
    resume_position: Ints
    """As long as `last_message`."""


class Assembler:
    """Takes frames in the order they arrived, gives blocks. One per session of the server, or `restart`."""

    def __init__(
        self,
        start: int,
        register: Callable[[Relation], int],
        spool: Spool,
        *,
        budget: int = BUDGET,
        hear: Hear | None = None,
    ) -> None:
        """Transactions that end at or before `start` are dropped. `register` gives a relation's id.

        `hear` is given the messages that tell of tables, in their place; they are no rows.
        """
        self.received = start
        """Everything that ends at or before this position has come out of `feed`."""
        self.keepalives: list[wire.Keepalive] = []
        """The keepalives of the last run, for the caller to answer."""
        self._start = start
        self._register = register
        self._spool = spool
        self._budget = budget
        self._hear = hear or (lambda _message, _position, _at: None)
        self._open: _Open | None = None
        self._parts: list[pa.RecordBatch] = []
        self._held_bytes = 0
        self._oids = np.zeros(1, dtype=np.int64)
        self._ids = np.zeros(1, dtype=np.int32)
        self._promised: dict[int, Relation] = {}

    @property
    def reached(self) -> int:
        """How far into its log the server has come, as far as it has told: `received`, or beyond it."""
        return self.received

    @property
    def spooling(self) -> bool:
        """Whether a transaction has begun that is too large for memory, and has not ended."""
        return self._spool.batches > 0

    @property
    def in_transaction(self) -> bool:
        """Whether a transaction has begun, and its Commit has not come."""
        return self._open is not None

    def feed(self, frames: Frames) -> Iterator[Block]:
        """The blocks that this run of messages completes. Must be exhausted before the next call.

        The last block carries the progress that the run allows. Raises ProtocolError for messages
        that pgoutput version 1 does not send, and JournalFull when there is no room to spool.
        """
        kind = _CLASS[frames.tag]
        if not kind.all():
            raise ProtocolError(f"the server sent a message of an unknown kind {chr(frames.tag[kind == 0][0])!r}")
        alone, heartbeat = _messages_outside(frames)
        transactions = self._transactions(frames, alone)
        ddl = messages_of_ddl(frames)
        row_message, oid = row_messages(frames, (kind == _ROW) & ~heartbeat & ~ddl)
        relation = self._map_relations(frames, row_message, oid, transactions, ddl)
        rows, of = self._build(frames, transactions, row_message, relation)
        yield from self._emit(frames, transactions, rows, of)

    def cover(self, position: int) -> Block:
        """The source has nothing more that ends at or before `position`; the block that says so."""
        if self._open is not None:
            raise ProtocolError("the server ended in the middle of a transaction")
        before, self.received = self.received, max(self.received, position)
        return Block(progress=self.received if self.received > before else None)

    def restart(self) -> None:
        """Another session sends the log from `received` on, or from before it: what has come out is dropped."""
        self.discard()
        self._start = self.received

    def discard(self) -> None:
        """Forget what was not finished: the connection is gone."""
        self._let_go()

    def _let_go(self) -> None:
        """Forget the rows of the transaction that has begun."""
        self._open = None
        self._parts.clear()
        self._held_bytes = 0
        self._spool.clear()

    # -- transactions ------------------------------------------------------------------------

    def _transactions(self, frames: Frames, alone: npt.NDArray[np.bool_]) -> _Transactions:
        begins = np.flatnonzero((frames.tag == wire.BEGIN) | alone)
        ends = np.flatnonzero((frames.tag == wire.COMMIT) | alone)
        single, at = alone[begins], frames.at[begins]
        # Begin: tag, commit position, commit time, xid. Message: tag, flags, end position, ...
        position = np.where(single, frames.int64(at + 2) - 1, frames.int64(at + 1))
        ts = np.where(single, frames.sent_at(begins), frames.int64(at + np.where(single, 1, 9)))
        txid = np.where(single, 0, frames.uint32(at + np.where(single, 1, 17)))
        # Commit: tag, flags, commit position, end position, commit time.
        resume = frames.int64(frames.at[ends] + np.where(alone[ends], 2, 10))
        if self._open is not None:
            begins = np.concatenate(([-1], begins))
            position = np.concatenate(([self._open.commit_position], position))
            ts = np.concatenate(([self._open.commit_ts - wire.UNIX_OF_2000_US], ts))
            txid = np.concatenate(([self._open.txid], txid))
        found = _Transactions(begins, ends, position, ts + wire.UNIX_OF_2000_US, txid, resume)
        _check_order(found)
        committed = frames.int64(frames.at[ends] + 2) - alone[ends]
        if not np.array_equal(committed, position[: len(ends)]):
            raise ProtocolError("a Commit does not belong to the Begin before it")
        return found

    # -- rows --------------------------------------------------------------------------------

    def _map_relations(
        self, frames: Frames, row_message: Ints, oid: Ints, found: _Transactions, ddl: npt.NDArray[np.bool_]
    ) -> npt.NDArray[np.int32]:
        """The registered id of each row's relation, as described by the messages before that row."""
        relation = np.zeros(len(oid), dtype=np.int32)
        done = 0
        for described in np.flatnonzero((frames.tag == wire.RELATION) | ddl).tolist():
            if ddl[described]:
                inside = int(np.searchsorted(found.first_message, described, side="right")) - 1
                self._hear(frames.payload(described), int(found.commit_position[inside]), int(found.commit_ts[inside]))
                continue
            upto = int(np.searchsorted(row_message, described))
            relation[done:upto] = self._lookup(oid[done:upto])
            done = upto
            self._describe(wire.parse_relation(frames.payload(described)))
        relation[done:] = self._lookup(oid[done:])
        return relation

    def _lookup(self, oid: Ints) -> npt.NDArray[np.int32]:
        if self._promised:
            for each in np.unique(oid).tolist():
                if each in self._promised:
                    self._describe(self._promised[each])
        at = np.minimum(np.searchsorted(self._oids, oid), len(self._oids) - 1)
        if not np.array_equal(self._oids[at], oid):
            raise ProtocolError("the server sent a change of a table that it had not described")
        return self._ids[at]

    def _describe(self, relation: Relation) -> int:
        """From now on the table is like this. Returns its registered id."""
        self._promised.pop(relation.oid, None)
        known = dict(zip(self._oids.tolist(), self._ids.tolist(), strict=True))
        known[relation.oid] = number = self._register(relation)
        self._oids = np.array(sorted(known), dtype=np.int64)
        self._ids = np.array([known[oid] for oid in self._oids.tolist()], dtype=np.int32)
        return number

    def _promise(self, relation: Relation) -> None:
        """From now on the table is like this; it is registered when a row of it comes."""
        self._promised[relation.oid] = relation

    def _build(
        self, frames: Frames, found: _Transactions, row_message: Ints, relation: npt.NDArray[np.int32]
    ) -> tuple[pa.RecordBatch, Ints]:
        """All rows of the run, and for each the transaction it belongs to (an index into `found`)."""
        of = np.searchsorted(found.first_message, row_message, side="right") - 1
        closed = len(found.last_message)
        last = np.append(found.last_message, len(frames))
        if len(of) and (of[0] < 0 or np.any(row_message > last[np.minimum(of, closed)])):
            raise ProtocolError("the server sent a change outside a transaction")
        index = np.arange(len(of)) - np.searchsorted(of, np.arange(len(found.first_message)))[of]
        if self._open is not None:
            index[of == 0] += self._open.rows
        if len(index) and index.max() > np.iinfo(np.int32).max:
            raise ProtocolError("a transaction has more changes than can be numbered")
        # Until its Commit arrives the end of the last transaction is unknown, and 0 stands for it.
        resume = np.append(found.resume_position, 0)[np.minimum(of, closed)]
        values = {
            "tx_index": index,
            "op": OPS[frames.tag[row_message]],
            "commit_position": found.commit_position[of],
            "resume_position": resume,
            "commit_ts": found.commit_ts[of],
            "txid": found.txid[of],
            "relation": relation,
        }
        columns = [column(name, held) for name, held in values.items()]
        columns.append(payloads(frames, row_message))
        return pa.RecordBatch.from_arrays(columns, schema=CAPTURED), of

    # -- blocks ------------------------------------------------------------------------------

    def _emit(self, frames: Frames, found: _Transactions, rows: pa.RecordBatch, of: Ints) -> Iterator[Block]:
        closed = len(found.last_message)
        whole = int(np.searchsorted(of, closed))
        wanted = found.resume_position > self._start
        last = rows.slice(0, whole)
        if not wanted.all():
            last = last.take(integers(np.flatnonzero(wanted[of[:whole]])))
        if self._open is not None and closed:
            if wanted[0]:
                yield from self._release(int(found.resume_position[0]), goes_on=bool(whole > 0 and of[0] == 0))
            self._let_go()
        progress = self._advance(frames, found)
        if last.num_rows and last.column(_RESUME)[-1].as_py() == progress:
            progress = None
        yield Block(last if last.num_rows else None, progress=progress)
        self._hold(found, rows.slice(whole))

    def _release(self, resume: int, *, goes_on: bool) -> Iterator[Block]:
        """The held rows of the open transaction, now that its end is known."""
        left = self._spool.batches + len(self._parts)
        for part in chain(self._spool.drain(), self._parts):
            left -= 1
            end = column("resume_position", np.full(part.num_rows, resume))
            yield Block(part.set_column(_RESUME, CAPTURED.field(_RESUME), end), goes_on or left > 0)

    def _advance(self, frames: Frames, found: _Transactions) -> int | None:
        """The position that this run covers, if it is beyond what was covered before."""
        before = self.received
        self.received = max(self.received, *found.resume_position[-1:].tolist(), 0)
        self.keepalives = []
        for index in np.flatnonzero(frames.tag == wire.KEEPALIVE).tolist():
            keepalive = wire.parse_keepalive(frames.payload(index))
            self.keepalives.append(keepalive)
            if np.searchsorted(found.first_message, index) == np.searchsorted(found.last_message, index):
                self.received = max(self.received, keepalive.wal_end)
        return self.received if self.received > before else None

    def _hold(self, found: _Transactions, tail: pa.RecordBatch) -> None:
        """Keep the rows of a transaction whose Commit has not arrived."""
        if len(found.first_message) == len(found.last_message):
            self._open = None
            return
        rows = tail.num_rows + (self._open.rows if self._open is not None else 0)
        self._open = _Open(int(found.commit_position[-1]), int(found.commit_ts[-1]), int(found.txid[-1]), rows)
        if tail.num_rows:
            self._parts.append(tail)
            self._held_bytes += tail.nbytes
        if self._held_bytes > self._budget:
            for part in self._parts:
                self._spool.write(part)
            self._parts.clear()
            self._held_bytes = 0


def _messages_outside(frames: Frames) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Which messages are logical messages outside a transaction, and which of these are heartbeats."""
    alone = frames.tag == wire.MESSAGE
    heartbeat = np.zeros(len(frames), dtype=np.bool_)
    if alone.any():
        at = np.flatnonzero(alone)
        alone[at] = frames.octets[frames.at[at] + 1] & 1 == 0
        for index in np.flatnonzero(alone).tolist():
            heartbeat[index] = frames.is_heartbeat(index)
    return alone, heartbeat


def messages_of_ddl(frames: Frames) -> npt.NDArray[np.bool_]:
    """Which messages the event trigger has written."""
    found: npt.NDArray[np.bool_] = frames.tag == wire.MESSAGE
    for index in np.flatnonzero(found).tolist():
        found[index] = frames.is_ddl(index)
    return found


def _check_order(found: _Transactions) -> None:
    begins, ends = found.first_message, found.last_message
    if (
        len(begins) - len(ends) not in (0, 1)
        or np.any(ends < begins[: len(ends)])
        or np.any(begins[1:] <= ends[: len(begins) - 1])
        or np.any(np.diff(found.resume_position) <= 0)
        or np.any(found.resume_position <= found.commit_position[: len(ends)])
    ):
        raise ProtocolError("the server sent Begin and Commit out of order")


def row_messages(frames: Frames, is_row: npt.NDArray[np.bool_]) -> tuple[Ints, Ints]:
    """For each row the message it comes from and the OID of its table (0 for a logical message).

    A truncate of several tables gives a row for each of them.
    """
    messages = np.flatnonzero(is_row)
    tag = frames.tag[messages]
    oid = np.where(tag == wire.MESSAGE, 0, frames.uint32(frames.at[messages] + 1))
    truncates = np.flatnonzero(tag == wire.TRUNCATE)
    if not len(truncates):
        return messages, oid
    emptied = [wire.parse_truncate(frames.payload(at)) for at in messages[truncates].tolist()]
    count = np.ones(len(messages), dtype=np.int64)
    count[truncates] = [len(oids) for oids in emptied]
    oid = np.repeat(oid, count)
    oid[np.repeat(tag == wire.TRUNCATE, count)] = list(chain.from_iterable(emptied))
    return np.repeat(messages, count), oid


def payloads(frames: Frames, row_message: Ints) -> pa.LargeBinaryArray:
    """The messages of the rows, gathered in C++ from an array that covers rows and gaps in turn."""
    if not len(row_message):
        return pa.nulls(0, pa.large_binary())
    fresh = np.append(True, np.diff(row_message) > 0)
    distinct = row_message[fresh]
    offsets = np.empty(2 * len(distinct), dtype=np.int64)
    offsets[0::2] = frames.at[distinct]
    offsets[1::2] = frames.end[distinct]
    turns = pa.LargeBinaryArray.from_buffers(
        pa.large_binary(), len(offsets) - 1, [None, pa.py_buffer(offsets), pa.py_buffer(frames.raw)]
    )
    return turns.take(integers(2 * (np.cumsum(fresh) - 1)))


def column(name: str, values: npt.NDArray[Any]) -> pa.Array:
    """A column of CAPTURED over numpy's memory. (`pa.array` would do, but it imports pandas.)"""
    kind = CAPTURED.field(name).type
    held = np.ascontiguousarray(values, dtype=_NUMPY.get(name, np.int64))
    return pa.Array.from_buffers(kind, len(held), [None, pa.py_buffer(held)])


def integers(values: Ints) -> pa.Int64Array:
    return pa.Array.from_buffers(pa.int64(), len(values), [None, pa.py_buffer(values)])
