"""JSON made by column says what Python's own JSON says of each row, and keeps every digit."""

from __future__ import annotations

import base64
import json
import math
from datetime import date, datetime, time
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from millstream.wire.json_columns import json_objects, json_text
from millstream.wire.text import base64_text, decimal_text

PAIR = pa.struct([("x", pa.int8()), ("y", pa.string())])
WORDS = pa.map_(pa.string(), pa.string())


def values(array: pa.Array) -> list[Any]:
    return [json.loads(text) for text in json_text(array).to_pylist()]


@given(st.lists(st.none() | st.text(), max_size=20), st.integers(0, 5))
def test_any_text_comes_back(texts: list[str | None], skipped: int) -> None:
    usable = [None if text is None else text.encode("utf-8", "replace").decode() for text in texts]
    assert values(pa.array(usable, pa.string()).slice(skipped)) == usable[skipped:]


@given(st.lists(st.none() | st.binary(), max_size=20), st.integers(0, 5))
def test_any_bytes_come_back_from_base64(raw: list[bytes | None], skipped: int) -> None:
    texts = base64_text(pa.array(raw, pa.binary()).slice(skipped)).to_pylist()
    assert [None if text is None else base64.b64decode(text, validate=True) for text in texts] == raw[skipped:]


@given(st.lists(st.none() | st.integers(-(10**38 - 1), 10**38 - 1), max_size=20), st.integers(0, 38), st.integers(0, 5))
def test_decimals_keep_all_their_digits(numbers: list[int | None], scale: int, skipped: int) -> None:
    exact = [None if number is None else Decimal(f"{number}e-{scale}") for number in numbers]
    texts = decimal_text(pa.array(exact, pa.decimal128(38, scale)).slice(skipped)).to_pylist()
    assert texts == [None if number is None else f"{number:f}" for number in exact[skipped:]]


@given(st.lists(st.floats() | st.none(), max_size=20))
@example([-0.0])
def test_doubles_come_back_to_the_last_bit(numbers: list[float | None]) -> None:
    named = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
    found = [named.get(value, value) for value in values(pa.array(numbers, pa.float64()))]
    assert repr([None if n is None else float(n) for n in found]) == repr(numbers)


def test_every_other_type_has_its_form() -> None:
    at = datetime(2026, 1, 31, 12, 30, 0, 5)  # noqa: DTZ001
    cases: list[tuple[pa.Array, list[Any]]] = [
        (pa.array([True, None, False]), [True, None, False]),
        (pa.array([2**63 - 1, -(2**63)], pa.int64()), [2**63 - 1, -(2**63)]),
        (pa.array([0.1], pa.float32()), [0.1]),
        (pa.array([Decimal("0.10")], pa.decimal128(4, 2)), ["0.10"]),
        (pa.array([date(1, 1, 1), None]), ["0001-01-01", None]),
        (pa.array([at], pa.timestamp("us")), ["2026-01-31T12:30:00.000005"]),
        (pa.array([at], pa.timestamp("us", "UTC")), ["2026-01-31T12:30:00.000005Z"]),
        (pa.array([time(1, 2, 3)], pa.time64("us")), ["01:02:03.000000"]),
        (pa.nulls(2), [None, None]),
        (pa.array([["a", None], None, [], ['"']], pa.list_(pa.string())), [["a", None], None, [], ['"']]),
        (pa.array([[[1], []], None], pa.list_(pa.list_(pa.int32()))), [[[1], []], None]),
        (
            pa.array([{"x": 1, "y": None}, None], pa.struct([("x", pa.int8()), ("y", pa.string())])),
            [{"x": 1, "y": None}, None],
        ),
        (
            pa.array([[("k", "v"), ("l", None)], None, []], pa.map_(pa.string(), pa.string())),
            [{"k": "v", "l": None}, None, {}],
        ),
    ]
    for array, expected in cases:
        assert values(array) == expected
        assert values(array.slice(1)) == expected[1:], "a slice of a column begins elsewhere in its buffers"


def test_a_member_without_value_is_left_out() -> None:
    a, b = pa.array(["1", None, None]), pa.array(["2", "3", None])
    assert json_objects(["a", 'b"'], [a, b]).to_pylist() == ['{"a":1,"b\\"":2}', '{"b\\"":3}', "{}"]


def test_an_object_has_members() -> None:
    with pytest.raises(ValueError, match="members"):
        json_objects([], [])


def test_a_long_column_is_made_at_once() -> None:
    numbers = np.arange(100_000)
    assert values(pa.array(numbers)) == numbers.tolist()
