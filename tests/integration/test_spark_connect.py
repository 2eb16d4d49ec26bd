"""The format on a real Spark Connect server: installed where the server's Python is, and not at the client's.

Streams through a server, which is killed in the middle, are in tests/chaos.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.fixtures.connect import ConnectServer
from tests.fixtures.journals import Journal, shop_table

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]

CLIENT = """
import sys
from pyspark.sql import SparkSession

url, journal = sys.argv[1:]
spark = SparkSession.builder.remote(url).getOrCreate()
options = {"journal": journal, "table": "public.orders", "startingSeq": "earliest"}
rows = spark.read.format("millstream").options(**options).load().orderBy("_ms_seq").collect()
print([(row["_ms_seq"], row["id"], row["body"]) for row in rows])
assert not [name for name in sys.modules if "millstream" in name]
"""
"""A process of its own: a program has either a session of its own or one of a server."""


def test_the_format_works_through_spark_connect(tmp_path: Path) -> None:
    journal = Journal.create(tmp_path / "journal")
    journal.register(shop_table("orders", 1))
    for i in range(5):
        journal.transaction([("public.orders", i, f"body {i}")])
    server = ConnectServer(tmp_path / "server")
    try:
        server.start()
        command = [sys.executable, "-P", "-c", CLIENT, server.url, str(journal.path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, env={"PATH": ""})
    finally:
        server.kill()
    assert done.returncode == 0, done.stderr[-3000:]
    wanted = [(i + 1, i, f"body {i}") for i in range(5)]
    assert done.stdout.strip() == str(wanted)
