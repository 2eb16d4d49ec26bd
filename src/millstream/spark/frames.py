"""From slices to record batches of a DataFrame of changes: decoded by column, in Spark's Python workers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import pyarrow as pa

from millstream.changelog import assemble
from millstream.journal import JournalReader
from millstream.journal.format import Slice
from millstream.journal.slices import EMPTY, read_slice
from millstream.model import SeqRange
from millstream.spark.fitting import fit
from millstream.spark.format_options import SchemaChange
from millstream.spark.rows import Opener, Rows, described
from millstream.wire.envelope import envelope


@dataclass(frozen=True)
class FramePlan:
    """What every task of a DataFrame knows besides its slices. Small, picklable."""

    locations: tuple[str, ...]
    source_kind: str
    event_prefix: str
    table: str | None
    schema_change: SchemaChange
    derived: bool
    """The columns are those of the table, and not the user's choice."""
    columns: pa.Schema
    """What every record batch has, to the letter: Spark looks at the first one only."""


def frames(plan: FramePlan, slices: Sequence[Slice], span: SeqRange) -> Iterator[pa.RecordBatch]:
    """The changes of these slices that lie in `span`, relation by relation, each in seq order."""
    pairs = [(piece, span) for piece in slices]
    opener = Opener(plan.locations, pairs, open_anew)
    for (journal_id, relation_id), group in groupby(pairs, key=lambda pair: (pair[0].journal_id, pair[0].relation)):
        relation = described(plan.locations, plan.source_kind, journal_id, relation_id)
        for rows in Rows(opener, None, group):
            changes = assemble(rows, relation, relation_id, plan.event_prefix)
            yield fit(changes if plan.table is not None else envelope(changes, relation), plan.columns)


def open_anew(piece: Slice, locations: Sequence[str], span: SeqRange) -> pa.RecordBatch:
    """As `open_slice`, but a slice whose file is gone is looked for again.

    A segment is rewritten once, and the writer keeps its first form only for batches it knows of. The
    rows are the same in both forms, so that it does not matter from which they come.
    """
    try:
        return read_slice(piece, locations, span)
    except FileNotFoundError:
        wanted = SeqRange(max(span.start, piece.first_seq - 1), min(span.end, piece.last_seq))
        again = JournalReader(locations).slices(wanted)
        found = [read_slice(other, locations, wanted) for other in again if other.relation == piece.relation]
        return pa.concat_batches([EMPTY, *found])
