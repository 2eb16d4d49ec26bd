"""Rows that a constraint of a DuckDB or Delta table does not allow: dead letters, and everything else arrives."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import pytest
from deltalake import DeltaTable

from millstream.engine import delivery
from millstream.model import Column
from tests.fixtures.delivery import Bench
from tests.fixtures.inprocess import FakeSpark, InProcessQuery
from tests.fixtures.journals import Journal, shop_table
from tests.fixtures.tuples import insert, update

ORDERS = shop_table("orders", 16_400)


@pytest.fixture(params=["duckdb mirror", "duckdb changelog", "delta mirror", "delta changelog"])
def shop(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr(delivery, "SliceQuery", InProcessQuery)
    kind, write = request.param.split()
    journal = Journal.create(tmp_path / "journal")
    journal.register(ORDERS)
    options = {"path": str(tmp_path / "copy"), "write": write}
    return Bench(FakeSpark(), tmp_path, journal, kind=kind, options=options)  # type: ignore[arg-type]


def constrain(shop: Bench) -> None:
    """From now on the copy has no body that begins with `bad`, and none that is missing."""
    if shop.kind == "duckdb":
        with closing(duckdb.connect(shop.options["path"])) as db:
            columns = db.execute("SELECT sql FROM duckdb_tables() WHERE table_name = 'orders'").fetchall()[0][0]
            db.execute("ALTER TABLE public.orders RENAME TO before")
            checked = columns.removesuffix(");").replace("body VARCHAR", "body VARCHAR NOT NULL")
            db.execute(f"{checked}, CHECK (body NOT LIKE 'bad%'))")
            db.execute("INSERT INTO public.orders SELECT * FROM public.before")
    else:
        table = DeltaTable(f"{shop.options['path']}/public.orders")
        table.alter.add_constraint({"good": "body IS NOT NULL AND body NOT LIKE 'bad%'"})


def rows(shop: Bench) -> list[tuple[Any, ...]]:
    if shop.kind == "duckdb":
        with closing(duckdb.connect(shop.options["path"])) as db:
            return db.execute("SELECT id, body FROM public.orders ORDER BY id, _ms_seq").fetchall()
    found = DeltaTable(f"{shop.options['path']}/public.orders").to_pyarrow_table()
    found = found.sort_by([("id", "ascending"), ("_ms_seq", "ascending")])
    return list(zip(found["id"].to_pylist(), found["body"].to_pylist(), strict=True))


def test_what_a_constraint_does_not_allow_is_a_letter(shop: Bench) -> None:
    mirrors = shop.options["write"] == "mirror"
    shop.journal.append(ORDERS, [insert("1", "one"), insert("2", "two")])
    assert shop.deliver_all().error is None
    constrain(shop)
    shop.journal.append(
        ORDERS,
        [
            insert("3", "three"),
            update(["1", "bad"]),
            insert("4", None),
            update(["2", "two again"]),
            insert("5", "five"),
        ],
    )
    assert shop.deliver_all().error is None
    kept = [(1, "one"), (2, "two again")] if mirrors else [(1, "one"), (2, "two"), (2, "two again")]
    assert rows(shop) == [*kept, (3, "three"), (5, "five")]
    letters = shop.store.letters("shop", "log")
    key = ("1", "4") if mirrors else (None, None)
    assert [(one.seq, one.kind, one.key) for one in letters] == [(4, "constraint", key[0]), (5, "constraint", key[1])]
    assert "bad" not in "".join(one.reason for one in letters)
    # What comes later for such a row is written, and the letter is of no more use.
    shop.journal.append(ORDERS, [update(["1", "good"]), insert("6", "six")])
    assert shop.deliver_all().error is None
    assert rows(shop)[-1] == (6, "six")
    assert (1, "good") in rows(shop)
    state = "superseded" if mirrors else "waiting"
    assert [one.state.value for one in shop.store.letters("shop", "log")] == [state, "waiting"]


NUMBERS = replace(ORDERS, columns=(ORDERS.columns[0], Column("body", 20)))
"""The table with a column that is wider at the source than in the copy."""


@pytest.fixture
def narrow(shop: Bench) -> Bench:
    """The copy's table is there before the stream, with a column of 32 bits."""
    with closing(duckdb.connect(shop.options["path"])) as db:
        db.execute("CREATE SCHEMA public; CREATE TABLE public.orders (id INTEGER, body INTEGER)")
    return shop


@pytest.mark.parametrize("shop", ["duckdb mirror", "duckdb changelog"], indirect=True)
def test_a_number_that_a_narrower_column_does_not_hold_is_a_letter(narrow: Bench) -> None:
    mirrors = narrow.options["write"] == "mirror"
    narrow.journal.register(NUMBERS)
    changes = [insert("1", "1"), insert("2", str(2**31)), insert("3", str(2**31 - 1)), update(["1", str(-(2**31) - 1)])]
    narrow.journal.append(NUMBERS, changes)
    assert narrow.deliver_all().error is None
    assert rows(narrow) == [(1, 1), (3, 2**31 - 1)]
    found = narrow.store.letters("shop", "log")
    assert [(one.op, one.kind, one.key) for one in found] == [
        ("c", "value", "2" if mirrors else None),
        ("u", "value", "1" if mirrors else None),
    ]
    assert str(2**31) not in "".join(one.reason for one in found)


@pytest.mark.parametrize("shop", ["duckdb mirror"], indirect=True)
def test_a_key_that_is_narrower_there_is_refused(narrow: Bench) -> None:
    wider = replace(NUMBERS, columns=(replace(ORDERS.columns[0], type_oid=20), Column("body", 20)))
    narrow.journal.register(wider)
    narrow.journal.append(wider, [insert("1", "1")])
    assert "id is BIGINT at the source, and INTEGER" in str(narrow.deliver_all().error)


@pytest.mark.parametrize("shop", ["delta mirror"], indirect=True)
def test_a_key_that_a_partition_cannot_hold_is_a_letter(shop: Bench) -> None:
    table = replace(ORDERS, columns=(*ORDERS.columns, Column("place", 25, key=True)), key=("id", "place"))
    table = replace(table, oid=16_401, name="places", primary_key=table.key)
    shop.journal.register(table)
    shop.options["partition_by"] = {"public.places": ["place"]}
    rows = [("1", "one", "here"), ("2", "two", ""), ("3", "three", "there")]
    shop.journal.append(table, [insert(*row, oid=16_401) for row in rows])
    assert shop.deliver_all().error is None
    found = DeltaTable(f"{shop.options['path']}/public.places").to_pyarrow_table()
    assert sorted(found["id"].to_pylist()) == [1, 3]
    assert [(one.seq, one.kind) for one in shop.store.letters("shop", "log")] == [(2, "value")]
