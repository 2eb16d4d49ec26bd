"""An archive of Spark's classes, so that its Java process starts in half the time.

A JVM that starts Spark reads and checks some ten thousand classes. Java can keep them in a file in
the form it uses in memory (class data sharing): a start that finds the file costs half the CPU.
`python -m millstream.spark.archive` makes it, once for an installation, by running a small stream;
set-up calls it. A session uses the file if it is there and goes on without it if it is not: Java
itself checks that it was made from the same Java and the same jars.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

import pyarrow as pa
import pyspark
from pyspark import SparkContext
from pyspark.sql import SparkSession

from millstream.errors import MillstreamError
from millstream.journal import JournalWriter
from millstream.model import BatchLimits, Op, SeqRange
from millstream.sources.base import CAPTURED, Block
from millstream.spark.distribution import make_distribution, shared_distribution, shelf
from millstream.spark.java import Java, find_java

_EXIT_SECONDS = 180


def archive_path(java: Java) -> Path:
    """Where the archive for this Java and this pyspark belongs, made or not: within the environment of this Python."""
    made_from = f"{java.home}\n{java.version}\n{pyspark.__file__}\n{shared_distribution()}"
    name = hashlib.sha256(made_from.encode()).hexdigest()[:16]
    return shelf() / f"spark-{name}.jsa"


def archive_options(java: Java) -> list[str]:
    """The Java options that use the archive; none if there is none."""
    archive = archive_path(java)
    # A stale archive is only slow, and Java's own words about it would be in nobody's interest.
    return [f"-XX:SharedArchiveFile={archive}", "-Xlog:cds=off", "-Xlog:cds+dynamic=off"] if archive.exists() else []


def make_archive() -> Path:
    """Run a small stream and keep the classes it needed. Takes the place of an older archive in one step."""
    from millstream.spark.session import build_session

    archive = archive_path(find_java())
    make_distribution(shared_distribution())
    fresh = archive.with_suffix(f".{os.getpid()}.new")
    with tempfile.TemporaryDirectory(prefix="millstream-archive-") as scratch:
        spark = build_session(Path(scratch) / "spark", java_options=[f"-XX:ArchiveClassesAtExit={fresh}"])
        _run_a_stream(spark, Path(scratch))
        spark.stop()
        jvm = SparkContext._gateway.proc  # type: ignore[union-attr]
        jvm.stdin.close()
        jvm.wait(_EXIT_SECONDS)
    if not fresh.exists():
        raise MillstreamError("Java left no archive of its classes", hint="Spark works without it, and starts slower")
    fresh.replace(archive)
    return archive


def _run_a_stream(spark: SparkSession, scratch: Path) -> None:
    """One batch of one message on its way from a journal through a query and a Python worker."""
    from millstream.spark.query import SliceQuery
    from millstream.spark.slices import SliceOptions

    journal = scratch / "journal"
    _write_a_message(journal)
    options = SliceOptions((str(journal),), 0, BatchLimits(0, 1 << 20, 1000), 2, ready="")

    def deliver(_: SeqRange) -> None:
        # A batch of changes, and one in which SQL has a part.
        spark.sparkContext.parallelize([0], 1).mapPartitions(lambda tasks: tasks).collect()
        spark.range(1).mapInArrow(lambda batches: batches, "id bigint").collect()

    query = SliceQuery(spark, "archive", options, scratch / "checkpoint", deliver, once=True)
    query.start()
    failed = query.wait()
    if failed is not None:
        raise failed


def _write_a_message(path: Path) -> None:
    values = [[0], [Op.MESSAGE], [1], [2], [0], [1], [0], [b"M"]]
    columns = [pa.array(value, field.type) for value, field in zip(values, CAPTURED, strict=True)]
    writer = JournalWriter.create(path, source="archive", source_kind="postgres", identity={}, start_position=0)
    writer.append(Block(pa.RecordBatch.from_arrays(columns, schema=CAPTURED)))
    writer.commit()
    writer.close()


def main() -> None:
    """Make the archive, unless it is there, and say where it is."""
    archive = archive_path(find_java())
    print(archive if archive.exists() else make_archive())


if __name__ == "__main__":
    main()
