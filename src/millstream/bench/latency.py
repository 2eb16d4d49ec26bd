"""From commit to visible file at a steady thousand changes a second, seen by a second process.

Time begins with the commit timestamp that the server puts into its log, before the commit is on its disk. It ends
when the other process sees the batch's file in `_millstream/commits`, which lists files that are there already;
for the baseline, when it sees a length of the file that includes the transaction's Commit message.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import psycopg
import pyarrow as pa
import pyarrow.parquet as pq

from millstream.bench import content, recvlogical, stream
from millstream.bench.frame import BASELINE, OURS, Settings
from millstream.bench.mix import CYCLE, schema
from millstream.bench.rig import PUBLICATION, SETTINGS, SLOT, Connection, await_true, prepare
from millstream.embedded import EmbeddedPostgres, server_directory
from millstream.engine.home import Home
from millstream.errors import BenchFailed
from millstream.model import Json

SECONDS = 60.0
CHANGES_A_SECOND = 1_000
TRANSACTION = 20
WARM_SECONDS = 5.0
"""The load runs this long before it counts."""
MUST_P50, MUST_P99 = 400.0, 1_000.0
BATCH = '{"max_ms": "1ms"}'
"""A batch begins as soon as there is something and the one before it is done."""

Milliseconds = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Seen:
    """What one run gave: a latency per change, whether all is there, and the pace the load kept."""

    latencies: Milliseconds
    equal: bool
    pace: float

    def to_json(self) -> Json:
        p50, p99 = np.percentile(self.latencies, [50, 99])
        return {
            "p50": round(float(p50), 1),
            "p99": round(float(p99), 1),
            "max": round(float(self.latencies.max()), 1),
            "changes_a_second": round(self.pace),
            "equal": self.equal,
        }


@dataclass
class Live:
    """A fresh database on the bench's server, with the load's tables. `committed` counts cycles."""

    server: EmbeddedPostgres
    database: str
    connection: Connection
    directory: Path
    committed: int = 0
    began_us: int = field(default=0)

    @property
    def uri(self) -> str:
        return self.server.uri(self.database)

    def trickle(self, seconds: float) -> float:
        """Keep the pace for so long, for one transaction at least; returns the changes per second that were reached."""
        pace = CHANGES_A_SECOND / TRANSACTION
        first = self.committed + 1
        self.committed += max(1, round(seconds * pace)) * (TRANSACTION // CYCLE)
        self.began_us = self._clock_us()
        self.connection.execute("CALL bench.trickle(%s, %s, %s)", (first, self.committed, pace))
        changes = (self.committed - first + 1) * CYCLE
        # The last transaction begins one turn before the time is over.
        return changes / ((self._clock_us() - self.began_us) / 1e6 + 1 / pace)

    def _clock_us(self) -> int:
        row = self.connection.execute("SELECT (extract(epoch FROM clock_timestamp()) * 1e6)::int8").fetchone()
        assert row is not None  # noqa: S101 - the clock runs
        return int(row[0])

    @property
    def changes(self) -> int:
        return self.committed * CYCLE


def run(settings: Settings) -> Json:
    """Both by turns, each on a fresh database."""
    seconds = settings.seconds or SECONDS
    seen: dict[str, list[Seen]] = {BASELINE: [], OURS: []}
    ways = {BASELINE: through_pg_recvlogical, OURS: through_spark}
    settings.steps.plan(2 * settings.repeat)
    with ExitStack() as stack:
        directory = stack.enter_context(_directory())
        server = stack.enter_context(EmbeddedPostgres(directory / "data", settings=SETTINGS))
        stack.enter_context(stream.session(directory))
        for number in range(settings.repeat):
            for name, way in ways.items():
                settings.steps.step(f"{name}, {number + 1} of {settings.repeat}")
                with _live(server, f"{name}{number}", directory / f"{name}{number}") as live:
                    seen[name].append(way(live, seconds))
    return _result(seen, seconds)


def _result(seen: dict[str, list[Seen]], seconds: float) -> Json:
    ours, theirs = ([one.to_json() for one in seen[way]] for way in (OURS, BASELINE))
    p50, p99, their_p50, their_p99 = (
        statistics.median(one[which] for one in found) for found in (ours, theirs) for which in ("p50", "p99")
    )
    return {
        "name": "latency",
        "value": p50,
        "unit": "ms p50",
        "p50": p50,
        "p99": p99,
        "baseline": f"{recvlogical.NAME}: commit to Commit message in the file",
        "baseline_value": their_p50,
        "baseline_p50": their_p50,
        "baseline_p99": their_p99,
        "ratio": round(their_p50 / p50, 3),
        "must": f"p50 {MUST_P50:g} ms, p99 {MUST_P99:g} ms",
        "reached": p50 <= MUST_P50 and p99 <= MUST_P99,
        "rows": round(seconds * CHANGES_A_SECOND),
        "equal": all(one["equal"] for one in (*ours, *theirs)),
        "runs": [
            {**own, **{f"baseline_{key}": value for key, value in other.items()}}
            for own, other in zip(ours, theirs, strict=True)
        ],
    }


def through_spark(live: Live, seconds: float) -> Seen:
    """The engine, to a directory of Parquet."""
    lake, home = live.directory / "lake", Home(live.directory / "home").create()
    arrivals = stream.Arrivals(["lake"])
    options = {"slot": SLOT, "publication": PUBLICATION}
    file = stream.stream_file(live.directory, live.uri, options, {"lake": lake}, BATCH)
    pace, looks = 0.0, []

    def conduct() -> None:
        nonlocal pace, looks
        await_true(lambda: _slot_is_read(live.connection), "capture runs", seconds=60)
        with _reader("names", lake / "_millstream" / "commits") as looks:
            # Neither the start of the stream nor what piled up meanwhile is part of a steady state.
            live.trickle(0)
            arrivals.await_seq(live.changes)
            live.trickle(min(WARM_SECONDS, seconds))
            arrivals.await_seq(live.changes)
            pace = live.trickle(seconds)
            arrivals.await_seq(live.changes)

    stream.run(file, home, arrivals, conduct)
    latencies = _latencies(lake, dict(looks), live.began_us)
    equal = content.changelog_equals(lake, live.connection, live.changes) and len(latencies) == round(
        seconds * CHANGES_A_SECOND
    )
    return Seen(latencies, equal, pace)


def through_pg_recvlogical(live: Live, seconds: float) -> Seen:
    """The server's own reader, to a file."""
    file = live.directory / "baseline.out"
    prepare(live.uri, SLOT)
    reader = subprocess.Popen(
        recvlogical.command(live.server.bin("pg_recvlogical"), live.uri, SLOT, file), stderr=subprocess.DEVNULL
    )
    try:
        await_true(lambda: _slot_is_read(live.connection), "pg_recvlogical runs", seconds=60)
        with _reader("length", file) as looks:
            live.trickle(min(WARM_SECONDS, seconds))
            pace = live.trickle(seconds)
            await_true(lambda: _changes_in(file) >= live.changes, "the file has the last change", seconds=60)
    finally:
        reader.terminate()
        reader.wait()
    found = list(recvlogical.transactions(file.read_bytes()))
    lengths = np.array([length for length, _ in looks])
    seen_at = np.array([at for _, at in looks])
    counted = [one for one in found if one.commit_us >= live.began_us]
    changes = np.array([one.changes for one in counted])
    at = seen_at[np.searchsorted(lengths, [one.end for one in counted])]
    latencies = at * 1e3 - np.array([one.commit_us for one in counted]) / 1e3
    return Seen(np.repeat(latencies, changes), sum(one.changes for one in found) == live.changes, pace)


def _latencies(lake: Path, seen: dict[str | int, float], began_us: int) -> Milliseconds:
    """Per change: from its commit until its batch was seen."""
    found = []
    for name, at in seen.items():
        commit = json.loads((lake / "_millstream" / "commits" / str(name)).read_text())
        for file in commit["files"]:
            times = pq.read_table(lake / file["path"], columns=["_ms_commit_ts"], partitioning=None)["_ms_commit_ts"]
            committed = times.cast(pa.int64()).to_numpy()
            found.append(at * 1e3 - committed[committed >= began_us] / 1e3)
    return np.concatenate(found) if found else np.empty(0)


def _changes_in(file: Path) -> int:
    return sum(one.changes for one in recvlogical.transactions(file.read_bytes()))


def _slot_is_read(connection: Connection) -> bool:
    found = connection.execute("SELECT 1 FROM pg_replication_slots WHERE slot_name = %s AND active", (SLOT,))
    return found.fetchone() is not None


@contextmanager
def _reader(way: str, path: Path) -> Iterator[list[tuple[str | int, float]]]:
    """The second process; the list is filled when the block ends."""
    looks: list[tuple[str | int, float]] = []
    command = [sys.executable, "-m", "millstream.bench.latency_reader", way, str(path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield looks
    finally:
        said, _ = process.communicate()
    if process.returncode != 0:
        raise BenchFailed("the second process of the latency bench failed")
    looks += [(seen, at) for seen, at in json.loads(said)]


@contextmanager
def _live(server: EmbeddedPostgres, database: str, directory: Path) -> Iterator[Live]:
    """A database with empty tables; dropped at the end, with the slot that was made for it."""
    directory.mkdir()
    with psycopg.connect(server.uri(), autocommit=True) as maintenance:
        maintenance.execute(f"CREATE DATABASE {database}".encode())
        try:
            with psycopg.connect(server.uri(database), autocommit=True) as connection:
                connection.execute(schema().encode())
                yield Live(server, database, connection, directory)
        finally:
            await_true(lambda: not _slot_is_read(maintenance), "the slot is free", seconds=60)
            maintenance.execute(
                "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name = %s", (SLOT,)
            )
            maintenance.execute(f"DROP DATABASE {database} WITH (FORCE)".encode())


@contextmanager
def _directory() -> Iterator[Path]:
    made = server_directory("millstream-bench-")
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)
