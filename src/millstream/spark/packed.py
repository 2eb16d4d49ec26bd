"""Changes on their way from Spark's SQL to the task that delivers them: as rows that any number of tables can share.

A row has a piece of a table's changes, in Arrow's stream format; or a piece of work that needs no SQL, which the task
does itself; or what a task before it has to say. The task first takes all of its rows to disk: tables are delivered
one after another, or side by side, whatever order they come in.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa

from millstream.changelog import schema
from millstream.model import Json, Relation
from millstream.spark.images import Binding
from millstream.spark.joining import Joiner, Named
from millstream.spark.stage import describe
from millstream.targets.base import Receipt

PACKED = pa.schema(
    [
        pa.field("relation", pa.int32()),
        pa.field("changes", pa.binary()),
        pa.field("left_out", pa.int64()),
        pa.field("work", pa.string()),
        pa.field("error", pa.string()),
    ]
)
PACKED_DDL = "relation int, changes binary, left_out bigint, work string, error string"


def pack(
    binding: Binding, relation_id: int, begin: int, *, isolate: bool = False, skip: bool = False
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """The function for `mapInArrow`: images in, packed changes out; the transforms from `begin` on are done here.

    `isolate` and `skip`: as a `Joiner` has them.
    """

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        joiner = Joiner(binding.bound(), begin, isolate=isolate, skip=skip)
        try:
            for changes in joiner.changes(batches):
                yield _row(relation=relation_id, changes=_stream(changes))
            yield _row(relation=relation_id, left_out=joiner.left_out)
        except Named as failed:
            yield _row(error=json.dumps(failed.error))
        except Exception as failed:  # noqa: BLE001 - named to the driver, which raises it there
            yield _row(error=json.dumps(describe(failed)))

    return run


def packed_work(pieces: list[list[Json]]) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """The function for `mapInArrow`: numbers of tasks in, their work out, for what needs no SQL."""

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                for piece in pieces[number]:
                    yield _row(work=json.dumps(piece))

    return run


def _row(**values: object) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([values], schema=PACKED)


def _stream(changes: pa.RecordBatch) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, changes.schema) as writer:
        writer.write_batch(changes)
    return bytes(sink.getvalue())


@dataclass
class Unpacked:
    """The changes of one table on disk, and a count of them. See `stage.Reading`."""

    relation: Relation
    relation_id: int
    path: Path
    rows: int = 0
    bytes: int = 0
    left_out: int = 0
    seqs: list[int] = field(default_factory=list)
    detail: Json = field(default_factory=dict)

    @property
    def shaped(self) -> Relation:
        return self.relation

    @property
    def read(self) -> int:
        """How many changes of the source these were."""
        return self.rows + self.left_out

    @property
    def skipped(self) -> int:
        return self.left_out

    def batches(self) -> Iterator[pa.RecordBatch]:
        """In seq order; can be asked for again."""
        if self.rows:
            with pa.OSFile(str(self.path)) as file, pa.ipc.open_stream(file) as reader:
                yield from reader

    def receipts(self) -> list[Receipt]:
        if not self.rows:
            return []
        first, last = self.seqs[0], self.seqs[-1]
        return [Receipt(self.relation_id, self.relation.table, self.rows, self.bytes, first, last, self.detail)]


@dataclass(frozen=True)
class Unpacking:
    """All that a task was given."""

    tables: dict[int, Unpacked]
    work: list[Json]
    error: Json | None


def unpack(batches: Iterable[pa.RecordBatch], relations: dict[int, Relation], scratch: Path) -> Unpacking:
    """Take the rows of a task to disk. `relations` are the tables as targets get them, by number."""
    tables: dict[int, Unpacked] = {}
    writers: dict[int, pa.RecordBatchStreamWriter] = {}
    work: list[Json] = []
    error: Json | None = None
    try:
        for row in (row for batch in batches for row in batch.to_pylist()):
            if row["error"] is not None:
                error = error or json.loads(row["error"])
            elif row["work"] is not None:
                work.append(json.loads(row["work"]))
            else:
                number = row["relation"]
                if number not in tables:
                    tables[number] = Unpacked(relations[number], number, scratch / f"{number}.arrow")
                    writers[number] = pa.ipc.new_stream(str(tables[number].path), schema(relations[number]))
                _add(tables[number], writers[number], row)
    finally:
        for writer in writers.values():
            writer.close()
    return Unpacking(tables, work, error)


def _add(table: Unpacked, writer: pa.RecordBatchStreamWriter, row: Json) -> None:
    table.left_out += row["left_out"] or 0
    if row["changes"] is None:
        return
    with pa.ipc.open_stream(row["changes"]) as reader:
        for batch in reader:
            writer.write_batch(batch)
            seqs = batch["_ms_seq"]
            table.rows += batch.num_rows
            table.bytes += batch.nbytes
            table.seqs = [*table.seqs[:1], seqs[0].as_py(), seqs[-1].as_py()]
