"""What a lane does ahead of what it writes: the next run is made meanwhile, and COPY gets its rows in pieces."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from decimal import Decimal

import pyarrow as pa
import pytest

from millstream.targets.lanes import copy_text
from millstream.targets.lanes.database import ColumnDef, Values
from millstream.targets.lanes.runs import ahead


def test_an_item_is_made_while_the_one_before_it_is_worked_on() -> None:
    begun = [threading.Event() for _ in range(3)]

    def items() -> Iterator[int]:
        for number, event in enumerate(begun):
            event.set()
            yield number

    seen = []
    for number in ahead(items()):
        assert begun[min(number + 1, 2)].wait(30)
        seen.append(number)
    assert seen == [0, 1, 2]


def test_what_goes_wrong_with_an_item_is_raised_in_its_place() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise ValueError("the second")

    coming = ahead(items())
    assert next(coming) == 1
    with pytest.raises(ValueError, match="the second"):
        next(coming)


def test_who_stops_early_leaves_nobody_at_work() -> None:
    made = []

    def items() -> Iterator[int]:
        for number in range(9):
            made.append(number)
            yield number

    coming = ahead(items())
    assert next(coming) == 0
    coming.close()
    assert made == [0, 1]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("ahead")]


def columns() -> list[Values]:
    """Seven rows with what is written in ways of its own, NULLs among it."""
    day = datetime(2026, 1, 2, 3, 4, 5, 6, UTC)
    arrays = {
        "bigint": pa.array([1, -2, None, 4, 5, 6, 7], pa.int64()),
        "numeric(12,2)": pa.array([Decimal("0.10"), None, Decimal("-3.00"), *[Decimal("7.25")] * 4]),
        "text": pa.array(["a\tb", "c\\d", None, "", "\n", "plain", "é"]),
        "bytea": pa.array([b"", b"\x00\xff", None, b"a", b"bc", b"def", b"\\"]),
        "timestamp with time zone": pa.array([day, None, *[day] * 5], pa.timestamp("us", "UTC")),
        "text[]": pa.array([["a", None], [], None, ['"', "\\"], ["x"], ["y", "z"], [""]]),
        "vector(2)": pa.array([[1.0, 2.5], None, *[[0.5, -1.0]] * 5], pa.list_(pa.float32())),
    }
    values = [Values(ColumnDef(f"c{at}", kind), array) for at, (kind, array) in enumerate(arrays.items())]
    special = pa.array([None, None, "NaN", None, None, None, "Infinity"])
    return [*values, Values(ColumnDef("s", "numeric"), pa.nulls(7, pa.decimal128(10, 2)), special)]


def test_rows_in_pieces_are_the_same_text_as_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    (whole,) = copy_text.copy_text(columns())
    monkeypatch.setattr(copy_text, "PIECE_ROWS", 3)
    pieces = [piece.to_pybytes() for piece in copy_text.copy_text(columns())]
    assert len(pieces) == 3
    assert b"".join(pieces) == whole.to_pybytes()
    assert whole.to_pybytes().count(b"\n") == 7
