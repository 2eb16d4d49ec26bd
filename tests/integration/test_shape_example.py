"""The example with SQL, Python and everything else, on real Spark: full tables, then rows that enter and leave."""

from __future__ import annotations

import hashlib
import re
import sqlite3
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from millstream import Engine, StreamSpec, load_streams
from millstream.fold import fold
from millstream.sources import open_source
from millstream.sources.base import Severity
from millstream.spark.analysis import SparkAnalyst
from millstream.transforms.check import shape_findings
from millstream.transforms.shape import Shape, SqlFilter, Step
from tests.fixtures.engines import await_that
from tests.fixtures.postgres import Database

pytestmark = [pytest.mark.postgres, pytest.mark.spark]

EXAMPLE = Path(__file__).parents[2] / "examples" / "filters"
TABLES = """
    CREATE TABLE orders (id int PRIMARY KEY, status text, total numeric(12,2), secret text, customer_id int);
    CREATE TABLE customers (id int PRIMARY KEY, name text, email text, phone text, country text);
    INSERT INTO orders SELECT i, (ARRAY['draft', 'open', 'paid'])[1 + i % 3], i / 2.0, 'x', i % 7
        FROM generate_series(1, 90) i;
    INSERT INTO customers SELECT i, CASE i % 4 WHEN 0 THEN 'test ' ELSE 'anna ' END || i, i || '@x',
        NULLIF('+' || i, '+3'), (ARRAY['de', 'us', 'nl'])[1 + i % 3] FROM generate_series(1, 40) i;
"""
CHANGES = """
    UPDATE orders SET status = 'paid' WHERE id % 10 = 0;
    UPDATE orders SET status = 'draft' WHERE id % 11 = 0;
    UPDATE orders SET id = id + 1000 WHERE id % 13 = 0;
    UPDATE orders SET total = 'NaN' WHERE id = 4;
    DELETE FROM orders WHERE id % 17 = 0;
    UPDATE customers SET country = 'fr' WHERE id % 5 = 0;
    UPDATE customers SET country = 'us' WHERE id % 7 = 0;
    UPDATE customers SET name = 'test ' || id WHERE id % 9 = 0;
    DELETE FROM customers WHERE id = 6;
    INSERT INTO customers VALUES (100, 'emil', 'e@x', NULL, 'de'), (101, 'test e', 'e@x', NULL, 'de');
"""
ORDERS = """
    SELECT id, upper(status), total::text, round(total * 1.19, 2)::text, 'shop', customer_id FROM orders
    WHERE status <> 'draft' AND total >= 0 AND total <> 'NaN' ORDER BY id
"""
CUSTOMERS = """
    SELECT id, initcap(name), email, CASE WHEN phone IS NOT NULL THEN '***' END, country FROM customers
    WHERE country IN ('de', 'fr', 'nl') AND name NOT LIKE 'test %' ORDER BY id
"""


@pytest.fixture
def stream(database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StreamSpec:
    monkeypatch.setattr(sys, "path", [str(EXAMPLE), *sys.path])
    database.sql(TABLES)
    environment = {"SHOP_URI": database.uri, "SHOP_OUT": str(tmp_path)}
    (found,) = load_streams([EXAMPLE / "shop.yaml"], environment=environment)
    # The workers of these tests were started before, and do not have this test's environment.
    (tmp_path / "salt").write_text("pepper")
    steps = [
        replace(step, arguments=(("email", f"file:{tmp_path}/salt"),)) if step.verb == "hash" else step
        for step in found.shape.transforms
    ]
    return replace(found, shape=replace(found.shape, transforms=tuple(steps)))


def expected(database: Database) -> tuple[list[tuple[Any, ...]], list[tuple[Any, ...]]]:
    customers = [
        (id, name, hashlib.sha256(f"pepper{email}".encode()).hexdigest(), phone, country)
        for id, name, email, phone, country in database.sql(CUSTOMERS)
    ]
    return database.sql(ORDERS), customers


def copied(root: Path) -> tuple[list[tuple[Any, ...]], list[tuple[Any, ...]]]:
    with closing(sqlite3.connect(root / "copy.db")) as db:
        orders = 'SELECT id, status, total, gross, origin, customer_id FROM "public.orders" ORDER BY id'
        customers = 'SELECT id, name, email, phone, country FROM "public.customers" ORDER BY id'
        return db.execute(orders).fetchall(), db.execute(customers).fetchall()


def logged(root: Path, table: str) -> list[dict[str, Any]]:
    files = sorted((root / "log" / table).glob("*.parquet"))
    rows = fold([pq.read_table(path, partitioning=None) for path in files], ["id"])
    found: list[dict[str, Any]] = rows.sort_by("id").to_pylist()
    return found


def test_the_example_delivers_what_it_says(
    spark: SparkSession, stream: StreamSpec, database: Database, tmp_path: Path
) -> None:
    with Engine(tmp_path / "home") as engine:
        engine.upsert_streams([stream])
        engine.await_ready("shop", 120)
        assert copied(tmp_path) == expected(database)
        database.sql(CHANGES)
        wanted = expected(database)
        await_that(lambda: copied(tmp_path) == wanted)
        (log,) = engine.verify("shop", "log").targets
        assert log.equal
        with closing(sqlite3.connect(tmp_path / "copy.db")) as db:
            db.execute("UPDATE \"public.orders\" SET status = 'planted' WHERE id = 1")
            db.execute("INSERT INTO \"public.orders\" (id, status, _ms_seq) VALUES (777, 'planted', 1)")
            db.commit()
        (copy,) = engine.verify("shop", "copy", repair=True).targets
        (told,) = [one for one in copy.tables if one.table == "public.orders"]
        assert (told.missing, told.changed, told.extra, told.repaired) == (0, 1, 1, True)
        assert copied(tmp_path) == wanted
    orders, customers = logged(tmp_path, "public.orders"), logged(tmp_path, "public.customers")
    assert [(row["id"], row["status"], str(row["gross"])) for row in orders] == [
        (id, status, gross) for id, status, _, gross, _, _ in wanted[0]
    ]
    assert [(row["id"], row["name"], row["email"], row["phone"], row["country"]) for row in customers] == wanted[1]
    assert pa.types.is_decimal(
        pq.read_schema(next((tmp_path / "log/public.orders").glob("*.parquet"))).field("gross").type
    )


def test_what_spark_says_of_the_tables_is_found_by_check(
    spark: SparkSession, stream: StreamSpec, database: Database
) -> None:
    source = open_source(stream.source)
    relations = source.relations(stream.source.tables)
    source.close()
    analyst = SparkAnalyst(lambda: spark)
    assert {one.severity for one in shape_findings(stream, relations, analyst)} <= {Severity.OK, Severity.WARNING}
    halfway = Shape(transforms=(Step("add_sql", (("both", "concat(status, id)"),), ("public.orders",)),))
    found = shape_findings(replace(stream, shape=halfway), relations, analyst)
    (warning,) = [one.message for one in found if one.severity is Severity.WARNING]
    assert "does not send it (status), which the transforms of stream shop need together with others" in warning
    wrong = Shape(
        filters=(SqlFilter("status = 'paid'"),),
        transforms=(Step("add_sql", (("gross", "totl * 2"),), ("public.orders",)),),
    )
    found = shape_findings(replace(stream, shape=wrong), relations, analyst)
    assert sorted(one.message for one in found if one.severity is Severity.ERROR) == [
        "stream shop: add: public.orders has no column totl",
        "stream shop: filter: public.customers has no column status",
    ]


def test_the_example_of_the_page_fits_the_tables_that_it_is_for(
    spark: SparkSession, database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOP_SALT", "pepper")
    database.sql(f"{TABLES}; ALTER TABLE orders RENAME secret TO internal_note")
    (text,) = re.findall(r"```yaml\n(.*?)```", (EXAMPLE.parents[1] / "docs/filters.md").read_text(), re.DOTALL)
    (tmp_path / "shop.yaml").write_text(text)
    (shop,) = load_streams([tmp_path / "shop.yaml"])
    source = open_source(replace(shop.source, uri=database.uri))
    relations = source.relations(shop.source.tables)
    source.close()
    found = shape_findings(shop, relations, SparkAnalyst(lambda: spark))
    assert (found[-1].severity, found[-1].message) == (
        Severity.OK,
        "the filters and transforms of stream shop fit its 2 tables",
    )
