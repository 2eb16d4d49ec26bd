"""kill -9 of the delivering process after each durable step: nothing is lost, nothing comes twice.

Batches run here without Spark, so that every step is reached within seconds; `tests/chaos` kills the
whole engine at the same steps, on real Spark and under load.
"""

from __future__ import annotations

import random
import re
import signal
import sqlite3
from collections.abc import Callable
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import duckdb
import pytest

import millstream
from tests.fixtures.delivering import deliver
from tests.fixtures.delivery import commits_of
from tests.fixtures.forks import run
from tests.fixtures.journals import Change, Journal, delivered, shop_table
from tests.fixtures.postgres import Database

pytestmark = pytest.mark.chaos

NAME = re.compile(r'failpoint\("(\w+)\.(\w+)"\)')


def failpoints(*rooms: str) -> list[str]:
    """Every failpoint of these parts of delivery, as the code names them."""
    sources = sorted(Path(millstream.__file__).parent.rglob("*.py"))
    found = [match for path in sources for match in NAME.findall(path.read_text())]
    return [f"{where}.{step}" for where, step in found if where in rooms]


def fill(journal: Journal, transactions: int) -> None:
    choose = random.Random(transactions)
    for number, name in enumerate(("orders", "items")):
        journal.register(shop_table(name, 100 + number))
    for number in range(transactions):
        rows = [(choose.choice(("public.orders", "public.items")), i, f"{number} {choose.random()}") for i in range(20)]
        journal.transaction(rows, commit=number % 5 == 0)
    journal.commit()


def run_until_it_ends(root: Path, armed: list[str], kind: str, options: dict[str, Any]) -> list[str]:
    """Start the process again and again, each failpoint kills once, until it ends well. Returns what has killed."""
    state = root / "failpoints"
    state.mkdir()
    environment = {"MILLSTREAM_FAILPOINT": ",".join(armed), "MILLSTREAM_FAILPOINT_STATE": str(state)}
    for _ in range(len(armed) + 1):
        ended = run(deliver, str(root), kind, options, environment=environment)
        if ended.code == 0:
            break
        assert ended.code == -signal.SIGKILL, ended.stderr
    assert ended.code == 0
    return sorted(path.name.removesuffix(".fired") for path in state.glob("*.fired"))


def assert_exact(root: Path, journal: Journal) -> None:
    assert delivered(root / "log") == journal.written
    commits = commits_of(root / "log")
    assert (commits[0]["start"], commits[-1]["end"]) == (0, journal.last_seq)
    assert all(before["end"] == after["start"] for before, after in pairwise(commits))
    listed = {file["path"] for commit in commits for file in commit["files"]}
    assert listed == {str(path.relative_to(root / "log")) for path in (root / "log").rglob("*.parquet")}


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    made = Journal.create(tmp_path / "journal")
    fill(made, transactions=80)
    return made


def test_a_kill_after_each_step_changes_nothing(tmp_path: Path, journal: Journal) -> None:
    # Nothing is replayed here, and no schema waits for approval: tests/unit/test_engine_kills.py kills there.
    elsewhere = ("files.rewound", "delivery.gate_reached")
    armed = [name for name in failpoints("delivery", "stage", "files") if name not in elsewhere]
    assert len(armed) >= 9
    assert run_until_it_ends(tmp_path, armed, "files", {"path": str(tmp_path / "log")}) == sorted(armed)
    assert_exact(tmp_path, journal)


Rows = Callable[[str], list[tuple[Any, ...]]]


def assert_lane_is_exact(rows: Rows, journal: Journal, cursors: str) -> None:
    """Every change once, and a cursor at the end, in a changelog that is in one database."""
    found = [
        (seq, Change(table, id_, body))
        for table in ("public.orders", "public.items")
        for seq, id_, body in rows(f"SELECT _ms_seq, id, body FROM {table_name(table, cursors)} ORDER BY _ms_seq")
    ]
    assert len(found) == len(journal.written)
    assert dict(found) == journal.written
    assert rows(f"SELECT seq FROM {cursors}") == [(journal.last_seq,)]


def table_name(table: str, cursors: str) -> str:
    return table if "." in cursors else f'"{table}"'


AROUND_THE_COMMIT = ["lane.committed", "lane.written"]
"""The steps that differ between databases; the others are killed at with Postgres."""


def kill_a_lane(root: Path, kind: str, options: dict[str, Any], armed: list[str] = AROUND_THE_COMMIT) -> None:
    assert run_until_it_ends(root, armed, kind, {**options, "write": "changelog"}) == sorted(armed)


def test_a_kill_around_the_commit_into_sqlite_changes_nothing(tmp_path: Path, journal: Journal) -> None:
    path = tmp_path / "copy.db"
    kill_a_lane(tmp_path, "sqlite", {"path": str(path)})
    with closing(sqlite3.connect(path)) as db:
        assert_lane_is_exact(lambda sql: db.execute(sql).fetchall(), journal, "_millstream_cursors")


def test_a_kill_around_the_commit_into_duckdb_changes_nothing(tmp_path: Path, journal: Journal) -> None:
    path = tmp_path / "copy.db"
    kill_a_lane(tmp_path, "duckdb", {"path": str(path)})
    with closing(duckdb.connect(str(path))) as db:
        assert_lane_is_exact(lambda sql: db.execute(sql).fetchall(), journal, "_millstream.cursors")


@pytest.mark.postgres
def test_a_kill_after_each_step_into_postgres_changes_nothing(
    tmp_path: Path, journal: Journal, database: Database
) -> None:
    armed = [step for step in failpoints("lane") if step != "lane.loaded"]  # which is a step of baselines
    assert len(armed) >= 4
    kill_a_lane(tmp_path, "postgres", {"uri": database.uri}, armed)
    assert_lane_is_exact(database.sql, journal, "_millstream.cursors")
