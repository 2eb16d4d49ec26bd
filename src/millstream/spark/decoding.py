"""From a task's slices to changes: read, decoded by column, relation by relation."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import pyarrow as pa

from millstream.changelog import assemble
from millstream.failpoint import failpoint
from millstream.journal.format import Slice
from millstream.model import Relation, SeqRange
from millstream.spark.rows import CHUNK_BYTES, CHUNK_ROWS, Opener, Rows
from millstream.spark.shelf import Decoded, Shelf

SHARED_ROWS = 1024
"""Fewer are decoded sooner than asked for."""

Piece = tuple[Slice, SeqRange]
"""A slice and the range of its batch."""


class Decoding:
    """The changes of one relation in seq order, with a count of what was read so far. To be iterated once."""

    def __init__(
        self,
        relation: Relation,
        relation_id: int,
        event_prefix: str,
        after_position: int | None,
        opener: Opener,
        pieces: Iterable[Piece],
        shelf: Shelf | None = None,
    ) -> None:
        """Changes up to `after_position` are left out. `shelf`: where other targets' tasks may have them, decoded."""
        self._relation = relation
        self._relation_id = relation_id
        self._event_prefix = event_prefix
        self._after = after_position
        self._opener = opener
        self._pieces = pieces
        self._shelf = shelf
        self._read: list[Rows | Decoded] = []
        self.bytes = 0
        """As the journal has the rows that were taken."""
        self.seqs: list[int] = []
        """The first one and the last."""

    @property
    def taken(self) -> int:
        """Rows of the journal that became changes."""
        return sum(one.taken for one in self._read)

    @property
    def skipped(self) -> int:
        """Rows that were read and left out."""
        return sum(one.skipped for one in self._read)

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        for batch in self._alone(self._pieces) if self._shelf is None else self._together(self._shelf):
            if batch.num_rows:
                seqs = batch["_ms_seq"]
                self.seqs = [*self.seqs[:1], seqs[0].as_py(), seqs[-1].as_py()]
            yield batch
            failpoint("stage.slice_decoded")

    def _alone(self, pieces: Iterable[Piece]) -> Iterator[pa.RecordBatch]:
        rows = Rows(self._opener, self._after, pieces)
        self._read.append(rows)
        for size, batch in self._assembled(rows):
            self.bytes += size
            yield batch

    def _together(self, shelf: Shelf) -> Iterator[pa.RecordBatch]:
        for group in groups(self._pieces):
            rows = sum(piece.rows for piece, _ in group)
            if not SHARED_ROWS <= rows <= 2 * CHUNK_ROWS or sum(piece.length for piece, _ in group) > 4 * CHUNK_BYTES:
                yield from self._alone(group)
                continue
            found = shelf.changes(self._key(group), partial(self._decoded, group))
            self._read.append(found)
            self.bytes += found.bytes
            yield from found.batches

    def _decoded(self, group: Sequence[Piece]) -> Decoded:
        rows = Rows(self._opener, self._after, group)
        made = list(self._assembled(rows))
        return Decoded([batch for _, batch in made], rows.taken, rows.skipped, sum(size for size, _ in made))

    def _assembled(self, rows: Rows) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Changes, each batch with the bytes of the rows that it was made of."""
        for raw in rows:
            yield raw.nbytes, assemble(raw, self._relation, self._relation_id, self._event_prefix)

    def _key(self, group: Sequence[Piece]) -> str:
        """Names the changes, not their place, which moves when a segment is sealed: a seq is one change for ever."""
        seqs = [(max(piece.first_seq, span.start + 1), min(piece.last_seq, span.end)) for piece, span in group]
        named = (group[0][0].journal_id, self._event_prefix, self._relation_id, self._after, seqs)
        return hashlib.blake2b(repr(named).encode(), digest_size=16).hexdigest()


def groups(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Slices that are decoded together: as many as fit into a chunk, by what is known of them without a look."""
    group: list[Piece] = []
    rows = 0
    for piece in pieces:
        if group and rows + piece[0].rows > CHUNK_ROWS:
            yield group
            group, rows = [], 0
        group.append(piece)
        rows += piece[0].rows
    if group:
        yield group
