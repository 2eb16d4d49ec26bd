"""The changes of one relation on their way to a target: what the stream's filters and transforms make of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millstream.errors import MissingBase, RowUnshaped
from millstream.latest import booleans
from millstream.model import Relation
from millstream.spark.rows import MESSAGES
from millstream.targets.lanes.tables import mirror_key
from millstream.targets.rejects import (
    AT_ONCE,
    BYTES_AT_ONCE,
    LACKING_AT_ONCE,
    Outstanding,
    Reject,
    RowsRejected,
    substituted,
    unshaped_reject,
)
from millstream.transforms.aside import rows_of, shaped_apart, stubs, unsent_rows
from millstream.transforms.changes import apart
from millstream.transforms.compiled import Compiled, compiled
from millstream.transforms.lacking import needed_anyway
from millstream.transforms.shape import Shaping


class Aside:
    """Changes of one relation that cannot be transformed: those that are letters already, and those that are found."""

    def __init__(
        self,
        bound: Compiled,
        relation: Relation,
        relation_id: int,
        outstanding: Outstanding | None,
        *,
        mirrors: bool,
    ) -> None:
        self._bound = bound
        self._relation = relation
        self._relation_id = relation_id
        self._mirrors = mirrors
        it = outstanding or Outstanding()
        self._unshapable = it.unshapable
        self._wanted = it.wanted
        self._completed = it.completed
        self._events = pa.array(sorted(it.unshaped.union(it.unshapable)), pa.string())
        self._rejects: list[Reject] = []
        self._bytes = 0

    def pieces(self, batch: pa.RecordBatch) -> Iterator[tuple[pa.RecordBatch, bool]]:
        """The batch in pieces, in order: changes that can be shaped, as far as is known, and each one that cannot."""
        batch, begin = substituted(batch, self._completed), 0
        if len(self._events):
            for at in np.flatnonzero(booleans(pc.is_in(batch["_ms_event_id"], self._events))).tolist():
                if at > begin:
                    yield rows_of(batch, begin, at), True
                yield rows_of(batch, at, at + 1), False
                begin = at + 1
        if begin < batch.num_rows:
            yield rows_of(batch, begin, batch.num_rows) if begin else batch, True

    def stub(self, row: pa.RecordBatch) -> pa.RecordBatch | None:
        """What goes on of a change that cannot be transformed: where rows have keys, its key."""
        event = row["_ms_event_id"][0].as_py()
        why = self._unshapable.get(event)
        if why is not None:
            # What it lacks may be had: then it is seen whether anything fails on it.
            lacking = needed_anyway(self._bound, apart(row, self._bound.rule).new)
            if lacking is not None:
                self.reject_unsent(row, lacking)
            else:
                self.reject(row, RowUnshaped(why, kind="unsent" if event in self._wanted else None))
        return stubs(self._bound, row) if self._mirrors else None

    def reject(self, row: pa.RecordBatch, why: RowUnshaped) -> None:
        """Note a change that cannot be transformed. Raises RowsRejected when there are too many to carry."""
        key = mirror_key(self._bound.relation) if self._mirrors else ()
        stub = stubs(self._bound, row)
        self._rejects.append(unshaped_reject(self._relation, self._relation_id, row, stub, key, why))
        self._bytes += len(self._rejects[-1].row)
        most = LACKING_AT_ONCE if why.kind == "unsent" else AT_ONCE
        if len(self._rejects) >= most or self._bytes >= BYTES_AT_ONCE:
            self.check()

    def reject_unsent(self, batch: pa.RecordBatch, lacking: pa.StringArray) -> None:
        """Note the changes that lack what is needed, which the reasons tell."""
        for row, why in unsent_rows(batch, lacking):
            self.reject(row, why)

    def check(self) -> None:
        """Raise RowsRejected if changes were found that cannot be transformed. To be called after the last one."""
        if self._rejects:
            raise RowsRejected(self._rejects)


class Shaped:
    """Decoded changes as the target gets them. To be iterated once."""

    def __init__(
        self,
        shaping: Shaping | None,
        relation: Relation,
        relation_id: int,
        changes: Iterable[pa.RecordBatch],
        outstanding: Outstanding | None = None,
        *,
        skip: bool = False,
        bygone: bool = False,
    ) -> None:
        """Raises ConfigError when the stream's filters and transforms do not fit the relation.

        `skip`: what cannot be transformed is left out. `bygone`: the target has these changes, so that nobody asks
        any more what they were: of such a one its key goes on.
        """
        # Messages belong to no table: there is nothing in them to filter by.
        self._bound = self._aside = None
        if shaping is not None and relation_id != MESSAGES:
            self._bound = compiled(shaping, relation)
        if shaping is not None and self._bound is not None:
            self._aside = Aside(self._bound, relation, relation_id, outstanding, mirrors=shaping.mirrors)
        self._changes = changes
        self._skip = skip
        self._bygone = bygone
        self.relation = relation if self._bound is None else self._bound.relation
        """The table as the target sees it."""
        self.left_out = 0
        """How many of the changes that were read so far are nothing to the target."""

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        """Raises RowsRejected, after the last of them at the latest, if some cannot be transformed."""
        if self._bound is None or self._aside is None:
            yield from self._changes
            return
        for batch in self._changes:
            rows = 0
            for piece, fit in self._aside.pieces(batch):
                for made in self._shaped(self._bound, self._aside, piece) if fit else [self._aside.stub(piece)]:
                    if made is not None and made.num_rows:
                        rows += made.num_rows
                        yield made
            self.left_out += batch.num_rows - rows
        self._aside.check()

    def _shaped(self, bound: Compiled, aside: Aside, batch: pa.RecordBatch) -> list[pa.RecordBatch]:
        try:
            return [bound.changes(batch)]
        except (MissingBase, RowUnshaped):
            made, failed = shaped_apart(bound, batch)
            if self._bygone:
                return [*made, *(stubs(bound, row) for row, _ in failed)]
            for row, why in failed if not self._skip else ():
                aside.reject(row, why)
            return made
