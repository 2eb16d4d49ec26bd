"""How far a Spark job is while it runs, and its end when it shall not go on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from uuid import uuid4

from pyspark.sql import SparkSession

from millstream.observe import counted

PROGRESS_SECONDS = 1.0


@contextmanager
def watched(
    spark: SparkSession, what: str, stopping: threading.Event, say: Callable[[int, float], None]
) -> Iterator[None]:
    """Tell once a second how many tasks of this thread's jobs have ended, and after how many seconds; cancel them
    once `stopping` is set."""
    context, group, over = spark.sparkContext, f"{what}-{uuid4().hex}", threading.Event()
    context.setJobGroup(group, what, interruptOnCancel=True)
    started = time.monotonic()

    def watch() -> None:
        while not over.wait(PROGRESS_SECONDS):
            if stopping.is_set():
                context.cancelJobGroup(group)
            else:
                say(_tasks_done(spark, group), time.monotonic() - started)

    watcher = threading.Thread(target=watch, name=group, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()
        context.setLocalProperty("spark.jobGroup.id", None)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Progress:
    """A job of so many tasks over so many rows, told to people."""

    what: str
    tasks: int
    rows: int

    def text(self, done: int, seconds: float) -> str:
        done = min(done, self.tasks)
        parts = f"{self.what}: {done} of {counted(self.tasks, 'part')}"
        # The server's estimate; of a table that was never analysed it has none.
        rows = self.rows * done // self.tasks if self.tasks else 0
        return f"{parts}, about {rows:,} rows, {rows / seconds:,.0f} rows/s" if rows and seconds else parts


def _tasks_done(spark: SparkSession, group: str) -> int:
    """How many tasks of the jobs have ended, by Spark's own word."""
    tracker = spark.sparkContext.statusTracker()
    done = 0
    for job in tracker.getJobIdsForGroup(group):
        found = tracker.getJobInfo(job)
        for stage in found.stageIds if found else ():
            info = tracker.getStageInfo(stage)
            done += info.numCompletedTasks if info else 0
    return done
