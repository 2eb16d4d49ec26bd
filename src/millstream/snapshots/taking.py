"""Taking a snapshot: the state of a target, read in one transaction of its own, and written file by file."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime

import pyarrow as pa

from millstream.errors import SnapshotError
from millstream.failpoint import failpoint
from millstream.journal.places import position_text
from millstream.model import Json, StreamSpec, TargetSpec
from millstream.snapshots.letters import Open, write_letters
from millstream.snapshots.manifest import KeptFile, TableEntry, TargetSnapshot
from millstream.snapshots.rows import Format, schema_text, write_rows
from millstream.snapshots.store import SnapshotStore
from millstream.targets.base import Keepable, Kept, KeptTable


class TakingStopped(Exception):
    """The process shall end: what was written so far is removed."""


@dataclass(frozen=True)
class Taking:
    """One snapshot of one target. Runs on any thread; nothing is changed at the target."""

    store: SnapshotStore
    stream: StreamSpec
    target: TargetSpec
    keepable: Keepable
    letters: Callable[[], Open]
    """The target's dead letters and doubts as they are now, with everything."""
    home: str
    format: Format
    stopping: threading.Event

    def run(self) -> TargetSnapshot:
        """Raises NotReady when the target has nothing yet, TargetError, SnapshotError, TakingStopped."""
        began, at = time.monotonic(), datetime.now(UTC)
        # Once before and once after the state is fixed: who retries one meanwhile writes its row, and removes it.
        before = self.letters()
        with self.keepable.keep(self.stream.name, self.target.name) as kept:
            id = self.store.begin(self.stream.name, self.target.name, self.home)
            try:
                snapshot = self._write(id, at, kept, before)
            except BaseException:
                # What is wrong is raised; what cannot be removed is removed by the next one.
                with suppress(SnapshotError):
                    self.store.give_up(self.stream.name, self.target.name, id)
                raise
        done = replace(snapshot, seconds=round(time.monotonic() - began, 3))
        failpoint("keep.written")
        self.store.finish(done)
        return done

    def _write(self, id: str, at: datetime, kept: Kept, before: Open) -> TargetSnapshot:
        folder = f"{self.stream.name}/{self.target.name}/{id}"
        entries = [self._table(folder, number, table) for number, table in enumerate(kept.tables, 1)]
        found = self.letters().up_to(kept.cursor.seq, before)
        letters = write_letters(self.store.files, folder, found) if found else None
        return TargetSnapshot(
            id=id,
            stream=self.stream.name,
            target=self.target.name,
            kind=self.target.kind,
            base=self.store.base,
            created_at=at,
            seconds=0.0,
            journal_id=kept.cursor.journal_id,
            epoch=kept.cursor.epoch,
            seq=kept.cursor.seq,
            position=kept.cursor.position,
            position_text=position_text(self.stream.source.kind, kept.cursor.position),
            format=self.format,
            settings=settings(self.stream, self.target),
            own=kept.own,
            tables=tuple(entries),
            letters=letters,
        )

    def _table(self, folder: str, number: int, table: KeptTable) -> TableEntry:
        name = f"{number:05}.{self.format.value}"
        with self.store.files.writing(f"{folder}/{name}") as file:
            rows = write_rows(file, self.format, table.schema, self._watched(table.batches))
        failpoint("keep.table_written")
        return TableEntry(
            name=table.name,
            place=table.place,
            data=KeptFile(name, rows, file.bytes, file.sha256),
            schema=schema_text(table.schema),
            columns={field.name: str(field.type) for field in table.schema},
            make=table.make,
            finish=table.finish,
        )

    def _watched(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            if self.stopping.is_set():
                raise TakingStopped
            yield batch
            failpoint("keep.rows_written")


def settings(stream: StreamSpec, target: TargetSpec) -> Json:
    """What decides which rows a target has, besides the source."""
    return {
        "tables": sorted(stream.source.tables),
        "shape": stream.shape.to_json() if stream.shape else {},
        "write": target.options.get("write", "mirror"),
        "deletes": target.options.get("deletes", "hard"),
    }
