"""How far each table of a target is: what it was brought, and what of it still waits in the journal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from millstream.engine.journal_status import JournalStatus
from millstream.model import Cursor
from millstream.sources.patterns import matcher
from millstream.state.base import Total


@dataclass(frozen=True)
class TableStatus:
    """What a target (or all targets of a stream together) has been brought of one table since the stream exists.

    The lags are of this table alone: other tables may be further. Where several targets are taken together, they are
    those of the one that is furthest behind.
    """

    name: str
    events_replicated: int
    bytes_replicated: int
    last_event: datetime | None
    """When the last of these changes was committed; None when the journal no longer knows."""
    seq: int | None = None
    """The last change of the table that was delivered,"""
    position: str | None = None
    """and where its transaction ends in the source's log; None when the journal no longer knows."""
    lag_events: int | None = None
    """How many changes of the table are in the journal and not delivered yet; None while nobody can know."""
    lag_bytes: int | None = None
    """About how many bytes of the journal these are."""
    lag_seconds: float | None = None
    """How old the oldest of them is; 0 when there is none."""
    snapshot: str | None = None
    """With `mode: snapshot`: `done`, since a target gets all tables at once. Otherwise how its last copy beside the
    changes is, if there was one: `waiting`, `running`, `done` or `failed`."""


def tables_of(
    totals: Sequence[Total],
    cursor: Cursor | None,
    patterns: Sequence[str],
    journal: JournalStatus,
    now: datetime,
    *,
    copied: bool,
    copies: Mapping[str, str] | None = None,
) -> tuple[TableStatus, ...]:
    """The tables of which a target has something, or of which something waits for it. By name."""
    waiting = {} if copied else journal.backlog(cursor, matcher(patterns))
    known = waiting is not None and not copied
    by_name, copies = {total.table: total for total in totals}, copies or {}
    found = []
    for name in sorted({*by_name, *(waiting or {}), *copies}):
        total, left = by_name.get(name), (waiting or {}).get(name)
        at, position = journal.place_of(total.last_seq) if total is not None else (None, None)
        oldest = journal.place_of(left.first_seq)[0] if left is not None else None
        age = max(0.0, (now - oldest).total_seconds()) if oldest is not None else None
        found.append(
            TableStatus(
                name=name,
                events_replicated=total.events if total else 0,
                bytes_replicated=total.bytes if total else 0,
                last_event=at,
                seq=total.last_seq if total else None,
                position=position,
                lag_events=(left.rows if left else 0) if known else None,
                lag_bytes=(left.bytes if left else 0) if known else None,
                lag_seconds=(age if left else 0.0) if known else None,
                snapshot="done" if copied else copies.get(name),
            )
        )
    return tuple(found)


def together(name: str, parts: Sequence[TableStatus]) -> TableStatus:
    """One table at several targets."""
    last = min(parts, key=lambda part: part.seq if part.seq is not None else -1)
    behind = max(parts, key=lambda part: part.lag_events or 0)
    return TableStatus(
        name=name,
        events_replicated=sum(part.events_replicated for part in parts),
        bytes_replicated=sum(part.bytes_replicated for part in parts),
        last_event=max((part.last_event for part in parts if part.last_event is not None), default=None),
        seq=last.seq,
        position=last.position,
        lag_events=behind.lag_events,
        lag_bytes=behind.lag_bytes,
        lag_seconds=behind.lag_seconds,
        snapshot=last.snapshot,
    )
