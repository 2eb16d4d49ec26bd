"""What a second process saw of a target, and when: the lag of every change, from its commit until then.

A target shows how far it is by itself: directories by the names in `_millstream/commits`, a database by the cursor
that is committed together with the rows. When a change was committed stands in the journal.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millstream.errors import BenchFailed
from millstream.journal import JournalReader, open_slice
from millstream.model import SeqRange

STEP = 50_000

Milliseconds = npt.NDArray[np.float64]
Looks = list[tuple[int, float]]
"""What was seen (a seq, a length) with the Unix time of each; both grow."""


@contextmanager
def reader(way: str, what: str | Path) -> Iterator[Looks]:
    """The second process (see `latency_reader`); the list is filled when the block ends."""
    looks: Looks = []
    command = [sys.executable, "-m", "millstream.bench.latency_reader", way, str(what)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield looks
    finally:
        said, _ = process.communicate()
    if process.returncode != 0:
        raise BenchFailed("the second process, which looks at the target, failed")
    looks += sorted((int(seen), at) for seen, at in json.loads(said))


def lags(journal: Path, looks: Looks, first: int, last: int) -> tuple[Milliseconds, Milliseconds]:
    """Of the changes from seq `first` to `last`: when each was committed (Unix time), and its lag, both in ms.

    Fewer than that if the last of them were never seen.
    """
    committed = _commit_times(journal, SeqRange(first - 1, last)) / 1e3
    seen, at = (np.array(column, dtype=np.float64) for column in (zip(*looks, strict=True) if looks else ((), ())))
    found = np.searchsorted(seen, np.arange(first, last + 1))
    there = found < len(seen)
    return committed[there], at[found[there]] * 1e3 - committed[there]


def _commit_times(journal: Path, span: SeqRange) -> npt.NDArray[np.int64]:
    """In order of seq, in microseconds of Unix time."""
    locations = [str(journal)]
    reader = JournalReader(locations)
    times = np.empty(span.end - span.start, np.int64)
    for start in range(span.start, span.end, STEP):
        part = SeqRange(start, min(start + STEP, span.end))
        for piece in reader.slices(part):
            rows = open_slice(piece, locations, part)
            at = rows.column("seq").to_numpy() - span.start - 1
            times[at] = rows.column("commit_ts").cast(pa.int64()).to_numpy()
    return times
