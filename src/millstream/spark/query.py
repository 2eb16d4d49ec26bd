"""One Structured Streaming query over slices: start it, learn a batch's range, end it.

Only mechanics are here; what a batch does and what a failure means is `engine.delivery`'s. Spark's
offset and commit logs only schedule: no cursor is ever read from them.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from millstream.model import SeqRange
from millstream.spark.slices import FORMAT, SliceOptions, SliceSource

BatchFunction = Callable[[SeqRange], None]

READY_TIMEOUT = 60.0

_LOGS_AS_PLAIN_FILES = {
    "fs.file.impl": "org.apache.hadoop.fs.RawLocalFileSystem",
    "fs.file.impl.disable.cache": "true",
}
"""How a query's own session writes Spark's logs. By default Hadoop keeps a checksum beside each file, and starts the
program `chmod` for both of them: four processes a batch, which take longer than what is written; so two. The setting is
no other session's, since some of Hadoop takes a local file system for the kind with checksums."""

_NO_GENERATED_CODE = {"spark.sql.codegen.wholeStage": "false"}
"""Nobody executes the query's plan: its batches are jobs of their own. Spark would generate code for it, each time."""

_starting = threading.Lock()
"""Spark gives a source's planning process ten seconds to connect: queries start one after another."""


class CheckpointUnusable(Exception):
    """Spark's own record of the batches cannot be read, or says what cannot be. Raised inside a batch."""


class SliceQuery:
    """A running query. `deliver(range)` is called for one batch at a time, in order of range.

    The batch function delivers everything or raises: Spark takes a return for success.
    """

    def __init__(
        self,
        spark: SparkSession,
        name: str,
        options: SliceOptions,
        checkpoint: Path,
        deliver: BatchFunction,
        *,
        once: bool,
    ) -> None:
        self._deliver = deliver
        self._start_seq = options.start_seq
        self._known = threading.Event()
        self._query: StreamingQuery | None = None
        self._reached = False
        self._failed: Exception | None = None
        self.unusable: str | None = None
        """Why the checkpoint cannot be used, if a batch found out."""
        checkpoint.parent.mkdir(parents=True, exist_ok=True)
        for leftover in checkpoint.parent.glob(".ready-*"):
            leftover.unlink()
        self._ready = checkpoint.parent / f".ready-{uuid4().hex}"
        own = spark.newSession()
        for key, value in (_LOGS_AS_PLAIN_FILES | _NO_GENERATED_CODE).items():
            own.conf.set(key, value)
        own.dataSource.register(SliceSource)
        plan = replace(options, ready=str(self._ready)).encode()
        writer = (
            own.readStream.format(FORMAT)
            .option("plan", plan)
            .load()
            .writeStream.queryName(name)
            .option("checkpointLocation", str(checkpoint))
            .foreachBatch(self._on_batch)
        )
        self._writer = writer.trigger(availableNow=True) if once else writer

    def start(self) -> None:
        """Start, and return when the planning process answers or the query has ended. `wait` tells why."""
        with _starting:
            try:
                self._query = self._writer.start()
                self._known.set()
                deadline = time.monotonic() + READY_TIMEOUT
                pause = threading.Event()
                # The planning process is nobody's child that could be waited for: it leaves a file.
                while not self._ready.exists() and self._query.isActive and time.monotonic() < deadline:
                    pause.wait(0.02)
                self._reached = self._ready.exists()
            except (PySparkException, Py4JError) as failed:
                self._failed = failed
            finally:
                self._ready.unlink(missing_ok=True)

    @property
    def reached_journal(self) -> bool:
        """Whether the query came as far as planning a batch: its checkpoint could be read."""
        return self._reached

    def wait(self) -> Exception | None:
        """Wait for the end of the query and return why it failed, or None."""
        if self._query is None:
            return self._failed
        try:
            self._query.awaitTermination()
        except (PySparkException, Py4JError) as failed:
            return failed
        return None

    def stop(self) -> None:
        """Interrupt a running batch (its function raises) and end the query."""
        if self._query is not None:
            with suppress(PySparkException):
                self._query.stop()

    def _on_batch(self, _: DataFrame, batch: int) -> None:
        self._known.wait()
        try:
            start = self._offset(batch - 1) if batch else self._start_seq
            self._deliver(SeqRange(start, self._offset(batch)))
        except CheckpointUnusable as failed:
            self.unusable = str(failed)
            raise

    def _offset(self, batch: int) -> int:
        """The end of a batch, from the running query's own log. The files' format is Spark's secret."""
        try:
            logged = self._query._jsq.streamingQuery().offsetLog().get(batch)  # type: ignore[union-attr]
            offset = json.loads(logged.get().offsets().apply(0).get().json())
            return int(offset["seq"])
        except (Py4JError, ValueError, KeyError) as failed:
            raise CheckpointUnusable(f"batch {batch} is not in Spark's offset log") from failed
