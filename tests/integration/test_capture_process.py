"""The capture process: what it keeps, how it ends, and what it never holds up."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from millstream.engine import supervisor
from millstream.engine.capture_order import CaptureOrder
from millstream.errors import SourceHalted
from millstream.observe import Event
from tests.chaos.rig import failpoints
from tests.fixtures.capture import SECONDS, Captured, captured, source_spec
from tests.fixtures.postgres import Database, drop_slots

pytestmark = pytest.mark.postgres

TABLE = "CREATE TABLE t (id int PRIMARY KEY, v text)"


@contextmanager
def load(database: Database, pause: float = 0.0) -> Iterator[None]:
    """Transactions of one to ten rows by another thread, as long as the block lasts."""
    stop = threading.Event()

    def insert() -> None:
        with database.connect(autocommit=False) as connection:
            number, many = 0, 0
            while not stop.wait(pause):
                many = 1 + many % 10
                connection.execute(
                    "INSERT INTO t SELECT n, repeat('v', 50) FROM generate_series(%s::int, %s) n",
                    (number, number + many - 1),
                )
                number += many
                connection.commit()

    worker = threading.Thread(target=insert)
    worker.start()
    try:
        yield
    finally:
        stop.set()
        worker.join()


def holds_exactly_the_table(capture: Captured, database: Database) -> int:
    """Every row of the table was inserted once; so was every row in the journal, in whole transactions."""
    rows = capture.rows()
    ids = [int(row["payload"].split(b"t\0\0\0")[1][1:].split(b"t")[0]) for row in rows]
    assert ids == sorted(id for (id,) in database.sql("SELECT id FROM t"))
    events = {(row["commit_position"], row["tx_index"]) for row in rows}
    assert len(events) == len(rows)
    sizes: dict[int, list[int]] = {}
    for row in rows:
        sizes.setdefault(row["commit_position"], []).append(row["tx_index"])
    assert all(indexes == list(range(len(indexes))) for indexes in sizes.values())
    return len(rows)


@pytest.mark.own_capture
def test_changes_are_in_the_journal_soon_and_once_over_restarts(any_database: Database, tmp_path: Path) -> None:
    database = any_database
    database.sql(TABLE)
    with captured(database, tmp_path / "journal") as capture:
        capture.await_state("running")
        database.sql("INSERT INTO t VALUES (1, 'a')")
        capture.await_log_end()
        assert capture.supervisor.last_status["seq"] >= 1
    assert capture.supervisor.state == "stopped"
    assert capture.kinds[-1] == "capture.stopped"
    database.sql("INSERT INTO t VALUES (2, 'b')")
    with captured(database, tmp_path / "journal", order={"expect_journal": True}) as capture:
        capture.await_state("running")
        database.sql("INSERT INTO t VALUES (3, 'c')")
        capture.await_log_end()
    assert holds_exactly_the_table(capture, database) == 3
    assert "capture.journal_created" not in capture.kinds


def test_killed_at_random_under_load_it_goes_on_without_gap_or_double(database: Database, tmp_path: Path) -> None:
    database.sql(TABLE)
    with captured(database, tmp_path / "journal") as capture:
        capture.await_state("running")
        with load(database, pause=0.001):
            for round_ in range(2):
                capture.await_state("running")
                before = capture.supervisor.last_status["seq"]
                assert capture.supervisor.wait_for(lambda s, b=before: s.last_status["seq"] > b + 300, SECONDS)
                assert capture.supervisor.pid is not None
                os.kill(capture.supervisor.pid, signal.SIGKILL)
                assert capture.supervisor.wait_for(lambda s, r=round_: s.restarts > r, SECONDS)
        capture.await_state("running")
        capture.await_log_end()
    assert holds_exactly_the_table(capture, database) > 600
    assert capture.kinds.count("capture.restarting") == 2


def test_killed_at_each_durable_step_it_goes_on_without_gap_or_double(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One journal; each process is killed at another step, and the next one goes on."""
    in_order = ["publication_created", "slot_created", "trigger_installed", "journal_created", "look_saved"]
    later = ["replication_started", "block_appended", "committed", "acked", "spooled"]
    steps = [f"capture.{step}" for step in [*in_order, *later]]
    assert sorted(steps) == sorted(name for name in failpoints() if name.startswith("capture."))
    database.sql(TABLE + "; ALTER TABLE t ALTER v SET STORAGE EXTERNAL")
    monkeypatch.setenv("MILLSTREAM_FAILPOINT_STATE", str(tmp_path))
    monkeypatch.setattr(supervisor, "HEALTHY_SECONDS", 0.0)
    coming = iter(steps)

    def arm(event: Event | None = None) -> None:
        # Called before each start of the process, on the thread that starts it.
        if event is None or event.kind == "capture.restarting":
            monkeypatch.setenv("MILLSTREAM_FAILPOINT", next(coming, "none"))

    arm()
    asked = {"ddl_trigger": True}
    with captured(database, tmp_path / "journal", hear=arm, ack="journaled", options=asked) as capture:
        with load(database, pause=0.02):
            assert capture.supervisor.wait_for(lambda s: s.restarts == len(steps) - 1, 2 * SECONDS), capture.events
            capture.await_state("running")
            database.sql("INSERT INTO t SELECT -n, repeat('v', 100000) FROM generate_series(1, 200) n")
            assert capture.supervisor.wait_for(lambda s: s.restarts == len(steps), SECONDS), capture.events
            capture.await_state("running")
        capture.await_log_end()
    assert sorted(path.stem for path in tmp_path.glob("*.fired")) == sorted(steps)
    holds_whole_transactions_of_the_table(capture, database)


def holds_whole_transactions_of_the_table(capture: Captured, database: Database) -> None:
    """As `holds_exactly_the_table`, for a table whose first rows may be older than the slot."""
    rows = capture.rows()
    ids = [int(row["payload"].split(b"t\0\0\0")[1][1:].split(b"t")[0]) for row in rows]
    there = {id for (id,) in database.sql("SELECT id FROM t")}
    assert len(ids) == len(set(ids))
    assert set(ids) <= there
    missing = there - set(ids)
    assert not missing or max(missing) < min(id for id in ids if id >= 0)
    assert len({(row["commit_position"], row["tx_index"]) for row in rows}) == len(rows)


def test_a_fast_shutdown_is_not_held_up_by_a_target_that_stands_still(any_database: Database, tmp_path: Path) -> None:
    database = any_database
    database.sql(TABLE)
    with captured(database, tmp_path / "journal") as capture:
        capture.await_state("running")
        database.sql("INSERT INTO t VALUES (1, 'a')")
        capture.await_log_end()
        capture.supervisor.send_ack(capture.supervisor.last_status["end"])
        database.await_true(
            f"SELECT confirmed_flush_lsn - '0/0' >= {capture.supervisor.last_status['end']} "
            f"FROM pg_replication_slots WHERE slot_name = '{database.name}'"
        )
        database.sql("INSERT INTO t SELECT n, 'b' FROM generate_series(2, 500) n")
        capture.await_log_end()
        # If it were held up, that would be for as long as wal_sender_timeout, a minute.
        database.server.stop("fast", timeout=50)
        database.server.start()
        assert capture.supervisor.wait_for(lambda s: "capture.unavailable" in capture.kinds, SECONDS)
        database.sql("INSERT INTO t VALUES (501, 'c')")
        capture.await_state("running")
        capture.await_log_end()
        assert capture.supervisor.restarts == 0
    assert holds_exactly_the_table(capture, database) == 501


def test_the_slot_moves_with_what_was_delivered_and_not_before(database: Database, tmp_path: Path) -> None:
    database.sql(TABLE)
    confirmed = (
        f"SELECT (confirmed_flush_lsn - '0/0')::int8 FROM pg_replication_slots WHERE slot_name = '{database.name}'"
    )
    with captured(database, tmp_path / "journal", options={"status_interval": "100ms"}) as capture:
        capture.await_state("running")
        ((start,),) = database.sql(confirmed)
        database.sql("INSERT INTO t VALUES (1, 'a')")
        capture.await_log_end()
        end = capture.supervisor.last_status["end"]
        assert end > start
        assert database.sql(confirmed) == [(start,)]
        capture.supervisor.send_ack(end)
        database.await_true(f"SELECT ({confirmed}) = {end}")
        capture.supervisor.send_ack(1 << 60)  # more than the journal has: its end counts
        database.sql("INSERT INTO t VALUES (2, 'b')")
        capture.await_log_end()
        database.await_true(f"SELECT ({confirmed}) > {end}")
        ((now,),) = database.sql(confirmed)
        assert capture.supervisor.wait_for(lambda s: now <= s.last_status["end"], SECONDS)


def test_what_is_not_as_it_was_left_halts_for_good_and_says_what_to_do(database: Database, tmp_path: Path) -> None:
    database.sql(TABLE)
    with captured(database, tmp_path / "journal") as capture:
        capture.await_state("running")
    database.sql(f"ALTER PUBLICATION {database.name} DROP TABLE t")
    with captured(database, tmp_path / "journal") as capture:
        capture.await_state("halted")
        assert "changes may be missing" in str(capture.supervisor.error)
    drop_slots(database)
    with captured(database, tmp_path / "journal") as capture:
        capture.await_state("halted")
        error = capture.supervisor.error
        assert isinstance(error, SourceHalted)
        assert "does not exist any more" in error.message
        assert "rebase" in (error.hint or "")
        assert (capture.supervisor.restarts, capture.supervisor.pid) == (0, None)


def test_a_stop_does_not_wait_for_other_peoples_transactions(database: Database, tmp_path: Path) -> None:
    database.sql(TABLE)
    slots = f"SELECT count(*) FROM pg_replication_slots WHERE slot_name = '{database.name}'"
    with database.connect(autocommit=False) as writer:
        writer.execute("INSERT INTO t VALUES (1, 'a')")
        with captured(database, tmp_path / "journal") as capture:
            assert capture.supervisor.wait_for(lambda _: "source.waiting" in capture.kinds, SECONDS)
            capture.supervisor.stop(SECONDS)
            assert capture.supervisor.state == "stopped"
            assert "capture.killed" not in capture.kinds
        database.await_true(f"SELECT ({slots}) = 0")
        with captured(database, tmp_path / "journal") as capture:
            assert capture.supervisor.wait_for(lambda _: "source.waiting" in capture.kinds, SECONDS)
            assert capture.supervisor.pid is not None
            os.kill(capture.supervisor.pid, signal.SIGKILL)
            assert capture.supervisor.wait_for(lambda _: "capture.unavailable" in capture.kinds, SECONDS)
            assert "still being made" in str(capture.supervisor.error)
            writer.rollback()
            capture.await_state("running")
            database.sql("INSERT INTO t VALUES (2, 'b')")
            capture.await_log_end()
        assert [row["tx_index"] for row in capture.rows()] == [0]


def test_a_process_that_does_not_stop_is_killed(database: Database, tmp_path: Path) -> None:
    database.sql(TABLE)
    with captured(database, tmp_path / "journal") as capture:
        capture.await_state("running")
        assert capture.supervisor.pid is not None
        os.kill(capture.supervisor.pid, signal.SIGSTOP)
        capture.supervisor.stop(0.5)
        assert capture.supervisor.state == "stopped"
        assert "capture.killed" in capture.kinds


def _alone(database: Database, journal: Path) -> subprocess.Popen[str]:
    """The process without a supervisor."""
    process = subprocess.Popen(
        [sys.executable, "-m", "millstream.engine.capture_process"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps(CaptureOrder(source_spec(database), journal).to_json()) + "\n")
    process.stdin.flush()
    return process


def _running(process: subprocess.Popen[str]) -> list[dict]:
    heard = []
    assert process.stdout is not None
    for line in process.stdout:
        heard.append(json.loads(line))
        if heard[-1].get("status", {}).get("state") == "running":
            return heard
    pytest.fail(f"it ended: {heard}")


def test_sigterm_is_a_clean_stop_and_sigint_is_none(database: Database, tmp_path: Path) -> None:
    database.sql(TABLE)
    with _alone(database, tmp_path / "journal") as process:
        _running(process)
        mapped = Path(f"/proc/{process.pid}/maps").read_text()
        process.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.3)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    assert "pyarrow" in mapped
    assert "pandas" not in mapped


def test_an_engine_that_dies_takes_capture_with_it(database: Database, tmp_path: Path) -> None:
    database.sql(TABLE)
    with _alone(database, tmp_path / "journal") as process:
        _running(process)
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(60) == 0


def test_spark_is_not_in_it() -> None:
    code = (
        "import sys, millstream.engine.capture_loop, millstream.sources.postgres.source;"
        "print([name for name in sys.modules if name.startswith(('pyspark', 'py4j'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
