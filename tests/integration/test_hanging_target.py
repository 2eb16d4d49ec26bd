"""A database that takes a connection and then never answers: it holds up nobody, and is given up in time."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from millstream import Engine, Mode, StreamSpec, TargetSpec
from millstream.bench.proxy import Proxy
from millstream.embedded.postgres import HOST
from millstream.engine import delivery
from millstream.targets.lanes import sessions
from tests.fixtures.capture import source_spec
from tests.fixtures.engines import QUICK, await_that, delivered
from tests.fixtures.postgres import Database, fresh_database

pytestmark = pytest.mark.postgres

PATIENCE = 2.0


def test_a_target_that_hangs_from_the_start_holds_up_neither_others_nor_the_end(
    engine: Engine, database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "ASKING_SECONDS", PATIENCE)
    monkeypatch.setattr(sessions.Connection, "patience", PATIENCE)
    monkeypatch.setattr(delivery, "SETTLE_SECONDS", 0.2)
    database.sql("CREATE TABLE orders (id int PRIMARY KEY, note text)")
    with fresh_database(database.server) as copy, Proxy(HOST, copy.server.port) as line:
        line.stall(after=1)  # which says that the connection is made
        behind = f"postgresql://postgres@{HOST}:{line.port}/{copy.name}?sslmode=disable&gssencmode=disable"
        targets = (
            TargetSpec("hangs", "postgres", QUICK, options={"uri": behind}),
            TargetSpec("log", "files", QUICK, options={"path": str(tmp_path / "shop" / "log")}),
        )
        with engine:
            engine.upsert_stream(
                StreamSpec("shop", source_spec(database), Mode.CDC, targets, checkpoint_interval_ms=100)
            )

            def status(target: str) -> tuple[int, str | None]:
                found = {one.name: one for one in engine.get_status("shop").targets}[target]
                return found.events, found.retrying

            await_that(lambda: engine.get_status("shop").source.state == "running")
            database.sql("INSERT INTO orders VALUES (1, 'an order')")
            await_that(lambda: status("log")[0] == 1)
            assert delivered(tmp_path) == {"public.orders": [(1, "an order")]}
            await_that(lambda: "no answer came in time" in (status("hangs")[1] or ""))
            # While it waits for an answer once more, it is stopped.
            began = time.monotonic()
            engine.pause("shop", "hangs")
            assert time.monotonic() - began < 25 * PATIENCE
            line.release()
            engine.resume("shop", "hangs")
            await_that(lambda: status("hangs")[0] == 1)
        assert copy.sql("SELECT id, note FROM public.orders") == [(1, "an order")]
