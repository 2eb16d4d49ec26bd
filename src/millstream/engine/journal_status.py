"""What a journal says of itself, for the status of the streams that read it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime

from millstream.engine.home import Home
from millstream.errors import JournalError
from millstream.journal import JournalReader, Retained
from millstream.journal.backlog import Backlog
from millstream.journal.places import position_text
from millstream.model import Cursor, Relation


class JournalStatus:
    """What a journal says of itself; everything is None when there is none or it cannot be read."""

    def __init__(self, home: Home, source: str, kind: str, *, table_lags: bool = True) -> None:
        self._table_lags = table_lags
        self._kind = kind
        self._reader: JournalReader | None = None
        self.journal_id: str | None = None
        self.incarnation: int | None = None
        self.seq: int | None = None
        self.covered: int | None = None
        self.commit_ts_us: int | None = None
        self.retained: Retained | None = None
        self.error: str | None = None
        self._first_seq = 1
        path = home.journal_path(source)
        if not (path / "journal.json").exists():
            return
        try:
            self._read(JournalReader([str(path)]))
        except (JournalError, OSError) as error:
            self.error = str(error)

    def _read(self, reader: JournalReader) -> None:
        header, head = reader.header(), reader.head()
        self.journal_id, self.incarnation = header.journal_id, header.incarnation
        self._first_seq = header.first_seq
        if head is not None:
            self._reader = reader
            self.retained = reader.retained()
            self.seq, self.covered = head.seq, head.covered
            self.commit_ts_us = head.commit_ts_us if head.seq >= header.first_seq else None

    def lag(self, cursor: Cursor | None, now: datetime) -> tuple[int | None, float | None]:
        """How many changes a target does not have yet, and how old the oldest of them is."""
        if self._reader is None or self.seq is None:
            return None, None
        if cursor is not None and cursor.journal_id != self.journal_id:
            return None, None
        have = cursor.seq if cursor else self._first_seq - 1
        if self.seq <= have:
            return 0, 0.0
        try:
            oldest = self._reader.plan_end(have, max_events=1, max_bytes=1)
        except JournalError:
            oldest = None
        at = from_us(oldest.commit_ts_us) if oldest else None
        return self.seq - have, max(0.0, (now - at).total_seconds()) if at else None

    def backlog(self, cursor: Cursor | None, chosen: Callable[[Relation], bool]) -> dict[str, Backlog] | None:
        """By table what a target does not have yet, of the tables that are `chosen`; None when nobody can know."""
        if not self._table_lags or self._reader is None or self.seq is None:
            return None
        if cursor is not None and cursor.journal_id != self.journal_id:
            return None
        have = cursor.seq if cursor else self._first_seq - 1
        if self.seq <= have:
            return {}
        try:
            relations = self._reader.relations()
            left = self._reader.backlog(have)
        except JournalError:
            return None
        found: dict[str, Backlog] = {}
        for id, one in left.items():
            relation = relations.get(id)
            if relation is not None and chosen(relation):
                before = found.get(relation.table)
                found[relation.table] = one if before is None else before.plus(one)
        return found

    def place_of(self, seq: int) -> tuple[datetime | None, str | None]:
        """When the change with this seq was committed, and where its transaction ends in the source's log.

        None if it is no longer, or not yet, in the journal.
        """
        if self._reader is None or not self._first_seq <= seq <= (self.seq or 0):
            return None, None
        try:
            found = self._reader.plan_end(seq - 1, max_events=1, max_bytes=1)
        except JournalError:
            found = None
        return (from_us(found.commit_ts_us), self.text(found.position)) if found else (None, None)

    def text(self, position: int | None) -> str | None:
        return None if position is None else position_text(self._kind, position)


def from_us(us: int | None) -> datetime | None:
    """A commit time of the journal as Python's."""
    return None if us is None else datetime.fromtimestamp(us / 1_000_000, UTC)
