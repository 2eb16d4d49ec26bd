"""From commit to where it can be read, at a steady thousand changes a second, seen by a second process.

Time begins with the commit timestamp that the server puts into its log, before the commit is on its disk. It ends
when the other process sees the batch's file in `_millstream/commits`, which lists files that are there already, or in
a database the cursor that is committed with the rows; for the baseline, when it sees a length of the file that includes
the transaction's Commit message.
"""

from __future__ import annotations

import statistics
import subprocess
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from millstream.bench import content, recvlogical, stream
from millstream.bench.frame import BASELINE, OURS, Settings
from millstream.bench.live import CHANGES_A_SECOND, Live, another_server, fresh_database, live, room, slot_is_read
from millstream.bench.rig import PUBLICATION, SETTINGS, SLOT, SOURCE, Connection, await_true, prepare
from millstream.bench.sight import Milliseconds, lags, reader
from millstream.embedded import EmbeddedPostgres
from millstream.engine.home import Home
from millstream.model import Json

SECONDS = 60.0
WARM_SECONDS = 5.0
"""The load runs this long before it counts."""
MUST: Mapping[str, tuple[float, float]] = {"files": (400.0, 1_000.0), "postgres": (500.0, 1_500.0)}
"""By kind of target: milliseconds at the median and at the 99th percentile."""
BATCH: Json = {"max_ms": "1ms"}
"""A batch begins as soon as there is something and the one before it is done."""
TARGET = "copy"


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


@dataclass(frozen=True)
class Place:
    """Where a run delivers to: its keys in a stream file, how it is looked at, and what must hold at the end."""

    keys: Json
    way: str
    what: str | Path
    equals: Callable[[Live], bool]


def files(directory: Path) -> Place:
    """A directory of Parquet."""
    lake = directory / "lake"
    return Place(
        stream.files(lake, BATCH),
        "names",
        lake / "_millstream" / "commits",
        lambda base: content.changelog_equals(lake, base.connection, base.changes),
    )


def database(connection: Connection, uri: str) -> Place:
    """Mirrors in another database."""
    keys = {"kind": "postgres", "uri": uri, "batch": BATCH}
    return Place(keys, "cursor", uri, lambda base: content.copies_equal(base.connection, connection))


def run(settings: Settings) -> Json:
    """Both by turns, each on a fresh database."""
    seconds = settings.seconds or SECONDS
    seen: dict[str, list[Seen]] = {BASELINE: [], OURS: []}
    settings.steps.plan(2 * settings.repeat)
    with ExitStack() as stack:
        directory = stack.enter_context(room())
        server = stack.enter_context(EmbeddedPostgres(directory / "data", settings=SETTINGS))
        stack.enter_context(stream.session(directory))
        ours = through_files
        if settings.target == "postgres":
            ours = partial(through_database, another_server(stack))
        ways = {BASELINE: through_pg_recvlogical, OURS: ours}
        for number in range(settings.repeat):
            for name, way in ways.items():
                settings.steps.step(f"{name}, {number + 1} of {settings.repeat}")
                with live(server, f"{name}{number}", directory / f"{name}{number}") as base:
                    seen[name].append(way(base, seconds))
    return _result(seen, seconds, settings.target)


def _result(seen: dict[str, list[Seen]], seconds: float, target: str) -> Json:
    ours, theirs = ([one.to_json() for one in seen[way]] for way in (OURS, BASELINE))
    p50, p99, their_p50, their_p99 = (
        statistics.median(one[which] for one in found) for found in (ours, theirs) for which in ("p50", "p99")
    )
    must_p50, must_p99 = MUST[target]
    return {
        "name": "latency" if target == "files" else f"latency --target {target}",
        "value": p50,
        "unit": "ms p50",
        "p50": p50,
        "p99": p99,
        "baseline": f"{recvlogical.NAME}: commit to Commit message in the file",
        "baseline_value": their_p50,
        "baseline_p50": their_p50,
        "baseline_p99": their_p99,
        "ratio": round(their_p50 / p50, 3),
        "must": f"p50 {must_p50:g} ms, p99 {must_p99:g} ms",
        "reached": p50 <= must_p50 and p99 <= must_p99,
        "rows": round(seconds * CHANGES_A_SECOND),
        "equal": all(one["equal"] for one in (*ours, *theirs)),
        "runs": [
            {**own, **{f"baseline_{key}": value for key, value in other.items()}}
            for own, other in zip(ours, theirs, strict=True)
        ],
        "notes": [f"latency: p99 {p99:g} ms, of the baseline {their_p99:g} ms"],
    }


def through_files(base: Live, seconds: float) -> Seen:
    """The engine, to a directory of Parquet."""
    return through_spark(base, seconds, files(base.directory))


def through_database(other: EmbeddedPostgres, base: Live, seconds: float) -> Seen:
    """The engine, to a fresh database on another server."""
    with fresh_database(other, "copies") as (connection, uri):
        return through_spark(base, seconds, database(connection, uri))


def through_spark(base: Live, seconds: float, place: Place) -> Seen:
    """The engine, to one target."""
    home = Home(base.directory / "home").create()
    arrivals = stream.Arrivals([TARGET])
    options = {"slot": SLOT, "publication": PUBLICATION}
    file = stream.stream_file(base.directory, base.uri, options, {TARGET: place.keys})
    pace, first, looks = 0.0, 1, []

    def conduct() -> None:
        nonlocal pace, first, looks
        await_true(lambda: slot_is_read(base.connection), "capture runs", seconds=60)
        # Neither the start of the stream nor what piled up meanwhile is part of a steady state.
        base.trickle(0)
        arrivals.await_seq(base.changes)
        with reader(place.way, place.what) as looks:
            base.trickle(min(WARM_SECONDS, seconds))
            arrivals.await_seq(base.changes)
            first = base.changes + 1
            pace = base.trickle(seconds)
            arrivals.await_seq(base.changes)

    stream.run(file, home, arrivals, conduct)
    _, latencies = lags(home.journal_path(SOURCE), looks, first, base.changes)
    return Seen(latencies, place.equals(base) and len(latencies) == round(seconds * CHANGES_A_SECOND), pace)


def through_pg_recvlogical(base: Live, seconds: float) -> Seen:
    """The server's own reader, to a file."""
    file = base.directory / "baseline.out"
    prepare(base.uri, SLOT)
    process = subprocess.Popen(
        recvlogical.command(base.server.bin("pg_recvlogical"), base.uri, SLOT, file), stderr=subprocess.DEVNULL
    )
    try:
        await_true(lambda: slot_is_read(base.connection), "pg_recvlogical runs", seconds=60)
        with reader("length", file) as looks:
            base.trickle(min(WARM_SECONDS, seconds))
            pace = base.trickle(seconds)
            await_true(lambda: _changes_in(file) >= base.changes, "the file has the last change", seconds=60)
    finally:
        process.terminate()
        process.wait()
    found = list(recvlogical.transactions(file.read_bytes()))
    lengths = np.array([length for length, _ in looks])
    seen_at = np.array([at for _, at in looks])
    counted = [one for one in found if one.commit_us >= base.began_us]
    changes = np.array([one.changes for one in counted])
    at = seen_at[np.searchsorted(lengths, [one.end for one in counted])]
    latencies = at * 1e3 - np.array([one.commit_us for one in counted]) / 1e3
    return Seen(np.repeat(latencies, changes), sum(one.changes for one in found) == base.changes, pace)


def _changes_in(file: Path) -> int:
    return sum(one.changes for one in recvlogical.transactions(file.read_bytes()))
