"""The schema changes of a home's streams: listed from journals and cursors, decided in the state store."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from millstream.engine.gate import events
from millstream.engine.home import Home
from millstream.engine.receipts import forget_failures
from millstream.errors import ConfigError, UnknownName
from millstream.journal import JournalReader, journal_exists
from millstream.model import StreamSpec
from millstream.registry.ddl import DdlEvent
from millstream.registry.kinds import Decided, Decision
from millstream.registry.noticed import Noticed
from millstream.spark.tables import OwnTables
from millstream.state.base import StateStore


def events_of(home: Home, store: StateStore, stream: StreamSpec) -> list[DdlEvent]:
    """Every schema change of the stream's tables, oldest first; none while nothing was captured."""
    path = home.journal_path(stream.source.name)
    if not journal_exists(path):
        return []
    captured = tuple(store.captured(stream.source.name))
    tables = None if set(captured) <= set(stream.source.tables) else OwnTables(stream.source.tables, captured)
    return events(stream, JournalReader([str(path)]), tables, store)


def one_of(found: Sequence[DdlEvent], stream: str, id: int | str) -> DdlEvent:
    """The event with this number. Raises UnknownName."""
    for one in found:
        if str(one.id) == str(id):
            return one
    raise UnknownName(f"stream {stream} has no schema change {id}", hint=f"see `millstream ddl list {stream}`")


def decide(home: Home, store: StateStore, stream: StreamSpec, id: int | str, *, approved: bool) -> None:
    """Write a decision down. Raises ConfigError if a change is rejected that every target has; to approve it is fine.

    What has failed of it at a target is tried again once it is approved.
    """
    found = one_of(events_of(home, store, stream), stream.name, id)
    if found.state == "applied":
        if approved:
            return
        raise ConfigError(f"schema change {id} of stream {stream.name} is applied at every target already")
    journal = JournalReader([str(home.journal_path(stream.source.name))]).header().journal_id
    decision = Decision.APPROVED if approved else Decision.REJECTED
    store.decide_ddl(stream.name, journal, found.key, Decided(decision, datetime.now(UTC)))
    if approved and isinstance(found.version, Noticed):
        forget_failures(store, stream.name, journal, found.version.number)
