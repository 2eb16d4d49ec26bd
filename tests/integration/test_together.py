"""A replay, a schema change that waits for approval, and a state that is brought back, at once and by Spark itself."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from millstream import Engine, StreamState, TargetSpec
from millstream.testing import Script
from tests.fixtures.delivery import commits_of
from tests.fixtures.engines import QUICK, await_that, delivered, stream

pytestmark = pytest.mark.spark

Rows = list[tuple[int, str]]


def held(path: Path, columns: str = "id, note") -> Rows:
    with closing(sqlite3.connect(path, timeout=60)) as lite:
        return lite.execute(f'SELECT {columns} FROM "public.orders" ORDER BY id').fetchall()


def is_gated(engine: Engine) -> bool:
    return [one.state for one in engine.get_status("shop").targets] == [StreamState.GATED] * 2


def replay_of(engine: Engine, target: str) -> Mapping[str, Any]:
    """How the target's replay is; nothing before it has begun."""
    return next(one.replay or {} for one in engine.get_status("shop").targets if one.name == target)


def test_what_comes_again_and_what_was_kept_stop_at_the_gate_and_go_on_behind_it(
    spark: SparkSession, script: Script, tmp_path: Path
) -> None:
    lite = TargetSpec("lite", "sqlite", QUICK, options={"path": str(tmp_path / "lite.db")})
    shop = stream(script, tmp_path)
    shop = replace(shop, targets=(*shop.targets, lite), ddl=(("add_column", "gate"),))
    before = [(1, "first"), (2, "second"), (3, "third")]
    with Engine(tmp_path / "home") as engine:
        engine.upsert_stream(shop)
        engine.await_ready("shop", 120)
        script.insert("public.orders", id=1, note="first")
        await_that(lambda: [one.seq for one in engine.get_status("shop").targets] == [1, 1])
        (kept,) = engine.create_snapshot("shop", "lite", path=str(tmp_path / "kept"))
        for id_, note in before[1:]:
            script.insert("public.orders", id=id_, note=note)
        script.table("public.orders", {"id": "integer", "note": "text", "size": "text"}, key=["id"])
        script.insert("public.orders", id=4, note="fourth", size="s")
        await_that(lambda: is_gated(engine))
        with closing(sqlite3.connect(tmp_path / "lite.db", timeout=60)) as copy, copy:
            copy.execute("UPDATE \"public.orders\" SET note = 'damaged'")
        # The log gets a part once more, the mirror goes back to the snapshot, and neither passes the gate.
        engine.replay("shop", 1, "log", tables=["public.orders"], until=1)
        engine.restore_snapshot("shop", kept.id, "lite", path=str(tmp_path / "kept"), overwrite=True)
        await_that(lambda: replay_of(engine, "log").get("state") == "done")
        await_that(lambda: held(tmp_path / "lite.db") == before and is_gated(engine))
        replayed = replay_of(engine, "log")
        assert replayed["events"] == 1
        assert delivered(tmp_path) == {"public.orders": before}
        (event,) = [one for one in engine.ddl_events("shop") if one.state == "pending"]
        engine.decide_ddl("shop", event.id, approved=True)
        await_that(lambda: [one.seq for one in engine.get_status("shop").targets] == [4, 4])
        # All of it once more, over the change of columns.
        engine.replay("shop", 1, "lite")
        await_that(lambda: replay_of(engine, "lite").get("state") == "done")
        assert delivered(tmp_path) == {"public.orders": [*before, (4, "fourth")]}
        assert held(tmp_path / "lite.db", "id, note, size") == [*((*row, None) for row in before), (4, "fourth", "s")]
    assert commits_of(tmp_path / "shop" / "log")[0]["replayed"] == replayed["epoch"]
