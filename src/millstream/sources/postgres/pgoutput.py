"""The messages of Postgres' output plugin `pgoutput` (protocol versions 1 to 4), framed by array.

A replication connection hands over CopyData messages one by one: `w` carries one pgoutput message
behind a header of 25 bytes (position, end of log, clock), `k` is a keepalive. A binary COPY of the
same messages, which is how they are read in bulk, has one message per row. Nothing is done per
message in Python: a run of them is joined once, and the fields that frame it are gathered from
the joined bytes with numpy. Only the rare kinds (relation, truncate, keepalive) are parsed here
one at a time. Values of rows are never looked at.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millstream.model import Column, Relation

Ints = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]

HEADER: Final = 25
"""Bytes in front of a pgoutput message: `w`, position, end of log, clock."""

BEGIN: Final = ord("B")
COMMIT: Final = ord("C")
ORIGIN: Final = ord("O")
RELATION: Final = ord("R")
TYPE: Final = ord("Y")
INSERT: Final = ord("I")
UPDATE: Final = ord("U")
DELETE: Final = ord("D")
TRUNCATE: Final = ord("T")
MESSAGE: Final = ord("M")
STREAM_START: Final = ord("S")
STREAM_STOP: Final = ord("E")
STREAM_COMMIT: Final = ord("c")
STREAM_ABORT: Final = ord("A")
KEEPALIVE: Final = ord("k")
DATA: Final = ord("w")

HEARTBEAT_PREFIX: Final = "millstream.heartbeat"
"""Prefix of the logical messages that Millstream itself writes, to move the log of an idle source."""

DDL_PREFIX: Final = "millstream.ddl."
"""Prefix of those that the event trigger writes (`ddl_trigger`); a slot's name follows."""

UNIX_OF_2000_US: Final = 946_684_800_000_000
"""Postgres counts microseconds from 2000-01-01; this is that day in Unix microseconds."""

_KEEPALIVE = struct.Struct(">cqqB")
_STATUS = struct.Struct(">cqqqqB")
_RELATION_TAIL = struct.Struct(">ch")
_COLUMN_TAIL = struct.Struct(">Ii")
_TRUNCATE = struct.Struct(">cIB")
_STREAM_START = struct.Struct(">cIB")
_STREAM_COMMIT = struct.Struct(">cIBqqq")
_STREAM_ABORT = struct.Struct(">cII")
_XID_BYTES = 4
_HEARTBEAT = HEARTBEAT_PREFIX.encode() + b"\0"
_DDL = DDL_PREFIX.encode()
_MESSAGE_PREFIX_AT = 10  # tag, flags, lsn


_COPY_SIGNATURE: Final = b"PGCOPY\n\xff\r\n\0"
_COPY_END: Final = b"\xff\xff"
_ROW_HEADER: Final = 6  # count of fields, length of the first


class ProtocolError(Exception):
    """Bytes that are no message of pgoutput, or in an order it never sends."""


@dataclass(frozen=True)
class Frames:
    """A run of messages in one buffer. `at` is where each pgoutput message starts, `end` where it ends."""

    raw: bytes | memoryview
    at: Ints
    end: Ints
    tag: Bytes
    """The pgoutput tag, or KEEPALIVE (no pgoutput message uses that letter)."""
    clock: int | None = None
    """The server's clock for all messages, where they carry none of their own."""

    def __len__(self) -> int:
        return len(self.at)

    @cached_property
    def octets(self) -> Bytes:
        """Every byte of the buffer."""
        return np.frombuffer(self.raw, dtype=np.uint8)

    @cached_property
    def _int64(self) -> npt.NDArray[np.int64]:
        # Overlapping views, one element per byte offset: indexing them gathers fields at any offset.
        return np.ndarray((max(len(self.raw) - 7, 0),), ">i8", self.raw, strides=(1,))

    @cached_property
    def _uint32(self) -> npt.NDArray[np.uint32]:
        return np.ndarray((max(len(self.raw) - 3, 0),), ">u4", self.raw, strides=(1,))

    def int64(self, offsets: Ints) -> Ints:
        """The big-endian 64-bit integers at these byte offsets."""
        return self._int64[offsets].astype(np.int64)

    def uint32(self, offsets: Ints) -> Ints:
        """The big-endian unsigned 32-bit integers at these byte offsets."""
        return self._uint32[offsets].astype(np.int64)

    def payload(self, index: int) -> bytes:
        """One message, from its tag to its end."""
        return bytes(self.raw[self.at[index] : self.end[index]])

    def part(self, begin: int, end: int) -> Frames:
        """Some of the messages, over the same buffer."""
        return Frames(self.raw, self.at[begin:end], self.end[begin:end], self.tag[begin:end], self.clock)

    def position(self, index: int) -> int:
        """The place in the log that a message of a stream carries in front of it."""
        return int(self.int64(self.at[index : index + 1] - HEADER + 1)[0])

    def without_xid(self, which: npt.NDArray[np.bool_]) -> tuple[Frames, Ints]:
        """The messages as they are outside of a streamed transaction, and the subtransaction of each of `which`.

        These have a number behind their tag: the tag moves up to its last byte.
        """
        if np.any((self.end - self.at)[which] <= _XID_BYTES):
            raise ProtocolError("the server sent a message of a streamed transaction that is too short")
        xid = np.zeros(len(self), dtype=np.int64)
        xid[which] = self.uint32(self.at[which] + 1)
        # Only their own bytes: blocks may be short, and many in a run.
        begin, end = int(self.at[0]), int(self.end[-1])
        octets, at = self.octets[begin:end].copy(), self.at - begin
        octets[at[which] + _XID_BYTES] = octets[at[which]]
        at = np.where(which, at + _XID_BYTES, at)
        return Frames(octets.tobytes(), at, self.end - begin, self.tag, self.clock), xid

    def sent_at(self, indexes: Ints) -> Ints:
        """When the server sent these messages, in its own microseconds."""
        if self.clock is not None:
            return np.full(len(indexes), self.clock, dtype=np.int64)
        return self.int64(self.at[indexes] - 8)

    def is_heartbeat(self, index: int) -> bool:
        """Whether a logical message is one of Millstream's own."""
        return self._has_prefix(index, _HEARTBEAT)

    def is_ddl(self, index: int) -> bool:
        """Whether a logical message describes a table that was altered."""
        return self._has_prefix(index, _DDL)

    def _has_prefix(self, index: int, prefix: bytes) -> bool:
        at = int(self.at[index]) + _MESSAGE_PREFIX_AT
        return self.raw[at : at + len(prefix)] == prefix


def frame(messages: Sequence[bytes | memoryview], sizes: Sequence[int]) -> Frames:
    """Join CopyData messages and find what each of them is. Raises ProtocolError for an unknown kind."""
    raw = b"".join(messages)
    end = np.cumsum(np.array(sizes, dtype=np.int64))
    start = end - np.array(sizes, dtype=np.int64)
    octets = np.frombuffer(raw, dtype=np.uint8)
    kind = octets[start]
    data = kind == DATA
    if not np.all(data | (kind == KEEPALIVE)):
        raise ProtocolError("the server sent a replication message of an unknown kind")
    if np.any(data & (end - start <= HEADER)):
        raise ProtocolError("the server sent a replication message that is too short")
    at = np.where(data, start + HEADER, start)
    return Frames(raw, at, end, octets[at])


def frame_rows(raw: bytes, sizes: Ints, first: bool, clock: int) -> Frames:
    """What `frame` does, for rows of a binary COPY of one column, which are the pgoutput messages.

    The server sends each row in a CopyData message of its own, `sizes` long; the header of the copy
    stands in front of its `first` row, and its end mark is a message too. Raises ProtocolError for
    bytes that are no such copy.
    """
    end = np.cumsum(sizes)
    start = end - sizes
    if first and len(start):
        start[0] += copy_header(raw)
    whole = end - start > _ROW_HEADER
    if not all(raw[at:to] in (b"", _COPY_END) for at, to in zip(start[~whole], end[~whole], strict=True)):
        raise ProtocolError("the server sent a row that is too short")
    return _frame(raw, start[whole], end[whole], clock)


def frame_copied(rows: pa.LargeBinaryArray, head: int, clock: int) -> Frames:
    """The same for rows as `CopySocket` hands them on: one after the other, each behind a head of so many bytes."""
    _, bounds, data = rows.buffers()
    edge = np.frombuffer(bounds, np.int64)[rows.offset : rows.offset + len(rows) + 1]
    return _frame(memoryview(data).cast("B"), edge[:-1] + head, edge[1:], clock)


def _frame(raw: bytes | memoryview, start: Ints, end: Ints, clock: int) -> Frames:
    """The messages of rows that are one column of bytes, which is checked."""
    frames = Frames(raw, start + _ROW_HEADER, end, np.zeros(0, dtype=np.uint8), clock)
    if np.any(end < frames.at + 1):
        raise ProtocolError("the server sent a row that is too short")
    fields, length = frames.uint32(start) >> 16, frames.uint32(start + 2)
    if np.any(fields != 1) or np.any(length != end - frames.at):
        raise ProtocolError("the server sent a row that is not one column of bytes")
    return Frames(raw, frames.at, end, frames.octets[frames.at], clock)


def copy_header(raw: bytes) -> int:
    """How long the header is with which a binary COPY begins."""
    if not raw.startswith(_COPY_SIGNATURE):
        raise ProtocolError("the server sent no binary copy")
    (extension,) = struct.unpack_from(">I", raw, len(_COPY_SIGNATURE) + 4)
    return len(_COPY_SIGNATURE) + 8 + int(extension)


@dataclass(frozen=True)
class Keepalive:
    """The server is alive and has sent everything up to `wal_end`; it may want an answer now."""

    wal_end: int
    reply: bool


def parse_keepalive(payload: bytes) -> Keepalive:
    """A keepalive message, whole."""
    try:
        _, wal_end, _, reply = _KEEPALIVE.unpack(payload)
    except struct.error:
        raise ProtocolError("the server sent a keepalive of the wrong length") from None
    return Keepalive(wal_end, bool(reply))


@dataclass(frozen=True)
class StreamCommit:
    """The end of a streamed transaction: what Begin and Commit say of an unstreamed one. The time is Postgres' own."""

    xid: int
    commit_position: int
    resume_position: int
    commit_ts: int


def parse_stream_start(payload: bytes) -> tuple[int, bool]:
    """Which transaction a block is of, and whether it is its first."""
    try:
        _, xid, first = _STREAM_START.unpack(payload)
    except struct.error:
        raise ProtocolError("the server sent a stream start of the wrong length") from None
    return xid, bool(first)


def parse_stream_commit(payload: bytes) -> StreamCommit:
    """The commit of a streamed transaction."""
    try:
        _, xid, _, commit, end, ts = _STREAM_COMMIT.unpack(payload)
    except struct.error:
        raise ProtocolError("the server sent a stream commit of the wrong length") from None
    return StreamCommit(xid, commit, end, ts)


def parse_stream_abort(payload: bytes) -> tuple[int, int]:
    """The transaction and its subtransaction that was aborted; both are the same where it was all of it.

    Protocol 4 adds where and when; nobody needs it who keeps changes until they are committed.
    """
    try:
        _, xid, subtransaction = _STREAM_ABORT.unpack_from(payload)
    except struct.error:
        raise ProtocolError("the server sent a stream abort of the wrong length") from None
    return xid, subtransaction


def status_update(*, written: int, flushed: int, unix_us: int) -> bytes:
    """A standby status update: received up to `written`, need not be sent again up to `flushed`."""
    return _STATUS.pack(b"r", written, flushed, flushed, unix_us - UNIX_OF_2000_US, 0)


def parse_truncate(payload: bytes) -> tuple[int, ...]:
    """The OIDs of the relations that one TRUNCATE emptied."""
    try:
        _, count, _ = _TRUNCATE.unpack_from(payload)
        return struct.unpack_from(f">{count}I", payload, _TRUNCATE.size)
    except struct.error:
        raise ProtocolError("the server sent a truncate message of the wrong length") from None


def parse_relation(payload: bytes) -> Relation:
    """A relation as the log describes it: names, type OIDs and modifiers, which columns identify a row."""
    try:
        (oid,) = struct.unpack_from(">I", payload, 1)
        schema, at = _text(payload, 5)
        name, at = _text(payload, at)
        identity, count = _RELATION_TAIL.unpack_from(payload, at)
        at += _RELATION_TAIL.size
        columns = []
        for _ in range(count):
            key = payload[at] & 1 == 1
            column, at = _text(payload, at + 1)
            type_oid, type_mod = _COLUMN_TAIL.unpack_from(payload, at)
            at += _COLUMN_TAIL.size
            columns.append(Column(column, type_oid, type_mod, key))
    except (struct.error, ValueError, IndexError):
        raise ProtocolError("the server sent a relation message that cannot be read") from None
    # An empty schema name stands for pg_catalog.
    return Relation(oid, schema or "pg_catalog", name, identity.decode("ascii"), tuple(columns))


def _text(payload: bytes, at: int) -> tuple[str, int]:
    end = payload.index(b"\0", at)
    return payload[at:end].decode(), end + 1
