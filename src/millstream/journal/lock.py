"""One writer at a time: a lock for processes on this host, an epoch for everybody else."""

from __future__ import annotations

import fcntl
import json
import os
import socket
from datetime import UTC, datetime
from pathlib import Path

from millstream.errors import JournalCorrupt, JournalLocked
from millstream.journal.files import disk_errors, open_file, replace_file

FILE = "writer.lock"
EPOCH = "epoch"


class WriterLock:
    """Held from construction to `release`, or to the death of the process."""

    def __init__(self, directory: Path) -> None:
        path = directory / FILE
        with disk_errors(path, "lock the journal"):
            self._fd = open_file(path, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(self._fd, 1000, 0)
            os.close(self._fd)
            raise JournalLocked(
                f"the journal {directory} is being written by {_describe(owner)}",
                hint="stop that process first; a journal has one writer",
            ) from None
        me = {"pid": os.getpid(), "host": socket.gethostname(), "started": datetime.now(UTC).isoformat()}
        with disk_errors(path, "lock the journal"):
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, json.dumps(me).encode() + b"\n", 0)

    def release(self) -> None:
        """Let the next writer in. Idempotent. The file stays: removing it would race with the next."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _describe(owner: bytes) -> str:
    try:
        facts = json.loads(owner)
        return f"process {facts['pid']} on {facts['host']} since {facts['started']}"
    except (ValueError, KeyError, TypeError):
        return "another process"


def next_epoch(directory: Path) -> int:
    """Count one more opening, durably, and say which it is."""
    path = directory / EPOCH
    with disk_errors(path, "count the writer's epoch"):
        try:
            epoch = int(path.read_bytes()) + 1
        except FileNotFoundError:
            epoch = 1
        except ValueError:
            raise JournalCorrupt(
                f"{path} does not hold a number",
                hint="write into it a number above every epoch that `journal verify` shows",
            ) from None
        replace_file(path, b"%d\n" % epoch)
    return epoch
