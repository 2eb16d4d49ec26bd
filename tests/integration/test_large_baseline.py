"""Gigabytes that are copied while others write, by an engine that is killed again and again: once each, and exact."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow.compute as pc
import pyarrow.dataset as ds
import pytest
from typer.testing import CliRunner

from millstream.cli.app import app
from millstream.demo.engine import Engine
from millstream.embedded import EmbeddedPostgres
from millstream.engine.home import Home
from millstream.engine.reload import DONE, RELOAD
from millstream.errors import StateError
from millstream.model import Json
from tests.fixtures.memory import watched
from tests.fixtures.postgres import TEST_SETTINGS, Database, fresh_database

GB = float(os.environ.get("MILLSTREAM_BASELINE_GB", "0"))
MIRROR = os.environ.get("MILLSTREAM_BASELINE_MIRROR", "postgres")

pytestmark = [
    pytest.mark.postgres,
    pytest.mark.spark,
    pytest.mark.timeout(7200),
    pytest.mark.skipif(GB == 0, reason="takes minutes, and gigabytes of disk: `make baseline` runs it"),
]

KILLS = 4
WIDE_BYTES = 1100
"""About so many a row of `wide` takes on disk."""
LIMITS_KB = {"capture": 400_000, "python": 1_200_000, "java": 1_000_000}
"""With the pages of files that a process has mapped."""
SERVER = {**TEST_SETTINGS, "shared_buffers": "128MB", "max_wal_size": "4GB", "autovacuum_naptime": "1min"}
# A range takes longer than that to read, and no statement of a writer does: so the log says what was read how often.
SOURCE = {**SERVER, "log_min_duration_statement": "50ms", "log_destination": "stderr"}
# Rows begin at even numbers and move to odd ones, each to its own: none is ever in the way of another.
CREATE = """
CREATE TABLE wide (id bigint PRIMARY KEY, n int NOT NULL DEFAULT 0, at timestamptz, cost numeric(12,2), flag bool,
    code uuid, raw bytea, tags text[], note text, more text, body text);
ALTER TABLE wide ALTER body SET STORAGE EXTERNAL;
CREATE TABLE keyless (what text, n int, note text);
CREATE TABLE parts (id bigint, region int, note text, PRIMARY KEY (region, id)) PARTITION BY LIST (region);
CREATE TABLE parts_1 PARTITION OF parts FOR VALUES IN (1);
CREATE TABLE parts_2 PARTITION OF parts FOR VALUES IN (2);
"""
FILL = """
INSERT INTO wide SELECT 2 * i, 0, timestamptz '2024-01-01' + i * interval '1 s', i / 7.0, i % 3 = 0, md5(i::text)::uuid,
    decode(repeat(md5(i::text), 4), 'hex'), ARRAY['a', NULL, i::text], repeat(md5(i::text), 10),
    repeat(md5((i + 1)::text), 8), CASE WHEN i % 20 = 0 THEN repeat(md5(i::text), 100) END
FROM generate_series({first}, {last}) i
"""
FILL_OTHERS = """
INSERT INTO keyless SELECT 'row ' || i, i % 3, repeat(md5(i::text), 10) FROM generate_series(1, {few}) i;
INSERT INTO parts SELECT i, 1 + i % 2, repeat(md5(i::text), 10) FROM generate_series(1, {few}) i;
"""
# Single statements, each of which commits by itself: none waits for another.
WRITES = {
    "updates": (6, "\\set id random(1, :last)\nUPDATE wide SET n = n + 1, cost = cost + 1 WHERE id = :id;\n"),
    # Rows of the last range with long values, which such a change leaves out: they change again before it is delivered.
    "busy": (8, "\\set id :top - 40 * random(0, 999)\nUPDATE wide SET n = n + 1 WHERE id = :id;\n"),
    "moves": (3, "\\set id random(1, :last)\nUPDATE wide SET id = :last - id WHERE id = :id;\n"),
    "deletes": (1, "\\set id random(1, :last)\nDELETE FROM wide WHERE id = :id;\n"),
    "inserts": (
        2,
        "\\set n :n + 1\n\\set id :last + 1 + (:client_id + 1) * 100000000 + :n\n"
        "INSERT INTO wide (id, note, body) VALUES (:id, 'new', repeat('x', 3000));\n",
    ),
    "keyless": (1, "\\set n :n + 1\nINSERT INTO keyless VALUES ('new', :n, 'while it is copied');\n"),
    "parts": (2, "\\set id random(1, :few)\nUPDATE parts SET region = 3 - region WHERE id = :id;\n"),
}
RATE = int(os.environ.get("MILLSTREAM_BASELINE_RATE", "400"))
"""Transactions a second."""

STREAM = """
name: shop
source:
  {{kind: postgres, uri: "{uri}", tables: ["public.*"], slot: {slot}, snapshot_at_once: 64MiB, heartbeat_interval: 1s}}
mode: snapshot_then_cdc
targets:
  - {mirror}
  - {{name: log, kind: files, path: "{root}/log"}}
"""


def fill(database: Database, rows: int) -> None:
    database.sql(CREATE)
    step = 200_000
    for first in range(1, rows + 1, step):
        database.sql(FILL.format(first=first, last=min(rows, first + step - 1)))
    database.sql(FILL_OTHERS.format(few=max(1000, rows // 10)))
    database.sql("ANALYZE")


@contextmanager
def writing(database: Database, directory: Path, rows: int) -> Iterator[subprocess.Popen[str]]:
    """pgbench, until the block ends. A statement of it that fails fails the test."""
    scripts = []
    for name, (weight, script) in WRITES.items():
        (directory / name).write_text(script)
        scripts += ["-f", f"{directory / name}@{weight}"]
    numbers = {"last": 2 * rows + 1, "top": rows // 20 * 40, "few": max(1000, rows // 10), "n": 0}
    variables = [word for name, number in numbers.items() for word in ("-D", f"{name}={number}")]
    command = [str(database.server.bin("pgbench")), "-n", "-c", "4", "-T", "7200", "-R", str(RATE)]
    process = subprocess.Popen(
        [*command, *variables, *scripts, database.uri], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        yield process
        assert process.poll() is None, process.communicate()[0]
    finally:
        process.kill()
        process.communicate()


@dataclass
class Copying:
    """The engine, killed and started again; what its state says of the mirror's tables, and its memory."""

    engine: Engine
    most: Counter[str] = field(default_factory=Counter)

    def tables(self) -> Json:
        """How far the mirror is, by table; nothing before it has begun."""
        try:
            store = Home(self.engine.home).open_state(read_only=True)
        except StateError:
            return {}  # it is about to be made
        with closing(store):
            found: Json = store.notes("shop", RELOAD).get("copy", {}).get("tables", {})
        return found

    def wide(self) -> Json:
        found: Json = self.tables().get("public.wide", {"done": 0, "chunks": None, "state": "waiting", "points": []})
        return found

    def states(self) -> Json:
        """By name, what each target does."""
        done = CliRunner().invoke(app, ["status", "shop", "--json", "--home", str(self.engine.home)])
        (stream,) = json.loads(done.stdout)["streams"]
        return {one["name"]: one["state"] for one in stream["targets"]}

    @contextmanager
    def running(self) -> Iterator[None]:
        """A process of the engine. At the end of the block it is killed, unless it has ended."""
        self.engine.start()
        try:
            with watched(self.engine.pid) as watch:
                yield
        finally:
            self.engine.kill()
            for kind, kb in watch.most(LIMITS_KB).items():
                self.most[kind] = max(self.most[kind], kb)

    def await_range(self, share: float, after: int) -> None:
        """Until that part of the ranges of `wide` are done, and at least one more than there were."""
        self.await_that(lambda: self.wide()["done"] > after, 900)
        least = int(self.wide()["chunks"] * share)
        self.await_that(lambda: self.wide()["done"] >= least, 1800)

    def await_that(self, condition: Callable[[], bool], seconds: float) -> None:
        until = time.monotonic() + seconds
        while not condition():
            log = self.engine.log.read_text()[-3000:] if self.engine.log.exists() else ""
            assert self.engine.running, f"the engine ended by itself:\n{log}"
            assert time.monotonic() < until, f"not within {seconds:g} s; {self.tables()}\n{log}"
            time.sleep(0.25)


def say(text: str) -> None:
    sys.stderr.write(f"{time.strftime('%T')} {text}\n")


def read_ranges(log: str) -> Counter[str]:
    """How often the source's log says that a range of `wide` was read to its end."""
    return Counter(re.findall(r'COPY \(SELECT .* FROM ONLY "?public"?\."?wide"? WHERE (\("id"\) .*?)\) TO STDOUT', log))


@pytest.fixture
def servers(server_dir: Path) -> Iterator[tuple[Database, Database]]:
    """A source, and a server for a mirror: else the log of the one would be the other's too."""
    with ExitStack() as held:
        source, target = (
            held.enter_context(fresh_database(held.enter_context(EmbeddedPostgres(server_dir / name, 18, settings))))
            for name, settings in (("source", SOURCE), ("target", SERVER))
        )
        yield source, target


def mirror(kind: str, root: Path, target: Database) -> str:
    place = f'uri: "{target.uri}"' if kind == "postgres" else f'path: "{root}/copy"'
    return f"{{name: copy, kind: {kind}, {place}}}"


def test_gigabytes_are_copied_once_and_exactly_whoever_is_killed(
    servers: tuple[Database, Database], tmp_path: Path
) -> None:
    source, target = servers
    rows = int(GB * (1 << 30) / WIDE_BYTES)
    began = time.monotonic()
    fill(source, rows)
    ((size,),) = source.sql(
        "SELECT sum(pg_table_size(oid))::int8 FROM pg_class WHERE relnamespace = 'public'::regnamespace"
    )
    say(f"{rows:,} rows, {size / (1 << 30):.2f} GiB, made in {time.monotonic() - began:.0f} s")
    file = tmp_path / "shop.yaml"
    about = {"uri": source.uri, "slot": source.name, "root": tmp_path, "mirror": mirror(MIRROR, tmp_path, target)}
    file.write_text(STREAM.format(**about))
    copying = Copying(Engine(file, tmp_path / "home", tmp_path / "engine.log"))
    began, reached = time.monotonic(), list[int]()
    with writing(source, tmp_path, rows):
        for kill in range(KILLS):
            with copying.running():
                copying.await_range((kill + 1) / (KILLS + 2), after=max(reached, default=0))
            reached.append(copying.wide()["done"])
            say(f"killed after {reached[-1]} of {copying.wide()['chunks']} ranges, {time.monotonic() - began:.0f} s")
        with copying.running():
            copying.await_that(lambda: copying.wide()["state"] == DONE, 3600)
            seconds = time.monotonic() - began
            say(f"copied in {seconds:.0f} s, {size / (1 << 20) / seconds:.1f} MiB/s; {copying.tables()}")
            copying.await_that(lambda: set(copying.states().values()) == {"running"}, 3600)
            say(f"all targets run after {time.monotonic() - began:.0f} s")
    say(f"the most memory, in kB: {dict(copying.most)}")
    check_read_once(copying, source, reached)
    for name in ("copy", "log"):
        verify(copying, name)
    check_log(tmp_path / "log")
    assert {kind: kb for kind, kb in copying.most.items() if kb > LIMITS_KB[kind]} == {}


def check_read_once(copying: Copying, source: Database, reached: list[int]) -> None:
    """Ranges that were done before a kill were not read after it."""
    wide = copying.wide()
    begins = [point["from"] for point in wide["points"]]
    assert [begin >= done for begin, done in zip(begins[1:], reached, strict=True)] == [True] * KILLS, (begins, reached)
    read = read_ranges((source.server.data_dir / "millstream.log").read_text(errors="replace"))
    say(f"ranges began at {begins}; read to their end: {len(read)} of {wide['chunks']}, {read.total()} times in all")
    assert len(read) == wide["chunks"]
    # One that was read to its end, and not written down when the engine was killed, is read once more.
    assert read.total() <= wide["chunks"] + KILLS


def verify(copying: Copying, target: str) -> None:
    """Alone: what was committed up to now comes first."""
    began = time.monotonic()
    command = ["verify", "shop", "--target", target, "--json", "--home", str(copying.engine.home)]
    process = subprocess.Popen([sys.executable, "-m", "millstream", *command], stdout=subprocess.PIPE, text=True)
    with watched(process.pid) as watch:
        said, _ = process.communicate()
    (found,) = json.loads(said)["targets"]
    counts = {one["table"]: (one["source_rows"], one["target_rows"], one["equal"]) for one in found["tables"]}
    say(f"verify {target}: {counts}, {time.monotonic() - began:.0f} s; in kB: {watch.most(LIMITS_KB)}")
    assert process.returncode == 0, said
    assert set(counts) == {"public.wide", "public.keyless", "public.parts"}


def check_log(log: Path) -> None:
    """Every row of one snapshot once, and every later change once."""
    paths = [str(path) for path in log.rglob("*.parquet")]
    found = ds.dataset(paths).to_table(columns=["_ms_op", "_ms_seq", "_ms_event_id"])
    assert pc.count_distinct(found["_ms_event_id"]).as_py() == found.num_rows
    read = pc.equal(found["_ms_op"], "r")
    assert pc.count_distinct(found.filter(read)["_ms_seq"]).as_py() == 1, "one snapshot, and no rest of another"
    later = pc.unique(found.filter(pc.invert(read))["_ms_seq"])
    ends = pc.min_max(later).as_py()
    assert ends["max"] - ends["min"] + 1 == len(later), "no change is missing"
    say(f"log: {found.num_rows:,} rows, {len(later):,} of them changes after the snapshot")
