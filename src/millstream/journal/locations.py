"""How a reader reaches a journal: base URLs opened through `pyarrow.fs`, nothing else.

No directory is listed, no file is asked for its size, nothing is mapped. So a reader works the
same on another host, where only the base URL differs.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
from pyarrow import fs

from millstream.errors import JournalError


class Locations:
    """The places where one journal can be read, in order of preference. Picklable."""

    def __init__(self, bases: Sequence[str]) -> None:
        if not bases:
            raise JournalError("a reader needs at least one location of its journal")
        self.bases = tuple(bases)
        self._opened: list[tuple[fs.FileSystem, str]] | None = None

    def __reduce__(self) -> tuple[object, ...]:
        return Locations, (self.bases,)

    def __str__(self) -> str:
        return ", ".join(self.bases)

    def read(self, name: str, offset: int, length: int) -> pa.Buffer:
        """Up to `length` bytes from `offset` of a file, from the first location that has it.

        Raises FileNotFoundError if none has.
        """
        failed: OSError | None = None
        for filesystem, base in self._filesystems():
            try:
                with filesystem.open_input_file(f"{base}/{name}") as file:
                    return file.read_buffer(length) if offset == 0 else _read_at(file, length, offset)
            except OSError as error:
                if failed is None or not isinstance(error, FileNotFoundError):
                    failed = error
        assert failed is not None  # noqa: S101 - there is at least one location
        if isinstance(failed, FileNotFoundError):
            raise FileNotFoundError(failed.errno, f"{name} is in none of {self}") from failed
        raise JournalError(f"cannot read {name} in {self}: {failed}", hint="check the journal's location") from failed

    def read_all(self, name: str) -> bytes:
        """A small file, whole."""
        pieces = []
        offset = 0
        while piece := self.read(name, offset, 1 << 20).to_pybytes():
            pieces.append(piece)
            offset += len(piece)
            if len(piece) < 1 << 20:
                break
        return b"".join(pieces)

    def _filesystems(self) -> list[tuple[fs.FileSystem, str]]:
        if self._opened is None:
            self._opened = [_open(base) for base in self.bases]
        return self._opened


def _read_at(file: pa.NativeFile, length: int, offset: int) -> pa.Buffer:
    file.seek(offset)
    return file.read_buffer(length)


def _open(base: str) -> tuple[fs.FileSystem, str]:
    """`file:` URLs are taken literally, as Spark does: a percent sign or a space is just itself."""
    scheme, separator, rest = base.partition("://")
    if not separator:
        return fs.LocalFileSystem(), base.rstrip("/")
    if scheme == "file":
        return fs.LocalFileSystem(), "/" + rest.strip("/")
    filesystem, path = fs.FileSystem.from_uri(base)
    return filesystem, path.rstrip("/")
