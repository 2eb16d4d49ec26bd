"""kill -9 of the delivering process after each durable step: nothing is lost, nothing comes twice.

Batches run here without Spark, so that every step is reached within seconds; `tests/chaos` kills the
whole engine at the same steps, on real Spark and under load.
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

import millstream
from tests.fixtures.delivery import commits_of
from tests.fixtures.journals import Journal, delivered, shop_table

pytestmark = pytest.mark.chaos

ROOMS = re.compile(r'failpoint\("((?:delivery|files|stage)\.\w+)"\)')


def failpoints() -> list[str]:
    """Every failpoint of delivery, as the code names them."""
    sources = sorted(Path(millstream.__file__).parent.rglob("*.py"))
    return [name for path in sources for name in ROOMS.findall(path.read_text())]


def fill(journal: Journal, transactions: int) -> None:
    choose = random.Random(transactions)
    for number, name in enumerate(("orders", "items")):
        journal.register(shop_table(name, 100 + number))
    for number in range(transactions):
        rows = [(choose.choice(("public.orders", "public.items")), i, f"{number} {choose.random()}") for i in range(20)]
        journal.transaction(rows, commit=number % 5 == 0)
    journal.commit()


def run_until_it_ends(root: Path, armed: list[str]) -> list[str]:
    """Start the process again and again, each failpoint kills once, until it ends well. Returns what has killed."""
    state = root / "failpoints"
    state.mkdir()
    environment = {
        **os.environ,
        "MILLSTREAM_FAILPOINT": ",".join(armed),
        "MILLSTREAM_FAILPOINT_STATE": str(state),
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    command = [sys.executable, "-m", "tests.fixtures.delivering", str(root)]
    for _ in range(len(armed) + 1):
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150, check=False)
        if ended.returncode == 0:
            break
        assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert ended.returncode == 0
    return sorted(path.name.removesuffix(".fired") for path in state.glob("*.fired"))


def assert_exact(root: Path, journal: Journal) -> None:
    assert delivered(root / "log") == journal.written
    commits = commits_of(root / "log")
    assert (commits[0]["start"], commits[-1]["end"]) == (0, journal.last_seq)
    assert all(before["end"] == after["start"] for before, after in pairwise(commits))
    listed = {file["path"] for commit in commits for file in commit["files"]}
    assert listed == {str(path.relative_to(root / "log")) for path in (root / "log").rglob("*.parquet")}


def test_a_kill_after_each_step_changes_nothing(tmp_path: Path) -> None:
    journal = Journal.create(tmp_path / "journal")
    fill(journal, transactions=150)
    armed = failpoints()
    assert len(armed) >= 9
    assert run_until_it_ends(tmp_path, armed) == sorted(armed)
    assert_exact(tmp_path, journal)
