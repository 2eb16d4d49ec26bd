"""kill -9 at each step that has to do with dead letters: none is lost, none comes twice, no row goes back."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import millstream
from millstream.state.sqlite import SqliteStateStore
from tests.chaos.rig import failpoints
from tests.fixtures.journals import Journal, shop_table
from tests.fixtures.tuples import insert, update

pytestmark = pytest.mark.chaos

ORDERS = shop_table("orders", 16_400)
RETRYING = ("letters.redelivered", "state.letters_removed")


class Shop:
    """Deliveries and retries by processes of their own, into a SQLite file that takes no `bad` body."""

    def __init__(self, root: Path, processes: subprocess.Popen[str]) -> None:
        self.root = root
        self._processes = processes
        self.file = root / "copy.db"
        self.journal = Journal.create(root / "journal")
        self.make_table("CHECK (body NOT LIKE 'bad%')")

    def make_table(self, check: str) -> None:
        with closing(sqlite3.connect(self.file)) as db:
            columns = f"(id INTEGER PRIMARY KEY, body TEXT {check}, _ms_seq INTEGER)"
            db.execute(f'CREATE TABLE "public.orders" {columns}')

    def take_everything(self) -> None:
        with closing(sqlite3.connect(self.file)) as db:
            db.execute('ALTER TABLE "public.orders" RENAME TO old')
        self.make_table("")
        with closing(sqlite3.connect(self.file)) as db:
            db.execute('INSERT INTO "public.orders" SELECT * FROM old')
            db.commit()

    def run(self, verb: str, *, at: str | None = None) -> None:
        """Deliver or retry; with `at` it is killed there."""
        asked = {"do": verb, "root": str(self.root), "file": str(self.file), "at": at}
        assert self._processes.stdin is not None
        assert self._processes.stdout is not None
        self._processes.stdin.write(f"{json.dumps(asked)}\n")
        self._processes.stdin.flush()
        assert int(self._processes.stdout.readline()) == (0 if at is None else -signal.SIGKILL)

    def rows(self) -> list[tuple[Any, ...]]:
        with closing(sqlite3.connect(self.file)) as db:
            return db.execute('SELECT id, body FROM "public.orders" ORDER BY id').fetchall()

    def letters(self) -> list[tuple[int, str]]:
        store = SqliteStateStore(self.root / "state.db")
        try:
            return [(one.seq, one.state.value) for one in store.letters()]
        finally:
            store.close()


@pytest.fixture(scope="module")
def processes() -> Iterator[subprocess.Popen[str]]:
    paths = (str(Path(__file__).parents[2]), str(Path(millstream.__file__).parents[1]))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", "tests.fixtures.retrying"]
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        yield server
        assert server.stdin is not None
        server.stdin.close()


@pytest.fixture
def shop(tmp_path: Path, processes: subprocess.Popen[str]) -> Shop:
    return Shop(tmp_path, processes)


def test_all_failpoints_of_letters_are_killed_at_here() -> None:
    mine = {name for name in failpoints() if name.startswith(("letters.", "state.letters"))}
    assert mine == {"state.letters_added", "letters.recorded", *RETRYING}


@pytest.mark.parametrize("at", ["state.letters_added", "letters.recorded", "lane.committed"])
def test_letters_that_were_written_down_before_a_kill_are_there_once(shop: Shop, at: str) -> None:
    shop.journal.append(ORDERS, [insert(str(n), f"{'bad' if n % 4 == 0 else 'good'} {n}") for n in range(12)])
    shop.run("deliver", at=at)
    shop.run("deliver")
    assert shop.rows() == [(n, f"good {n}") for n in range(12) if n % 4]
    assert shop.letters() == [(1, "waiting"), (5, "waiting"), (9, "waiting")]


def test_what_a_batch_made_obsolete_is_known_though_its_process_was_killed_before_it_could_say_so(shop: Shop) -> None:
    shop.journal.append(ORDERS, [insert("1", "bad"), insert("2", "bad"), insert("3", "good")])
    shop.run("deliver")
    shop.journal.append(ORDERS, [update(["1", "better"])])
    shop.run("deliver", at="lane.committed")
    assert shop.letters() == [(1, "waiting"), (2, "waiting")]
    shop.run("deliver")
    assert shop.letters() == [(1, "superseded"), (2, "waiting")]
    shop.take_everything()
    shop.run("retry")
    assert shop.rows() == [(1, "better"), (2, "bad"), (3, "good")]


@pytest.mark.parametrize("at", RETRYING)
def test_a_retry_that_is_killed_is_repeated_without_harm(shop: Shop, at: str) -> None:
    shop.journal.append(ORDERS, [insert("1", "bad 1"), insert("2", "bad 2"), insert("3", "good")])
    shop.run("deliver")
    shop.take_everything()
    shop.run("retry", at=at)
    shop.run("retry")
    assert shop.rows() == [(1, "bad 1"), (2, "bad 2"), (3, "good")]
    assert shop.letters() == []
