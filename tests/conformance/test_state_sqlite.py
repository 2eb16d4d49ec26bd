"""A state store on a disk: kills, other processes, files of other versions."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from millstream.errors import StateError
from millstream.model import Cursor
from millstream.state import sqlite
from millstream.state.sqlite import SqliteStateStore
from tests.fixtures.cursors import AT, cursor

WRITER = """
import sys
from pathlib import Path
from millstream.model import Cursor
from millstream.state.sqlite import SqliteStateStore
store = SqliteStateStore(Path(sys.argv[1]))
print("ready", flush=True)
for seq in range(1, int(sys.argv[2]) + 1):
    store.save_cursor(Cursor("shop", "log", "j1", 1, seq, seq * 10))
    print(seq, flush=True)
"""


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []

    def start(count: int, **environment: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path / "state.db"), str(count)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_a_cursor_outlives_kill_9_right_after_it_was_saved(
    writer: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    process = writer(50, MILLSTREAM_FAILPOINT="state.cursor_saved:7")
    out, _ = process.communicate(timeout=120)
    assert process.returncode == -signal.SIGKILL
    assert out.split() == ["ready", *map(str, range(1, 7))]
    store = SqliteStateStore(tmp_path / "state.db")
    saved = store.get_cursor("shop", "log")
    assert saved is not None
    assert (saved.seq, saved.position) == (7, 70)
    assert [c.seq for c in store.cursor_history("shop", "log")] == [6, 5, 4, 3, 2, 1]
    store.close()


def test_kill_9_at_any_moment_leaves_a_whole_cursor(
    writer: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    """Whatever was reported as saved is there, and the cursor and its history fit together."""
    process = writer(1_000_000)
    assert process.stdout is not None
    reported = 0
    for line in process.stdout:
        reported = 0 if line == "ready\n" else int(line)
        if reported == 100:
            process.kill()
    process.wait()
    store = SqliteStateStore(tmp_path / "state.db")
    saved = store.get_cursor("shop", "log")
    assert saved is not None
    assert saved.seq in (reported, reported + 1)
    assert saved.position == saved.seq * 10
    assert [c.seq for c in store.cursor_history("shop", "log", limit=10_000)] == list(range(saved.seq - 1, 0, -1))
    store.close()


def test_a_write_that_fails_half_way_leaves_nothing(tmp_path: Path) -> None:
    store = SqliteStateStore(tmp_path / "state.db")
    store.save_cursor(cursor(1))
    broken = Cursor("shop", "log", "j1", 1, 2, 2**70, AT, AT)  # the history is written, then this does not fit
    with pytest.raises((StateError, OverflowError)):
        store.save_cursor(broken)
    assert store.get_cursor("shop", "log") == cursor(1)
    assert store.cursor_history("shop", "log") == []
    store.save_cursor(cursor(3))
    assert [c.seq for c in store.cursor_history("shop", "log")] == [1]
    store.close()


def test_another_process_reads_while_one_writes(writer: Callable[..., subprocess.Popen[str]], tmp_path: Path) -> None:
    process = writer(1_000_000)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    reader = SqliteStateStore(tmp_path / "state.db", read_only=True)
    for _ in range(100):
        reported = int(process.stdout.readline())
        seen = reader.get_cursor("shop", "log")
        assert seen is not None
        assert seen.seq >= reported
    with pytest.raises(StateError, match="opened for reading"):
        reader.save_cursor(cursor(1))
    reader.close()


def test_a_reader_sees_the_last_write_while_a_writer_is_in_a_transaction(tmp_path: Path) -> None:
    store = SqliteStateStore(tmp_path / "state.db")
    store.save_cursor(cursor(1))
    other = sqlite3.connect(tmp_path / "state.db", isolation_level=None)
    other.execute("begin immediate")
    other.execute("update cursors set seq = 99")
    assert store.get_cursor("shop", "log") == cursor(1)
    other.execute("rollback")
    other.close()
    store.close()


def test_a_closed_store_is_read_by_a_reader_alone(tmp_path: Path) -> None:
    store = SqliteStateStore(tmp_path / "state.db")
    store.save_cursor(cursor(4))
    store.close()
    reader = SqliteStateStore(tmp_path / "state.db", read_only=True)
    assert reader.get_cursor("shop", "log") == cursor(4)
    reader.close()


def test_the_file_is_private_and_durable(tmp_path: Path) -> None:
    store = SqliteStateStore(tmp_path / "state.db")
    store.save_cursor(cursor(1))
    assert {p.name: p.stat().st_mode & 0o777 for p in tmp_path.iterdir()} == {
        "state.db": 0o600,
        "state.db-wal": 0o600,
        "state.db-shm": 0o600,
    }
    assert store._writer is not None
    assert store._writer.execute("pragma journal_mode").fetchone() == ("wal",)
    assert store._writer.execute("pragma synchronous").fetchone() == (2,)
    store.close()


def test_a_store_of_another_version_is_refused(tmp_path: Path) -> None:
    SqliteStateStore(tmp_path / "state.db").close()
    with sqlite3.connect(tmp_path / "state.db") as db:
        db.execute("pragma user_version = 99")
    db.close()
    with pytest.raises(StateError, match="has version 99, this program knows version 8"):
        SqliteStateStore(tmp_path / "state.db")


def test_a_store_of_the_first_version_is_brought_up_to_date(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    store = SqliteStateStore(path)
    store.save_cursor(cursor(4))
    store.close()
    with sqlite3.connect(path) as db:
        tables = (
            "totals",
            "pauses",
            "captured",
            "deletions",
            "faults",
            "requests",
            "letters",
            "doubts",
            "reloads",
            "verifications",
            "ddl_decisions",
            "replays",
            "notes",
        )
        for table in tables:
            db.execute(f"drop table {table}")
        db.execute("pragma user_version = 1")
    db.close()
    with pytest.raises(StateError, match="written by an older version"):
        SqliteStateStore(path, read_only=True)
    store = SqliteStateStore(path)
    assert (store.get_cursor("shop", "log"), store.totals(), store.pending()) == (cursor(4), [], [])
    store.close()


def test_a_reader_waits_for_the_process_that_creates_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "state.db"
    path.touch()  # the file is there before its tables are

    class Creates(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            SqliteStateStore(path).close()
            return True

    with monkeypatch.context() as creating:
        creating.setattr(sqlite.threading, "Event", Creates)
        SqliteStateStore(path, read_only=True).close()
    (tmp_path / "other.db").touch()
    monkeypatch.setattr(sqlite, "CREATING_SECONDS", 0.05)
    with pytest.raises(StateError, match="is being created"):
        SqliteStateStore(tmp_path / "other.db", read_only=True)


@pytest.mark.parametrize("read_only", [True, False])
def test_what_cannot_be_opened_is_a_clear_error(tmp_path: Path, read_only: bool) -> None:
    with pytest.raises(StateError, match=r"cannot open: state store .*missing"):
        SqliteStateStore(tmp_path / "missing" / "state.db", read_only=read_only)
    (tmp_path / "state.db").write_text("this is no database, it only looks like a file" * 50)
    with pytest.raises(StateError, match="not a database"):
        SqliteStateStore(tmp_path / "state.db", read_only=read_only)


def test_that_a_target_must_begin_anew_is_known_after_a_kill(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from millstream.state.sqlite import SqliteStateStore; "
        "SqliteStateStore(Path(sys.argv[1])).set_needs_reload('shop', 'copy', 'changes are gone')"
    )
    environment = {**os.environ, "MILLSTREAM_FAILPOINT": "state.reload_saved"}
    path = tmp_path / "state.db"
    ended = subprocess.run([sys.executable, "-c", code, str(path)], env=environment, check=False, timeout=120)
    assert ended.returncode == -signal.SIGKILL
    store = SqliteStateStore(path)
    assert store.needs_reload("shop") == {"copy": "changes are gone"}
    store.close()
