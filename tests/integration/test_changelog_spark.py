"""Spark reads a changelog written by pyarrow with the types that the decoder means, and folds it."""

from __future__ import annotations

from datetime import UTC, date, datetime, time
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from millstream import changelog
from millstream.fold import fold, fold_with_spark
from millstream.sources.postgres.types import column_types
from tests.fixtures.tuples import NUMERIC_12_2, delete, insert, journal_rows, relation, truncate, update

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("time_type")]

TABLE = relation(
    ("id", 20),
    ("small", 21),
    ("n", 23),
    ("f", 700),
    ("g", 701),
    ("ok", 16),
    ("price", 1700, NUMERIC_12_2),
    ("note", 25),
    ("raw", 17),
    ("day", 1082),
    ("at", 1114),
    ("instant", 1184),
    ("words", 1009),
    ("prices", 1231, NUMERIC_12_2),
    ("coin", 790),
    ("serial", 5069),
    ("hour", 1083),
    ("hours", 1183),
    ("span", 1186),
    ("spans", 1187),
    ("zoned", 1266),
    key=["id"],
    types=(("interval", "struct"), ("time", "time"), ("timetz", "struct")),
)
ROW = ["1", "2", "3", "0.5", "-0.25", "t", "12.34", "é", "\\x00ff", "0001-01-01", "1582-10-10 00:00:00.000001"]
FIRST = [*ROW, "2024-02-29 12:00:00+00", '{"a, b",NULL}', "{1.50,NULL}", "-$1,234.50", "18446744073709551615"]
FIRST += [
    "23:59:59.999999",
    "{00:00:00,NULL}",
    "1 year -1 mons +3 days -00:00:01.5",
    '{"1 day",NULL}',
    "24:00:00-01:30",
]
ODD_TIMES = ["infinity", "0044-03-15 00:00:00 BC", "infinity"]
ODD = ["2", None, None, "NaN", "Infinity", "f", "NaN", "x", "\\x", *ODD_TIMES, "{{a},{b}}", "{NaN}", None, "0"]
ODD += ["24:00:00", "{24:00:00}", "infinity", "{infinity}", None]
NOTHING = [None] * 20


def test_spark_reads_the_types_that_are_meant_and_folds_the_rows(spark: SparkSession, tmp_path: Path) -> None:
    changes = [
        insert("9", *NOTHING),
        truncate(),
        insert(*FIRST),
        insert(*ODD),
        update(["3", *ODD[1:7], ..., *ODD[8:]], key=["2", *NOTHING]),
        insert("4", *NOTHING),
        delete(key=["4", *NOTHING]),
    ]
    batch = changelog.assemble(journal_rows(changes), TABLE, 1, "0123456789ab")
    for part in range(0, len(changes), 4):
        pq.write_table(pa.Table.from_batches([batch.slice(part, 4)]), tmp_path / f"{part}.parquet")

    frame = spark.read.parquet(str(tmp_path))
    types = dict(frame.dtypes)
    assert [types[c.name] for c in TABLE.columns] == [kind.spark for kind in column_types(TABLE)]
    assert types["_ms_special"] == "map<string,string>"
    assert types["_ms_unchanged"] == "array<string>"
    assert types["_ms_commit_ts"] == "timestamp"
    assert types["_ms_before"].startswith("struct<id:bigint,small:smallint,")

    folded = {row["id"]: row for row in fold_with_spark(frame, ["id"]).toArrow().to_pylist()}
    plainly = {row["id"]: row for row in fold([batch], ["id"]).to_pylist()}
    assert repr(folded) == repr(plainly)  # by text, because NaN differs from itself
    assert folded.keys() == {1, 3}
    assert folded[1] == {
        "id": 1,
        "small": 2,
        "n": 3,
        "f": 0.5,
        "g": -0.25,
        "ok": True,
        "price": Decimal("12.34"),
        "note": "é",
        "raw": b"\0\xff",
        "day": date(1, 1, 1),
        "at": datetime(1582, 10, 10, 0, 0, 0, 1),  # noqa: DTZ001
        "instant": datetime(2024, 2, 29, 12, tzinfo=UTC),
        "words": ["a, b", None],
        "prices": [Decimal("1.50"), None],
        "coin": Decimal("-1234.50"),
        "serial": Decimal(2**64 - 1),
        "hour": time(23, 59, 59, 999999),
        "hours": [time(0), None],
        "span": {"months": 11, "days": 3, "microseconds": -1_500_000},
        "spans": [{"months": 0, "days": 1, "microseconds": 0}, None],
        "zoned": {"microseconds": 86_400_000_000, "offset_seconds": -5400},
        "_ms_special": [],
    }
    assert folded[3]["note"] == "x"
    assert dict(folded[3]["_ms_special"]) == {
        "price": "NaN",
        "day": "infinity",
        "at": "0044-03-15 00:00:00 BC",
        "instant": "infinity",
        "words": "{{a},{b}}",
        "prices": "{NaN}",
        "hour": "24:00:00",
        "hours": "{24:00:00}",
        "span": "infinity",
        "spans": "{infinity}",
    }
    assert [folded[3][name] for name in ("price", "day", "at", "instant", "raw")] == [None, None, None, None, b""]


def test_an_empty_changelog_folds_to_nothing(spark: SparkSession, tmp_path: Path) -> None:
    batch = changelog.assemble(journal_rows([insert(*FIRST)]).slice(1), TABLE, 1, "0123456789ab")
    pq.write_table(pa.Table.from_batches([batch]), tmp_path / "part.parquet")
    assert fold_with_spark(spark.read.parquet(str(tmp_path)), ["id"]).count() == 0
