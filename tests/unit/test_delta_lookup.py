"""Rows of a Delta table that are looked up by their keys: all of them, and without reading what cannot have them."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from deltalake import write_deltalake

from millstream.targets.deltas import tables
from millstream.targets.deltas.mirror import rows_under
from millstream.targets.deltas.tables import Handle

SPECIAL = pa.map_(pa.string(), pa.string())
NOON = datetime(2024, 1, 1, 12, tzinfo=UTC)
KEYS: dict[str, tuple[pa.DataType, list[Any]]] = {
    "whole numbers": (pa.int64(), list(range(-5, 25))),
    "texts that begin alike": (pa.string(), [f"{'p' * 100}{number:02d}é" for number in range(30)]),
    "times within a millisecond": (
        pa.timestamp("us", "UTC"),
        [NOON + timedelta(microseconds=number) for number in range(30)],
    ),
    "days": (pa.date32(), [date(2024, 1, 1) + timedelta(days=number) for number in range(30)]),
    "decimals": (pa.decimal128(20, 10), [Decimal(number) / 10**10 for number in range(30)]),
    "bytes": (pa.binary(), [bytes([number]) for number in range(30)]),
}


def made(path: Path, kind: pa.DataType, keys: list[Any]) -> Handle:
    """Three files of ten rows, in the order of their keys."""
    for low in range(0, 30, 10):
        some = keys[low : low + 10]
        columns = {
            "k": pa.array(some, kind),
            "n": pa.array(range(low, low + 10), pa.int64()),
            "old": pa.array([number % 2 == 0 for number in range(10)]),
            "_ms_special": pa.nulls(10, SPECIAL),
        }
        write_deltalake(str(path), pa.table(columns), mode="append")
    found = Handle.existing(path)
    assert found is not None
    return found


@pytest.mark.parametrize("name", KEYS)
def test_each_key_finds_its_row(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "PART_BYTES", 1)
    kind, keys = KEYS[name]
    table = made(tmp_path / "t", kind, keys)
    for places in ([0, 9, 10, 29], [11, 12], [29], []):
        asked = pa.table({"k": pa.array([keys[at] for at in places], kind)})
        found = rows_under(table, asked, ("k",), ["n"]).sort_by("_ms_place")
        assert found["n"].to_pylist() == places
        assert found["_ms_place"].to_pylist() == list(range(len(places)))
    asked = pa.table({"k": pa.array(keys[9:12], kind)})
    assert rows_under(table, asked, ("k",), ["n"], pc.field("old"))["n"].to_pylist() == [10]


@pytest.mark.parametrize("name", KEYS)
def test_files_in_which_a_part_of_the_key_is_always_the_same(tmp_path: Path, name: str) -> None:
    kind, values = KEYS[name]
    for file in range(3):
        columns = {
            "k": pa.array([values[file]] * 10, kind),
            "n": pa.array(range(10), pa.int64()),
            "_ms_special": pa.nulls(10, SPECIAL),
        }
        write_deltalake(str(tmp_path / "t"), pa.table(columns), mode="append")
    table = Handle.existing(tmp_path / "t")
    assert table is not None
    asked = pa.table({"k": pa.array([values[1], values[2], values[2]], kind), "n": pa.array([4, 0, 77], pa.int64())})
    found = rows_under(table, asked, ("k", "n"), []).sort_by("_ms_place")
    assert (found["n"].to_pylist(), found["_ms_place"].to_pylist()) == ([4, 0], [0, 1])


def test_two_columns_and_keys_that_are_not_there(tmp_path: Path) -> None:
    table = made(tmp_path / "t", pa.int64(), list(range(30)))
    asked = pa.table({"k": pa.array([3, 25, 99], pa.int32()), "n": pa.array([3, 3, 99], pa.int64())})
    found = rows_under(table, asked, ("k", "n"), ["old"])
    assert found.select(["k", "n", "old", "_ms_place"]).to_pylist() == [{"k": 3, "n": 3, "old": False, "_ms_place": 0}]


def test_files_of_other_ranges_are_not_read(tmp_path: Path) -> None:
    made(tmp_path / "t", pa.int64(), list(range(30)))
    files = sorted((tmp_path / "t").glob("*.parquet"), key=lambda path: path.stat().st_mtime_ns)
    for path in files[1:]:
        path.write_bytes(b"not to be read")
    table = Handle.existing(tmp_path / "t")
    assert table is not None
    assert rows_under(table, pa.table({"k": pa.array([4, 7], pa.int64())}), ("k",), ["n"])["n"].to_pylist() == [4, 7]
