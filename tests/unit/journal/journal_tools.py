"""Makes up transactions, writes them to journals, and reads everything back."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from millstream.journal import JOURNAL, JournalReader, JournalWriter, open_slice
from millstream.model import Column, Relation, SeqRange
from millstream.sources.base import CAPTURED, Block, Told

START = 1_000
RELATIONS = 4


@dataclass(frozen=True)
class Transaction:
    """Rows of one transaction, in the schema CAPTURED, and its end."""

    rows: pa.RecordBatch

    @property
    def resume(self) -> int:
        return int(self.rows.column("resume_position")[0].as_py())

    @property
    def commit(self) -> int:
        return int(self.rows.column("commit_position")[0].as_py())

    @property
    def ts(self) -> int:
        return int(self.rows.column("commit_ts")[0].value)


class Maker:
    """Makes transactions at growing positions, with random content from a seed."""

    def __init__(self, seed: int = 1, position: int = START, payload: int = 30) -> None:
        self._random = random.Random(seed)
        self._bytes = np.random.default_rng(seed)
        self._payload = payload
        self.position = position

    def transaction(self, rows: int, *, relations: int = RELATIONS, payload: int | None = None) -> Transaction:
        self.position += self._random.randrange(1, 50)
        commit = self.position
        self.position += self._random.randrange(1, 20)
        size = self._payload if payload is None else payload
        payloads = [self._bytes.bytes(self._random.randrange(0, 2 * size + 1)) for _ in range(rows)]
        ts = 1_700_000_000_000_000 + commit * 1000 + self._random.randrange(-200_000, 200_000)
        columns = [
            pa.array(np.arange(rows), pa.int32()),
            pa.array(self._bytes.choice(list(b"cud"), rows), pa.uint8()),
            pa.array(np.full(rows, commit), pa.int64()),
            pa.array(np.full(rows, self.position), pa.int64()),
            pa.array(np.full(rows, ts), pa.int64()).cast(pa.timestamp("us", "UTC")),
            pa.array(np.full(rows, self._random.randrange(1 << 32)), pa.int64()),
            pa.array(self._bytes.integers(0, relations + 1, rows), pa.int32()),
            pa.array(payloads, pa.large_binary()),
        ]
        return Transaction(pa.RecordBatch.from_arrays(columns, schema=CAPTURED))

    def singles(self, count: int) -> list[Transaction]:
        """Many transactions of one row each, made quickly."""
        rows = self.transaction(count).rows
        commit = self.position + 3 * np.arange(1, count + 1)
        self.position = int(commit[-1]) + 2
        columns = {name: rows.column(name) for name in rows.schema.names}
        columns["tx_index"] = pa.array(np.zeros(count), pa.int32())
        columns["commit_position"] = pa.array(commit)
        columns["resume_position"] = pa.array(commit + 2)
        rows = pa.RecordBatch.from_arrays(list(columns.values()), schema=CAPTURED)
        return [Transaction(rows.slice(at, 1)) for at in range(count)]

    def transactions(self, sizes: Iterable[int]) -> list[Transaction]:
        return [self.transaction(size) for size in sizes]


def relation(number: int) -> Relation:
    return Relation(number, "public", f"t{number}", "d", (Column("id", 23, key=True), Column("v", 25)), ("id",))


def create(path: Path, **options: Any) -> JournalWriter:
    writer = JournalWriter.create(
        path, source="shop", source_kind="postgres", identity={"slot": "s"}, start_position=START, **options
    )
    for number in range(1, RELATIONS + 1):
        assert writer.register(relation(number)) == number
    return writer


def block(*transactions: Transaction, **facts: Any) -> Block:
    return Block(pa.concat_batches([one.rows for one in transactions]), **facts)


def append_in_parts(writer: JournalWriter, transaction: Transaction, rows: int, told: tuple[Told, ...] = ()) -> None:
    """Append one transaction as several blocks, all but the last with the transaction open; that has what was told."""
    for start in range(0, len(transaction.rows), rows):
        part, goes_on = transaction.rows.slice(start, rows), start + rows < len(transaction.rows)
        writer.append(Block(part, open_transaction=goes_on, told=() if goes_on else told))


def numbered(transactions: Sequence[Transaction], first_seq: int = 1) -> pa.Table:
    """The rows a journal must hold after these transactions."""
    rows = pa.Table.from_batches([one.rows for one in transactions], CAPTURED)
    seq = pa.array(np.arange(first_seq, first_seq + len(rows)), pa.int64())
    return pa.Table.from_arrays([seq, *rows.columns], schema=JOURNAL).combine_chunks()


def read_range(reader: JournalReader, range: SeqRange) -> pa.Table:
    """All rows of a range through slices, in seq order."""
    slices = reader.slices(range)
    found = [open_slice(slice, reader.locations, range) for slice in slices]
    for slice, batch in zip(slices, found, strict=True):
        assert set(batch.column("relation").to_pylist()) <= {slice.relation}
    return pa.Table.from_batches(found, JOURNAL).sort_by("seq").combine_chunks()


def read_all(path: Path) -> pa.Table:
    reader = JournalReader([str(path)])
    head = reader.head()
    assert head is not None
    return read_range(reader, SeqRange(reader.first_seq() - 1, head.seq))


def seal_everything(writer: JournalWriter) -> None:
    """Let background sealing finish."""
    writer.maintain()
    while writer._closed.backlog:
        writer._closed.seal_next()
        if writer._closed.collect(wait=True):
            writer._publish()


def segment_files(path: Path) -> list[Path]:
    return sorted((path / "segments").glob("*.arrows"))


def ends(transactions: Sequence[Transaction], first_seq: int = 1) -> Iterator[int]:
    """The last seq of each transaction."""
    seq = first_seq - 1
    for one in transactions:
        seq += len(one.rows)
        yield seq


def script(body: str) -> list[str]:
    """A command that runs `body` in another Python with these tools at hand."""
    lines = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\nfrom journal_tools import *\n"
    return [sys.executable, "-c", lines + body]
