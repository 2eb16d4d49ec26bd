"""The examples of docs/library.md, run as they stand there."""

from __future__ import annotations

import re
import threading
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from tests.fixtures.postgres import Database

pytestmark = [pytest.mark.postgres, pytest.mark.spark, pytest.mark.timeout(300)]

PAGE = Path(__file__).parents[2] / "docs" / "library.md"


def test_the_examples_of_the_library_page_work(
    tmp_path: Path,
    database: Database,
    spark: SparkSession,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    running, streaming, reading = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    database.sql("CREATE TABLE orders (id int PRIMARY KEY, note text)")
    names: dict[str, object] = {"uri": database.uri}
    exec(running, names)  # noqa: S102 - the documentation is what is tested
    database.sql("INSERT INTO orders SELECT i, 'note ' || i FROM generate_series(1, 50) i")
    exec(running, names)  # noqa: S102
    assert names["code"] == 0
    assert spark.range(3).count() == 3, "a session that was there before must be left running"
    delivered = pa.concat_tables(pq.read_table(file) for file in sorted(tmp_path.glob("log/public.orders/*.parquet")))
    assert delivered["id"].to_pylist() == list(range(1, 51))
    exec(reading, names)  # noqa: S102
    assert "public.orders 50 ['seq', 'tx_index', 'op'" in capsys.readouterr().out
    (segment,) = (tmp_path / "home" / "journals" / "shop" / "segments").glob("*.arrows")
    with pa.ipc.open_stream(segment.read_bytes()) as stream:
        assert stream.read_all()["seq"].to_pylist() == list(range(1, 51))

    def wait_until_done(query: StreamingQuery) -> None:
        database.sql("UPDATE orders SET note = 'changed' WHERE id = 7")
        deadline = time.monotonic() + 120
        while not any(p["numInputRows"] for p in query.recentProgress):
            assert query.isActive, query.exception()
            assert time.monotonic() < deadline
            threading.Event().wait(0.05)

    names |= {"spark": spark, "work": tmp_path, "wait_until_done": wait_until_done}
    exec(streaming, names)  # noqa: S102
    (row,) = spark.read.parquet(str(tmp_path / "orders_log")).collect()
    assert (row["_ms_op"], row["id"], row["note"]) == ("u", 7, "changed")
