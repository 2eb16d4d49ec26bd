"""Filters and transforms in a stream file: what is right becomes a shape, what is wrong is named with its place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from millstream.config import StreamFileError, load_streams
from millstream.config.definition import definition, from_definition
from millstream.transforms.shape import FieldFilter, Shape, SqlFilter, Step

FILE = """\
name: shop
source: {kind: postgres, uri: "postgresql://app@localhost/shop", tables: ["public.*"]}
mode: cdc
targets: [{name: log, kind: files, path: ./log}]
"""


def loaded(tmp_path: Path, more: str) -> Shape:
    path = tmp_path / "shop.yaml"
    path.write_text(FILE + more)
    (stream,) = load_streams([path])
    assert from_definition(json.loads(json.dumps(definition(stream)))) == stream
    return stream.shape


def problems(tmp_path: Path, more: str) -> list[str]:
    with pytest.raises(StreamFileError) as refused:
        loaded(tmp_path, more)
    return [str(problem).split("shop.yaml:", 1)[1] for problem in refused.value.problems]


def test_nothing_is_the_default_and_changes_nothing(tmp_path: Path) -> None:
    assert not loaded(tmp_path, "")
    assert not loaded(tmp_path, "transforms: []\nmatch: []\nops: [truncate, insert, update, delete]\n")


def test_everything_that_needs_no_sql(tmp_path: Path) -> None:
    shape = loaded(
        tmp_path,
        """\
match:
  - {column: region, equals: eu}
  - {column: day, in: [2024-01-31, "2024-02-01"], tables: [public.orders]}
  - {column: sku, prefix: "A-"}
  - {column: sku, regex: "^[A-Z]"}
ops: [update, insert]
transforms:
  - drop: secret
  - rename: {a: b}
    tables: ["public.item_*"]
  - cast: {total: string}
  - add: {origin: eu, level: 3, live: true}
  - mask: [email]
  - mask: {phone: "none"}
  - hash: {columns: [name, iban], salt: file:salt}
  - truncate: {note: 100}
""",
    )
    assert shape.fields == (
        FieldFilter("region", "equals", ("eu",)),
        FieldFilter("day", "in", ("2024-01-31", "2024-02-01"), ("public.orders",)),
        FieldFilter("sku", "prefix", ("A-",)),
        FieldFilter("sku", "regex", ("^[A-Z]",)),
    )
    assert shape.ops == ("insert", "update")
    salt = f"file:{tmp_path}/salt"
    assert shape.transforms == (
        Step("drop", (("secret", None),)),
        Step("rename", (("a", "b"),), ("public.item_*",)),
        Step("cast", (("total", "string"),)),
        Step("add", (("origin", "eu"), ("level", 3), ("live", True))),
        Step("mask", (("email", "***"),)),
        Step("mask", (("phone", "none"),)),
        Step("hash", (("name", salt), ("iban", salt))),
        Step("truncate", (("note", 100),)),
    )


def test_what_is_in_sql_and_python(tmp_path: Path) -> None:
    shape = loaded(
        tmp_path,
        """\
filter:
  public.orders: status <> 'draft'
  "public.item_*": n > 0
transforms:
  - add: {origin: eu, gross: {sql: total * 2}, net: {sql: total}, level: 1}
  - select: [id, upper(name) AS name]
  - {select: "*", tables: [public.orders]}
  - python: shop.rows:clean
""",
    )
    assert shape.in_spark
    assert shape.filters == (
        SqlFilter("status <> 'draft'", ("public.orders",)),
        SqlFilter("n > 0", ("public.item_*",)),
    )
    assert shape.transforms == (
        Step("add", (("origin", "eu"),)),
        Step("add_sql", (("gross", "total * 2"), ("net", "total"))),
        Step("add", (("level", 1),)),
        Step("select", (("id", None), ("upper(name) AS name", None))),
        Step("select", (("*", None),), ("public.orders",)),
        Step("python", (("shop.rows:clean", None),)),
    )
    assert loaded(tmp_path, "filter: a = 1\n").filters == (SqlFilter("a = 1"),)
    assert not loaded(tmp_path, "filter:\n")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("match: [{column: a}]", "5:9: match[0]: needs exactly one test; one of equals, prefix, regex, in"),
        ("match: [{column: a, equals: 1, prefix: b}]", "5:9: match[0]: needs exactly one test"),
        (
            "match: [{column: a, is: 1}]",
            "5:21: match[0].is: unknown key; known keys: column, equals, prefix, regex, in, tables",
        ),
        ("match: [{column: a, equals: 1, tables: [orders]}]", "5:41: match[0].tables[0]: not a table pattern"),
        ("ops: [insert, updates]", "5:6: ops: `updates` is no operation; did you mean `update`?"),
        ("ops: []", "5:6: ops: must be a list of operations"),
        ("transforms: [{drop: a, mask: b}]", "5:14: transforms[0]: needs exactly one transform"),
        ("transforms: [{tables: [public.a]}]", "5:14: transforms[0]: needs exactly one transform"),
        ("transforms: [{rename: a}]", "5:23: transforms[0].rename: must be a mapping of columns; write {rename:"),
        ("transforms: [{truncate: {a: long}}]", "5:25: transforms[0].truncate: must be a mapping of columns"),
        ("transforms: [{hash: {columns: a, salt: pepper}}]", "transforms[0].hash.salt: the salt is given by reference"),
        ("filter: [a = 1]", "5:9: filter: must be a condition in SQL, or one per table pattern"),
        ("filter: {orders: a = 1}", "5:18: filter.orders: not a table pattern"),
        ("transforms: [{add: {a: [1]}}]", "5:20: transforms[0].add: `a` must be a text, number or truth, or {sql:"),
        ("transforms: [{python: clean}]", "transforms[0].python: must be module:function; write {python: shop.rows"),
        ("transforms: [{droop: a}]", "unknown key; did you mean `drop`?"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(tmp_path: Path, more: str, said: str) -> None:
    found = problems(tmp_path, more + "\n")
    assert any(said in one for one in found), found
    assert not any("pepper" in one for one in found)
