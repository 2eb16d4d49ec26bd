"""The two small files that say who a journal is (`journal.json`) and how far it goes (`head`), on this host."""

from __future__ import annotations

import os
from pathlib import Path

from millstream.journal.files import HEAD, HEADER, disk_errors, open_file
from millstream.journal.format import Head, Header


def journal_exists(path: Path) -> bool:
    """Whether a journal was created here, wholly: its header is the last thing `JournalWriter.create` writes."""
    return (path / HEADER).exists()


def read_header(path: Path) -> Header:
    """The header of the journal in a directory of this host."""
    return Header.from_bytes((path / HEADER).read_bytes())


def read_head(path: Path) -> Head | None:
    """The head of the journal in a directory of this host, None if it is gone or half written."""
    try:
        return Head.from_bytes((path / HEAD).read_bytes())
    except FileNotFoundError:
        return None


class HeadFile:
    """The head while a writer holds it open. It is written over in place: it has one size, and readers check it."""

    def __init__(self, path: Path) -> None:
        self._path = path / HEAD
        with disk_errors(self._path, "open the head"):
            self._fd = open_file(self._path, os.O_WRONLY | os.O_CREAT)

    @property
    def closed(self) -> bool:
        return self._fd < 0

    def publish(self, head: Head) -> None:
        """Let readers see up to there. What it names is durable already; the head itself need not be."""
        with disk_errors(self._path, "publish the head"):
            os.pwrite(self._fd, head.to_bytes(), 0)

    def close(self) -> None:
        os.close(self._fd)
        self._fd = -1
