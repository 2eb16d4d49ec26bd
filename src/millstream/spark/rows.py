"""The raw rows of a task's slices: opened once where slices share their bytes, in chunks fit for decoding.

Used by every task that decodes: those that stage for a target, and those of the public format.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache

import pyarrow as pa
import pyarrow.compute as pc

from millstream.changelog import pieces
from millstream.journal import JournalReader, open_slice
from millstream.journal.format import Slice
from millstream.model import Relation, SeqRange
from millstream.sources.decoders import messages

CHUNK_ROWS = 16_384
CHUNK_BYTES = 16 << 20
"""Raw rows are gathered up to here before they are decoded: long runs decode fast, and memory stays bounded."""

SHARED_BYTES = 64 << 20
"""How much of the bytes that several relations share a task keeps open."""

OpenOne = Callable[[Slice, Sequence[str], SeqRange], pa.RecordBatch]
"""Opens one slice: `open_slice`, or what does the same in a case that it leaves to the caller."""

MESSAGES = 0
"""The relation id of logical messages, which belong to no table of the source."""


_READING = threading.Lock()
"""A reader is for one thread at a time, and the engine's deliveries are threads of one process."""


@lru_cache(maxsize=4096)
def described(locations: tuple[str, ...], source_kind: str, journal_id: str, relation_id: int) -> Relation:
    """A description, read once per worker: one id of one journal never means anything else."""
    if relation_id == MESSAGES:
        return messages(source_kind)
    with _READING:
        return _journal(locations, journal_id).relation(relation_id)


@lru_cache(maxsize=16)
def _journal(locations: tuple[str, ...], journal_id: str) -> JournalReader:
    return JournalReader(locations)


class Opener:
    """Opens slices, those that share their bytes one after another, as long as what they hold fits into memory.

    A stretch of an open segment holds rows of many relations. A task works relation by relation, so
    it would read, check and parse the same bytes for each: more work than all the rest.
    """

    def __init__(
        self, locations: tuple[str, ...], slices: Sequence[tuple[Slice, SeqRange]], open_one: OpenOne = open_slice
    ) -> None:
        self._locations = locations
        self._open_one = open_one
        self._held: dict[Slice, pa.RecordBatch] = {}
        self._sharing: dict[Slice, list[tuple[Slice, SeqRange]]] = {}
        stretches: dict[tuple[str, int, int], list[tuple[Slice, SeqRange]]] = defaultdict(list)
        for piece, span in slices:
            stretches[piece.segment, piece.offset, piece.length].append((piece, span))
        room = SHARED_BYTES
        for (_, _, length), sharing in stretches.items():
            room -= length
            if len(sharing) > 1 and room >= 0:
                self._sharing.update((piece, sharing) for piece, _ in sharing)

    def open(self, piece: Slice, span: SeqRange) -> pa.RecordBatch:
        """The rows of a slice that lie in the batch. Once per slice."""
        if piece not in self._held and piece in self._sharing:
            for one, its_span in self._sharing[piece]:
                del self._sharing[one]
                self._held[one] = self._open_one(one, self._locations, its_span)
        held = self._held.pop(piece, None)
        return self._open_one(piece, self._locations, span) if held is None else held


class Rows:
    """The raw rows of one relation in seq order, in chunks, with a count of what was taken and left out."""

    def __init__(self, opener: Opener, after_position: int | None, pieces: Iterable[tuple[Slice, SeqRange]]) -> None:
        self._opener = opener
        self._after = after_position
        self._pieces = pieces
        self.taken = 0
        self.skipped = 0

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        waiting: list[pa.RecordBatch] = []
        rows = size = 0
        for piece, span in self._pieces:
            for part in _split(self._kept(self._opener.open(piece, span))):
                if waiting and (rows + part.num_rows > CHUNK_ROWS or size + part.nbytes > CHUNK_BYTES):
                    yield pa.concat_batches(waiting)
                    waiting, rows, size = [], 0, 0
                waiting.append(part)
                rows += part.num_rows
                size += part.nbytes
        if waiting:
            yield pa.concat_batches(waiting)

    def _kept(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        opened = batch.num_rows
        if self._after is not None:
            batch = batch.filter(pc.greater(batch.column("resume_position"), self._after))
        self.taken += batch.num_rows
        self.skipped += opened - batch.num_rows
        return batch


def _split(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    for offset in range(0, batch.num_rows, CHUNK_ROWS):
        yield from pieces(batch.slice(offset, CHUNK_ROWS), CHUNK_BYTES)
