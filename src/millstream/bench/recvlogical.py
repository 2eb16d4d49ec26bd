"""The baseline: `pg_recvlogical`, the server's own reader of its log, to a file."""

from __future__ import annotations

import hashlib
import subprocess
import time
from pathlib import Path

from millstream.bench.frame import Taken
from millstream.bench.rig import LONGEST, PUBLICATION, Backlog
from millstream.errors import BenchFailed

NAME = "pg_recvlogical to a file"
_READ = 1 << 20


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
