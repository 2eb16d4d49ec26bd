"""The changes of a batch on disk, before the first table is committed: a commit cannot be taken back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from millstream.model import Relation
from millstream.targets.base import LaneBatch
from millstream.targets.lanes.lane import MESSAGES
from millstream.targets.lanes.runs import Run, by_table, runs


@dataclass(frozen=True)
class Spooled:
    """The changes of one table on disk: each of `runs` reads one back."""

    relation: Relation
    runs: Sequence[Callable[[], Run]]


def spool(batch: LaneBatch, scratch: Path, *, messages: bool) -> list[Spooled]:
    tables = []
    for number, parts in enumerate(by_table(batch.parts)):
        found: list[Callable[[], Run]] = []
        for run in runs(parts):
            if run.relation_id != MESSAGES or messages:
                found.append(_kept(run, scratch / f"{number}-{len(found)}.arrow"))
        if found or batch.range.start == batch.range.end:
            tables.append(Spooled(parts[-1].relation, found))
    return tables


def _kept(run: Run, path: Path) -> Callable[[], Run]:
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, run.changes.schema) as writer:
        writer.write_table(run.changes)
    # Not the run itself: whoever keeps the way to read it back would keep its changes in memory.
    relation, relation_id = run.relation, run.relation_id

    def read() -> Run:
        with pa.memory_map(str(path)) as file:
            return Run(relation, relation_id, pa.ipc.open_file(file).read_all())

    return read
