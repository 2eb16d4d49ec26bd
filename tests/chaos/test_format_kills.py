"""A streaming query on the public format whose driver is killed -9 in the middle, again and again."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.fixtures.connect import ConnectServer
from tests.fixtures.journals import Journal, shop_table

pytestmark = [
    pytest.mark.spark,
    pytest.mark.chaos,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not os.environ.get("MILLSTREAM_CHAOS_EACH"), reason="minutes; `make chaos` runs it"),
]

KILLS = 4

QUERY = """
import sys
from pyspark.sql import SparkSession

url, journal, out, once = sys.argv[1:]
spark = SparkSession.builder.remote(url).getOrCreate()
options = {"journal": journal, "table": "public.orders", "startingSeq": "earliest", "maxEventsPerBatch": 30}
stream = spark.readStream.format("millstream").options(**options).load().select("_ms_seq", "id", "body")
writer = stream.writeStream.format("parquet").option("path", out + "/rows").option("checkpointLocation", out + "/cp")
query = (writer.trigger(availableNow=True) if once else writer).start()
print("running", flush=True)
query.awaitTermination()
if once:
    for row in spark.read.parquet(out + "/rows").orderBy("_ms_seq").collect():
        print(row["_ms_seq"], row["id"], row["body"], sep="|")
"""


def query(server: ConnectServer, journal: Journal, out: Path, once: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-P", "-c", QUERY, server.url, str(journal.path), str(out), once]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def test_a_driver_that_is_killed_again_and_again_leaves_no_gap_and_nothing_twice(tmp_path: Path) -> None:
    seed = int(os.environ.get("MILLSTREAM_CHAOS_SEED", random.SystemRandom().randrange(1 << 30)))
    print(f"MILLSTREAM_CHAOS_SEED={seed}")
    chance = random.Random(seed)
    journal = Journal.create(tmp_path / "journal")
    journal.register(shop_table("orders", 1))
    journal.register(shop_table("items", 2))
    over = threading.Event()

    def write() -> None:
        i = 0
        while not over.wait(0.02):
            journal.transaction([("public.orders", i, f"body {i}"), ("public.items", i, "x")])
            i += 1

    writer = threading.Thread(target=write)
    journal.transaction([("public.orders", -1, "first")])
    writer.start()
    server = ConnectServer(tmp_path / "server")
    try:
        for _ in range(KILLS):
            server.start()
            running = query(server, journal, tmp_path, "")
            assert running.stdout is not None
            assert running.stdout.readline() == "running\n"
            over.wait(chance.uniform(1, 12))
            server.kill()
            running.kill()
            running.communicate()
        over.set()
        writer.join()
        server.start()
        said, _ = query(server, journal, tmp_path, "once").communicate(timeout=240)
    finally:
        over.set()
        server.kill()
    orders = [(seq, c.id, c.body) for seq, c in sorted(journal.written.items()) if c.table == "public.orders"]
    assert said.splitlines()[1:] == [f"{seq}|{id_}|{body}" for seq, id_, body in orders]
    assert len(orders) > 500
