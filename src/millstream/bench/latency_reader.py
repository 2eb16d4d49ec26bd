"""The second process of the latency bench: it looks, again and again, and writes down when it saw what.

`python -m millstream.bench.latency_reader names DIRECTORY` sees the names of files that appear in a directory,
`... length FILE` how long a file is. Nothing else is read, so that looking costs next to nothing. When its standard
input ends it prints one JSON list of `[name or length, Unix time]`.
"""

from __future__ import annotations

import json
import os
import select
import sys
import time
from collections.abc import Callable
from pathlib import Path

EVERY = 0.002
"""Seconds between two looks: the most that a figure is too high by."""

Look = Callable[[], list[str | int]]


def names(directory: Path) -> Look:
    """The whole files that are new in a directory since the last look."""
    seen: set[str] = set()

    def look() -> list[str | int]:
        try:
            fresh = {entry.name for entry in os.scandir(directory) if entry.name.endswith(".json")} - seen
        except FileNotFoundError:
            return []
        seen.update(fresh)
        return list(fresh)

    return look


def length(file: Path) -> Look:
    """The length of a file, if it is another than at the last look."""
    seen = 0

    def look() -> list[str | int]:
        nonlocal seen
        try:
            now = file.stat().st_size
        except FileNotFoundError:
            return []
        if now == seen:
            return []
        seen = now
        return [now]

    return look


WAYS: dict[str, Callable[[Path], Look]] = {"names": names, "length": length}


def main(way: str, path: Path) -> None:
    """Look until standard input ends, and once more."""
    look = WAYS[way](path)
    found: list[tuple[str | int, float]] = []
    over = False
    while not over:
        over = bool(select.select([sys.stdin], [], [], EVERY)[0])
        fresh = look()
        now = time.time()
        found += [(seen, now) for seen in fresh]
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
