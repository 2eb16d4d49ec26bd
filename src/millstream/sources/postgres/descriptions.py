"""What the catalog says of the tables that the log speaks of, asked no more often than it has to be."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from millstream.model import Relation
from millstream.sources.postgres import catalog
from millstream.sources.postgres.connection import Connection, value_encoding

MOST_EXPECTED = 32
"""Of so many tables or fewer all are asked for with the first one that changes."""


class Descriptions:
    """Asks the catalog. Not for threads.

    A stream describes a table when it first changes: then the catalog is asked about that one. Each call of bulk
    reading describes all tables anew that change in it. But all that a call sends was committed before it sends
    anything: one look at that moment, at all tables that changed in the last call too, is late enough for each of them.
    """

    def __init__(self, control: Connection, publications: Sequence[str], known: Collection[int] = ()) -> None:
        """`known` are the numbers of tables that have changed before."""
        self._control = control
        self._publications = tuple(publications)
        self._looked: dict[int, Relation | None] | None = None
        self._described = set(known) if len(known) <= MOST_EXPECTED else set()
        self._expected: set[int] = set()

    def begin_call(self) -> None:
        """A call of bulk reading sends its changes from now on, and nothing else is described before the next one."""
        self._expected, self._described, self._looked = self._described, set(), {}

    def end_calls(self) -> None:
        """What is described from now on is streamed."""
        self._looked = None

    def completed(self, relation: Relation, before: Relation | None) -> Relation:
        """As `catalog.enrich` does it."""
        if self._looked is None:
            return catalog.enrich(self._control, relation, self._publications, before)
        self._described.add(relation.oid)
        if relation.oid not in self._looked:
            wanted = sorted((self._expected - self._looked.keys()) | {relation.oid})
            found = catalog.tables_by_oid(self._control, wanted, self._publications)
            self._looked |= dict.fromkeys(wanted) | {table.relation.oid: table.relation for table in found}
        known = self._looked[relation.oid]
        return catalog.completed(relation, known, before, value_encoding(self._control.pgconn))
