"""Changes that are decoded once for all targets on a machine that read them.

Targets are delivered to independently of each other. But those that keep up read the same changes within the same
second, and decoding is most of what their tasks do. So the first task that needs a run of changes lays them on a shelf
when it has decoded them, and the others take them from there, as Arrow in a file that they map into their memory.

Nothing rests on a shelf. If it is full, gone, or locked by somebody who does not come back, then a task decodes for
itself. What lies there is gone when every reader has had it, or when it is old; it is never read after a restart.

    KEY.lock     held by who decodes or takes; its text says what lies there, and how many have had it
    KEY.arrow    the changes; appears whole
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from uuid import uuid4

import pyarrow as pa

MOST_BYTES = 256 << 20
"""What may lie on a shelf. Nothing is added to a full one: what came first is what a slower reader needs next."""
KEPT_SECONDS = 30.0
"""How long something lies there at most,"""
PATIENCE_SECONDS = 2.0
"""and how long a task waits for another one that decodes what it needs: some hundred times what that takes."""
_PAUSE = 0.002


@dataclass(frozen=True)
class Decoded:
    """A run of changes of one relation, decoded, and what they were made of."""

    batches: Sequence[pa.RecordBatch]
    taken: int
    """Rows of the journal that they are,"""
    skipped: int
    """and rows that were read and left out."""
    bytes: int
    """Of the journal's rows that were taken."""


@dataclass(frozen=True)
class _Label:
    """What is known of something on the shelf."""

    taken: int
    skipped: int
    bytes: int
    had: int
    """How many tasks have had it, with the one that laid it there."""


@dataclass(frozen=True)
class Shelf:
    """Where tasks of one machine share what they have decoded. Picklable; any number of processes may use it."""

    directory: str
    readers: int
    """How many targets read the same changes."""

    def prepare(self) -> None:
        """Make an empty one. To be called before any task uses it."""
        shutil.rmtree(self.directory, ignore_errors=True)
        with suppress(OSError):  # who finds none does without
            Path(self.directory).mkdir(mode=0o700, parents=True, exist_ok=True)

    def changes(self, key: str, decode: Callable[[], Decoded]) -> Decoded:
        """What `decode` returns, or somebody else has laid there under this key, which belongs to these changes alone.

        Raises what `decode` does, and nothing else.
        """
        with _locked(Path(self.directory, f"{key}.lock")) as lock:
            if lock is None:
                return decode()
            found = self._take(lock, key)
            if found is None:
                found = decode()
                with suppress(OSError, pa.ArrowException):  # a full disk is the next one's trouble, not this task's
                    self._lay(lock, key, found)
            return found

    def _take(self, lock: int, key: str) -> Decoded | None:
        label = _read_label(lock)
        if label is None:
            return None
        try:
            with pa.memory_map(str(self._path(key))) as file, pa.ipc.open_stream(file) as reader:
                batches = list(reader)
        except (OSError, pa.ArrowException):
            return None
        label = replace(label, had=label.had + 1)
        with suppress(OSError):  # it stays until it is old, or is laid there anew
            if label.had >= self.readers:
                self._remove(key)
            else:
                _write_label(lock, label)
        return Decoded(batches, label.taken, label.skipped, label.bytes)

    def _lay(self, lock: int, key: str, made: Decoded) -> None:
        if not made.batches or not self._has_room(sum(batch.nbytes for batch in made.batches)):
            self._remove(key)
            return
        # A lock that is old may be removed while it is held: so nobody writes to a file that another has written to.
        part = Path(self.directory, f"{key}-{uuid4().hex}.part")
        try:
            with pa.OSFile(str(part), "wb") as file, pa.ipc.new_stream(file, made.batches[0].schema) as writer:
                for batch in made.batches:
                    writer.write_batch(batch)
            part.rename(self._path(key))
        finally:
            part.unlink(missing_ok=True)
        _write_label(lock, _Label(made.taken, made.skipped, made.bytes, had=1))

    def _has_room(self, wanted: int) -> bool:
        """Whether so many bytes fit, when what is old is gone."""
        with os.scandir(self.directory) as found:
            for entry in found:
                try:
                    status = entry.stat()
                    if time.time() - status.st_mtime > KEPT_SECONDS:
                        Path(entry.path).unlink()
                    else:
                        wanted += status.st_size
                except FileNotFoundError:  # the last reader took it
                    continue
        return wanted <= MOST_BYTES

    def _path(self, key: str) -> Path:
        return Path(self.directory, f"{key}.arrow")

    def _remove(self, key: str) -> None:
        for path in (self._path(key), Path(self.directory, f"{key}.lock")):
            path.unlink(missing_ok=True)


@contextmanager
def _locked(path: Path) -> Iterator[int | None]:
    """Hold a lock, which ends with the process; None when it cannot be had, or what it was for is gone meanwhile."""
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        yield None
        return
    try:
        yield lock if _acquired(lock) and os.fstat(lock).st_nlink else None
    finally:
        os.close(lock)


def _acquired(lock: int) -> bool:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            if time.monotonic() >= deadline:
                return False
            # A lock cannot be waited for with an end to it, and a process that was stopped must stop no other target.
            time.sleep(_PAUSE)
        else:
            return True


def _read_label(lock: int) -> _Label | None:
    """None when nothing was laid there, or whoever was about to was killed."""
    try:
        text = os.pread(lock, 4096, 0)
        return _Label(**json.loads(text)) if text else None
    except (OSError, ValueError, TypeError):
        return None


def _write_label(lock: int, label: _Label) -> None:
    text = json.dumps(asdict(label)).encode()
    os.ftruncate(lock, 0)
    os.pwrite(lock, text, 0)
