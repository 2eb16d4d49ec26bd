"""What the processes in which delivery tasks run have asked of the system."""

from __future__ import annotations

import ctypes
import os
import sys

import pytest
from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

GET_THP_DISABLE = 42


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has huge pages to be switched off")
def test_workers_do_without_huge_pages_and_their_arrow_keeps_memory(spark: SparkSession) -> None:
    def memory(_: int) -> tuple[int, str | None]:
        return ctypes.CDLL(None).prctl(GET_THP_DISABLE, 0, 0, 0, 0), os.environ.get("MIMALLOC_PURGE_DELAY")

    delay = os.environ.get("MIMALLOC_PURGE_DELAY", "10000")
    assert set(spark.sparkContext.parallelize(range(4), 4).map(memory).collect()) == {(1, delay)}
