"""Bringing a target back to a snapshot, in one transaction of its own: all of it, or nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from millstream.errors import ConfigError, JournalMismatch, OutOfRange
from millstream.journal import JournalReader, check_cursor
from millstream.model import Cursor, StreamSpec, TargetSpec
from millstream.snapshots.letters import Open, read_letters
from millstream.snapshots.manifest import TableEntry, TargetSnapshot
from millstream.snapshots.rows import read_rows, schema_of
from millstream.snapshots.store import SnapshotStore, compare
from millstream.snapshots.taking import settings
from millstream.targets.base import Keepable, Kept, KeptTable, TargetCursor

RELOAD = (
    "restore a later snapshot, or reload: give the stream a new target (another name, an empty place), which begins "
    "with all rows of the source"
)

_SAID = {
    "tables": "the stream's tables",
    "shape": "its filters or transforms",
    "write": "what the target writes (`write`)",
    "deletes": "how the target deletes (`deletes`)",
}


def check_usable(snapshot: TargetSnapshot, journal: JournalReader, stream: StreamSpec, target: TargetSpec) -> None:
    """Raise unless the stream can go on from the snapshot without a gap: ConfigError, JournalMismatch or OutOfRange."""
    what = f"snapshot {snapshot.id}"
    if snapshot.kind != target.kind:
        raise ConfigError(
            f"{what} is of a target of kind {snapshot.kind}, and {target.name} is of kind {target.kind}",
            hint="restore it to a target of its own kind",
        )
    now = settings(stream, target)
    changed = [said for key, said in _SAID.items() if snapshot.settings.get(key) != now[key]]
    if changed:
        raise ConfigError(
            f"{what} cannot be gone on from: {', '.join(changed)} have changed since",
            hint="take that back in the stream file, or use a snapshot that was taken since",
        )
    header, head = journal.header(), journal.head()
    if snapshot.journal_id != header.journal_id:
        raise JournalMismatch(
            f"{what} is at seq {snapshot.seq} of journal {snapshot.journal_id}, and the stream's journal is "
            f"{header.journal_id} now",
            hint=RELOAD,
        )
    if head is None:
        return
    earliest = journal.retained().earliest
    if snapshot.seq + 1 < earliest.seq:
        refused = earliest.refuse(f"{what} is at seq {snapshot.seq}, and seq {snapshot.seq + 1}", header.source_kind)
        raise OutOfRange(refused.message, hint=RELOAD)
    if snapshot.seq > head.seq:
        raise JournalMismatch(f"{what} is at seq {snapshot.seq}, beyond the journal's end", hint=RELOAD)
    cut = journal.cut_at(snapshot.seq) if snapshot.seq >= max(header.first_seq, earliest.seq) else None
    if cut is not None:
        # A baseline may have brought the target further than its seq says.
        position = min(snapshot.position, cut.resume_position)
        own = (snapshot.stream, snapshot.target, snapshot.journal_id, snapshot.epoch)
        check_cursor(journal, Cursor(*own, snapshot.seq, position))


def restore(store: SnapshotStore, snapshot: TargetSnapshot, target: Keepable, token: str, *, overwrite: bool) -> bool:
    """Bring the target back. False: that was done already under this token.

    Raises SnapshotError for a file that is not what was written, and as the target does: nothing is changed then.
    """
    cursor = TargetCursor(snapshot.journal_id, snapshot.epoch, snapshot.seq, snapshot.position)
    tables = (_table(store, snapshot, entry) for entry in snapshot.tables)
    kept = Kept(cursor, snapshot.own, tables)
    return target.bring_back(snapshot.stream, snapshot.target, kept, token, overwrite=overwrite)


def letters_of(store: SnapshotStore, snapshot: TargetSnapshot) -> Open:
    """The dead letters that the target had then, and what was in doubt."""
    expected = snapshot.letters
    if expected is None:
        return Open()
    with store.files.reading(f"{snapshot.folder}/{expected.file}") as file:
        data = file.read()
    compare(snapshot, expected, file.bytes, file.sha256)
    return read_letters(data)


def _table(store: SnapshotStore, snapshot: TargetSnapshot, entry: TableEntry) -> KeptTable:
    schema = schema_of(entry.schema)
    return KeptTable(entry.name, entry.place, schema, _rows(store, snapshot, entry, schema), entry.make, entry.finish)


def _rows(
    store: SnapshotStore, snapshot: TargetSnapshot, entry: TableEntry, schema: pa.Schema
) -> Iterator[pa.RecordBatch]:
    with store.files.reading(f"{snapshot.folder}/{entry.data.file}") as file:
        yield from read_rows(file, snapshot.format, schema)
        compare(snapshot, entry.data, file.bytes, file.sha256)
