"""Small tables, read right after the snapshot is exported, before anybody can rewrite them.

A table that is rewritten (TRUNCATE, VACUUM FULL) loses its rows to older snapshots. One to which that happens several
times a second would never be copied, if its turn came with all others. So small tables are locked (ACCESS SHARE, which
only such statements wait for) as soon as the snapshot is there, read as soon as they may be, and let go: within some
milliseconds, as a rule. What is locked at that moment, or is larger, is read later, as ever.

No lock is waited for while others are held: whoever wants two tables from the application's side never meets us in a
deadlock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pyarrow as pa

from millstream.errors import SourceUnavailable
from millstream.model import Relation
from millstream.sources.base import Chunk
from millstream.sources.postgres.chunks import holds_still, statement_of, whole_table
from millstream.sources.postgres.connection import Connection, translated
from millstream.sources.postgres.copying import copied
from millstream.sources.postgres.patterns import quote
from millstream.sources.postgres.session import TURN_SECONDS, Refused, Session
from millstream.sources.postgres.waiting import awaited

TABLE_BYTES = 1 << 20
"""A table with its long values that is larger than this is not read early,"""
TOTAL_BYTES = 16 << 20
"""and no more than this, of all of them together: the rows travel with the plan."""

_SMALL = """
    SELECT t.root, n.nspname, c.relname, c.oid::int8 FROM (
        SELECT c.oid::int8 AS root, c.oid FROM pg_class c
        WHERE c.oid = ANY (%(oids)s::int8[]::oid[]) AND c.relkind = 'r'
        UNION ALL
        SELECT c.oid::int8, tree.relid FROM pg_class c, pg_partition_tree(c.oid) tree
        WHERE c.oid = ANY (%(oids)s::int8[]::oid[]) AND c.relkind = 'p' AND tree.isleaf) t
    JOIN pg_class c ON c.oid = t.oid JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE c.relkind = 'r' AND c.relpersistence = 'p' AND pg_table_size(c.oid) <= %(limit)s
    ORDER BY pg_table_size(c.oid) LIMIT %(most)s"""
_MOST = 500

Rows = tuple[pa.LargeBinaryArray, ...]


class EarlyTables:
    """The small tables of a snapshot, locked by the session that reads them. One use.

    While it holds locks no other session of ours may touch these tables: it would stand in line behind whoever
    waits for us.
    """

    def __init__(
        self,
        control: Connection,
        session: Session,
        relations: Mapping[int, Relation],
        filters: Mapping[int, str | None],
        most: int | None = None,
    ) -> None:
        """Only looks which tables these are; before the snapshot is asked for. `filters`: which rows are read.

        `most`: so many bytes may be read in a second, so that no more than this are read here.
        """
        self._session = session
        self._total = TOTAL_BYTES if most is None else min(TOTAL_BYTES, most)
        asked = {"oids": list(relations), "limit": TABLE_BYTES, "most": _MOST}
        with translated("looking for small tables"):
            rows = control.execute(_SMALL.encode(), asked).fetchall()
        self._chunks = {
            int(oid): whole_table(relations[root], quote(schema, name), int(oid), filters[root])
            for root, schema, name, oid in rows
        }
        self._held: set[int] = set()
        self._read: dict[int, tuple[Chunk, Rows]] = {}
        self._open = True

    def lock(self) -> None:
        """Keep them as they are, in the session's open transaction; those that somebody rewrites just now are left."""
        if not self._chunks or self._try_lock(list(self._chunks)):
            return
        for oid in self._chunks:
            self._try_lock([oid])

    def read(self) -> None:
        """Read what is held, and let it go.

        Raises SourceUnavailable if one was rewritten between the snapshot and its lock: it takes another snapshot.
        """
        left = self._total
        try:
            for oid, filenode in self._filenodes().items():
                chunk = replace(self._chunks[oid], what={**self._chunks[oid].what, "filenode": filenode})
                rows = self._rows(chunk, left) if left > 0 and oid in self._held else None
                if rows is not None:
                    left -= sum(part.nbytes for part in rows)
                    self._read[oid] = (chunk, rows)
        except Refused:
            # It cannot be read, and the transaction is over: whoever comes to the table again says why.
            self._take_rest()
        self.let_go()

    def found_in(self, chunks: Sequence[Chunk]) -> tuple[Chunk, ...]:
        """The chunks of the plan, with the rows of those that were read as it describes them."""
        return tuple(self._with_rows(chunk) for chunk in chunks)

    def _with_rows(self, chunk: Chunk) -> Chunk:
        early, rows = self._read.get(chunk.what["oid"], (None, None))
        same = early is not None and (early.relation, early.what) == (chunk.relation, chunk.what)
        return replace(chunk, rows=rows) if same else chunk

    def let_go(self) -> None:
        """Give the locks back, and end the session's transaction. What was not read is read later. Idempotent."""
        if self._open:
            self._open = False
            self._held.clear()
            awaited(self._session.run("ROLLBACK"))

    def _filenodes(self) -> dict[int, int]:
        """The file of each table that is held, as the snapshot has it."""
        if not self._held:
            return {}
        oids = ", ".join(map(str, sorted(self._held)))
        found = awaited(self._session.run(f"SELECT oid, relfilenode FROM pg_class WHERE oid IN ({oids})"))
        return {int(oid or 0): int(filenode or 0) for oid, filenode in found}

    def _try_lock(self, oids: Sequence[int]) -> bool:
        names = ", ".join(f"ONLY {self._chunks[oid].what['leaf']}" for oid in oids)
        awaited(self._session.run("SAVEPOINT early"))
        try:
            awaited(self._session.run(f"LOCK TABLE {names} IN ACCESS SHARE MODE NOWAIT"))
        except Refused:
            # It is in use, gone, or not ours to read: whoever reads it later says so.
            self._take_rest()
            awaited(self._session.run("ROLLBACK TO SAVEPOINT early"))
            return False
        self._held.update(oids)
        return True

    def _take_rest(self) -> None:
        """What the server still says of a statement that it refused: before that it takes no other."""
        while not self._session.finished():
            self._session.await_input(TURN_SECONDS)

    def _rows(self, chunk: Chunk, most: int) -> Rows | None:
        """The rows of a table; None, and no lock is held any more, if they are more than that."""
        if not holds_still(self._session, chunk):
            raise SourceUnavailable(f"{chunk.relation.table} was rewritten while the snapshot was taken")
        found, size = [], 0
        for part in copied(self._session, statement_of(chunk)):
            found.append(part)
            size += part.nbytes
            if size > most:
                # Long values are kept short on disk. The session is in the middle of it, and of no use any more.
                self._open = False
                self._held.clear()
                self._session.close()
                return None
        return tuple(found)
