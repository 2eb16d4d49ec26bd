"""Each type's text becomes its value; a value with no home is NULL and kept as exact text."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from millstream.errors import JournalCorrupt
from millstream.model import Column, Relation
from millstream.sources.decoders import decoder
from millstream.sources.postgres.casts import exact_text
from millstream.sources.postgres.types import CHOICES, column_type, column_types
from tests.fixtures.tuples import NUMERIC_12_2, Cell, columns, insert, relation

TYPES: dict[str, tuple[tuple[int, int], pa.DataType, str, dict[str, Any]]] = {
    "smallint": ((21, -1), pa.int16(), "smallint", {"-32768": -32768, "32767": 32767, "0": 0}),
    "integer": ((23, -1), pa.int32(), "int", {"-2147483648": -(2**31), "2147483647": 2**31 - 1}),
    "bigint": ((20, -1), pa.int64(), "bigint", {"-9223372036854775808": -(2**63), "9223372036854775807": 2**63 - 1}),
    "real": ((700, -1), pa.float32(), "float", {"0.1": float(np.float32(0.1)), "1e-45": float(np.float32(1e-45))}),
    "double": (
        (701, -1),
        pa.float64(),
        "double",
        {"0.1": 0.1, "-0": -0.0, "5e-324": 5e-324, "1.7976931348623157e+308": 1.7976931348623157e308},
    ),
    "double, no number": ((701, -1), pa.float64(), "double", {"Infinity": math.inf, "-Infinity": -math.inf}),
    "boolean": ((16, -1), pa.bool_(), "boolean", {"t": True, "f": False}),
    "numeric(12,2)": (
        (1700, NUMERIC_12_2),
        pa.decimal128(12, 2),
        "decimal(12,2)",
        {"9999999999.99": Decimal("9999999999.99"), "-0.01": Decimal("-0.01"), "0.00": Decimal("0.00")},
    ),
    "numeric(38,38)": (
        (1700, ((38 << 16) | 38) + 4),
        pa.decimal128(38, 38),
        "decimal(38,38)",
        {"0." + "9" * 38: Decimal("0." + "9" * 38)},
    ),
    "numeric(3,-2)": ((1700, ((3 << 16) | (-2 & 0x7FF)) + 4), pa.decimal128(5, 0), "decimal(5,0)", {"99900": 99900}),
    "numeric": ((1700, -1), pa.string(), "string", {"1e400": "1e400", "NaN": "NaN", "0.10": "0.10"}),
    "numeric(39,1)": ((1700, ((39 << 16) | 1) + 4), pa.string(), "string", {"1.5": "1.5"}),
    "numeric(38,-1)": ((1700, ((38 << 16) | (-1 & 0x7FF)) + 4), pa.string(), "string", {"10": "10"}),
    "numeric(2,5)": ((1700, ((2 << 16) | 5) + 4), pa.string(), "string", {"0.00012": "0.00012"}),
    "text": ((25, -1), pa.string(), "string", {"": "", "naïve 🌊": "naïve 🌊", "\\x00": "\\x00", "a\nb": "a\nb"}),
    "varchar": ((1043, 14), pa.string(), "string", {" x ": " x "}),
    "char(4)": ((1042, 8), pa.string(), "string", {"ab  ": "ab  "}),
    "bytea": ((17, -1), pa.binary(), "binary", {"\\x": b"", "\\x00ff10": b"\0\xff\x10", "\\xabcdef": b"\xab\xcd\xef"}),
    "date": ((1082, -1), pa.date32(), "date", {"0001-01-01": date(1, 1, 1), "9999-12-31": date(9999, 12, 31)}),
    "timestamp": (
        (1114, -1),
        pa.timestamp("us"),
        "timestamp_ntz",
        {
            "2024-02-29 23:59:59.999999": datetime(2024, 2, 29, 23, 59, 59, 999999),  # noqa: DTZ001
            "0001-01-01 00:00:00": datetime(1, 1, 1),  # noqa: DTZ001
            "1969-12-31 23:59:59.5": datetime(1969, 12, 31, 23, 59, 59, 500000),  # noqa: DTZ001
        },
    ),
    "timestamptz": (
        (1184, -1),
        pa.timestamp("us", "UTC"),
        "timestamp",
        {
            "2024-02-29 23:59:59.123+00": datetime(2024, 2, 29, 23, 59, 59, 123000, tzinfo=UTC),
            "9999-12-31 23:59:59.999999+00": datetime(9999, 12, 31, 23, 59, 59, 999999, tzinfo=UTC),
        },
    ),
    "uuid": ((2950, -1), pa.string(), "string", {"6f1c0a7e-0000-4000-8000-000000000001": None}),
    "json": ((114, -1), pa.string(), "string", {'{"a" :  1e400}': None}),
    "jsonb": ((3802, -1), pa.string(), "string", {'{"a": [1, null]}': None}),
    "money": (
        (790, -1),
        pa.decimal128(19, 2),
        "decimal(19,2)",
        {
            "$0.00": Decimal("0.00"),
            "-$0.01": Decimal("-0.01"),
            "$1,234.50": Decimal("1234.50"),
            "-$92,233,720,368,547,758.08": Decimal("-92233720368547758.08"),
        },
    ),
    "oid": ((26, -1), pa.int64(), "bigint", {"4294967295": 2**32 - 1, "0": 0}),
    "xid": ((28, -1), pa.int64(), "bigint", {"4294967295": 2**32 - 1}),
    "xid8": ((5069, -1), pa.decimal128(20, 0), "decimal(20,0)", {"18446744073709551615": Decimal(2**64 - 1)}),
    "regclass": ((2205, -1), pa.string(), "string", {"pg_class": None, "-": None, '"My".t': None}),
    "interval, as any other type": ((1186, -1), pa.string(), "string", {"1 mon -00:00:01": None}),
}


def values(of: Relation, texts: list[Cell]) -> tuple[list[Any], list[dict[str, str]]]:
    result = decoder(of).decode(*columns([insert(text) for text in texts]))
    result.after.validate(full=True)
    return result.after[0].to_pylist(), [dict(entries) for entries in result.special.to_pylist()]


@pytest.mark.parametrize("name", TYPES)
def test_values_with_a_home_arrive(name: str) -> None:
    (oid, modifier), arrow, spark, expected = TYPES[name]
    of = relation(("c", oid, modifier))
    (kind,) = column_types(of)
    assert (kind.arrow, kind.spark) == (arrow, spark)
    wanted = [text if value is None else value for text, value in expected.items()]
    found, special = values(of, [*expected, None, *expected])
    assert repr(found) == repr([*wanted, None, *wanted]) if arrow == pa.float64() else found == [*wanted, None, *wanted]
    assert special == [{}] * len(found)


def test_not_a_number_has_a_home_in_floats_alone() -> None:
    found, special = values(relation(("c", 701)), ["NaN", "1"])
    assert math.isnan(found[0])
    assert found[1] == 1
    assert special == [{}, {}]


ODD = {
    "numeric": ((1700, NUMERIC_12_2), "12.34", ["NaN", "Infinity", "-Infinity", "1.234", "123456789012.00", ""]),
    "date": ((1082, -1), "2024-02-29", ["infinity", "-infinity", "0044-03-15 BC", "10000-01-01", "5874897-12-31", ""]),
    "timestamp": (
        (1114, -1),
        "2024-02-29 01:02:03",
        ["infinity", "-infinity", "0044-03-15 00:00:00 BC", "294276-12-31 23:59:59.999999", "2024-02-30 00:00:00"],
    ),
    "timestamptz": (
        (1184, -1),
        "2024-02-29 01:02:03+00",
        [
            "infinity",
            "-infinity",
            "0044-03-15 00:00:00+00 BC",
            "294276-12-31 23:59:59.999999+00",
            "2024-02-29 01:02:03",
        ],
    ),
    "integer": ((23, -1), "7", ["2147483648", "seven", "", "7.0"]),
    "boolean": ((16, -1), "t", ["true", "", "x"]),
    "money": ((790, -1), "$1,234.50", ["1.50", "1,50 €", "$1", "-$.50", "($1.00)", "$1.5.00", ""]),
    "bytea": ((17, -1), "\\x01", ["abc", "\\x0", "\\x0g", "", "\\", "\\001\\002", "\\xAB", "\\xé1"]),
}


@pytest.mark.parametrize("spread", [1, 50])
@pytest.mark.parametrize("name", ODD)
def test_values_without_a_home_keep_their_exact_text(name: str, spread: int) -> None:
    (oid, modifier), plain, odd = ODD[name]
    of = relation(("c", oid, modifier))
    (home,), _ = values(of, [plain])
    texts: list[Cell] = []
    for text in odd:
        texts += [plain] * spread + [text, None]
    found, special = values(of, texts)
    assert found == [home if text == plain else None for text in texts]
    assert special == [{"c": text} if text in odd else {} for text in texts]


@pytest.mark.parametrize("name", ODD)
def test_only_odd_values(name: str) -> None:
    (oid, modifier), _, odd = ODD[name]
    found, special = values(relation(("c", oid, modifier)), list(odd))
    assert found == [None] * len(odd)
    assert special == [{"c": text} for text in odd]


def test_text_that_is_no_utf8_is_kept_as_hex() -> None:
    found, special = values(relation(("c", 25)), ["é", b"\xff\xfe", None, b"\xc3", "x"])
    assert found == ["é", None, None, None, "x"]
    assert special == [{}, {"c": "\\xfffe"}, {}, {"c": "\\xc3"}, {}]


def test_specials_of_a_row_stand_in_the_order_of_its_columns() -> None:
    of = relation(("n", 1700, NUMERIC_12_2), ("t", 25), ("d", 1082))
    result = decoder(of).decode(
        *columns([insert("NaN", "x", "infinity"), insert("1.00", "y", "2024-01-01"), insert("1", b"\xff", "infinity")])
    )
    assert result.special.to_pylist() == [
        [("n", "NaN"), ("d", "infinity")],
        [],
        [("t", "\\xff"), ("d", "infinity")],
    ]


def test_key_columns_whose_type_has_special_values_are_text() -> None:
    columns_of_each = [("n", 1700, NUMERIC_12_2), ("d", 1082), ("ts", 1114), ("tz", 1184), ("i", 20), ("b", 17)]
    of = relation(*columns_of_each, key=["n", "d", "ts", "tz", "i", "b"])
    assert [kind.spark for kind in column_types(of)] == ["string"] * 4 + ["bigint", "binary"]
    whole_row = Relation(of.oid, of.schema, of.name, "f", of.columns, of.key, (), enriched=True)
    assert [kind.spark for kind in column_types(whole_row)][:4] == [
        "decimal(12,2)",
        "date",
        "timestamp_ntz",
        "timestamp",
    ]


def test_a_domain_is_what_lies_beneath_it() -> None:
    known = Column("c", 90_000, type_kind="d", base_type_oid=1700, base_type_mod=NUMERIC_12_2)
    assert column_type(known).arrow == pa.decimal128(12, 2)
    assert column_type(Column("c", 90_000, type_kind="d", base_type_oid=23)).arrow == pa.int32()
    assert column_type(Column("c", 90_000, type_kind="d")).arrow == pa.string()
    assert column_type(Column("c", 90_001, type_kind="e", enum_labels=("a", "b"))).arrow == pa.string()
    assert column_type(Column("c", 90_002)).arrow == pa.string()


@pytest.mark.parametrize("oid", [16, 17, 20, 25, 1082, 1083, 1186, 1266])
@pytest.mark.parametrize("large", [False, True])
def test_a_cast_reads_any_binary_array(oid: int, large: bool) -> None:
    """Slices, 64-bit offsets, and NULLs that have bytes under them: snapshots bring such arrays."""
    plain = {16: "t", 17: "\\x0a", 20: "5", 25: "é", 1082: "2024-01-01"}
    text = {**plain, 1083: "12:30:00", 1186: "1 mon", 1266: "12:30:00-01"}[oid].encode()
    kind = pa.large_binary() if large else pa.binary()
    whole = pa.array([b"??", text, b"hidden", text, b"odd \xff", b"??"], kind)
    masked = pa.Array.from_buffers(kind, 6, [pa.py_buffer(bytes([0b111011])), *whole.buffers()[1:]]).slice(1, 4)
    to = column_type(Column("c", oid), choices=tuple(CHOICES))
    array, odd = to.read(masked)
    array.validate(full=True)
    one = to.read(pa.array([text]))[0][0].as_py()
    assert array.type == to.arrow
    assert array.to_pylist() == [one, None, one, None]
    assert odd.tolist() == [3]
    assert exact_text(masked, odd).to_pylist() == ["\\x" + b"odd \xff".hex()]


def test_a_description_without_what_was_added_later_keeps_its_fingerprint() -> None:
    old = relation(("id", 20), key=["id"])
    assert "element_delimiter" not in old.to_json()["columns"][0]
    assert not {"encoding", "types"} & old.to_json().keys()
    assert Relation.from_json(old.to_json()) == old
    new = Relation(1, "s", "t", "d", (Column("c", 90_001, element_type_oid=5, element_delimiter=";"),))
    assert Relation.from_json(new.to_json()) == new
    asked = replace(old, types=(("interval", "struct"), ("time", "time")))
    assert Relation.from_json(json.loads(json.dumps(asked.to_json()))) == asked
    assert asked.fingerprint() != old.fingerprint()


def test_a_choice_of_types_holds_for_arrays_and_domains_but_not_for_keys() -> None:
    asked = replace(
        relation(("t", 1083), ("l", 1187), ("k", 1083), ("z", 1266), key=["k", "z"]),
        types=(("interval", "struct"), ("time", "time"), ("timetz", "struct")),
    )
    domain = Column("d", 90_000, type_kind="d", base_type_oid=1186, base_type_mod=-1)
    found = column_types(replace(asked, columns=(*asked.columns, domain)))
    span = "struct<months:int,days:int,microseconds:bigint>"
    assert [kind.spark for kind in found] == ["time(6)", f"array<{span}>", "string", "string", span]
    with pytest.raises(JournalCorrupt, match="columns of type time are to be carved"):
        column_types(replace(asked, types=(("time", "carved"),)))
