"""What the state store has of one target's copies: their record (see `reload`), and how their tables are cut."""

from __future__ import annotations

from millstream.engine.copying import RANGES
from millstream.engine.reload import FAILED, RELOAD, UNFINISHED, table_waiting
from millstream.model import Json
from millstream.state.base import StateStore


class ReloadNotes:
    """Read anew each time: batches and commands write to the same store."""

    def __init__(self, store: StateStore, stream: str, target: str) -> None:
        self._store = store
        self._stream = stream
        self._target = target

    def due(self) -> Json | None:
        """The record of copies that have not ended."""
        record = self._store.notes(self._stream, RELOAD).get(self._target)
        return record if record is not None and record["state"] in UNFINISHED else None

    def record(self) -> Json:
        """The record; there is one once copies were asked for."""
        return self._store.notes(self._stream, RELOAD)[self._target]

    def is_left(self) -> bool:
        """Whether something is still to be found or copied."""
        record = self.record()
        return not record["resolved"] or any(one["state"] in UNFINISHED for one in record["tables"].values())

    def save(self, record: Json) -> None:
        self._store.save_note(self._stream, self._target, RELOAD, record)

    def save_table(self, name: str, **changed: object) -> None:
        record = self.record()
        self.save({**record, "tables": {**record["tables"], name: {**record["tables"][name], **changed}}})

    def fail_table(self, name: str, where: str | None, error: str) -> None:
        """A table of which nothing can be copied, whether it was known before or not."""
        record = self.record()
        failed = {**table_waiting(where), "state": FAILED, "error": error}
        self.save({**record, "tables": {**record["tables"], name: failed}})

    def fail_rest(self, error: str) -> None:
        """Nothing that is left can be copied."""
        record = self.record()
        left = {name: one for name, one in record["tables"].items() if one["state"] in UNFINISHED}
        names = left or {name: table_waiting() for name in record["names"] or ["*"]}
        broken = {name: {**one, "state": FAILED, "error": error} for name, one in names.items()}
        self.save({**record, "resolved": True, "tables": {**record["tables"], **broken}})

    def cut(self) -> Json:
        """How tables are cut, and which is at hand; empty if none is."""
        return self._store.notes(self._stream, RANGES).get(self._target, {})

    def save_cut(self, note: Json) -> None:
        self._store.save_note(self._stream, self._target, RANGES, note)
