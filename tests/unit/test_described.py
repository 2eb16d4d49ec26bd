"""Descriptions of a journal's tables, asked for by several threads of one process."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from millstream.spark import rows
from tests.fixtures.journals import Journal, shop_table

TABLES, THREADS, ROUNDS = 40, 4, 20


@pytest.fixture
def eager_threads() -> Iterator[None]:
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("eager_threads")
def test_deliveries_that_ask_at_the_same_time_get_the_same_descriptions(tmp_path: Path) -> None:
    """Each engine has one thread per target, and all of them ask when a table's first change arrives."""
    journal = Journal.create(tmp_path / "journal")
    tables = [shop_table(f"t{number}", 100 + number) for number in range(TABLES)]
    for table in tables:
        journal.register(table)
    journal.transaction([("public.t0", 1, "first")])
    locations = (str(journal.path),)
    with ThreadPoolExecutor(THREADS) as threads:
        for _ in range(ROUNDS):
            rows._journal.cache_clear()
            rows.described.cache_clear()
            together = Barrier(THREADS)

            def ask(number: int, together: Barrier = together) -> str:
                together.wait()
                return rows.described(locations, "postgres", "any", number).name

            found = list(threads.map(ask, range(1, THREADS + 1)))
            assert found == [f"t{number}" for number in range(THREADS)]
    journal.writer.close()
