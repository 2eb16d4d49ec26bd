"""The first rows of a table of gigabytes, in ranges of its key, to a lake and a database, by a process that is killed.

`make baseline` runs it with 5 GiB (MILLSTREAM_BASELINE_GB), for which ranges are what the defaults choose.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from millstream import Engine
from millstream.embedded import EmbeddedPostgres
from millstream.errors import StateError
from tests.fixtures.engines import await_that
from tests.fixtures.memory import Watch, watched
from tests.fixtures.postgres import Database, fresh_database

GIGABYTES = float(os.environ.get("MILLSTREAM_BASELINE_GB", "0"))
SECONDS = 600 + 600 * GIGABYTES

pytestmark = [
    pytest.mark.postgres,
    pytest.mark.spark,
    pytest.mark.timeout(2 * SECONDS),
    pytest.mark.skipif(GIGABYTES == 0, reason="takes gigabytes of disk, and minutes: `make baseline` runs it"),
]

Tables = dict[str, dict[str, Any]]

LIMITS_KB = {"capture": 350_000, "python": 1_100_000, "java": 1_000_000}
"""With the pages of files that a process has mapped."""

SETTINGS = {"fsync": "off", "shared_buffers": "256MB", "max_wal_size": "2GB", "checkpoint_timeout": "15min"}
CREATE = """
CREATE TABLE item (id bigint PRIMARY KEY, at timestamptz NOT NULL, price numeric(12, 2), name text, doc text);
CREATE TABLE other (id int PRIMARY KEY, note text);
ALTER TABLE item ALTER doc SET STORAGE EXTERNAL;
"""
PIECE = 50_000
FAR = 1_000_000_000
"""Where rows move to: behind all ranges, and in front of them."""
# One row of ten has a long value, which is stored apart: an update of the others' columns does not send it.
ROWS = """
INSERT INTO item SELECT i, now(), i / 100.0, repeat(md5(i::text), 40),
    CASE WHEN i % 10 = 0 THEN repeat(md5((-i)::text), 1000) END
FROM generate_series({first}, {last}) i
"""
STREAM = """
name: shop
source: {{kind: postgres, uri: "{uri}", tables: ["public.*"], slot: {slot}{more}}}
mode: snapshot_then_cdc
targets:
  - {{name: lake, kind: delta, path: "{root}/lake"}}
  - {{name: copy, kind: postgres, uri: "{copy}"}}
"""


def fill(database: Database) -> int:
    """Make the table. Returns how many rows it has."""
    database.sql(CREATE)
    rows = 0
    while database.sql("SELECT pg_total_relation_size('item')") < [(int(GIGABYTES * (1 << 30)),)]:
        database.sql(ROWS.format(first=rows + 1, last=rows + PIECE))
        rows += PIECE
    database.sql("CHECKPOINT")
    return rows


@contextmanager
def writing(database: Database, rows: int) -> Iterator[dict[str, int]]:
    """Somebody who changes, moves, removes and adds some neighbours at a time, all over the table. What was done."""
    over, done, failed = threading.Event(), {"transactions": 0, "changes": 0}, list[Exception]()
    chosen = random.Random(7)

    def write() -> None:
        try:
            with database.connect() as connection:
                while not over.wait(0.05):
                    low = chosen.randrange(1, rows - 100)
                    near = f"id BETWEEN {low} AND {low + 40}"
                    for statement in (
                        f"UPDATE item SET price = price + 1 WHERE {near}",
                        f"UPDATE item SET id = id + {FAR} WHERE {near} AND id % 20 = 0",
                        f"UPDATE item SET id = -id, name = 'moved' WHERE {near} AND id % 20 = 5",
                        f"DELETE FROM item WHERE {near} AND id % 20 = 7",
                        f"INSERT INTO item SELECT id + {FAR}, at, price, 'new', repeat('n', 5000) FROM item "
                        f"WHERE {near} AND id % 20 = 11 ON CONFLICT DO NOTHING",
                        f"INSERT INTO other VALUES ({done['transactions']}, 'flows')",
                    ):
                        done["changes"] += connection.execute(statement.encode()).rowcount
                        done["transactions"] += 1
        except Exception as error:  # noqa: BLE001 - told below
            failed.append(error)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        yield done
    finally:
        over.set()
        writer.join()
    assert failed == []


class Runs:
    """`millstream run`, again and again on one home."""

    def __init__(self, file: Path, home: Path) -> None:
        self._file, self._home = file, home
        self._engine = Engine(home)
        self.peaks: list[Watch] = []

    @contextmanager
    def running(self) -> Iterator[subprocess.Popen[bytes]]:
        command = [sys.executable, "-m", "millstream", "run", str(self._file), "--home", str(self._home)]
        with (
            (self._home.parent / "run.log").open("ab") as log,
            subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True) as process,
            watched(process.pid) as watch,
        ):
            self.peaks.append(watch)
            try:
                yield process
            finally:
                if process.poll() is None:
                    process.send_signal(signal.SIGINT)
                    process.wait(120)

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        """All of it at once: Spark, its workers and capture too."""
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def tables(self) -> Tables:
        """By target how its copy of the large table is; empty while nothing is known of it."""
        try:
            targets = self._engine.get_status("shop").targets
        except StateError:  # it is being made
            return {"lake": {}, "copy": {}}
        found = {one.name: (one.reload or {"tables": {}})["tables"] for one in targets}
        return {target: tables.get("public.item", {}) for target, tables in found.items()}

    def await_done(self, process: subprocess.Popen[bytes], part: float) -> None:
        """Until every target has so much of the table."""

        def is_done() -> bool:
            assert process.poll() is None, "it ended"
            found = self.tables().values()
            assert not [one for one in found if one.get("state") == "failed"], found
            return all(one.get("chunks") and one["done"] >= part * one["chunks"] for one in found)

        await_that(is_done, SECONDS)

    def await_running(self, process: subprocess.Popen[bytes]) -> None:
        def runs() -> bool:
            assert process.poll() is None, "it ended"
            return all(one.state == "running" for one in self._engine.get_status("shop").targets)

        await_that(runs, SECONDS)

    def verify(self) -> Any:
        command = [sys.executable, "-m", "millstream", "verify", "shop", "--home", str(self._home), "--json"]
        ended = subprocess.run(command, capture_output=True, timeout=SECONDS, check=False)
        assert ended.returncode == 0, (ended.stdout.decode(), ended.stderr.decode())
        return json.loads(ended.stdout)


def test_gigabytes_come_in_ranges_though_the_process_is_killed(server_dir: Path, tmp_path: Path) -> None:
    with (
        EmbeddedPostgres(server_dir / "data", 18, SETTINGS) as server,
        fresh_database(server) as shop,
        fresh_database(server) as copy,
    ):
        rows, file = fill(shop), tmp_path / "shop.yaml"
        more = "" if GIGABYTES > 4 else f", snapshot_at_once: {int(GIGABYTES * (1 << 29))}"
        said = {"uri": shop.uri, "slot": shop.name, "copy": copy.uri, "root": tmp_path, "more": more}
        file.write_text(STREAM.format(**said))
        runs, began = Runs(file, tmp_path / "home"), time.monotonic()
        tell(f"{rows:,} rows, {GIGABYTES:g} GiB")
        before: Tables = {}
        with writing(shop, rows) as written:
            for part in (0.2, 0.6, 1.0):
                with runs.running() as process:
                    if before:
                        await_that(lambda seen=before: is_further(seen, runs.tables()), SECONDS)  # type: ignore[misc]
                        tell(f"{time.monotonic() - began:.0f} s: went on: {progress(runs.tables())}")
                        went_on(before, runs.tables())
                    runs.await_done(process, part)
                    if part < 1:
                        runs.kill(process)
                        before = runs.tables()
                        tell(f"{time.monotonic() - began:.0f} s: killed: {progress(before)}")
                        continue
                    runs.await_running(process)
                    tell(f"{time.monotonic() - began:.0f} s: whole: {progress(runs.tables())}; {written} meanwhile")
                    runs.verify()
                    tell(f"{time.monotonic() - began:.0f} s: compared while it was written to, and equal")
        most = {kind: max(watch.most(LIMITS_KB)[kind] for watch in runs.peaks) for kind in LIMITS_KB}
        tell(f"kB at most: {most}")
        assert {target: one["state"] for target, one in runs.tables().items()} == {"lake": "done", "copy": "done"}
        assert {kind: kb for kind, kb in most.items() if kb > LIMITS_KB[kind]} == {}


def is_further(before: Tables, now: Tables) -> bool:
    """Whether every target has made a step since."""
    return all(one["state"] == "done" or now[target]["done"] > one["done"] for target, one in before.items())


def went_on(before: Tables, after: Tables) -> None:
    """What was done is counted, and not done again."""
    for target, known in before.items():
        now = after[target]
        if known["state"] == "done":
            assert now == known
            continue
        assert now["points"][: len(known["points"])] == known["points"]
        assert now["points"][len(known["points"])]["from"] == known["done"]
        assert (now["chunks"], now["rows"] > known["rows"]) == (known["chunks"], True)
        if now["state"] == "running":
            assert now["rows_per_second"] > 0
            assert now["seconds_left"] > 0


def progress(tables: Tables) -> str:
    names = ("state", "done", "chunks", "rows", "rows_per_second", "seconds_left", "tries")
    return "; ".join(f"{target} {[one.get(name) for name in names]}" for target, one in tables.items())


def tell(text: str) -> None:
    sys.stderr.write(f"\n{text}")
    sys.stderr.flush()
