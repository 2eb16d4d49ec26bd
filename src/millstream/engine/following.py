"""What the source's catalog told, brought to targets: tables are copied anew beside the flow, and receipts kept.

The order makes it safe to be killed anywhere: a copy is asked for, then its receipt is written. Who comes between asks
once more, which changes nothing but the time it takes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from millstream.engine.gate import own_noticed, reloads
from millstream.engine.home import Home
from millstream.engine.receipts import noted_epoch, receipt, receipts, save_receipts
from millstream.engine.reload import FAILED as COPY_FAILED
from millstream.engine.reload import RELOAD, UNFINISHED
from millstream.errors import MillstreamError
from millstream.journal import CatalogChange, JournalReader, journal_exists
from millstream.model import Mode, StreamSpec, TargetSpec
from millstream.observe import Event, Level, Observer
from millstream.registry.ddl import APPLIED, COPYING, FAILED, LEFT, WAITING, policy_at
from millstream.registry.kinds import Decision, Kind, Policy
from millstream.registry.noticed import Noticed
from millstream.spark.tables import OwnTables
from millstream.state.base import EpochRecord, StateStore

LOOK_SECONDS = 1.0
"""How often journals are looked at for what capture has found."""

CopyAnew = Callable[[StreamSpec, str, str], bool]
"""Asks for a copy of a table at a target. False: not now. Raises what keeps it from that for good."""


class Following:
    """Of all streams of a home. The control's thread."""

    def __init__(
        self,
        home: Home,
        store: StateStore,
        copy_anew: CopyAnew,
        recapture: Callable[[str], None],
        observer: Observer,
    ) -> None:
        """`recapture` starts the capture of a source anew: then it captures tables that have come."""
        self._home = home
        self._store = store
        self._copy_anew = copy_anew
        self._recapture = recapture
        self._observer = observer
        self._looked_at = float("-inf")
        self._readers: dict[str, JournalReader] = {}

    def serve(self, streams: Sequence[StreamSpec]) -> None:
        """Do what is due for these. Cheap while captures have found nothing."""
        clock = time.monotonic()
        if clock - self._looked_at < LOOK_SECONDS:
            return
        self._looked_at = clock
        found: dict[str, bool] = {}
        for stream in streams:
            source = stream.source.name
            if source not in found:
                found[source] = bool(self._changes(stream))
            if found[source]:
                self.settle(stream)
                told = self._told(stream)
                come = [self._follow(stream, target, told) for target in stream.targets]
                if any(come):
                    self._recapture(source)

    def settle(self, stream: StreamSpec) -> None:
        """Write down which copies have ended. Called before others are asked for, whose record takes their place."""
        if not self._changes(stream):
            return
        journal = self._readers[stream.source.name].header().journal_id
        known, tables = receipts(self._store, stream.name, journal), {one.number: one for one in self._told(stream)}
        copies = self._store.notes(stream.name, RELOAD)
        for target, words in known.items():
            ended = {
                number: word
                for number, before in words.items()
                if before == COPYING and number in tables
                if (word := _ended(copies.get(target), tables[number].table)) is not None
            }
            save_receipts(self._store, stream.name, target, journal, ended)

    def _told(self, stream: StreamSpec) -> list[Noticed]:
        """What the catalog told of the stream's tables."""
        captured = tuple(self._store.captured(stream.source.name))
        own = None if set(captured) <= set(stream.source.tables) else OwnTables(stream.source.tables, captured)
        return own_noticed(self._readers[stream.source.name], own)

    def _follow(self, stream: StreamSpec, target: TargetSpec, told: list[Noticed]) -> bool:
        """Have a target get what it has not got. Returns whether a table is among it that is not captured yet."""
        journal = self._readers[stream.source.name].header().journal_id
        epoch = self._store.current_epoch(stream.name, target.name)
        if epoch is not None:
            self._take_back(stream, target.name, epoch, told)
        known = receipts(self._store, stream.name, journal)
        decided = self._store.ddl_decisions(stream.name, journal)
        can, chosen, come = reloads(target), dict(stream.ddl), False
        for one in told:
            if receipt(known, target.name, one.number) != WAITING or not self._has_begun(stream, target.name):
                continue
            policy, said = policy_at(one, chosen, reloads=can), decided.get(one.key)
            approved = said is not None and said.decision is Decision.APPROVED
            if policy in (Policy.GATE, Policy.HALT) and not approved and not self._had(stream, target.name, one):
                continue
            word = LEFT if policy is Policy.IGNORE else self._bring(stream, target, one, can=can)
            if word is not None:
                began = epoch.epoch if epoch is not None else None
                save_receipts(self._store, stream.name, target.name, journal, {one.number: word}, began)
                come |= word == COPYING and one.kind is Kind.CREATE_TABLE
        return come

    def _take_back(self, stream: StreamSpec, target: str, epoch: EpochRecord, told: list[Noticed]) -> None:
        """A target that came back from a copy is where it was before some of it: that is to be done once more."""
        journal = self._readers[stream.source.name].header().journal_id
        noted = noted_epoch(self._store, stream.name, target, journal)
        if noted is None or noted >= epoch.epoch or epoch.journal_id != journal:
            return
        known = receipts(self._store, stream.name, journal)
        behind = [one.number for one in told if one.seq >= epoch.start_seq]
        again = {number: WAITING for number in behind if receipt(known, target, number) != WAITING}
        save_receipts(self._store, stream.name, target, journal, again, epoch.epoch)

    def repeat(self, stream: StreamSpec, targets: Sequence[str], seq: int) -> None:
        """Have what the catalog told since that change done once more: changes from before it come again."""
        if not self._changes(stream):
            return
        journal = self._readers[stream.source.name].header().journal_id
        again = {one.number: WAITING for one in self._told(stream) if one.seq >= seq}
        for target in targets:
            save_receipts(self._store, stream.name, target, journal, again)

    def _bring(self, stream: StreamSpec, target: TargetSpec, one: Noticed, *, can: bool) -> str | None:
        """Have the target get it; the receipt, None if that has to wait."""
        if not one.copies or self._had(stream, target.name, one):
            return APPLIED
        if not can:
            return LEFT
        try:
            return COPYING if self._copy_anew(stream, target.name, one.table) else None
        except MillstreamError as failed:
            message = f"{one.table} ({one.changes[0].in_words()}) cannot be copied anew: {failed.message}"
            fields = {"error": type(failed).__name__, "hint": failed.hint, "id": one.title}
            event = Event("stream.ddl_failed", message, Level.ERROR, stream.name, target.name, fields)
            self._observer.on_event(event)
            return FAILED

    def _has_begun(self, stream: StreamSpec, target: str) -> bool:
        return self._store.get_cursor(stream.name, target) is not None

    def _had(self, stream: StreamSpec, target: str, one: Noticed) -> bool:
        """Whether the target's baseline was taken after it."""
        epoch = self._store.current_epoch(stream.name, target)
        after = epoch.after_position if epoch is not None else None
        return after is not None and one.is_before(after)

    def _changes(self, stream: StreamSpec) -> Sequence[CatalogChange]:
        """What capture of its source has found; nothing while there is no journal."""
        name, path = stream.source.name, self._home.journal_path(stream.source.name)
        if stream.mode is Mode.SNAPSHOT or not journal_exists(path):
            self._readers.pop(name, None)
            return ()
        reader = self._readers.setdefault(name, JournalReader([str(path)]))
        return reader.catalog_changes() if reader.head() is not None else ()


def _ended(record: dict[str, object] | None, table: str) -> str | None:
    """What became of the copy of a table; None while it goes on."""
    if record is None:
        return APPLIED
    tables = record["tables"]
    assert isinstance(tables, dict)  # noqa: S101 - `reload.waiting` has made it
    state = tables[table]["state"] if table in tables else None
    if state in UNFINISHED or (state is None and record["state"] in UNFINISHED):
        return None
    return FAILED if state == COPY_FAILED else APPLIED
