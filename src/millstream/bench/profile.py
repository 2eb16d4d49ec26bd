"""Where the time of a drain goes: processor time per change, step by step.

What the server, capture, the JVM and the driver use is counted while a drain runs. What a delivery task does is
done once more in this process, alone, so that its steps can be told apart.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path

import pyarrow as pa

from millstream.bench.frame import OURS, Round
from millstream.bench.rig import Backlog
from millstream.changelog import assemble
from millstream.journal import JournalReader
from millstream.model import Json, Relation, SeqRange
from millstream.spark.rows import Opener, Rows
from millstream.targets.base import Attempt
from millstream.targets.files import FilesOptions, FilesStager

STEP = 100_000
"""Changes taken at a time: about what a batch holds."""


def of(rounds: Sequence[Round], backlog: Backlog, journal: Path, scratch: Path) -> Json:
    """Microseconds of processor time per change: processes as they were in the part's runs, steps as they are here."""
    part = backlog.part.name
    runs = [one for one in rounds if one.part == part]
    rows = runs[0].rows

    def used(process: str) -> float:
        seconds = statistics.median(one.taken[OURS].cpu_seconds.get(process, 0.0) for one in runs)
        return round(seconds / rows * 1e6, 2)

    processes = {process: used(process) for process in ("server", "capture", "workers", "jvm", "driver")}
    return {"part": part, "unit": "us/change", "processes": processes, "task": _task(journal, backlog, scratch)}


class _Clock:
    """Processor time of this process, by step."""

    def __init__(self) -> None:
        self.spent = dict.fromkeys(("read", "decode", "write"), 0.0)
        self._at = time.process_time()

    def lap(self, step: str) -> None:
        """What was used since the last lap belongs to this step."""
        now = time.process_time()
        self.spent[step] += now - self._at
        self._at = now


def _task(journal: Path, backlog: Backlog, scratch: Path) -> Mapping[str, float]:
    """Deliver the backlog once more, as tasks do it, into files that nobody reads."""
    reader = JournalReader([str(journal)])
    prefix = reader.header().event_prefix
    stager = FilesStager(str(scratch), 1, FilesOptions.model_fields["compression"].default)
    clock = _Clock()
    for start in range(backlog.warm, backlog.goal, STEP):
        span = SeqRange(start, min(start + STEP, backlog.goal))
        slices = [(piece, span) for piece in sorted(reader.slices(span), key=lambda piece: piece.relation)]
        opener = Opener(reader.locations, slices)
        for number, group in groupby(slices, key=lambda one: one[0].relation):
            relation = reader.relation(number)
            changes = _decoded(relation, number, prefix, Rows(opener, None, group), clock)
            stager.stage(relation, number, changes, Attempt(0, start))
            clock.lap("write")
    return {step: round(seconds / backlog.part.changes * 1e6, 2) for step, seconds in clock.spent.items()}


def _decoded(
    relation: Relation, number: int, prefix: str, rows: Iterable[pa.RecordBatch], clock: _Clock
) -> Iterator[pa.RecordBatch]:
    for raw in rows:
        clock.lap("read")  # and finding the slices before, which is part of it
        decoded = assemble(raw, relation, number, prefix)
        clock.lap("decode")
        yield decoded
        clock.lap("write")
