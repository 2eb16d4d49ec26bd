"""How fast each type becomes a column: a table with a column of each, one with arrays of each, and each alone.

One value in a thousand of a type that has values without a home is such a value, as tests have it too.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millstream.model import Column, Op, Relation
from millstream.sources.base import Decoded
from millstream.sources.postgres.decode import PostgresDecoder
from millstream.sources.postgres.types import TYPES, PgType

ROWS = 8_000
RUNS = 3
SLOWEST = 5

_OID = 16_385
_NUMERIC_12_2 = ((12 << 16) | 2) + 4
_PATTERN = 1_000
"""Rows that differ; longer tables repeat them."""

_EXAMPLES: dict[str, tuple[str, ...]] = {
    "bool": ("t", "f"),
    "int2": ("7", "-32768"),
    "int4": ("42", "-2147483648"),
    "int8": ("1234567", "-9223372036854775808"),
    "float4": ("0.1", "1e-07"),
    "float8": ("0.1", "3.141592653589793", "-1e+300"),
    "numeric": ("12.34", "-99999999.99"),
    "money": ("$12.34", "-$1,234,567.89"),
    "text": ("a few words", 'naïve, "quoted" and long enough to be a sentence of its own'),
    "bpchar": ("ab   ", "abcde"),
    "char": ("a", "z"),
    "uuid": ("6f1c0a7e-0000-4000-8000-000000000001", "b2b6a1b4-93d4-4c1f-9d52-6a1f6f9a1c55"),
    "bytea": ("\\x00ff10", "\\x" + "ab" * 30),
    "bit": ("10101",),
    "varbit": ("1", "1010101010"),
    "date": ("2024-02-29", "1999-12-31"),
    "timestamp": ("2024-02-29 12:34:56", "1999-12-31 23:59:59.999999"),
    "timestamptz": ("2024-02-29 12:34:56.5+00", "1999-12-31 23:59:59.999999+00"),
    "time": ("12:34:56.789",),
    "timetz": ("12:34:56.789+02",),
    "interval": ("1 mon -3 days 04:05:06",),
    "json": ('{"a": [1, 2, {"b": null}]}',),
    "xml": ("<a>b</a>",),
    "jsonpath": ('$."a"[*]',),
    "tsvector": ("'a':1 'fat':2 'rat':3",),
    "tsquery": ("'fat' & 'rat'",),
    "inet": ("10.0.0.1", "2001:db8::1/64"),
    "cidr": ("10.0.0.0/8",),
    "macaddr": ("08:00:2b:01:02:03",),
    "macaddr8": ("08:00:2b:01:02:03:04:05",),
    "point": ("(1.5,-2)",),
    "line": ("{1,2,3}",),
    "lseg": ("[(1,2),(3,4)]",),
    "box": ("(3,4),(1,2)",),
    "polygon": ("((1,2),(3,4),(5,6))",),
    "circle": ("<(1,2),3>",),
    "oid": ("16384", "4294967295"),
    "xid8": ("18446744073709551615", "12345"),
    "tid": ("(0,1)",),
    "pg_lsn": ("16/B374D848",),
    "pg_snapshot": ("10:20:10,14",),
    "aclitem": ("reader=r/owner",),
    "int2vector": ("1 2 3",),
}
_LIKE = {
    **dict.fromkeys(("varchar", "name", "refcursor", "pg_node_tree"), "text"),
    **dict.fromkeys(("xid", "cid"), "oid"),
    "jsonb": "json",
    "path": "polygon",
    "txid_snapshot": "pg_snapshot",
    "oidvector": "int2vector",
}
"""Types that look like another one."""

_ODD = {"numeric": "NaN", "date": "infinity", "timestamp": "infinity", "timestamptz": "0044-03-15 12:00:00+00 BC"}


def run(rows: int = ROWS, runs: int = RUNS) -> dict[str, Any]:
    """Rows per second of both tables, the slowest types alone, and whether every value found its place."""
    plain = [_Trial(entry.name, _column(entry), _texts(entry)) for entry in TYPES]
    lists = [_Trial(f"{entry.name}[]", _column(entry, listed=True), _lists(entry)) for entry in TYPES if entry.array]
    tables = [_measured("one column of each type", plain, rows, runs)]
    tables.append(_measured("one array of each type", lists, rows, runs))
    return {"rows": rows, "tables": tables, "equal": all(table["equal"] for table in tables)}


def _measured(name: str, trials: Sequence[_Trial], rows: int, runs: int) -> dict[str, Any]:
    table = _Table(trials, rows)
    alone = {trial.name: _Table([trial], rows).seconds(runs) / rows for trial in trials}
    slowest = sorted(alone, key=alone.__getitem__, reverse=True)[:SLOWEST]
    return {
        "table": name,
        "columns": len(trials),
        "rows_per_s": round(rows / table.seconds(runs)),
        "slowest": [{"type": each, "ns_per_value": round(alone[each] * 1e9)} for each in slowest],
        "equal": table.right(),
    }


def notes(result: dict[str, Any]) -> list[str]:
    """The result in a few lines."""
    return [
        f"{table['table']}, {table['columns']} columns: {table['rows_per_s']:,} rows/s; slowest, ns a value: "
        + ", ".join(f"{each['type']} {each['ns_per_value']:,}" for each in table["slowest"])
        for table in result["tables"]
    ]


class _Trial:
    """A column and the texts of `_PATTERN` rows of it; `odd` is what has no home, and where it stands."""

    def __init__(self, name: str, column: Column, texts: Sequence[str]) -> None:
        self.name, self.column = name, column
        self.texts = [texts[number % len(texts)] for number in range(_PATTERN)]
        self.odd = _ODD.get(name.removesuffix("[]"))
        if self.odd is not None:
            self.odd = f'{{"{self.odd}"}}' if name.endswith("[]") else self.odd
            self.texts[_PATTERN // 2] = self.odd


class _Table:
    """Insert messages of a table that has the columns of these trials."""

    def __init__(self, trials: Sequence[_Trial], rows: int) -> None:
        self.trials, self.rows = trials, rows
        columns = tuple(trial.column for trial in trials)
        self._decoder = PostgresDecoder(Relation(_OID, "bench", "types", "d", columns, enriched=True))
        raw = [_insert(texts) for texts in zip(*(trial.texts for trial in trials), strict=True)]
        times = -(-rows // _PATTERN)
        self._payload = pa.array((raw * times)[:rows], pa.large_binary())
        self._op: npt.NDArray[np.uint8] = np.full(rows, Op.CREATE, np.uint8)

    def decode(self) -> Decoded:
        return self._decoder.decode(self._op, self._payload)

    def seconds(self, runs: int) -> float:
        """Seconds of one core for all rows: the best of several runs, after one that pays for memory."""
        self.decode()
        return min(_seconds(self.decode) for _ in range(runs))

    def right(self) -> bool:
        """Whether what has no home is told apart, with its text, and all else has a value."""
        result = self.decode()
        odd = range(_PATTERN // 2, self.rows, _PATTERN)
        told = [(trial.column.name, trial.odd) for trial in self.trials if trial.odd is not None]
        expected = [told if number in odd else [] for number in range(self.rows)]
        nulls = [result.after[trial.column.name].null_count for trial in self.trials]
        missing = [len(odd) if trial.odd is not None else 0 for trial in self.trials]
        return bool(result.special.to_pylist() == expected and nulls == missing)


def _column(entry: PgType, *, listed: bool = False) -> Column:
    modifier = _NUMERIC_12_2 if entry.name == "numeric" else -1
    return Column(entry.name, entry.array if listed else entry.oid, modifier)


def _texts(entry: PgType) -> tuple[str, ...]:
    if entry.group == "Ranges":
        return ("[1,5)", "empty") if entry.name.endswith("range") and "multi" not in entry.name else ("{[1,5),[7,9)}",)
    name = _LIKE.get(entry.name, entry.name)
    return _EXAMPLES.get(name, ("some_name",))


def _lists(entry: PgType) -> tuple[str, ...]:
    """A short list and a longer one with a NULL in it, quoted where the server quotes."""
    elements = [_element(text, entry.delimiter) for text in _texts(entry)]
    return f"{{{elements[0]}}}", "{" + entry.delimiter.join([*elements, "NULL", *elements]) + "}"


def _element(text: str, delimiter: str) -> str:
    if not set(text) & set('{}"\\ ' + delimiter):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _insert(texts: Sequence[str]) -> bytes:
    raw = [text.encode() for text in texts]
    cells = b"".join(b"t" + struct.pack(">I", len(text)) + text for text in raw)
    return b"I" + struct.pack(">I", _OID) + b"N" + struct.pack(">H", len(texts)) + cells


def _seconds(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began
