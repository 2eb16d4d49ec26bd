"""format("millstream") in a Spark session that was told nothing about it."""

from __future__ import annotations

import os
import signal
import threading
import time
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import AnalysisException, StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery

from millstream import changelog
from tests.fixtures.journals import Journal, shop_table
from tests.fixtures.tuples import NUMERIC_12_2, delete, insert, relation, truncate, update
from tests.integration.test_changelog_spark import FIRST, NOTHING, ODD, TABLE

pytestmark = pytest.mark.spark

ARRAYS = relation(("id", 20), ("tags", 1009), ("prices", 1231, NUMERIC_12_2), ("_ms_seq", 25), key=["id"])


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal.create(tmp_path / "a journal")


def load(spark: SparkSession, journal: Journal, *, stream: bool = False, **options: object) -> DataFrame:
    reader = spark.readStream if stream else spark.read
    given = {"journal": str(journal.path), "startingSeq": "earliest", **options}
    return reader.format("millstream").options(**{name: str(value) for name, value in given.items()}).load()


def test_a_table_s_changes_arrive_as_the_changelog_has_them(spark: SparkSession, journal: Journal) -> None:
    changes = [
        insert(*FIRST),
        insert(*ODD),
        update(["3", *ODD[1:7], ..., *ODD[8:]], key=["2", *NOTHING]),
        truncate(),
        insert("4", *NOTHING),
        delete(key=["4", *NOTHING]),
    ]
    journal.append(TABLE, changes)
    journal.append(ARRAYS, [insert("1", '{a,NULL,"b c"}', "{1.50}", "mine"), insert("2", None, "{}", None)])
    expected = changelog.assemble(raw_rows(journal, 1, 6), TABLE, 1, journal.writer.header.event_prefix)
    arrived = load(spark, journal, table="public.t", endingSeq=6)
    assert [f.name for f in arrived.schema.fields] == expected.schema.names
    assert repr(arrived.orderBy("_ms_seq").toArrow().to_pylist()) == repr(expected.to_pylist())

    lists = load(spark, journal, table="public.t", startingSeq=7).orderBy("_ms_seq")
    assert dict(lists.dtypes)["prices"] == "array<decimal(12,2)>"
    assert [row["tags"] for row in lists.collect()] == [["a", None, "b c"], None]

    # The envelope of the same changes, read back with the types of the table.
    own = [f for f in arrived.schema.fields if f.name in [c.name for c in TABLE.columns]]
    image = load(spark, journal, endingSeq=6)
    ddl = ", ".join(f"{f.name} {f.dataType.simpleString()}" for f in own)
    back = image.select(F.from_json("after", ddl).alias("row"), "_ms_seq").orderBy("_ms_seq").select("row.*")
    typed = arrived.orderBy("_ms_seq").where("NOT _ms_deleted").select([f.name for f in own])
    assert repr(back.where("id IS NOT NULL").collect()) == repr(typed.collect())


DOCUMENTS = relation(("id", 20), ("doc", 3802), ("note", 25), key=["id"], identity="f")
TOO_LONG = '{"n": 1234567890123456789012345678901234567890}'
EXACT = '{"a": 1.50, "b": [1, null, "é"], "n": 1234567890123456789}'


def test_json_is_a_variant_if_one_asks_for_it(spark: SparkSession, journal: Journal) -> None:
    old, new = ["1", EXACT, "{}"], ["1", TOO_LONG, "{}"]
    journal.append(DOCUMENTS, [insert(*old), update(new, row=old), delete(row=new), insert("2", None, "x")])
    frame = load(spark, journal, table="public.t", json="variant", schemaChange="fail")
    assert dict(frame.dtypes)["doc"] == "variant"
    assert dict(frame.dtypes)["note"] == "string"
    found = frame.selectExpr(
        "variant_get(doc, '$.n', 'decimal(38,0)') n",
        "to_json(doc) text",
        "_ms_before.doc IS NOT NULL old",
        "_ms_special",
    )
    number = Decimal(1234567890123456789)
    text = '{"a":1.5,"b":[1,null,"é"],"n":1234567890123456789}'
    assert [tuple(row) for row in found.orderBy("_ms_seq").collect()] == [
        (number, text, False, {}),
        (None, None, True, {"doc": TOO_LONG}),
        (None, None, False, {"doc": TOO_LONG, "_ms_before.doc": TOO_LONG}),
        (None, None, False, {}),
    ]


def raw_rows(journal: Journal, first: int, last: int) -> pa.RecordBatch:
    from millstream.journal import JournalReader, rows
    from millstream.model import SeqRange

    (batch,) = rows(JournalReader(journal.locations), SeqRange(first - 1, last))
    return batch


def test_what_is_wrong_is_said_where_it_is_asked(spark: SparkSession, journal: Journal) -> None:
    journal.register(shop_table("orders", 1))
    journal.transaction([("public.orders", 1, "x")])
    with pytest.raises(AnalysisException, match=r"unknown option `tabel`: did you mean `table`\?"):
        load(spark, journal, tabel="public.orders")
    with pytest.raises(AnalysisException, match=r"startingSeq 9 is beyond the journal's end, seq 1"):
        load(spark, journal, table="public.orders", startingSeq=9).count()
    journal.append(shop_table("orders", 1, "extra"), [insert("2", "y", "z", oid=1)])
    with pytest.raises(AnalysisException, match=r"seq 1 of public.orders has other columns .*: extra is not there"):
        load(spark, journal, table="public.orders", schemaChange="fail").count()
    with pytest.raises(AnalysisException, match="the format millstream only reads"):
        spark.range(1).write.format("millstream").mode("append").save(str(journal.path))


def run(frame: DataFrame, out: Path) -> StreamingQuery:
    writer = frame.writeStream.format("parquet").option("path", str(out / "rows"))
    return writer.option("checkpointLocation", str(out / "checkpoint")).start()


def arrived(spark: SparkSession, out: Path) -> list[tuple[Any, ...]]:
    if not list(out.glob("rows/*.parquet")):
        return []
    rows = spark.read.parquet(str(out / "rows")).select("_ms_seq", "id", "body").orderBy("_ms_seq").collect()
    return [tuple(row) for row in rows]


def test_a_stream_that_is_killed_in_between_has_every_change_once(
    spark: SparkSession, journal: Journal, tmp_path: Path
) -> None:
    journal.register(shop_table("orders", 1))
    journal.register(shop_table("items", 2))
    killed = threading.Event()

    def write() -> None:
        for i in range(150):
            journal.transaction([("public.orders", i, f"body {i}"), ("public.items", i, "x")])
            killed.wait(0.03)

    journal.transaction([("public.orders", -1, "first")])
    writer = threading.Thread(target=write)
    writer.start()

    def frame() -> DataFrame:
        return load(spark, journal, stream=True, table="public.orders", maxEventsPerBatch=20)

    query = run(frame(), tmp_path)
    await_batches(query, 2)
    kill_planner()
    killed.set()
    with pytest.raises(StreamingQueryException):
        query.awaitTermination(120)
    writer.join()
    last = frame().writeStream.format("parquet").option("path", str(tmp_path / "rows"))
    last = last.option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(availableNow=True)
    assert last.start().awaitTermination(120)
    wanted = [(seq, c.id, c.body) for seq, c in sorted(journal.written.items()) if c.table == "public.orders"]
    assert arrived(spark, tmp_path) == wanted
    assert len(wanted) == 151


def await_batches(query: StreamingQuery, count: int) -> None:
    deadline = time.monotonic() + 120
    while not (query.lastProgress and query.lastProgress["batchId"] >= count):
        assert query.isActive, query.exception()
        assert time.monotonic() < deadline
        threading.Event().wait(0.05)


def kill_planner() -> None:
    """kill -9 of the Python process that plans the running query's batches."""
    planners = [
        int(entry.name)
        for entry in Path("/proc").iterdir()
        if entry.name.isdigit()
        and b"python_streaming_source_runner" in command_line(entry)
        and is_ours(int(entry.name))
    ]
    assert planners
    for planner in planners:
        os.kill(planner, signal.SIGKILL)


def command_line(process: Path) -> bytes:
    try:
        return (process / "cmdline").read_bytes()
    except OSError:
        return b""


def is_ours(process: int) -> bool:
    """Whether the process descends from this one."""
    while process > 1:
        if process == os.getpid():
            return True
        try:
            process = int(Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[1])
        except OSError:
            return False
    return False
