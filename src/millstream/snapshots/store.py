"""The snapshots below one path or URL.

    BASE/<stream>/<target>/<id>/
      begun.json                  who began it, and when
      <number>.arrow | .jsonl     a table each
      letters.jsonl               dead letters, and what is in doubt, if there are any
      manifest.json               written last: what has none is not there

A snapshot is removed manifest first, so that a kill on the way leaves what was never there. What a create that was
killed has left is removed by the next one of the same target in the same home, and a day later by whoever prunes.
"""

from __future__ import annotations

import json
import socket
from datetime import UTC, datetime, timedelta
from difflib import get_close_matches

from millstream.errors import SnapshotError, UnknownName
from millstream.failpoint import failpoint
from millstream.model import Json
from millstream.snapshots.manifest import NAME, KeptFile, TargetSnapshot
from millstream.snapshots.remote import open_files

BEGUN = "begun.json"
LATEST = "latest"
ABANDONED = timedelta(days=1)
"""So old, what was begun and not finished is nobody's work any more, wherever it was begun."""


class SnapshotStore:
    """What is kept below a base. Naming one creates nothing. Raises ConfigError for a base that nobody can open."""

    def __init__(self, base: str) -> None:
        self.files = open_files(base)
        self.base = self.files.base

    def all_of(self, stream: str, target: str) -> list[TargetSnapshot]:
        """The snapshots of a target, oldest first. Raises SnapshotError for one whose manifest is damaged."""
        found = (self.find(stream, target, id) for id in self.ids(stream, target))
        return [snapshot for snapshot in found if snapshot is not None]

    def ids(self, stream: str, target: str) -> list[str]:
        """What there is of a target, oldest first, finished or not."""
        return self.files.folders(f"{stream}/{target}")

    def find(self, stream: str, target: str, id: str) -> TargetSnapshot | None:
        """One of them; None if it was not finished."""
        folder = f"{stream}/{target}/{id}"
        data = self.files.read(f"{folder}/{NAME}")
        return None if data is None else TargetSnapshot.from_bytes(data, self.base, folder)

    def get(self, stream: str, target: str, id: str) -> TargetSnapshot:
        """One of them; `latest` is the newest. Raises UnknownName, and SnapshotError where there is none at all."""
        where = f"target {target} of stream {stream} below {self.base}"
        if id == LATEST:
            found = self.all_of(stream, target)
            if not found:
                raise SnapshotError(
                    f"there is no snapshot of {where}", hint=f"take one: millstream snapshot create {stream}"
                )
            return found[-1]
        found_one = self.find(stream, target, id) if _is_id(id) else None
        if found_one is None:
            known = [one.id for one in self.all_of(stream, target)]
            near = get_close_matches(id, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"see `millstream snapshot list {stream}`"
            raise UnknownName(f"there is no snapshot {id} of {where}", hint=hint)
        return found_one

    def begin(self, stream: str, target: str, home: str) -> str:
        """Give a new snapshot its id and its directory; clear away what this home has begun and not finished."""
        me = {"home": home, "host": socket.gethostname()}
        known = self.ids(stream, target)
        for id in known:
            folder = f"{stream}/{target}/{id}"
            if self.files.read(f"{folder}/{NAME}") is None and self._begun(folder) == me:
                self.files.remove_folder(folder)
        id = _new_id(known)
        text = json.dumps({**me, "at": datetime.now(UTC).isoformat()})
        self.files.write(f"{stream}/{target}/{id}/{BEGUN}", text.encode())
        failpoint("keep.begun")
        return id

    def _begun(self, folder: str) -> Json | None:
        data = self.files.read(f"{folder}/{BEGUN}")
        try:
            return {key: value for key, value in json.loads(data or b"{}").items() if key != "at"}
        except ValueError:
            return None

    def finish(self, snapshot: TargetSnapshot) -> None:
        """All files are there: from here on the snapshot is."""
        self.files.write(f"{snapshot.folder}/{NAME}", snapshot.to_bytes())
        failpoint("keep.finished")

    def give_up(self, stream: str, target: str, id: str) -> None:
        """Remove what was begun."""
        self.files.remove_folder(f"{stream}/{target}/{id}")

    def delete(self, snapshot: TargetSnapshot) -> None:
        """Remove a snapshot. Idempotent."""
        self.files.remove(f"{snapshot.folder}/{NAME}")
        failpoint("keep.manifest_removed")
        self.files.remove_folder(snapshot.folder)

    def prune(self, stream: str, target: str, keep: int) -> list[TargetSnapshot]:
        """Remove all but the newest `keep`, and what somebody began long ago; returns the snapshots that went."""
        found = {id: self.find(stream, target, id) for id in self.ids(stream, target)}
        gone = [one for one in found.values() if one is not None][:-keep]
        for one in gone:
            self.delete(one)
        for id, whole in found.items():
            if whole is None and _age(id) > ABANDONED:
                self.files.remove_folder(f"{stream}/{target}/{id}")
        return gone

    def check(self, snapshot: TargetSnapshot) -> None:
        """Read every file. Raises SnapshotError for one that is not what was written."""
        for expected in snapshot.files:
            with self.files.reading(f"{snapshot.folder}/{expected.file}") as file:
                while file.read(1 << 20):
                    pass
            compare(snapshot, expected, file.bytes, file.sha256)


def compare(snapshot: TargetSnapshot, expected: KeptFile, size: int, sha256: str) -> None:
    """Raise SnapshotError unless a file that was read is the one that was written."""
    if (size, sha256) != (expected.bytes, expected.sha256):
        raise SnapshotError(
            f"the file {expected.file} of snapshot {snapshot.id} is not what was written: {size} bytes, "
            f"and {expected.bytes} are expected, or their checksum differs",
            hint="it was damaged or replaced: use another snapshot",
        )


def _new_id(known: list[str]) -> str:
    now = datetime.now(UTC)
    id = f"{now:%Y%m%dT%H%M%S}{now.microsecond // 1000:03}Z"
    # Greater than all there are, whatever the clock does.
    return id if not known or id > max(known) else f"{max(known)}a"


def _age(id: str) -> timedelta:
    """How long ago a snapshot was begun; nothing for a name that is not ours."""
    try:
        return datetime.now(UTC) - datetime.strptime(id[:15], "%Y%m%dT%H%M%S").replace(tzinfo=UTC)
    except ValueError:
        return timedelta(0)


def _is_id(text: str) -> bool:
    return bool(text) and text.isalnum()
