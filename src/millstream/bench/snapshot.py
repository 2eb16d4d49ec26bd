"""All rows of a table, once: to Parquet beside `psql`'s binary COPY to a file, to Postgres beside `pg_dump` and `psql`.

Ours is a stream with `mode: snapshot` in a process whose Spark is up: its clock runs from its start until all rows are
visible at the target and its cursor is saved.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from millstream.bench import content, recvlogical, stream
from millstream.bench.drain import warm_up
from millstream.bench.frame import BASELINE, OURS, Settings, Taken, Way, alternate, result
from millstream.bench.live import Live, another_server, fresh_database, live, room
from millstream.bench.mix import Part
from millstream.bench.processes import engine_cpu, spent
from millstream.bench.rig import LONGEST, SETTINGS, Connection
from millstream.config import load_streams
from millstream.embedded import EmbeddedPostgres
from millstream.engine.home import Home
from millstream.engine.runner import run as run_streams
from millstream.errors import BenchFailed
from millstream.model import Json
from millstream.observe import Event, Level, Observers

ROWS = 5_000_000
MUST, MUST_POSTGRES = 0.8, 1.0
TABLE = "bench.mix1"
TARGET = "copy"
COPY = f"COPY {TABLE} TO STDOUT (FORMAT binary)"
PSQL = "psql, a binary COPY to a file"
PG_DUMP = "pg_dump piped to psql"


@dataclass(frozen=True)
class Whole(Part):
    """A table with so many rows."""

    @property
    def name(self) -> str:
        return f"{self.changes:,} rows"


def run(settings: Settings) -> Json:
    """To Parquet, or to a table with the same index in another Postgres."""
    rows = settings.rows or ROWS
    part, to_postgres = Whole(rows, rows), settings.target == "postgres"
    with ExitStack() as stack:
        directory = stack.enter_context(room())
        settings.steps.step(f"writing {rows:,} rows")
        server = stack.enter_context(EmbeddedPostgres(directory / "data", settings=SETTINGS))
        base = stack.enter_context(live(server, "source", directory / "source"))
        base.connection.execute("SELECT bench.put(1, 1, %s)", (rows,))
        base.connection.execute("VACUUM ANALYZE")
        base.connection.execute("CHECKPOINT")
        ways = _postgres_ways(base, another_server(stack)) if to_postgres else _parquet_ways(base)
        stack.enter_context(stream.session(directory))
        warm_up(ways, [part], settings)
        rounds = alternate([part], settings, ways)
    name = "snapshot --target postgres" if to_postgres else "snapshot"
    baseline, must = (PG_DUMP, MUST_POSTGRES) if to_postgres else (PSQL, MUST)
    return result(name, rounds, baseline=baseline, must=must) | {"unit": "rows/s"}


def _parquet_ways(base: Live) -> dict[str, Way]:
    expected = _server_digest(base.connection)

    def baseline(part: Part) -> Taken:
        file = base.directory / "baseline.out"
        seconds = _timed([[str(base.server.bin("psql")), "-X", "-q", "-d", base.uri, "-c", COPY]], file)
        equal = recvlogical.digest(file) == expected
        file.unlink()
        return Taken(seconds, equal)

    def ours(part: Part) -> Taken:
        scratch = _scratch(base)
        lake = scratch / "lake"
        return copy_once(base, scratch, stream.files(lake), lambda: files_equal(lake, base.connection, part.changes))

    return {BASELINE: baseline, OURS: ours}


def _postgres_ways(base: Live, other: EmbeddedPostgres) -> dict[str, Way]:
    def baseline(part: Part) -> Taken:
        with fresh_database(other, "dumped") as (copy, uri):
            copy.execute("CREATE SCHEMA bench")
            copy.execute("CHECKPOINT")
            dump = [str(base.server.bin("pg_dump")), "-d", base.uri, "-t", TABLE]
            load = [str(other.bin("psql")), "-X", "-q", "-v", "ON_ERROR_STOP=1", "-d", uri]
            seconds = _timed([dump, load], base.directory / "psql.out")
            return Taken(seconds, copied_equal(base.connection, copy))

    def ours(part: Part) -> Taken:
        with fresh_database(other, "copied") as (copy, uri):
            copy.execute("CHECKPOINT")
            keys = {"kind": "postgres", "uri": uri}
            return copy_once(base, _scratch(base), keys, lambda: copied_equal(base.connection, copy))

    return {BASELINE: baseline, OURS: ours}


def _scratch(base: Live) -> Path:
    path = base.directory / "run"
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    return path


def _timed(commands: list[list[str]], file: Path) -> float:
    """Run programs, each of which reads what the one before writes; the last one writes the file. Their seconds."""
    running: list[subprocess.Popen[bytes]] = []
    with file.open("wb") as out:
        began = time.perf_counter()
        for number, command in enumerate(commands, 1):
            given = running[-1].stdout if running else subprocess.DEVNULL
            last = number == len(commands)
            running.append(subprocess.Popen(command, stdin=given, stdout=out if last else subprocess.PIPE))
        for one in running:
            if one.stdout is not None:
                one.stdout.close()
        codes = [one.wait(LONGEST) for one in running]
        seconds = time.perf_counter() - began
    if any(codes):
        raise BenchFailed(f"{Path(commands[0][0]).name} failed: exit codes {codes}")
    return seconds


class _Seen:
    """An observer that knows when the rows were there, and what went wrong."""

    def __init__(self) -> None:
        self.at: float | None = None
        self.trouble: list[str] = []

    def on_event(self, event: Event) -> None:
        if event.kind == "snapshot.finished":
            self.at = event.at.timestamp()
        elif event.level >= Level.WARNING:
            self.trouble.append(f"{event.kind}: {event.message}")


def copy_once(base: Live, scratch: Path, keys: Json, equal: Callable[[], bool]) -> Taken:
    """A stream with `mode: snapshot` to one target, from its start to its end."""
    home, seen = Home(scratch / "home").create(), _Seen()
    file = stream.stream_file(scratch, base.uri, {"tables": [TABLE]}, {TARGET: keys}, mode="snapshot")
    before, began = engine_cpu(), time.time()
    code = run_streams(load_streams([file]), home=home, once=True, master=None, observers=Observers([seen]))
    if code != 0 or seen.at is None:
        raise BenchFailed(f"the stream failed: {'; '.join(seen.trouble[-3:])}")
    cpu = spent(before, engine_cpu())
    return Taken(seen.at - began, equal(), cpu, {"trouble": seen.trouble} if seen.trouble else {})


def _server_digest(connection: Connection) -> str:
    """SHA-256 of what the server itself copies."""
    found = hashlib.sha256()
    with connection.cursor().copy(COPY.encode()) as copy:
        for block in copy:
            found.update(block)
    return found.hexdigest()


def files_equal(directory: Path, connection: Connection, rows: int) -> bool:
    """Every row once, value by value, file by file: rows were written in the order of their ids, and stand so."""
    count = 0
    for file in sorted((directory / TABLE).glob("*.parquet")):
        found = pq.ParquetFile(file).read()
        found = found.select([name for name in found.column_names if not name.startswith("_ms_")]).sort_by("id")
        count += found.num_rows
        bounds = pc.min_max(found["id"]).as_py()
        within = f"(SELECT * FROM {TABLE} WHERE id BETWEEN {bounds['min']} AND {bounds['max']}) AS part"
        expected: pa.Table = content.source_rows(connection, within, found.schema)
        if not found.combine_chunks().equals(expected.combine_chunks()):
            return False
    return count == rows


def copied_equal(source: Connection, copy: Connection) -> bool:
    """The same rows, by the servers' own text of all columns, and the same indexes."""
    return content.copies_equal(source, copy, (TABLE,)) and _indexes(source) == _indexes(copy)


def _indexes(connection: Connection) -> list[tuple[object, ...]]:
    return connection.execute(
        "SELECT i.indisprimary, i.indisunique, i.indkey::text FROM pg_index i WHERE i.indrelid = to_regclass(%s)",
        (TABLE,),
    ).fetchall()
