"""Rows that SQL or a user's function fails on: they become dead letters, and everything else arrives."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from millstream.engine.reshaping import reshaped
from millstream.errors import RowUnshaped
from millstream.targets.rejects import unpacked
from millstream.transforms.shape import Shape, Shaping, SqlFilter, Step
from tests.fixtures.delivery import Bench
from tests.fixtures.journals import Journal, shop_table
from tests.fixtures.tuples import Change, delete, insert, update

pytestmark = pytest.mark.spark

ORDERS = replace(shop_table("orders", 16_400), identity="f")
HISTORIES = int(os.environ.get("MILLSTREAM_HISTORIES", "1"))
SHAPE = Shape(
    filters=(SqlFilter("10 / length(coalesce(body, '')) > 0"),),
    transforms=(
        Step("rename", (("id", "code"),)),
        Step("add_sql", (("half", "CAST(body AS INT) / 2"), ("part", "100 / (CAST(body AS INT) - 13)"))),
        Step("cast", (("half", "bigint"),)),
        Step("select", (("*", None), ("half + 1 AS more", None))),
    ),
)


def bench(spark: SparkSession, root: Path, shape: Shape, changes: list[Change]) -> Bench:
    journal = Journal.create(root / "journal")
    journal.register(ORDERS)
    journal.append(ORDERS, changes)
    return Bench(spark, root, journal, kind="sqlite", options={"path": str(root / "copy.db")}, shape=shape)


def test_each_row_that_sql_fails_on_is_a_letter_that_says_where(spark: SparkSession, tmp_path: Path) -> None:
    changes = [
        insert("1", "10"),
        insert("2", "hunter"),  # no number: add half
        insert("3", ""),  # the filter divides by zero
        insert("4", "13"),  # add part divides by zero
        insert("5", "7"),  # half is no whole number: cast
        insert("6", "20"),
        update(["2", "14"], row=["2", "hunter"]),  # repaired at the source, its old row is as bad as before
        insert("7", "hunter"),
        delete(row=["7", "hunter"]),
        update(["8", "nope"], row=["6", "20"]),  # its old key is free
        delete(row=["3", ""]),
    ]
    shop = bench(spark, tmp_path, SHAPE, changes)
    assert shop.deliver_all().error is None
    with closing(sqlite3.connect(tmp_path / "copy.db")) as db:
        found = db.execute('SELECT code, body, half, part, more FROM "public.orders" ORDER BY code').fetchall()
    assert found == [(1, "10", 5, 100 / -3, 6), (2, "14", 7, 100.0, 8)]
    letters = shop.store.letters("shop", "log")
    assert [(one.seq, one.key, one.kind, one.state.value, one.reason) for one in letters] == [
        (2, "2", "transform", "superseded", "public.orders.half: add fails on it"),
        (3, "3", "transform", "superseded", "public.orders: a filter fails on it"),
        (4, "4", "transform", "waiting", "public.orders.part: add fails on it"),
        (5, "5", "transform", "waiting", "public.orders.half: a value has no exact form as int64"),
        (8, "7", "transform", "superseded", "public.orders.half: add fails on it"),
        (10, "8", "transform", "waiting", "public.orders.half: add fails on it"),
    ]
    assert "hunter" not in "".join(event.message for event in shop.watching.events)
    shop.close()


@pytest.mark.skipif(HISTORIES == 1, reason="takes dozens of Spark jobs: make histories")
def test_a_row_that_a_function_fails_on_is_a_letter(spark: SparkSession, tmp_path: Path) -> None:
    shape = Shape(transforms=(Step("python", (("tests.fixtures.shaped:counted", None),)),))
    changes = [insert("1", "1"), insert("2", "hunter"), insert("3", "3")]
    shop = bench(spark, tmp_path, shape, changes)
    assert shop.deliver_all().error is None
    with closing(sqlite3.connect(tmp_path / "copy.db")) as db:
        found = db.execute('SELECT id, number FROM "public.orders" ORDER BY id').fetchall()
    assert found == [(1, 1), (3, 3)]
    (letter,) = shop.store.letters("shop", "log")
    assert (letter.seq, letter.key, letter.kind) == (2, "2", "transform")
    assert letter.reason == "public.orders: python tests.fixtures.shaped:counted fails on it"
    # It holds the source's change: it can be tried again, by the same transforms or others.
    whole = shop.store.get_letter(letter.id)
    assert whole is not None
    change = unpacked(whole.payload)
    with pytest.raises(RowUnshaped):
        reshaped(Shaping("shop", shape, True), ORDERS, letter.relation_id, change)
    other = Shape(transforms=(Step("add_sql", (("number", "try_cast(body AS BIGINT)"),)),))
    _, made = reshaped(Shaping("shop", other, True), ORDERS, letter.relation_id, change)
    assert made.select(["id", "body", "number"]).to_pylist() == [{"id": 2, "body": "hunter", "number": None}]
    shop.close()
