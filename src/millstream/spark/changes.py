"""The changes of one relation on their way to a target: what the stream's filters and transforms make of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pyarrow as pa

from millstream.model import Relation
from millstream.spark.rows import MESSAGES
from millstream.transforms.compiled import compiled
from millstream.transforms.shape import Shaping


class Shaped:
    """Decoded changes as the target gets them. To be iterated once."""

    def __init__(
        self, shaping: Shaping | None, relation: Relation, relation_id: int, changes: Iterable[pa.RecordBatch]
    ) -> None:
        """Raises ConfigError when the stream's filters and transforms do not fit the relation."""
        # Messages belong to no table: there is nothing in them to filter by.
        self._bound = compiled(shaping, relation) if shaping is not None and relation_id != MESSAGES else None
        self._changes = changes
        self.relation = relation if self._bound is None else self._bound.relation
        """The table as the target sees it."""
        self.left_out = 0
        """How many of the changes that were read so far are nothing to the target."""

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        if self._bound is None:
            yield from self._changes
            return
        for batch in self._changes:
            shaped = self._bound.changes(batch)
            self.left_out += batch.num_rows - shaped.num_rows
            if shaped.num_rows:
                yield shaped
