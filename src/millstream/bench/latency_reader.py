"""The second process of the latency bench: it looks, again and again, and writes down when it saw what.

`python -m millstream.bench.latency_reader names DIRECTORY` sees the numbers by which files that appear in a
directory are called, `... length FILE` how long a file is, `... cursor URI` the cursor in a database. Nothing else is
read, so that looking costs next to nothing. When its standard input ends it prints one JSON list of
`[number, Unix time]`.
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

Look = Callable[[], list[int]]


def names(directory: str) -> Look:
    """The numbers of the whole files that are new in a directory since the last look."""
    seen: set[str] = set()

    def look() -> list[int]:
        try:
            fresh = {entry.name for entry in os.scandir(directory) if entry.name.endswith(".json")} - seen
        except FileNotFoundError:
            return []
        seen.update(fresh)
        return [int(name.removesuffix(".json")) for name in fresh]

    return look


def length(file: str) -> Look:
    """The length of a file, if it is another than at the last look."""

    def now() -> int:
        try:
            return Path(file).stat().st_size
        except FileNotFoundError:
            return 0

    return _grown(now)


def cursor(uri: str) -> Look:
    """The cursor that stands in a target database, if it has moved since the last look."""
    import psycopg

    connection = psycopg.connect(uri, autocommit=True)
    there = False

    def now() -> int:
        nonlocal there
        if not there:
            row = connection.execute("SELECT to_regclass('_millstream.cursors') IS NOT NULL").fetchone()
            there = row == (True,)
        found = connection.execute("SELECT max(seq) FROM _millstream.cursors").fetchone() if there else None
        return (found[0] or 0) if found else 0

    return _grown(now)


def _grown(now: Callable[[], int]) -> Look:
    seen = 0

    def look() -> list[int]:
        nonlocal seen
        before, seen = seen, now()
        return [] if seen == before else [seen]

    return look


WAYS: dict[str, Callable[[str], Look]] = {"names": names, "length": length, "cursor": cursor}


def main(way: str, what: str) -> None:
    """Look until standard input ends, and once more."""
    look = WAYS[way](what)
    found: list[tuple[int, float]] = []
    over = False
    while not over:
        over = bool(select.select([sys.stdin], [], [], EVERY)[0])
        fresh = look()
        now = time.time()
        found += [(seen, now) for seen in fresh]
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
