"""How fast row messages become typed columns, on one core, against the row-at-a-time loop.

The table has ten columns of everyday types. The loop is the straightforward one: a cell's length by
`int.from_bytes`, its text by a slice, strings only; that it casts nothing is in its favour.
"""

from __future__ import annotations

import random
import statistics
import struct
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millstream.model import Column, Op, Relation
from millstream.sources.decoders import decoder

ROWS = 200_000
LOOP_ROWS = 20_000
RUNS = 5

_OID = 16_384
_COLUMNS = (
    Column("id", 20, key=True),
    Column("customer", 20),
    Column("quantity", 23),
    Column("price", 1700, ((12 << 16) | 2) + 4),
    Column("note", 25),
    Column("status", 1043, 24),
    Column("changed", 1184),
    Column("paid", 16),
    Column("weight", 701),
    Column("due", 1082),
)
TABLE = Relation(_OID, "bench", "orders", "d", _COLUMNS, ("id",), ("id",), enriched=True)


def run(rows: int = ROWS, loop_rows: int = LOOP_ROWS, runs: int = RUNS) -> dict[str, Any]:
    """Measure both ways by turns, take medians, and compare every value of the loop's rows."""
    op, payload = inserts(rows)
    few = payload.slice(0, loop_rows).to_pylist()
    columns = decoder(TABLE)
    columns.decode(op, payload)  # the first time pays for loading and for the memory of the process
    fast, slow = [], []
    for _ in range(runs):
        fast.append(rows / _seconds(lambda: columns.decode(op, payload)))
        slow.append(loop_rows / _seconds(lambda: row_at_a_time(few)))
    value, baseline = statistics.median(fast), statistics.median(slow)
    return {
        "name": "decode",
        "value": round(value),
        "unit": "rows/s",
        "baseline": "row-at-a-time Python, strings only",
        "baseline_value": round(baseline),
        "ratio": round(value / baseline, 1),
        "runs": [{"value": round(ours), "baseline_value": round(loop)} for ours, loop in zip(fast, slow, strict=True)],
        "rows": rows,
        "equal": _equal(columns.decode(op, payload).after.slice(0, loop_rows), row_at_a_time(few)),
    }


def inserts(rows: int) -> tuple[npt.NDArray[np.uint8], pa.LargeBinaryArray]:
    """Insert messages of the table, the same ones each time."""
    dice = random.Random(1)  # noqa: S311 - sample data
    raw = [_insert(dice, number) for number in range(rows)]
    return np.full(rows, Op.CREATE, np.uint8), pa.array(raw, pa.large_binary())


def _insert(dice: random.Random, number: int) -> bytes:
    texts = (
        str(number),
        str(dice.getrandbits(40)),
        str(dice.randrange(1000)),
        f"{dice.randrange(10**6)}.{dice.randrange(100):02d}",
        f"{dice.getrandbits(80):020x}",
        dice.choice(("new", "paid", "packed", "sent", "returned")),
        f"2024-{dice.randrange(1, 13):02d}-17 12:34:56.{dice.randrange(10**6):06d}+00",
        dice.choice("tf"),
        repr(dice.random()),
        f"2024-03-{dice.randrange(1, 29):02d}",
    )
    cells = b"".join(b"t" + struct.pack(">I", len(text)) + text.encode() for text in texts)
    return b"I" + struct.pack(">I", _OID) + b"N" + struct.pack(">H", len(texts)) + cells


def row_at_a_time(payload: list[bytes]) -> list[list[str | None]]:
    """The plain loop: every cell of every row as a string."""
    found = []
    for raw in payload:
        at = 8
        row: list[str | None] = []
        for _ in range(int.from_bytes(raw[6:8], "big")):
            if raw[at : at + 1] == b"t":
                end = at + 5 + int.from_bytes(raw[at + 1 : at + 5], "big")
                row.append(raw[at + 5 : end].decode())
                at = end
            else:
                row.append(None)
                at += 1
        found.append(row)
    return found


def _equal(typed: pa.RecordBatch, rows: list[list[str | None]]) -> bool:
    """Whether the typed columns hold what the loop's strings say."""
    for column, texts in zip(typed.columns, zip(*rows, strict=True), strict=True):
        plain = ["true" if text == "t" else "false" for text in texts] if column.type == pa.bool_() else texts
        if not pa.array(plain, pa.string()).cast(column.type).equals(column):
            return False
    return bool(typed.num_rows == len(rows))


def _seconds(work: Callable[[], object]) -> float:
    """Seconds of one core, whatever else runs on the machine: both ways use one thread."""
    began = time.process_time()
    work()
    return time.process_time() - began
