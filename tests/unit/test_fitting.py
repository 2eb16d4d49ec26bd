"""Versions of a table in the columns of one DataFrame: carried over exactly, or refused by name."""

from __future__ import annotations

import json
from datetime import date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_type
from pyspark.sql.types import VariantType, VariantVal

from millstream import changelog
from millstream.errors import ConfigError
from millstream.model import Relation
from millstream.spark.fitting import check_schema, fit, misfit
from millstream.spark.variants import variants
from tests.fixtures.tuples import NUMERIC_12_2, Change, delete, insert, journal_rows, relation, update

VARIANT = to_arrow_type(VariantType())
NUMERIC_20_4 = ((20 << 16) | 4) + 4
OLD = relation(("id", 23), ("gone", 25), ("n", 21), ("price", 1700, NUMERIC_12_2), key=["id"], identity="f")
NEW = relation(("id", 20), ("n", 701), ("price", 1700, NUMERIC_20_4), ("fresh", 16), key=["id"], identity="f")


def columns(table: Relation) -> pa.Schema:
    return check_schema(from_arrow_schema(changelog.schema(table)), "public.t")


def fitted(table: Relation, wanted: pa.Schema, *changes: Change) -> list[dict[str, Any]]:
    assert misfit(table, wanted, strict=False, whole=True) is None
    made = fit(changelog.assemble(journal_rows(changes), table, 1, "0123456789ab"), wanted)
    assert made.schema.equals(wanted)
    rows: list[dict[str, Any]] = made.to_pylist()
    return rows


def test_what_a_version_did_not_have_is_null_and_what_the_dataframe_has_not_is_left_out() -> None:
    row = ["7", "lost", "-3", "0.10"]
    made, changed, gone = fitted(OLD, columns(NEW), insert(*row), update(["8", *row[1:]], row=row), delete(row=row))
    values = {"id": 7, "n": -3.0, "price": Decimal("0.1000"), "fresh": None}
    assert {name: made[name] for name in values} == values
    assert made["_ms_before"] is None
    assert changed["_ms_before"] == values
    assert changed["id"] == 8
    assert gone["_ms_before"] == values


def test_a_version_that_is_the_dataframe_s_own_goes_through_untouched() -> None:
    batch = changelog.assemble(journal_rows([insert("1", "2", "3.0000", "t")]), NEW, 1, "0123456789ab")
    assert fit(batch, columns(NEW)) is batch


@pytest.mark.parametrize(
    ("old", "new", "sent", "found"),
    [
        ((21,), (23,), "-5", -5),
        ((23,), (20,), "-5", -5),
        ((21,), (700,), "-5", -5.0),
        ((700,), (701,), "0.5", 0.5),
        ((23,), (1700, NUMERIC_12_2), "2147483647", Decimal("2147483647.00")),
        ((20,), (25,), "9223372036854775807", "9223372036854775807"),
        ((1700, NUMERIC_12_2), (25,), "0.00", "0.00"),
        ((16,), (25,), "t", "true"),
        ((1082,), (25,), "0044-03-15", "0044-03-15"),
        ((1082,), (1114,), "2026-01-31", datetime(2026, 1, 31)),  # noqa: DTZ001
    ],
)
def test_a_wider_type_has_the_same_value(old: tuple[int, ...], new: tuple[int, ...], sent: str, found: object) -> None:
    before, after = (relation(("id", 23), ("c", *kind), key=["id"]) for kind in (old, new))  # type: ignore[arg-type]
    (row,) = fitted(before, columns(after), insert("1", sent))
    assert row["c"] == found


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ((20,), (23,), "c is bigint there and int in the DataFrame"),
        ((25,), (23,), "c is string there and int in the DataFrame"),
        ((20,), (701,), "c is bigint there and double"),
        ((701,), (25,), "c is double there and string"),
        ((1114,), (25,), "c is timestamp_ntz there and string"),
        ((1114,), (1184,), "c is timestamp_ntz there and timestamp"),
        ((20,), (1700, NUMERIC_12_2), "c is bigint there and decimal(12,2)"),
        ((1700, NUMERIC_20_4), (1700, NUMERIC_12_2), "c is decimal(20,4) there and decimal(12,2)"),
        ((16,), (23,), "c is boolean there and int"),
    ],
)
def test_a_type_that_cannot_hold_every_value_is_refused(old: tuple[int, ...], new: tuple[int, ...], said: str) -> None:
    before, after = (relation(("id", 23), ("c", *kind), key=["id"]) for kind in (old, new))  # type: ignore[arg-type]
    refused = misfit(before, columns(after), strict=False, whole=True)
    assert refused is not None
    assert said in " ".join(refused)


def test_strictly_every_difference_is_refused() -> None:
    base = relation(("id", 23), ("a", 23))
    more = relation(("id", 23), ("a", 23), ("b", 23))
    wider = relation(("id", 23), ("a", 20))
    assert misfit(base, columns(base), strict=True, whole=True) is None
    assert misfit(base, columns(more), strict=True, whole=True) == ("b", "is not there")
    assert misfit(more, columns(base), strict=True, whole=True) == ("b", "is not in the DataFrame")
    assert misfit(base, columns(wider), strict=True, whole=True) == ("a", "is int there and bigint in the DataFrame")


def test_columns_that_a_user_chose_are_all_that_counts() -> None:
    old_id = pa.struct([pa.field("id", pa.int64())])
    chosen = chosen_columns("public.t", ("note", pa.string()), ("_ms_seq", pa.int64()), ("_ms_before", old_id))
    more = relation(("id", 23), ("day", 1082), ("note", 25), key=["id"], identity="f")
    assert misfit(more, chosen, strict=False, whole=False) is None
    (row,) = fitted(more, chosen, update(["1", None, "x"], row=["2", None, None]))
    assert row == {"note": "x", "_ms_seq": 1, "_ms_before": {"id": 2}}


def chosen_columns(table: str | None, *fields: Any) -> pa.Schema:
    return check_schema(from_arrow_schema(pa.schema(fields)), table)


@pytest.mark.parametrize(
    ("table", "field", "said"),
    [
        ("public.t", ("_ms_seq", pa.string()), "_ms_seq is bigint, not string"),
        ("public.t", ("_MS_SEQ", pa.int64()), "there is no column _MS_SEQ"),
        ("public.t", ("_ms_before", pa.string()), "_ms_before is a struct"),
        ("public.t", pa.field("id", pa.int32(), nullable=False), "id can be NULL"),
        (None, ("id", pa.int32()), "there is no column id: the columns of our own are table, key"),
        (None, ("after", pa.struct([("id", pa.int32())])), "after is string, not struct<id:int>"),
    ],
)
def test_a_column_that_cannot_be_is_refused(table: str | None, field: Any, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        chosen_columns(table, field)
    assert said in refused.value.message


def test_dates_before_our_era_are_not_made_up() -> None:
    old, new = relation(("id", 23), ("d", 1082), key=["id"]), relation(("id", 23), ("d", 25), key=["id"])
    odd, plain = fitted(old, columns(new), insert("1", "0044-03-15 BC"), insert("2", "0044-03-15"))
    assert (odd["d"], dict(odd["_ms_special"])) == (None, {"d": "0044-03-15 BC"})
    assert plain["d"] == date(44, 3, 15).isoformat()


@pytest.mark.parametrize(
    "text",
    [
        *('{"a": 1, "a": 2}', "1" * 39, "0." + "1" * 39, "1e400", "[1, 1e-400]", "NaN", "not json", ""),
        '{"a": {"b": 0.1234567890123456789012345678901234567891}}',
    ],
)
def test_a_document_that_no_variant_holds_keeps_its_text(text: str) -> None:
    made, odd = variants(pa.array(["{}", None, text, text]), VARIANT)
    assert odd == [2, 3]
    assert made.is_valid().to_pylist() == [True, False, False, False]


@pytest.mark.parametrize(
    "text", ['{"b": 1, "a": [true, null, ""]}', "-0.5", "12345678901234567890.5", '"\\u00e9"', "1e2"]
)
def test_a_document_that_a_variant_holds_is_the_same_when_it_is_read_back(text: str) -> None:
    made, odd = variants(pa.array([text]), VARIANT)
    assert odd == []
    (found,) = made.to_pylist()
    assert json.loads(VariantVal(found["value"], found["metadata"]).toJson()) == json.loads(text)
