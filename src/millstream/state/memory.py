"""The state store of a process that need not outlive itself: tests, and streams used as a library.

The rules that every store must hold to are here as functions, since this is the store that has
nothing but rules.
"""

from __future__ import annotations

import copy
import itertools
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime

from millstream.errors import StateError
from millstream.model import Cursor, Json
from millstream.registry.kinds import Decided
from millstream.state.base import (
    FAULTS,
    INCOMPLETE,
    Doubt,
    EpochRecord,
    Fault,
    Letter,
    LetterState,
    Request,
    Runtime,
    Tally,
    Total,
)

HISTORY = 1000
"""How many former cursors are kept for each target."""


def refuse_going_back(old: Cursor, new: Cursor) -> None:
    """Raise StateError if `new` is behind `old`, or was written by an epoch that has been replaced."""
    where = f"cursor of {new.stream}/{new.target}"
    if new.epoch < old.epoch:
        raise StateError(
            f"{where}: delivery epoch {new.epoch} is over, epoch {old.epoch} has saved a cursor",
            hint="an older process may still be running; stop it",
        )
    same = (new.journal_id, new.epoch) == (old.journal_id, old.epoch)
    if same and (new.seq, new.position) < (old.seq, old.position):
        raise StateError(
            f"{where} would go back from seq {old.seq} at position {old.position} "
            f"to seq {new.seq} at position {new.position}",
            hint="only a new delivery epoch may start at an earlier point",
        )


def refuse_epoch_below(last: int | None, record: EpochRecord) -> None:
    """Raise StateError unless `record` is above the last epoch of its target."""
    if last is not None and record.epoch <= last:
        raise StateError(
            f"delivery epoch {record.epoch} of {record.stream}/{record.target} is not above epoch {last}",
            hint="another process may run this stream; only one may",
        )


def _listed(letter: Letter) -> Letter:
    return replace(letter, relation={}, payload=b"")


class MemoryStateStore:
    """Implements `StateStore`; what it holds is gone with the process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._streams: dict[str, Json] = {}
        self._cursors: dict[tuple[str, str], Cursor] = {}
        self._history: dict[tuple[str, str], list[Cursor]] = {}
        self._epochs: dict[tuple[str, str], EpochRecord] = {}
        self._acks: dict[str, int] = {}
        self._runtimes: dict[tuple[str, str], Runtime] = {}
        self._letters: dict[int, Letter] = {}
        self._doubts: dict[tuple[str, str, str], Doubt] = {}
        self._reloads: dict[tuple[str, str], str] = {}
        self._totals: dict[tuple[str, str, str], Total] = {}
        self._paused: set[tuple[str, str]] = set()
        self._captured: dict[str, set[str]] = {}
        self._deletions: dict[str, Json] = {}
        self._faults: dict[str, list[Fault]] = {}
        self._verifications: dict[str, dict[str, Json]] = {}
        self._decisions: dict[str, dict[tuple[str, int], Decided]] = {}
        self._replays: dict[str, dict[str, Json]] = {}
        self._notes: dict[str, dict[tuple[str, str], Json]] = {}
        self._requests: dict[int, Request] = {}
        self._ids = itertools.count(1)

    def put_stream(self, name: str, definition: Json) -> None:
        with self._lock:
            self._streams[name] = copy.deepcopy(definition)

    def get_stream(self, name: str) -> Json | None:
        with self._lock:
            return copy.deepcopy(self._streams.get(name))

    def list_streams(self) -> list[str]:
        with self._lock:
            return sorted(self._streams)

    def delete_stream(self, name: str, *, source: str | None = None) -> None:
        with self._lock:
            self._streams.pop(name, None)
            for kept in (self._cursors, self._history, self._epochs, self._runtimes):
                for key in [key for key in kept if key[0] == name]:
                    del kept[key]
            self._totals = {key: total for key, total in self._totals.items() if key[0] != name}
            self._paused = {key for key in self._paused if key[0] != name}
            self._letters = {id: letter for id, letter in self._letters.items() if letter.stream != name}
            self._doubts = {key: one for key, one in self._doubts.items() if key[0] != name}
            self._reloads = {key: reason for key, reason in self._reloads.items() if key[0] != name}
            self._deletions.pop(name, None)
            self._faults.pop(name, None)
            self._verifications.pop(name, None)
            self._decisions.pop(name, None)
            self._replays.pop(name, None)
            self._notes.pop(name, None)
            if source is not None:
                self._acks.pop(source, None)
                self._captured.pop(source, None)

    def begin_deletion(self, name: str, options: Json) -> None:
        with self._lock:
            self._deletions[name] = copy.deepcopy(options)

    def deletions(self) -> dict[str, Json]:
        with self._lock:
            return copy.deepcopy(self._deletions)

    def set_paused(self, stream: str, target: str, paused: bool) -> None:
        with self._lock:
            (self._paused.add if paused else self._paused.discard)((stream, target))

    def paused(self, stream: str) -> set[str]:
        with self._lock:
            return {target for name, target in self._paused if name == stream}

    def save_cursor(
        self, cursor: Cursor, tallies: Sequence[Tally] = (), superseded: Mapping[str, int] | None = None
    ) -> None:
        key = (cursor.stream, cursor.target)
        with self._lock:
            old = self._cursors.get(key)
            if old is not None:
                refuse_going_back(old, cursor)
                history = self._history.setdefault(key, [])
                history.append(old)
                del history[:-HISTORY]
            self._cursors[key] = cursor
            self._count(*key, tallies)
            for id, letter in list(self._letters.items()):
                if (letter.stream, letter.target) == key and letter.event_id in (superseded or {}):
                    if letter.kind in INCOMPLETE:
                        del self._letters[id]
                    else:
                        self._supersede(id, (superseded or {})[letter.event_id])
            for event, doubt in [(at[2], one) for at, one in self._doubts.items() if at[:2] == key]:
                if event in (superseded or {}) or doubt.until <= cursor.position:
                    del self._doubts[*key, event]

    def add_totals(self, stream: str, target: str, tallies: Sequence[Tally]) -> None:
        with self._lock:
            self._count(stream, target, tallies)

    def _count(self, stream: str, target: str, tallies: Sequence[Tally]) -> None:
        for tally in tallies:
            one = (stream, target, tally.table)
            old = self._totals.get(one, Total(*one, 0, 0, 0))
            events, size = old.events + tally.events, old.bytes + tally.bytes
            self._totals[one] = Total(*one, events, size, max(old.last_seq, tally.last_seq))

    def totals(self, stream: str | None = None) -> list[Total]:
        with self._lock:
            return [value for key, value in sorted(self._totals.items()) if stream in (None, key[0])]

    def get_cursor(self, stream: str, target: str) -> Cursor | None:
        with self._lock:
            return self._cursors.get((stream, target))

    def cursors(self, stream: str | None = None) -> list[Cursor]:
        with self._lock:
            return [value for key, value in sorted(self._cursors.items()) if stream in (None, key[0])]

    def cursor_history(self, stream: str, target: str, limit: int = 100) -> list[Cursor]:
        with self._lock:
            return self._history.get((stream, target), [])[::-1][:limit]

    def open_epoch(self, record: EpochRecord) -> None:
        key = (record.stream, record.target)
        with self._lock:
            last = self._epochs.get(key)
            refuse_epoch_below(last.epoch if last else None, record)
            self._epochs[key] = record

    def current_epoch(self, stream: str, target: str) -> EpochRecord | None:
        with self._lock:
            return self._epochs.get((stream, target))

    def save_ack(self, source: str, position: int) -> None:
        with self._lock:
            self._acks[source] = max(position, self._acks.get(source, position))

    def get_ack(self, source: str) -> int | None:
        with self._lock:
            return self._acks.get(source)

    def add_captured(self, source: str, patterns: Sequence[str]) -> None:
        with self._lock:
            self._captured.setdefault(source, set()).update(patterns)

    def captured(self, source: str) -> list[str]:
        with self._lock:
            return sorted(self._captured.get(source, ()))

    def set_runtime(self, runtime: Runtime) -> None:
        at = runtime.updated_at or datetime.now(UTC)
        with self._lock:
            kept = replace(runtime, fields=copy.deepcopy(dict(runtime.fields)), updated_at=at)
            self._runtimes[runtime.stream, runtime.target] = kept

    def runtimes(self, stream: str | None = None) -> list[Runtime]:
        with self._lock:
            return [value for key, value in sorted(self._runtimes.items()) if stream in (None, key[0])]

    def add_fault(self, fault: Fault) -> None:
        with self._lock:
            kept = self._faults.setdefault(fault.stream, [])
            kept.append(fault)
            del kept[:-FAULTS]

    def faults(self, stream: str) -> list[Fault]:
        with self._lock:
            return self._faults.get(stream, [])[::-1]

    def add_letters(self, letters: Sequence[Letter], *, keep: int | None = None) -> list[Letter]:
        with self._lock:
            known = {(one.stream, one.target, one.event_id) for one in self._letters.values()}
            for letter in letters:
                if (letter.stream, letter.target, letter.event_id) not in known:
                    id = next(self._ids)
                    self._letters[id] = replace(letter, id=id)
            gone: list[Letter] = []
            for owner in dict.fromkeys((one.stream, one.target) for one in letters):
                mine = [one for one in self._letters.values() if (one.stream, one.target) == owner]
                gone += mine[:-keep] if keep is not None else []
            for letter in gone:
                del self._letters[letter.id]
            return [_listed(letter) for letter in gone]

    def letters(self, stream: str | None = None, target: str | None = None) -> list[Letter]:
        with self._lock:
            mine = [one for one in self._letters.values() if stream in (None, one.stream)]
            return [_listed(one) for one in mine if target in (None, one.target)]

    def get_letter(self, id: int) -> Letter | None:
        with self._lock:
            return self._letters.get(id)

    def mark_letter(self, id: int, *, superseded_by: int | None = None, reason: str | None = None) -> None:
        with self._lock:
            if id in self._letters and superseded_by is not None:
                self._supersede(id, superseded_by)
            if id in self._letters and reason is not None:
                self._letters[id] = replace(self._letters[id], reason=reason, tries=self._letters[id].tries + 1)

    def remove_letters(self, ids: Sequence[int]) -> int:
        with self._lock:
            return sum(self._letters.pop(id, None) is not None for id in ids)

    def add_doubts(self, doubts: Sequence[Doubt]) -> None:
        with self._lock:
            self._doubts.update(((one.stream, one.target, one.event_id), one) for one in doubts)

    def doubts(self, stream: str, target: str) -> list[Doubt]:
        with self._lock:
            mine = [one for one in self._doubts.values() if (one.stream, one.target) == (stream, target)]
            return sorted(mine, key=lambda one: (one.seq, one.event_id))

    def set_doubts(self, stream: str, target: str, doubts: Sequence[Doubt]) -> None:
        with self._lock:
            self._doubts = {key: one for key, one in self._doubts.items() if key[:2] != (stream, target)}
            self._doubts.update(((one.stream, one.target, one.event_id), one) for one in doubts)

    def set_needs_reload(self, stream: str, target: str, reason: str | None) -> None:
        with self._lock:
            if reason is None:
                self._reloads.pop((stream, target), None)
            else:
                self._reloads[stream, target] = reason

    def needs_reload(self, stream: str) -> dict[str, str]:
        with self._lock:
            return {target: reason for (name, target), reason in self._reloads.items() if name == stream}

    def _supersede(self, id: int, seq: int) -> None:
        letter = self._letters[id]
        by = seq if letter.superseded_by is None else letter.superseded_by
        self._letters[id] = replace(letter, state=LetterState.SUPERSEDED, superseded_by=by)

    def decide_ddl(self, stream: str, journal_id: str, seq: int, decided: Decided) -> None:
        with self._lock:
            self._decisions.setdefault(stream, {})[journal_id, seq] = decided

    def ddl_decisions(self, stream: str, journal_id: str) -> dict[int, Decided]:
        with self._lock:
            found = self._decisions.get(stream, {})
            return {seq: decided for (journal, seq), decided in found.items() if journal == journal_id}

    def save_verification(self, stream: str, target: str, result: Json) -> None:
        with self._lock:
            self._verifications.setdefault(stream, {})[target] = copy.deepcopy(result)

    def verifications(self, stream: str) -> dict[str, Json]:
        with self._lock:
            return copy.deepcopy(self._verifications.get(stream, {}))

    def save_replay(self, stream: str, target: str, replay: Json) -> None:
        with self._lock:
            self._replays.setdefault(stream, {})[target] = copy.deepcopy(replay)

    def replays(self, stream: str) -> dict[str, Json]:
        with self._lock:
            return copy.deepcopy(self._replays.get(stream, {}))

    def save_note(self, stream: str, target: str, kind: str, note: Json) -> None:
        with self._lock:
            self._notes.setdefault(stream, {})[target, kind] = copy.deepcopy(note)

    def notes(self, stream: str, kind: str) -> dict[str, Json]:
        with self._lock:
            mine = self._notes.get(stream, {})
            return {target: copy.deepcopy(note) for (target, of), note in mine.items() if of == kind}

    def submit(self, verb: str, arguments: Json) -> int:
        with self._lock:
            id = next(self._ids)
            self._requests[id] = Request(id, verb, copy.deepcopy(arguments), datetime.now(UTC))
            return id

    def pending(self) -> list[Request]:
        with self._lock:
            return [request for request in self._requests.values() if request.answer is None]

    def answer(self, id: int, answer: Json) -> None:
        with self._lock:
            if id in self._requests:
                self._requests[id] = replace(self._requests[id], answer=copy.deepcopy(answer))

    def get_request(self, id: int) -> Request | None:
        with self._lock:
            return self._requests.get(id)

    def withdraw(self, id: int) -> bool:
        with self._lock:
            found = self._requests.get(id)
            if found is None or found.answer is not None:
                return False
            del self._requests[id]
            return True

    def close(self) -> None:
        """Nothing to let go of: the store may be read on."""
