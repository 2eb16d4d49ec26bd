"""A stream run by the real engine in this process, watched from a thread while the main one runs it.

The JVM is this process's and stays up from one run to the next; capture, planning and Python workers are
processes of their own, as always.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from millstream.bench.rig import LONGEST, SOURCE
from millstream.config import load_streams
from millstream.engine.home import Home
from millstream.engine.runner import Runner
from millstream.errors import BenchFailed
from millstream.model import Json
from millstream.observe import Event, Level, Observers
from millstream.spark.session import active_session, build_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

STREAM_FILE = """\
name: bench
source: {source}
mode: {mode}
targets: {targets}
"""


class Arrivals:
    """An observer that knows how far each target is, and since when."""

    def __init__(self, targets: Sequence[str]) -> None:
        self._changed = threading.Condition()
        self._ends = dict.fromkeys(targets, 0)
        self._at = dict.fromkeys(targets, 0.0)
        self._over = False
        self.batches = 0
        self.trouble: list[str] = []
        """What went wrong on the way, though it may have gone on."""

    def on_event(self, event: Event) -> None:
        with self._changed:
            if event.kind == "delivery.batch" and event.target is not None:
                self.batches += 1
                self._ends[event.target] = int(event.fields["end"])
                self._at[event.target] = event.at.timestamp()
            elif event.level >= Level.WARNING and event.kind != "capture.unavailable":
                self.trouble.append(f"{event.kind}: {event.message}")
            self._changed.notify_all()

    def over(self) -> None:
        """The run has ended."""
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def await_seq(self, seq: int) -> float:
        """Wait until every target has this seq; returns, in Unix time, when the last of them had it."""
        with self._changed:
            self._changed.wait_for(lambda: self._over or min(self._ends.values()) >= seq, LONGEST)
            if min(self._ends.values()) < seq:
                raise BenchFailed(f"the stream did not come to seq {seq}: {'; '.join(self.trouble[-3:]) or self._ends}")
            return max(self._at.values())


def files(path: Path, batch: Json | None = None) -> Json:
    """A target of Parquet files. Without `batch`, batches are cut as they are by default."""
    return {"kind": "files", "path": str(path)} | ({"batch": batch} if batch else {})


def stream_file(
    path: Path, uri: str, options: Mapping[str, Any], targets: Mapping[str, Json], *, mode: str = "cdc"
) -> Path:
    """A stream of the bench's tables to some targets, each with its keys as a stream file has them."""
    source = {"kind": "postgres", "name": SOURCE, "uri": uri, "tables": ["bench.*"], **options}
    listed = [{"name": name, **keys} for name, keys in targets.items()]
    file = path / "bench.yaml"
    file.write_text(STREAM_FILE.format(source=json.dumps(source), mode=mode, targets=json.dumps(listed)))
    return file


def run(file: Path, home: Home, arrivals: Arrivals, conduct: Callable[[], None]) -> None:
    """Run the stream until `conduct`, on a thread of its own, has returned. Raises what went wrong on either side."""
    with home.lock():
        store = home.open_state()
        runner = Runner(
            load_streams([file]), home, store, once=False, master=None, observers=Observers([arrivals]), conf={}
        )
        raised: list[BaseException] = []

        def play() -> None:
            try:
                conduct()
            except BaseException as failed:  # noqa: BLE001 - handed on, not swallowed
                raised.append(failed)
            finally:
                runner.stop()

        thread = threading.Thread(target=play, name="conductor", daemon=True)
        thread.start()
        try:
            code = runner.run()
        finally:
            arrivals.over()
            thread.join()
            store.close()
    if raised:
        raise raised[0]
    if code != 0:
        raise BenchFailed(f"the stream failed: {'; '.join(arrivals.trouble[-3:])}")


@contextmanager
def session(directory: Path) -> Iterator[SparkSession]:
    """This process's Spark, which streams then use and leave running. Stopped at the end, unless it was there."""
    found = active_session()
    spark = found or build_session(directory / "spark", app_name="millstream-bench")
    try:
        yield spark
    finally:
        if found is None:
            spark.stop()
