"""What does not fit: a transaction larger than memory, a journal larger than its disk."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from millstream.journal import JournalReader, describe, rows
from millstream.model import SeqRange
from tests.fixtures.capture import SECONDS, Captured, captured
from tests.fixtures.disks import mounted
from tests.fixtures.memory import peak_kb
from tests.fixtures.postgres import Database

pytestmark = pytest.mark.postgres

LIMIT_KB = 350_000
"""A process that has just begun has 110,000; the rows, were they all kept, would take as much as this and more."""


def copy(database: Database, count: int) -> None:
    """Rows of about 100 bytes, numbered from 0, in one transaction."""
    with database.connect(autocommit=False) as connection, connection.cursor() as cursor:
        with cursor.copy("COPY t FROM STDIN") as sink:
            filler = "x" * 85
            for start in range(0, count, 20_000):
                sink.write("".join(f"{number}\t{filler}\n" for number in range(start, min(start + 20_000, count))))
        connection.commit()


def await_sealed(capture: Captured) -> None:
    """Until every closed segment is sealed; the process says nothing about it, so it is looked at."""

    def sealed() -> bool:
        return all(segment.form != "closed" for segment in describe(capture.journal).segments)

    for _ in range(600):
        if capture.supervisor.wait_for(lambda _: sealed(), 0.1):
            return
    pytest.fail("the segments were not sealed within a minute")


@pytest.mark.own_capture
def test_a_million_rows_in_one_transaction_keep_memory_small(database: Database, tmp_path: Path) -> None:
    count = 1_000_000
    database.sql("CREATE TABLE t (id int, v text)")
    with captured(database, tmp_path / "journal") as capture:
        capture.await_state("running")
        copy(database, count)
        assert capture.supervisor.wait_for(lambda s: s.last_status["seq"] >= count, 200), capture.supervisor.last_status
        await_sealed(capture)
        assert capture.supervisor.pid is not None
        peak = peak_kb(capture.supervisor.pid)
        assert list((capture.journal / "spool").iterdir()) == []
    assert peak < LIMIT_KB
    index = expected = 0
    for batch in rows(JournalReader([str(capture.journal)]), SeqRange(0, count)):
        columns = {name: batch.column(name).to_numpy() for name in ("tx_index", "commit_position", "resume_position")}
        assert np.array_equal(columns["tx_index"], np.arange(index, index + len(batch)))
        expected = expected or columns["commit_position"][0]
        assert (columns["commit_position"] == expected).all()
        assert (columns["resume_position"] > expected).all()
        index += len(batch)
        number = str(index - 1).encode()
        assert number in batch.column("payload")[-1].as_py()
    assert index == count


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 40 MiB."""
    with mounted(tmp_path / "disk", "40m") as disk:
        yield disk.path


@pytest.mark.parametrize("how", ["small transactions", "one that is spooled"])
def test_a_full_disk_is_waited_out_and_nothing_is_lost(how: str, database: Database, small_disk: Path) -> None:
    database.sql("CREATE TABLE t (id int, v text)")
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(30 << 20))  # what is left is less than a transaction takes that must be spooled
    with captured(database, small_disk / "journal") as capture:
        capture.await_state("running")
        if how == "small transactions":
            for start in range(0, 60_000, 20_000):
                span = f"generate_series({start}, {start + 19_999})"
                database.sql(f"INSERT INTO t SELECT n, repeat('x', 200) FROM {span} n")
        else:
            database.sql("INSERT INTO t SELECT n, repeat('x', 400) FROM generate_series(0, 59999) n")
        assert capture.supervisor.wait_for(lambda _: "capture.disk_full" in capture.kinds, SECONDS), (
            capture.supervisor.last_status,
            capture.events,
        )
        capture.await_state("waiting")
        before = capture.supervisor.last_status["seq"]
        ballast.unlink()
        subprocess.run([shutil.which("mount") or "mount", "-o", "remount,size=200m", str(small_disk)], check=True)
        capture.await_log_end()
        assert capture.supervisor.wait_for(lambda _: "capture.disk_full_over" in capture.kinds, SECONDS)
        assert capture.supervisor.restarts == 0
        assert before < 60_000
    captured_ids = [int(row["payload"].split(b"t\0\0\0")[1][1:].split(b"t")[0]) for row in capture.rows()]
    assert captured_ids == list(range(60_000))
