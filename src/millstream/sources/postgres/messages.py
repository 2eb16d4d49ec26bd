"""Logical messages (`pg_logical_emit_message`): they belong to no table, so they get one of their own.

M flags1 lsn8 prefix NUL length4 content       flags 1: transactional
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millstream.errors import JournalCorrupt
from millstream.model import Column, Op, Relation
from millstream.sources.base import Decoded
from millstream.sources.postgres.casts import exact_text
from millstream.sources.postgres.cells import Message, bitmap, gather
from millstream.sources.postgres.decode import Result, chunks
from millstream.sources.postgres.types import BOOL_OID, BYTEA_OID, TEXT_OID, column_types

MESSAGES = Relation(
    oid=0,
    schema="millstream",
    name="messages",
    identity="n",
    columns=(
        Column("prefix", TEXT_OID, nullable=False),
        Column("content", BYTEA_OID, nullable=False),
        Column("transactional", BOOL_OID, nullable=False),
    ),
    enriched=True,
)
"""The description of relation id 0 in the journal of a Postgres source."""

_PREFIX_AT = 10


class MessageDecoder:
    """Implements `sources.base.Decoder` for logical messages."""

    def __init__(self, relation: Relation = MESSAGES) -> None:
        self.relation = relation
        self.types = column_types(relation)

    def decode(self, op: npt.NDArray[np.uint8], payload: pa.LargeBinaryArray) -> Decoded:
        """Decode a run of messages; they have no old row and nothing is left out of them."""
        if (op != Op.MESSAGE).any():
            raise JournalCorrupt("a change of a table stands among the logical messages")
        result = Result([column.name for column in self.relation.columns], self.types)
        for begin, end in chunks(payload, len(self.types)):
            try:
                self._chunk(Message(payload.slice(begin, end - begin)), result)
            except IndexError:
                raise JournalCorrupt("a logical message ends before its content does") from None
        return result.decoded()

    def _chunk(self, message: Message, result: Result) -> None:
        if (message.bytes[message.begin] != ord("M")).any():
            raise JournalCorrupt("a payload is no logical message")
        flags = message.bytes[message.begin + 1]
        start = message.begin + _PREFIX_AT
        # A prefix has no NUL in it, so the first one from its start on ends it.
        nuls = np.flatnonzero(message.bytes == 0)
        stop = nuls[np.searchsorted(nuls, start)]
        content = stop + 5
        if (content + message.int32(stop + 1) != message.end).any():
            raise JournalCorrupt("a logical message is not as long as it says")
        rows = len(start)
        bounds = message.bounds(2, rows)
        bounds[0, 0:-1:2], bounds[0, 1::2] = start, stop
        bounds[1, 0:-1:2], bounds[1, 1::2] = content, message.end
        text = gather(message, bounds[0], None)
        prefix, odd = self.types[0].read(text)
        if len(odd):
            result.special.append((odd + result.rows, result.names[0], exact_text(text, odd)))
        transactional = pa.Array.from_buffers(pa.bool_(), rows, [None, bitmap(flags & 1 == 1)])
        raw = gather(message, bounds[1], None).cast(self.types[1].arrow)
        result.append([prefix, raw, transactional], None, np.zeros(rows, bool))
