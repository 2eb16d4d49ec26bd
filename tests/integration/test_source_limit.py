"""Targets that stand still: how much log the source keeps for them, and what happens beyond the limit."""

from __future__ import annotations

from pathlib import Path

import pytest

from millstream.model import OnLimit
from tests.fixtures.capture import SECONDS, Captured, captured
from tests.fixtures.postgres import Database

pytestmark = pytest.mark.postgres

LIMIT = 1 << 20


def kept(database: Database) -> str:
    return (
        "SELECT (pg_current_wal_flush_lsn() - confirmed_flush_lsn)::int8 "
        f"FROM pg_replication_slots WHERE slot_name = '{database.name}'"
    )


def heard(capture: Captured, kind: str) -> bool:
    return capture.supervisor.wait_for(lambda _: any(event.kind == kind for event in capture.events), SECONDS)


@pytest.mark.parametrize("policy", list(OnLimit))
def test_beyond_the_limit_the_policy_decides(database: Database, tmp_path: Path, policy: OnLimit) -> None:
    database.sql("CREATE TABLE t (id int, v text)")
    fields = {"max_source_wal": LIMIT, "on_limit": policy, "options": {"status_interval": "100ms"}}
    with captured(database, tmp_path / "journal", **fields) as capture:
        capture.await_state("running")
        for _ in range(8):
            database.sql("INSERT INTO t SELECT n, repeat('v', 400) FROM generate_series(1, 1000) n")
        if policy is OnLimit.STOP:
            capture.await_state("halted")
            assert "on_limit is stop" in str(capture.supervisor.error)
            return
        capture.await_log_end()
        if policy is OnLimit.HOLD:
            assert heard(capture, "capture.log_held")
            ((bytes_kept,),) = database.sql(kept(database))
            assert bytes_kept > LIMIT
        else:
            assert heard(capture, "capture.log_released")
            database.await_true(f"SELECT ({kept(database)}) <= {LIMIT}")
            assert capture.supervisor.wait_for(lambda s: s.last_status["released"] >= 1, SECONDS)
        assert len(capture.rows()) == 8000, "whatever is acknowledged, the journal has every row"
