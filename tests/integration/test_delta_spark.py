"""Delta tables as Spark reads them with Delta's own package, which comes from Maven and which nothing else needs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pyspark
import pytest

from tests.fixtures.tuples import NUMERIC_12_2, delete, insert, relation, update
from tests.integration.test_delta import Lake

pytestmark = pytest.mark.spark

JARS = Path(__file__).parents[2] / ".cache" / "lake" / "jars"
THINGS = relation(("id", 23), ("a", 25), ("amount", 1700, NUMERIC_12_2), ("at", 1184), key=("id",))

READER = """
import json, sys
from millstream.spark.session import build_session
from pathlib import Path

home, jars, *tables = sys.argv[1:]
spark = build_session(Path(home), "local[2]", extra_conf={
    "spark.jars": jars,
    "spark.sql.shuffle.partitions": "2",
    "spark.databricks.delta.snapshotPartitions": "2",
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
})
found = []
for table in tables:
    rows = spark.read.format("delta").load(table).orderBy("_ms_seq", "id").toJSON().collect()
    found.append([json.loads(row) for row in rows])
latest = spark.sql(f"SELECT count(*) AS n FROM delta.`{tables[0]}` VERSION AS OF 1").collect()[0]["n"]
print(json.dumps({"tables": found, "first": latest}))
spark.stop()
"""


def read_with_spark(root: Path, *tables: Path) -> dict[str, object]:
    """In a process of its own: jars must be there when a session starts."""
    jars = ",".join(str(path) for path in sorted(JARS.glob("*.jar")))
    command = [sys.executable, "-c", READER, str(root / "spark"), jars, *map(str, tables)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=dict(os.environ))
    assert ended.returncode == 0, ended.stderr[-3000:]
    found: dict[str, object] = json.loads(ended.stdout.splitlines()[-1])
    return found


@pytest.mark.skipif(
    not JARS.is_dir(), reason="Delta's package for Spark is not here; `make lake` fetches it with Maven"
)
@pytest.mark.skipif(not pyspark.__version__.startswith("4.2."), reason="Delta's package is for Spark 4.2")
def test_spark_reads_mirrors_and_changelogs(tmp_path: Path) -> None:
    mirror = Lake(tmp_path / "lake", partition_by={"public.t": ["a"]})
    changelog = Lake(tmp_path / "changes", write="changelog")
    for lake in (mirror, changelog):
        lake.deliver(THINGS, [insert("1", "x", "1.50", "2026-01-02 03:04:05+00"), insert("2", "", "NaN", "infinity")])
        lake.deliver(THINGS, [update(["1", "y", "2.00", "2026-01-02 03:04:05+00"]), insert("3", None, None, None)])
        lake.deliver(THINGS, [delete(key=["3", None, None, None])])
    found = read_with_spark(tmp_path, tmp_path / "lake" / "public.t", tmp_path / "changes" / "public.t")
    tables = found["tables"]
    assert isinstance(tables, list)
    special = {"a": "", "amount": "NaN", "at": "infinity"}
    assert tables[0] == [
        {"id": 2, "_ms_seq": 2, "_ms_special": special},
        {"id": 1, "a": "y", "amount": 2.0, "at": "2026-01-02T03:04:05.000Z", "_ms_seq": 3},
    ]
    assert [(row["_ms_op"], row["id"], row.get("a")) for row in tables[1]] == [
        ("c", 1, "x"),
        ("c", 2, ""),
        ("u", 1, "y"),
        ("c", 3, None),
        ("d", 3, None),
    ]
    assert found["first"] == 2
