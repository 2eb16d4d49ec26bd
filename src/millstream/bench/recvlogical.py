"""The baseline: `pg_recvlogical`, the server's own reader of its log, to a file.

The file has the messages of pgoutput as they came, each with a line feed behind it.
"""

from __future__ import annotations

import hashlib
import struct
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from millstream.bench.frame import Taken
from millstream.bench.rig import LONGEST, PUBLICATION, Backlog
from millstream.errors import BenchFailed

NAME = "pg_recvlogical to a file"
EPOCH_2000_US = 946_684_800_000_000
_READ = 1 << 20
_FIXED = {b"B": 21, b"C": 26}


def drain(backlog: Backlog, file: Path) -> Taken:
    """Read a copy of the slot to its end; the time is the process's own, from start to exit."""
    with backlog.slot("baseline") as slot:
        began = time.perf_counter()
        done = subprocess.run(
            command(backlog.server.bin("pg_recvlogical"), backlog.uri, slot, file, "--endpos", backlog.end),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=LONGEST,
        )
        seconds = time.perf_counter() - began
    if done.returncode != 0:
        raise BenchFailed(f"pg_recvlogical failed: {done.stderr.strip()}")
    equal = digest(file) == backlog.reference.lines
    file.unlink()
    return Taken(seconds, equal)


def command(program: Path, uri: str, slot: str, file: Path, *more: str) -> list[str]:
    """How it is called: its own defaults, so the file is synced every ten seconds and at the end."""
    return [
        *(str(program), "--dbname", uri, "--slot", slot, "--start", "--no-loop", "--file", str(file)),
        *("-o", "proto_version=1", "-o", f"publication_names={PUBLICATION}", *more),
    ]


def digest(file: Path) -> str:
    """SHA-256 of a file."""
    found = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(_READ):
            found.update(block)
    return found.hexdigest()


@dataclass(frozen=True)
class Transaction:
    """A transaction of the file: when it was committed, its changes, and where its Commit message ends."""

    commit_us: int
    changes: int
    end: int


def transactions(data: bytes) -> Iterator[Transaction]:
    """The whole transactions of a file, in order. Raises ValueError for what is no message."""
    at = commit_us = changes = 0
    try:
        while at < len(data):
            tag = data[at : at + 1]
            end = at + _length(data, at)
            if end >= len(data):  # the last message is not whole yet
                return
            if data[end : end + 1] != b"\n":
                raise ValueError(f"no message at {at}")
            if tag == b"B":
                commit_us = struct.unpack_from(">q", data, at + 9)[0] + EPOCH_2000_US
                changes = 0
            elif tag in (b"I", b"U", b"D"):
                changes += 1
            elif tag == b"C":
                yield Transaction(commit_us, changes, end)
            at = end + 1
    except struct.error:  # nor is this one
        return


def _length(data: bytes, at: int) -> int:
    """The length of the message that begins at `at`."""
    tag = data[at : at + 1]
    if tag in _FIXED:
        return _FIXED[tag]
    if tag == b"R":
        return _relation_end(data, at) - at
    if tag == b"Y":
        return _text_end(data, _text_end(data, at + 5)) - at
    if tag not in (b"I", b"U", b"D"):
        raise ValueError(f"no message at {at}")
    end = _tuple_end(data, at + 6)
    if tag == b"U" and data[at + 5 : at + 6] in (b"K", b"O"):
        end = _tuple_end(data, end + 1)
    return end - at


def _tuple_end(data: bytes, at: int) -> int:
    (columns,) = struct.unpack_from(">h", data, at)
    at += 2
    for _ in range(columns):
        at += 5 + int(struct.unpack_from(">i", data, at + 1)[0]) if data[at : at + 1] in (b"t", b"b") else 1
    return at


def _relation_end(data: bytes, at: int) -> int:
    at = _text_end(data, _text_end(data, at + 5)) + 1
    (columns,) = struct.unpack_from(">h", data, at)
    at += 2
    for _ in range(columns):
        at = _text_end(data, at + 1) + 8
    return at


def _text_end(data: bytes, at: int) -> int:
    end = data.find(b"\0", at)
    return end + 1 if end >= 0 else len(data)
