"""A directory that one target of one stream writes to: whose it is, who may write, what was committed.

    PATH/_millstream/
      owner.json               whose directory this is, and which run may write
      lock                     held while the owner changes and while a batch is committed
      commits/END.json         one per batch, written last: a batch counts when this is there

The newest commit is the target's cursor. Used by targets whose data is files of some kind.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

from millstream.errors import TargetError, TargetRefused, TargetUnavailable
from millstream.model import Json, Relation, SeqRange
from millstream.targets.base import ASKING, TargetContext, TargetCursor

OWN = "_millstream"
_PERMANENT = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG}


class OwnDirectory:
    """The directory, and its own files in it. Every method but `locked` and `open` wants the lock to be held."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.own = root / OWN

    def open(self, context: TargetContext) -> TargetCursor | None:
        """Make it ours, unless only the cursor is asked for; returns the cursor. Takes the lock itself."""
        make_directory(self.own / "commits")
        with self.locked():
            self.check_ours(context)
            if context.epoch != ASKING:
                self._take_over(context)
            return self.cursor()

    def release(self, stream: str, target: str) -> bool:
        """Write down that no stream goes on here any more. False: it is not theirs. Takes the lock itself."""
        if not (self.own / "owner.json").exists():
            return False
        with self.locked():
            owner = self._owner() or {}
            if (owner.get("stream"), owner.get("target")) != (stream, target):
                return False
            write_whole(self.own / "owner.json", {**owner, "released": True})
            return True

    @contextmanager
    def locked(self) -> Iterator[None]:
        descriptor = os.open(self.own / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _owner(self) -> Json | None:
        path = self.own / "owner.json"
        return read_json(path) if path.exists() else None

    def check_ours(self, context: TargetContext) -> None:
        """Raise TargetRefused if the directory is another stream's, or one's that is no more."""
        owner = self._owner()
        if owner and (owner["stream"], owner["target"]) != (context.stream, context.target):
            raise TargetRefused(
                f"{self.root} belongs to target {owner['target']} of stream {owner['stream']}",
                hint="give each target a directory of its own",
            )
        if owner and owner.get("released"):
            raise TargetRefused(
                f"{self.root} holds what a stream named {owner['stream']} delivered before it was deleted",
                hint="give the target an empty directory, or remove this one",
            )

    def _take_over(self, context: TargetContext) -> None:
        owner = self._owner()
        # Where nothing was published yet, a state that knows less (it was lost) does no harm.
        if owner and owner["epoch"] > context.epoch and self.cursor() is not None:
            raise self._fenced(context.epoch, owner)
        write_whole(
            self.own / "owner.json",
            {"stream": context.stream, "target": context.target, "epoch": context.epoch, "run": context.run_id},
        )

    def check_owner(self, context: TargetContext) -> None:
        """Raise TargetRefused unless this run may still write."""
        owner = self._owner()
        if owner is None or owner["run"] != context.run_id:
            raise self._fenced(context.epoch, owner)

    def _fenced(self, epoch: int, owner: Json | None) -> TargetRefused:
        by = f"epoch {owner['epoch']} has taken over" if owner else "its owner file is gone"
        return TargetRefused(
            f"{self.root}: delivery epoch {epoch} may not write any more, {by}",
            hint="another process delivers this stream; let only one run",
        )

    def cursor(self) -> TargetCursor | None:
        """How far the directory is, by its newest commit."""
        last = max((e.name for e in os.scandir(self.own / "commits") if e.name.endswith(".json")), default=None)
        if last is None:
            return None
        commit = read_json(self.own / "commits" / last)
        owner = self._owner()
        epoch = max(commit["epoch"], owner["epoch"] if owner else 0)
        return TargetCursor(commit["journal_id"], epoch, commit["end"], commit["position"])

    def check_follows(self, context: TargetContext, last: TargetCursor | None, range: SeqRange) -> None:
        """Raise TargetRefused unless the batch is the one after `last`."""
        if last is None:
            return
        same_journal = last.journal_id == context.journal_id
        if range.start < last.seq or (same_journal and range.start != last.seq):
            raise TargetRefused(
                f"{self.root}: a batch that starts at seq {range.start} does not follow seq {last.seq}",
                hint="the stream's state and this directory do not belong together",
            )

    def write_commit(
        self,
        context: TargetContext,
        range: SeqRange,
        end_position: int,
        files: Sequence[Json],
        name: str | None = None,
    ) -> None:
        """From here on the batch counts. `name`: of a commit that is not a batch's, and sorts before the next one's."""
        commit = {
            "stream": context.stream,
            "target": context.target,
            "journal_id": context.journal_id,
            "epoch": context.epoch,
            "start": range.start,
            "end": range.end,
            "position": end_position,
            "committed_at": datetime.now(UTC).isoformat(),
            "files": list(files),
        }
        write_whole(self.own / "commits" / f"{name or f'{range.end:020d}'}.json", commit)


def directory_of(relation: Relation) -> str:
    """`schema.table` as a directory name: other characters percent-encoded, so that two tables never share one."""
    name = f"{_encoded(relation.schema)}.{_encoded(relation.name)}"
    if name[0] in "_.":
        # Spark takes such names for hidden; our own directory begins with one.
        name = f"%{ord(name[0]):02X}{name[1:]}"
    if len(name.encode()) > 200:
        digest = hashlib.sha256(name.encode()).hexdigest()[:16]
        name = f"{name.encode()[:180].decode(errors='ignore')}~{digest}"
    return name


def _encoded(part: str) -> str:
    return "".join(c if c.isalnum() or c in "_-" else quote(c, safe="").replace(".", "%2E") for c in part)


@contextmanager
def as_target_errors(where: Path) -> Iterator[None]:
    """Turn what the file system says into a target's error: transient unless waiting cannot help."""
    try:
        yield
    except OSError as failed:
        code = errno.errorcode.get(failed.errno or 0, type(failed).__name__)
        raise _target_error(failed, f"cannot write {where}: {code}") from failed


def _target_error(failed: OSError, message: str) -> TargetError:
    if failed.errno in _PERMANENT:
        return TargetRefused(message, hint="check the directory's owner and rights")
    if failed.errno in (errno.ENOSPC, errno.EDQUOT):
        return TargetUnavailable(message, hint="make room on this disk; delivery goes on by itself")
    return TargetUnavailable(message)


def make_directory(path: Path) -> None:
    """Create a directory and make its name durable, parents included."""
    if path.is_dir():
        return
    make_directory(path.parent)
    path.mkdir(exist_ok=True)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(path: Path, value: Json) -> None:
    """Write a JSON file that is either there whole, durably, or not at all."""
    temporary = path.with_suffix(".tmp")
    with temporary.open("w") as file:
        json.dump(value, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_directory(path.parent)


def read_json(path: Path) -> Json:
    """One of our own files. Raises TargetRefused when it is damaged."""
    try:
        value: dict[str, Any] = json.loads(path.read_bytes())
    except ValueError as damaged:
        raise TargetRefused(f"{path} is damaged", hint="restore the directory from a copy") from damaged
    return value
