"""Twenty-four writers, and snapshots taken in their midst: each of these is exact, and the source itself stays whole.

A reader that comes between the commit record of a transaction and its entry in the list of those that have committed
takes its rows for aborted, and marks them so on the source, for good. That is what the barrier is for; so the source
is held against what its writers were told, and not only against the targets.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psycopg
import pytest

from millstream import BatchLimits, Engine
from millstream.embedded import EmbeddedPostgres
from millstream.engine.reload import UNFINISHED
from millstream.model import Op
from millstream.sources import read_chunk, take_snapshot
from millstream.sources.base import Wanted
from millstream.sources.decoders import decoder
from millstream.sources.postgres import early
from tests.fixtures.capture import source_spec
from tests.fixtures.engines import await_that
from tests.fixtures.postgres import TEST_SETTINGS, Database, fresh_database
from tests.integration.test_reload import Everywhere

SECONDS = int(os.environ.get("MILLSTREAM_WRITERS_SECONDS", "3"))
"""How long they write; `make writers` says for minutes, as fast as they can."""
LONG = SECONDS > 10

pytestmark = [pytest.mark.postgres, pytest.mark.timeout(900 + 10 * SECONDS)]

WRITERS, KEPT = 24, 3
EVERY, LEAST = (10, 20) if LONG else (2, 3)
"""Of so many snapshots one has all tables, and so many there are in any case. A snapshot among writers that leave it no
processor takes a second and more, and each row that is written meanwhile makes the copies after it longer: to ask for
hundreds is to have them write until nothing ends any more."""
MANY = BatchLimits(max_ms=0, max_bytes=1 << 30, max_events=100_000)
TABLES = ("ledger", "account", "recent")
CREATE = """
CREATE TABLE ledger (id bigint PRIMARY KEY, note text);
CREATE TABLE account (id int PRIMARY KEY, note text);
CREATE TABLE recent (id bigint PRIMARY KEY, note text);
INSERT INTO account SELECT i, '0' FROM generate_series(1, 50) i;
"""
# A writer's own rows have the ids from a million times its number on, one for each transaction, without a gap.
COMMITS = """
\\set n :n + 1
\\set id (:client_id + 1) * 1000000 + :n
\\set none 0 - :id
\\set before :id - 3
\\set account random(1, 50)
BEGIN;
INSERT INTO ledger VALUES (:id, 'committed');
SAVEPOINT undone;
INSERT INTO ledger VALUES (:none, 'rolled back in part');
ROLLBACK TO SAVEPOINT undone;
INSERT INTO recent VALUES (:id, 'new');
DELETE FROM recent WHERE id = :before;
UPDATE account SET note = (note::int + 1)::text WHERE id = :account;
COMMIT;
"""
ROLLS_BACK = """
\\set none 0 - (:client_id + 1) * 1000000 - :n - 1
BEGIN;
INSERT INTO ledger VALUES (:none, 'rolled back');
UPDATE account SET note = '-1' WHERE id = 1;
ROLLBACK;
"""

Rows = dict[str, list[tuple[int, str]]]


@pytest.fixture
def shop(request: pytest.FixtureRequest, server_dir: Path) -> Iterator[Database]:
    """In the long form on a server that syncs: whoever waits for that has committed, and does not know it yet."""
    if not LONG:
        yield request.getfixturevalue("database")
        return
    settings = {**TEST_SETTINGS, "fsync": "on", "commit_delay": "2000", "commit_siblings": "1"}
    with EmbeddedPostgres(server_dir / "data", 18, settings) as server, fresh_database(server) as made:
        yield made


class Writers:
    """pgbench with a script of ours. It says at its end how many transactions it was told had committed."""

    def __init__(self, database: Database, directory: Path) -> None:
        for name, script in (("commits", COMMITS), ("rolls_back", ROLLS_BACK)):
            (directory / name).write_text(script)
        scripts = ["-f", f"{directory / 'commits'}@9", "-f", f"{directory / 'rolls_back'}@1"]
        speed = [] if LONG else ["-R", "150"]
        self._process = subprocess.Popen(
            [
                # In one thread: several count the transactions of a script without a lock, and lose one now and then.
                *(str(database.server.bin("pgbench")), "-n", "-c", str(WRITERS), "-j", "1", "-T", "3600"),
                # Not with prepared statements: pgbench blocks all writers of a thread while it prepares one of them.
                *("-D", "n=0", *speed, *scripts, database.uri),
            ],
            env={**os.environ, "PGOPTIONS": "-c lock_timeout=120s"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    @property
    def writing(self) -> bool:
        return self._process.poll() is None

    def told(self) -> int:
        """Let them end; how many transactions of the first script committed. None may have failed."""
        self._process.send_signal(signal.SIGALRM)  # as its own clock does: each ends the transaction it is in
        said, _ = self._process.communicate(timeout=120 + SECONDS)
        assert self._process.returncode == 0, said
        assert set(re.findall(r"number of failed transactions: (\d+)", said)) == {"0"}, said
        return int(re.findall(r"^ - (\d+) transactions", said, re.MULTILINE)[0])

    def stop(self) -> None:
        if self.writing:
            self._process.kill()
        self._process.communicate()


@contextmanager
def writing(database: Database, directory: Path) -> Iterator[Writers]:
    writers = Writers(database, directory)
    try:
        await_that(lambda: not writers.writing or database.sql("SELECT count(*) > 100 FROM ledger") == [(True,)])
        yield writers
    finally:
        writers.stop()


@contextmanager
def locking(database: Database) -> Iterator[Counter[str]]:
    """An application that now and then wants a table for itself, and does not wait for long. How that went."""
    over, went = threading.Event(), Counter[str]()

    def lock() -> None:
        with database.connect(options="-c lock_timeout=60s") as connection:
            while not over.wait(0.2):
                try:
                    with connection.transaction():
                        connection.execute("LOCK TABLE account IN ACCESS EXCLUSIVE MODE")
                    went["got"] += 1
                except psycopg.errors.LockNotAvailable:
                    went["refused"] += 1

    thread = threading.Thread(target=lock)
    thread.start()
    try:
        yield went
    finally:
        over.set()
        thread.join()


def rows_of_snapshot(database: Database, *tables: str) -> Rows:
    """All rows of a snapshot that is taken now."""
    found: Rows = {name: [] for name in tables}
    wanted = Wanted(frozenset(f"public.{name}" for name in tables))
    with closing(take_snapshot(source_spec(database), lambda _: None, wanted=wanted)) as taken:
        for chunk in taken.plan.chunks:
            for part in read_chunk(source_spec(database), taken.plan, chunk):
                rows = decoder(chunk.relation).decode(np.full(len(part), Op.READ, np.uint8), part).after
                found[chunk.relation.name] += zip(rows["id"].to_pylist(), rows["note"].to_pylist(), strict=True)
    return found


def numbers(rows: list[tuple[int, str]]) -> dict[int, list[int]]:
    """By writer the numbers of its transactions, in order."""
    own: dict[int, list[int]] = {}
    for id_, _ in sorted(rows):
        own.setdefault(id_ // 1_000_000, []).append(id_ % 1_000_000)
    return own


def broken(rows: Rows) -> list[str]:
    """What is not as whole transactions, and all of them up to a moment, leave it."""
    last = numbers(rows["recent"])
    wrong = [
        f"of the last rows of writer {writer} there are {ns}"
        for writer, ns in last.items()
        if ns != list(range(max(1, ns[-1] - KEPT + 1), ns[-1] + 1))
    ]
    if "ledger" not in rows:
        return wrong
    own = numbers(rows["ledger"])
    wrong += [f"writer {writer} has gaps" for writer, ns in own.items() if ns != list(range(1, len(ns) + 1))]
    wrong += [f"{note} is there" for _, note in rows["ledger"] if note != "committed"]
    counted = sum(int(note) for _, note in rows["account"])
    if counted != len(rows["ledger"]):
        wrong.append(f"{len(rows['ledger'])} rows, but {counted} counted")
    if {writer: ns[-1] for writer, ns in own.items()} != {writer: ns[-1] for writer, ns in last.items()}:
        wrong.append("the last rows are others")
    return wrong


def rows_of_source(database: Database) -> Rows:
    return {name: [(id_, note) for id_, note in database.sql(f"SELECT id, note FROM {name}")] for name in TABLES}


def copied_anew(engine: Engine) -> bool:
    """Whether no target has a copy to make."""
    reloads: list[Any] = [target.reload for target in engine.get_status("shop").targets]
    return not any(one is not None and one["state"] in UNFINISHED for one in reloads)


def test_snapshots_among_24_writers_are_exact_and_leave_the_source_whole(
    engine: Engine, shop: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop.sql(CREATE)
    everywhere, taken, reloads = Everywhere(engine, shop, tmp_path, only="copy log"), 0, 0
    targets = tuple(replace(target, limits=MANY) for target in everywhere.stream.targets)
    everywhere.stream = replace(everywhere.stream, targets=targets)
    with engine, locking(shop) as locked:
        with writing(shop, tmp_path) as writers:
            engine.upsert_stream(everywhere.stream)
            engine.await_ready("shop", 120)
            until = time.monotonic() + SECONDS
            while taken < LEAST or time.monotonic() < until:
                if copied_anew(engine) and (LONG or not taken):
                    engine.reload("shop")
                    reloads += 1
                # Small tables are read under their lock, and otherwise in chunks like all others.
                monkeypatch.setattr(early, "TABLE_BYTES", -1 if taken % 2 else 1 << 20)
                # The table in which all rows are new ones, again and again; now and then all of them.
                assert broken(rows_of_snapshot(shop, *(TABLES if taken % EVERY == 0 else ("recent",)))) == []
                taken += 1
            committed = writers.told()
        ended = time.monotonic()
        source = rows_of_source(shop)
        assert broken(source) == []
        assert len(source["ledger"]) == committed, "what was told to have committed is there"
        assert locked["refused"] == 0
        await_that(lambda: copied_anew(engine), 120 + 10 * SECONDS)
        shop.sql("INSERT INTO ledger VALUES (0, 'the last')")
        everywhere.await_equal(*TABLES)
    assert locked["got"] > 0
    sys.stderr.write(
        f"{committed:,} transactions, {taken} snapshots besides those of {reloads} reloads; "
        f"all was equal after {time.monotonic() - ended:.0f} s\n"
    )
