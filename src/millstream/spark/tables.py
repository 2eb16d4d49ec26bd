"""A stream's own tables among those of its source's journal, which other streams share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from millstream.journal import JournalReader, open_slice
from millstream.journal.format import Slice
from millstream.model import SeqRange
from millstream.sources.patterns import matcher
from millstream.spark.rows import MESSAGES

Piece = tuple[Slice, SeqRange]


@dataclass(frozen=True)
class OwnTables:
    """What tells a stream's tables from those of others in the same journal. Small, picklable."""

    patterns: tuple[str, ...]
    """The stream's own tables,"""
    captured: tuple[str, ...]
    """and everything that was ever captured from the source, for streams that are gone as well."""


@lru_cache(maxsize=4096)
def belongs(locations: tuple[str, ...], journal_id: str, relation: int, own: OwnTables) -> bool:
    """Whether a relation of the journal is one of the stream's tables.

    Only what is known to be another stream's is left out. A table keeps to its stream when it is renamed:
    it is the stream's if any of its descriptions up to this one has a name that the patterns mean. One
    that nobody's patterns mean was renamed before it ever changed: every stream gets it. Logical messages
    belong to no table, and to all streams.
    """
    if relation == MESSAGES:
        return True
    known = JournalReader(locations).relations()
    oid = known[relation].oid
    names = [other for id, other in known.items() if id <= relation and other.oid == oid]
    return any(map(matcher(own.patterns), names)) or not any(map(matcher(own.captured), names))


def share(
    locations: tuple[str, ...], own: OwnTables | None, pieces: Sequence[Piece]
) -> tuple[list[Piece], Counter[int]]:
    """The slices of the stream's tables, and by relation how many rows of others the batch has. None: all are its."""
    if own is None:
        return list(pieces), Counter()
    mine, others = [], Counter[int]()
    for piece, span in pieces:
        if belongs(locations, piece.journal_id, piece.relation, own):
            mine.append((piece, span))
        else:
            others[piece.relation] += rows_in(piece, span, locations)
    return mine, others


def rows_in(piece: Slice, span: SeqRange, locations: Sequence[str]) -> int:
    """How many rows of a slice lie in a batch. Its bytes are read only where it lies across an end of it."""
    if span.start < piece.first_seq and piece.last_seq <= span.end:
        return piece.rows
    return int(open_slice(piece, locations, span).num_rows)
