"""The examples of docs/spark.md, run as they stand there, on the journal of a real Postgres."""

from __future__ import annotations

import re
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from tests.fixtures.capture import captured
from tests.fixtures.postgres import Database

pytestmark = [pytest.mark.postgres, pytest.mark.spark, pytest.mark.timeout(300)]

PAGE = Path(__file__).parents[2] / "docs" / "spark.md"

TABLES = """
    CREATE TABLE customers (id int PRIMARY KEY, name text, country text);
    CREATE TABLE orders (id int PRIMARY KEY, customer_id int, status text, note text);
    ALTER TABLE orders REPLICA IDENTITY FULL
"""
FIRST = """
    INSERT INTO customers VALUES (1, 'Ada', 'uk'), (2, 'Émilie', 'fr');
    INSERT INTO orders SELECT i, 1 + i % 2, 'new', repeat('x', 3000) FROM generate_series(1, 40) i;
    UPDATE orders SET status = 'paid' WHERE id <= 20
"""
LATER = """
    UPDATE customers SET country = 'gb' WHERE id = 1;
    UPDATE orders SET id = id + 100 WHERE id <= 5;
    DELETE FROM orders WHERE id BETWEEN 31 AND 40;
    UPDATE orders SET status = 'sent' WHERE id > 100
"""
STATUS_COUNTS = "SELECT status, count(*) FROM orders GROUP BY status"


def test_the_examples_of_the_spark_page_work(tmp_path: Path, database: Database, spark: SparkSession) -> None:
    first, live, then, joined = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    database.sql(TABLES)
    with captured(database, tmp_path / "journal") as capture:
        capture.await_state("running")
        database.sql(FIRST)
        before = database.sql("SELECT id, customer_id, status, note FROM orders ORDER BY id")
        capture.await_log_end()
        moment = datetime.now(UTC)
        names: dict[str, Any] = {
            "spark": spark,
            "journal": str(tmp_path / "journal"),
            "moment": moment,
            "work": tmp_path,
        }
        exec(first, names)  # noqa: S102 - the documentation is what is tested
        assert names["changes"].where("_ms_op = 'u' AND _ms_before.status = 'new'").count() == 20

        exec(live, names)  # noqa: S102
        await_counts(spark, database, names["query"])
        database.sql(LATER)
        capture.await_log_end()
        await_counts(spark, database, names["query"])
        names["query"].stop()

    exec(then, names)  # noqa: S102
    columns = ["id", "customer_id", "status", "note"]
    assert [tuple(row) for row in names["orders_then"].orderBy("id").select(columns).collect()] == before

    exec(joined, names)  # noqa: S102
    found = spark.read.parquet(f"{tmp_path}/orders_with_customers").orderBy("_ms_seq").collect()
    assert len(found) == 40 + 20 + 5 + 5
    countries = {"Ada": "gb", "Émilie": "fr"}
    assert {(row["name"], row["country"]) for row in found} == set(countries.items()), "customers as they are now"
    assert [row["id"] for row in found if row["status"] == "sent"] == [101, 102, 103, 104, 105]


def await_counts(spark: SparkSession, database: Database, query: Any) -> None:
    """Until the live count says what the database says."""
    wanted = sorted(database.sql(STATUS_COUNTS))
    deadline = time.monotonic() + 120
    while (found := sorted(tuple(row) for row in spark.table("orders_by_status").collect())) != wanted:
        assert query.isActive, query.exception()
        assert time.monotonic() < deadline, (found, wanted)
        query.processAllAvailable()
