"""Durable steps on the writer's own disk, each with the one meaning it has everywhere.

A failed fsync ends the process: after one, the kernel may have thrown the pages away and a second
fsync would say yes, so nothing this process believes about the file holds any more. The next
process reads what is really there.
"""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from millstream.checksum import crc32
from millstream.errors import JournalError, JournalFull

EXIT_FSYNC = 74
"""Exit status after a failed fsync (EX_IOERR of sysexits)."""

HEADER = "journal.json"
HEAD = "head"
SEGMENTS = "segments"

FILE_MODE = 0o600
DIRECTORY_MODE = 0o700

_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_IOV_MAX = 512


@contextmanager
def disk_errors(path: Path, doing: str) -> Iterator[None]:
    """Turn what the operating system says into JournalFull or JournalError with a remedy."""
    try:
        yield
    except OSError as error:
        raise translated(error, path, doing) from error


def translated(error: OSError, path: Path, doing: str) -> JournalError:
    reason = os.strerror(error.errno) if error.errno else str(error)
    if error.errno in _NO_ROOM:
        return JournalFull(
            f"no room to {doing}: {path}: {reason}", hint="free space on the journal's disk; capture goes on by itself"
        )
    if error.errno in {errno.EROFS, errno.EACCES, errno.EPERM}:
        return JournalError(
            f"cannot {doing}: {path}: {reason}", hint="the journal's directory must be writable by this user"
        )
    return JournalError(f"cannot {doing}: {path}: {reason}", hint="look at the journal's disk")


def open_file(path: Path, flags: int) -> int:
    return os.open(path, flags, FILE_MODE)


def write_all(fd: int, parts: Sequence[Any]) -> None:
    """Write all parts (anything with the buffer protocol) in as few system calls as it takes."""
    views = [memoryview(part).cast("B") for part in parts if len(memoryview(part)) > 0]
    while views:
        written = os.writev(fd, views[:_IOV_MAX])
        while views and written >= len(views[0]):
            written -= len(views.pop(0))
        if written:
            views[0] = views[0][written:]


def sync_file(fd: int, path: Path) -> None:
    """Make a file's bytes durable, or end the process."""
    try:
        os.fdatasync(fd)
    except OSError as error:
        _end_process(path, error)


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable, or end the process."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    except OSError as error:
        _end_process(path, error)
    finally:
        os.close(fd)


def _end_process(path: Path, error: OSError) -> None:
    # Not an exception: nobody may catch this and go on with a file whose pages may be gone.
    text = f"millstream: fsync of {path} failed: {error.strerror}; ending now, nothing uncommitted is lost\n"
    os.write(sys.stderr.fileno(), text.encode())
    os._exit(EXIT_FSYNC)


def make_directory(path: Path) -> None:
    """Create a directory, its parents too, and make their names durable."""
    missing = []
    at = path
    while not at.exists():
        missing.append(at)
        at = at.parent
    for directory in reversed(missing):
        directory.mkdir(mode=DIRECTORY_MODE)
        sync_directory(directory.parent)


def replace_file(path: Path, content: bytes) -> None:
    """Replace a file so that a reader, and a crash of the machine, meets the old or the new one."""
    temporary = path.with_name(path.name + ".tmp")
    fd = open_file(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        write_all(fd, [content])
        sync_file(fd, temporary)
    finally:
        os.close(fd)
    temporary.rename(path)
    sync_directory(path.parent)


def remove_file(path: Path) -> bool:
    """Remove a file if it is there."""
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    return True


def sealed_json(body: Any) -> bytes:
    """JSON that carries its own CRC-32 and stays JSON."""
    return sealed_text(json.dumps(body, separators=(",", ":"), sort_keys=True))


def sealed_text(text: str) -> bytes:
    """As `sealed_json`, of a body that is JSON already."""
    return b'{"crc":%d,"body":%s}\n' % (crc32(text.encode()), text.encode())


def unsealed_json(raw: bytes) -> Any | None:
    """The body of `sealed_json`; None unless every byte is as it was written."""
    head, _, rest = raw.partition(b',"body":')
    body = rest.removesuffix(b"}\n")
    if not head.startswith(b'{"crc":') or not head[7:].isdigit() or int(head[7:]) != crc32(body):
        return None
    return json.loads(body)
