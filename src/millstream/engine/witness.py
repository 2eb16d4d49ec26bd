"""What the journal tells of rows after some of their changes.

A target that keeps every change, or every version of a row, can be given a value that was read at the source only if
it was the row's right after the change. It was if nobody took the key from the row or changed the value between the
change and the moment of reading. That is told by the journal, as soon as it has come there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millstream.changelog import assemble
from millstream.errors import OutOfRange
from millstream.journal import JournalReader
from millstream.latest import booleans, one_letter
from millstream.model import Op, Relation, SeqRange
from millstream.spark.rows import Opener, Rows, described
from millstream.targets.lanes.tables import mirror_key
from millstream.targets.rejects import key_texts, position_of

PATIENCE_SECONDS = 10.0
"""So long it is waited for the journal to come to a position."""
MOST = 1_000_000
"""So many changes are looked at: who is further behind than that cannot be told."""

_AGAIN_SECONDS = 0.05


@dataclass(frozen=True)
class Asked:
    """A change, and until which position it is asked what became of its row."""

    event_id: str
    seq: int
    key: str
    """As `targets.rejects.key_texts` has it, of the source's row."""
    values: frozenset[str]
    """The columns that it is about."""
    until: int


class Witness:
    """Of one journal. Any thread, one at a time."""

    def __init__(self, locations: Sequence[str], source_kind: str) -> None:
        self._locations = tuple(locations)
        self._kind = source_kind
        self._reader = JournalReader(locations)

    def unmoved(self, table: Relation, asked: Sequence[Asked]) -> set[str]:
        """The events of which it is sure that no later change before that position has touched the values."""
        sure: set[str] = set()
        # Most are asked for until the end of their own transaction: the others may have to wait, or fail.
        for until, group in groupby(sorted(asked, key=lambda one: one.until), key=lambda one: one.until):
            sure |= self._unmoved(table, list(group), until)
        return sure

    def _unmoved(self, table: Relation, asked: Sequence[Asked], until: int) -> set[str]:
        start = min(one.seq for one in asked)
        end = self._end(until)
        if end is None or end - start > MOST:
            return set()
        left = {one.event_id: one for one in asked}
        for relation, batch in self._changes(table.oid, SeqRange(start, end)) if end > start else ():
            for event in _touched(relation, batch, list(left.values()), until):
                left.pop(event, None)
        return set(left)

    def _end(self, until: int) -> int | None:
        """The seq up to which the journal has what was committed before a position; None if it does not come there."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                return self._reader.seq_at_position(until)
            except OutOfRange:
                if time.monotonic() > deadline:
                    return None
            threading.Event().wait(_AGAIN_SECONDS)

    def _changes(self, oid: int, span: SeqRange) -> Iterator[tuple[Relation, pa.RecordBatch]]:
        """The changes of a table, whatever it was called."""
        for piece in self._reader.slices(span):
            relation = described(self._locations, self._kind, piece.journal_id, piece.relation)
            if relation.oid == oid:
                for rows in Rows(Opener(self._locations, []), None, [(piece, span)]):
                    yield relation, assemble(rows, relation, piece.relation, "")


def _touched(relation: Relation, batch: pa.RecordBatch, asked: Sequence[Asked], until: int) -> Iterator[str]:
    """Which of the events a change of the batch comes after that touches their values, or may."""
    key, by_key = mirror_key(relation), dict[str, list[Asked]]()
    for one in asked:
        by_key.setdefault(one.key, []).append(one)
    mask = one_letter(batch["_ms_op"]) == Op.TRUNCATE
    texts = key_texts(batch, key) if key else ()
    for each in texts:
        mask |= booleans(pc.is_in(each, pa.array(list(by_key), pa.string())))
    for at in np.flatnonzero(mask).tolist():
        seq, every = batch["_ms_seq"][at].as_py(), batch["_ms_op"][at].as_py() == chr(Op.TRUNCATE)
        keys = {text for each in texts if (text := each[at].as_py()) is not None}
        # What an update of the row itself did not send, it left as it was.
        same = set(batch["_ms_unchanged"][at].as_py()) if len(keys) == 1 else set[str]()
        if position_of(batch["_ms_position"][at].as_py()) < until:
            for one in asked if every else [one for text in keys for one in by_key.get(text, ())]:
                if one.seq < seq and (every or not one.values <= same):
                    yield one.event_id
