"""Where snapshots are kept: files below a base, which is a directory here, or a URL (`remote`).

On a disk a file is synced before it gets its name; elsewhere it is there when it was closed. Names are paths below
the base, with slashes.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from millstream.errors import SnapshotError
from millstream.snapshots.urls import below


class Summed:
    """A file that counts and sums up what passes through it, either way."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._sum = hashlib.sha256()
        self.bytes = 0
        self.closed = False

    def write(self, data: Any) -> int:
        self._pass(data)
        return self._file.write(data)

    def read(self, size: int = -1) -> bytes:
        # Files of pyarrow take no negative size for all of it.
        data = self._file.read() if size < 0 else self._file.read(size)
        self._pass(data)
        return data

    def flush(self) -> None:
        """What is behind it decides when anything is written."""

    def close(self) -> None:
        self.closed = True

    def readable(self) -> bool:
        return True

    writable = readable

    def seekable(self) -> bool:
        return False

    @property
    def sha256(self) -> str:
        return self._sum.hexdigest()

    def _pass(self, data: Any) -> None:
        self._sum.update(data)
        self.bytes += memoryview(data).nbytes


class Files(ABC):
    """Files below a base. Every error that leaves it is a SnapshotError."""

    def __init__(self, base: str) -> None:
        self.base = base

    @contextmanager
    def writing(self, name: str) -> Iterator[Summed]:
        """A file to be written from its beginning to its end; it is there, durably, when the block has ended."""
        with self._errors("write", name), self._create(name) as file:
            yield Summed(file)

    @contextmanager
    def reading(self, name: str) -> Iterator[Summed]:
        with self._errors("read", name), self._open(name) as file:
            yield Summed(file)

    def read(self, name: str) -> bytes | None:
        """A small file, whole; None if it is not there."""
        try:
            with self.reading(name) as file:
                return file.read()
        except SnapshotError as failed:
            if isinstance(failed.__cause__, FileNotFoundError):
                return None
            raise

    def write(self, name: str, data: bytes) -> None:
        with self.writing(name) as file:
            file.write(data)

    def folders(self, name: str) -> list[str]:
        """The names of the directories in one, sorted; none if it is not there."""
        with self._errors("list", name):
            return sorted(self._folders(name))

    def remove(self, name: str) -> None:
        """Remove a file. Idempotent."""
        with self._errors("remove", name):
            self._remove(name)

    def remove_folder(self, name: str) -> None:
        """Remove a directory with everything in it. Idempotent."""
        with self._errors("remove", name):
            self._remove_folder(name)

    @abstractmethod
    def _create(self, name: str) -> Any: ...

    @abstractmethod
    def _open(self, name: str) -> Any: ...

    @abstractmethod
    def _folders(self, name: str) -> list[str]: ...

    @abstractmethod
    def _remove(self, name: str) -> None: ...

    @abstractmethod
    def _remove_folder(self, name: str) -> None: ...

    @contextmanager
    def _errors(self, what: str, name: str) -> Iterator[None]:
        try:
            yield
        except OSError as failed:
            kind, why, hint = self._explain(failed)
            raise kind(f"cannot {what} {below(self.base, name)}: {why}", hint=hint) from failed

    def _explain(self, failed: OSError) -> tuple[type[SnapshotError], str, str]:
        """The error that it is to whoever asked, why, and what to do. Nothing in it is a secret."""
        why = failed.strerror or type(failed).__name__
        return SnapshotError, why, "check the path and its rights, and whether there is room"


class LocalFiles(Files):
    """A directory of this host's file system. Files are 0600."""

    def __init__(self, base: Path) -> None:
        super().__init__(str(base))
        self._base = base

    @contextmanager
    def _create(self, name: str) -> Iterator[IO[bytes]]:
        path = self._base / name
        self._make(path.parent)
        unfinished = path.with_name(f"{path.name}.tmp")
        with os.fdopen(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        unfinished.rename(path)
        self._sync(path.parent)

    def _make(self, folder: Path) -> None:
        """Make a directory, durably, with those it stands in."""
        if not folder.exists():
            self._make(folder.parent)
            folder.mkdir(mode=0o700, exist_ok=True)
            self._sync(folder.parent)

    @contextmanager
    def _open(self, name: str) -> Iterator[IO[bytes]]:
        with (self._base / name).open("rb") as file:
            yield file

    def _folders(self, name: str) -> list[str]:
        try:
            return [one.name for one in (self._base / name).iterdir() if one.is_dir()]
        except FileNotFoundError:
            return []

    def _remove(self, name: str) -> None:
        path = self._base / name
        path.unlink(missing_ok=True)
        if path.parent.exists():
            self._sync(path.parent)

    def _remove_folder(self, name: str) -> None:
        if (self._base / name).exists():
            shutil.rmtree(self._base / name)

    def _sync(self, folder: Path) -> None:
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
