"""The text of arrays becomes lists; an array that is no list, as a whole, keeps its exact text."""

from __future__ import annotations

from datetime import datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.model import Column, Relation
from millstream.sources.decoders import decoder
from millstream.sources.postgres.types import BY_ARRAY_OID, ColumnType, column_type
from tests.fixtures.examples import examples
from tests.fixtures.tuples import NUMERIC_12_2, Cell, columns, insert, relation

INTS, TEXTS, NUMERICS, BYTEAS, BOXES = 1007, 1009, 1231, 1001, 1020


def values(of: Relation, texts: list[Cell]) -> tuple[list[Any], list[dict[str, str]]]:
    result = decoder(of).decode(*columns([insert(text) for text in texts]))
    result.after.validate(full=True)
    return result.after[0].to_pylist(), [dict(entries) for entries in result.special.to_pylist()]


LISTS: dict[str, tuple[int, int, str, dict[str, list[Any]]]] = {
    "integer[]": (INTS, -1, "array<int>", {"{}": [], "{1}": [1], "{1,NULL,-3}": [1, None, -3], "{NULL}": [None]}),
    "text[]": (
        TEXTS,
        -1,
        "array<string>",
        {
            '{a,"",NULL,"NULL",null}': ["a", "", None, "NULL", "null"],
            r'{"a,b","{c}","d\"e","f\\","\\\"","\\\\"}': ["a,b", "{c}", 'd"e', "f\\", '\\"', "\\\\"],
            '{naïve,"🌊 x"}': ["naïve", "🌊 x"],
        },
    ),
    "numeric(12,2)[]": (NUMERICS, NUMERIC_12_2, "array<decimal(12,2)>", {"{1.50,NULL}": [Decimal("1.50"), None]}),
    "numeric[]": (NUMERICS, -1, "array<string>", {"{NaN,1.50}": ["NaN", "1.50"]}),
    "boolean[]": (1000, -1, "array<boolean>", {"{t,f,NULL}": [True, False, None]}),
    "bytea[]": (BYTEAS, -1, "array<binary>", {r'{"\\x00ff","\\x",NULL}': [b"\0\xff", b"", None]}),
    "timestamp[]": (1115, -1, "array<timestamp_ntz>", {'{"2024-02-29 01:02:03"}': [datetime(2024, 2, 29, 1, 2, 3)]}),  # noqa: DTZ001
    "money[]": (791, -1, "array<decimal(19,2)>", {'{$1.00,"-$1,234.50"}': [Decimal("1.00"), Decimal("-1234.50")]}),
    "box[]": (BOXES, -1, "array<string>", {"{(1,1),(0,0);(2,2),(1,1);NULL}": ["(1,1),(0,0)", "(2,2),(1,1)", None]}),
    "int4range[]": (3905, -1, "array<string>", {'{"[1,5)",empty}': ["[1,5)", "empty"]}),
}


@pytest.mark.parametrize("name", LISTS)
def test_lists_arrive(name: str) -> None:
    oid, modifier, spark, expected = LISTS[name]
    assert column_type(Column("c", oid, modifier)).spark == spark
    wanted = list(expected.values())
    found, special = values(relation(("c", oid, modifier)), [*expected, None, *expected])
    assert found == [*wanted, None, *wanted]
    assert special == [{}] * len(found)


ODD = {
    "several dimensions": (INTS, "{{1,2},{3,4}}"),
    "bounds of its own": (INTS, "[0:1]={1,2}"),
    "bounds and dimensions": (TEXTS, '[1:1][-2:-1]={{"{","}"}}'),
    "an element with no home": (NUMERICS, "{1.00,NaN}"),
    "an element beyond the calendar": (1182, '{2024-01-01,"0044-03-15 BC"}'),
    "bytes that are no UTF-8": (TEXTS, b"{a,\xff}"),
    "no array at all": (INTS, "1"),
    "nothing": (INTS, ""),
    "half an array": (INTS, "{1"),
    "one brace": (INTS, "{"),
    "an empty element": (INTS, "{1,,2}"),
    "an open quote": (TEXTS, '{"a}'),
    "an escape outside quotes": (TEXTS, '{"a",\\b}'),
    "an escape and no quotes": (TEXTS, "{\\b}"),
    "text behind a quote": (TEXTS, '{"a"b}'),
    "a quote behind text": (TEXTS, '{a"b"}'),
    "a lone quote": (TEXTS, '{",a"b}'),
    "an array behind an element": (INTS, "{1,{2}}"),
    "a close too many": (INTS, "{1}}"),
    "quotes that swap inside and outside": (TEXTS, '{"a"{,"}'),
}


@pytest.mark.parametrize("spread", [0, 1, 20])
@pytest.mark.parametrize("name", ODD)
def test_an_array_that_is_no_list_keeps_its_exact_text(name: str, spread: int) -> None:
    oid, text = ODD[name]
    of = relation(("c", oid, NUMERIC_12_2 if oid == NUMERICS else -1))
    plain: dict[int, Cell] = {TEXTS: r'{"q\"",x}', 1182: "{2024-01-01}", NUMERICS: "{7.00}"}
    good = plain.get(oid, "{7,8}")
    (home,), _ = values(of, [good])
    texts: list[Cell] = [*[good] * spread, text, None, *[good] * spread, "{}", text]
    found, special = values(of, texts)
    exact = text if isinstance(text, str) else "\\x" + text.hex()
    assert found == [home if t == good else [] if t == "{}" else None for t in texts]
    assert special == [{"c": exact} if t == text else {} for t in texts]


def test_user_types_are_lists_of_text_when_the_delimiter_is_known() -> None:
    known = Column("c", 90_001, type_kind="b", element_type_oid=90_000, element_delimiter=":")
    of = Relation(16_400, "public", "t", "d", (known,), enriched=True)
    assert values(of, ['{a:"b,:c":NULL}'])[0] == [["a", "b,:c", None]]
    assert column_type(Column("c", 90_001, type_kind="b", element_type_oid=90_000)).spark == "string"


def test_vectors_are_lists_of_floats() -> None:
    kinds = {name: column_type(Column("c", 90_000, 3, type_kind="b", type_name=name)).spark for name in NAMES}
    assert kinds == NAMES
    of = Relation(16_400, "public", "t", "d", (Column("c", 90_000, type_kind="b", type_name="public.vector(3)"),))
    found, special = values(of, ["[1,-2.5,1e-07]", None, "[1]", "{1}"])
    assert [None if f is None else [round(x, 9) for x in f] for f in found] == [[1, -2.5, 1e-7], None, [1], None]
    assert special == [{}, {}, {}, {"c": "{1}"}]
    domain = Column("c", 90_000, type_kind="d", type_name="public.vector", base_type_oid=90_002)
    assert column_type(domain).spark == "string"


NAMES = {
    "vector": "array<float>",
    "public.vector(3)": "array<float>",
    '"My Schema".halfvec': "array<float>",
    "public.sparsevec(5)": "string",
    "public.hstore": "string",
    "public.vectors": "string",
    "public.vector[]": "string",
}


def test_arrays_as_keys_are_text() -> None:
    of = relation(("a", INTS), ("b", 23), key=["a", "b"])
    result = decoder(of).decode(*columns([insert("{{1}}", "1"), insert("{1}", "2")]))
    assert result.after["a"].to_pylist() == ["{{1}}", "{1}"]
    assert result.special.to_pylist() == [[], []]


def test_vectors_of_the_server_itself_are_no_arrays() -> None:
    assert column_type(Column("c", 22, element_type_oid=21, element_delimiter=",")).spark == "string"
    assert values(relation(("c", 30)), ["1 2 3"])[0] == ["1 2 3"]


def written(elements: list[str | None]) -> str:
    """As Postgres writes a list of texts."""
    return "{" + ",".join(map(_element, elements)) + "}"


def _element(text: str | None) -> str:
    if text is None:
        return "NULL"
    if text and text.upper() != "NULL" and not set(text) & set('{},"\\ \t\n\v\f\r'):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


ELEMENT = st.none() | st.text('ab,{}"\\ NUL', max_size=6) | st.text(max_size=4).filter(lambda text: "\0" not in text)


@settings(max_examples=examples(100), deadline=None)
@given(lists=st.lists(st.none() | st.lists(ELEMENT, max_size=5), min_size=1, max_size=8), odd=st.booleans())
def test_whatever_texts_a_list_holds_they_arrive(lists: list[list[str | None] | None], odd: bool) -> None:
    texts: list[Cell] = [None if each is None else written(each) for each in lists]
    nested = '{{"\\"","\\\\"},{NULL,"{"}}'
    found, special = values(relation(("c", TEXTS)), [*texts, nested] if odd else texts)
    assert found[: len(lists)] == lists
    assert special[: len(lists)] == [{}] * len(lists)
    assert not odd or (found[-1], special[-1]) == (None, {"c": nested})


@settings(max_examples=examples(100), deadline=None)
@given(texts=st.lists(st.text('a1,{}"\\N', max_size=8), min_size=1, max_size=6))
def test_any_text_is_a_list_or_kept(texts: list[str]) -> None:
    found, special = values(relation(("c", TEXTS)), list(texts))
    for text, value, odd in zip(texts, found, special, strict=True):
        assert (value is None) == (odd == {"c": text})
        if value is not None:
            assert odd == {}
            assert values(relation(("c", TEXTS)), [text])[0] == [value]


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("oid", [INTS, TEXTS, BYTEAS, 791, 1000])
def test_a_list_is_read_from_any_binary_array(oid: int, large: bool) -> None:
    """Slices, 64-bit offsets, and NULLs that have bytes under them."""
    element = {INTS: "5", TEXTS: '"é,"', BYTEAS: '"\\\\x0a"', 791: '"$1,000.00"', 1000: "t"}[oid]
    text = f"{{{element},NULL}}".encode()
    kind = pa.large_binary() if large else pa.binary()
    whole = pa.array([b"??", text, b"{hidden", text, b"odd \xff", b"??"], kind)
    masked = pa.Array.from_buffers(kind, 6, [pa.py_buffer(bytes([0b111011])), *whole.buffers()[1:]]).slice(1, 4)
    to: ColumnType = column_type(Column("c", oid))
    array, odd = to.read(masked)
    array.validate(full=True)
    one = to.read(pa.array([text]))[0][0].as_py()
    assert array.type == to.arrow
    assert array.to_pylist() == [one, None, one, None]
    assert one[1] is None
    assert odd.tolist() == [3]


def test_each_type_with_arrays_has_a_list() -> None:
    for oid, element in BY_ARRAY_OID.items():
        found = column_type(Column("c", oid))
        assert found.spark == f"array<{element.becomes.spark}>", element.name
        assert found.special
