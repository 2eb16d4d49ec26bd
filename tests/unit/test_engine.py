"""Streams managed from Python: added, paused, resumed and deleted while the engine runs."""

from __future__ import annotations

import os
import shutil
import sqlite3
import threading
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from millstream import Engine, Mode, Replicator, StreamState
from millstream.engine.rebase import rebase
from millstream.errors import ConfigError, HomeLocked, NotReady, UnknownStream
from millstream.testing import Script
from tests.fixtures.delivery import Watching
from tests.fixtures.engines import await_that, delivered, stream


def test_the_life_of_a_stream(engine: Engine, script: Script, tmp_path: Path, watching: Watching) -> None:
    replicator: Replicator = engine
    assert (replicator.kind, replicator.list_streams()) == ("millstream", [])
    engine.start()
    shop = stream(script, tmp_path)
    replicator.upsert_stream(shop)
    assert replicator.list_streams() == [shop]
    engine.await_ready("shop", 120)
    script.insert("public.orders", id=1, note="first")
    await_that(lambda: replicator.get_status("shop").events_replicated == 1)

    replicator.pause("shop")
    replicator.pause("shop")
    assert replicator.get_status("shop").state is StreamState.PAUSED
    before = replicator.get_status("shop")
    script.insert("public.items", id=2, note="while it was paused")
    await_that(lambda: replicator.get_status("shop").lag_events == 1)
    assert delivered(tmp_path) == {"public.orders": [(1, "first")]}
    assert replicator.get_status("shop").last_checkpoint == before.last_checkpoint

    replicator.resume("shop")
    replicator.resume("shop")
    await_that(lambda: replicator.get_status("shop").lag_events == 0)
    expected = {"public.items": [(2, "while it was paused")], "public.orders": [(1, "first")]}
    assert delivered(tmp_path) == expected
    await_that(lambda: engine.await_ready("shop").state is StreamState.RUNNING)
    status = engine.get_status("shop")
    assert (status.events_replicated, status.errors_last_hour, status.last_error) == (2, 0, None)
    assert status.last_checkpoint is not None
    assert status.last_event == status.last_checkpoint.wall
    assert status.last_checkpoint.seq == 2
    assert [(table.name, table.events_replicated) for table in status.tables_replicated] == [
        ("public.items", 1),
        ("public.orders", 1),
    ]
    assert status.bytes_replicated == sum(table.bytes_replicated for table in status.tables_replicated) > 0

    replicator.delete_stream("shop")
    assert replicator.list_streams() == []
    assert script.confirmed("main") is None
    assert not (engine.home.journal_path("main")).exists()
    assert delivered(tmp_path) == expected, "what was delivered stays"
    with pytest.raises(UnknownStream, match="has no stream shop"):
        replicator.get_status("shop")
    for kind in ("stream.applied", "stream.ready", "stream.paused", "stream.resumed", "stream.deleted"):
        await_that(lambda kind=kind: bool(watching.of(kind)))  # type: ignore[misc]


def test_two_streams_on_one_source_share_its_capture_and_get_their_own_tables(
    engine: Engine, script: Script, tmp_path: Path
) -> None:
    engine.start()
    engine.upsert_stream(stream(script, tmp_path, "orders", tables=("public.orders",)))
    engine.await_ready("orders", 120)
    script.insert("public.orders", id=1, note="before the other stream")
    script.insert("public.items", id=1, note="nobody wants it yet")
    await_that(lambda: engine.get_status("orders").events_replicated == 1)
    engine.upsert_stream(stream(script, tmp_path, "items", tables=("public.items",)))
    engine.await_ready("items", 120)
    engine.await_ready("orders", 120)
    with script.transaction() as changes:
        changes.insert("public.orders", id=2, note="in one")
        changes.insert("public.items", id=2, note="transaction")
    await_that(lambda: engine.get_status("orders").events_replicated == 2)
    await_that(lambda: engine.get_status("items").events_replicated == 1)
    assert delivered(tmp_path, "orders") == {"public.orders": [(1, "before the other stream"), (2, "in one")]}
    assert delivered(tmp_path, "items") == {"public.items": [(2, "transaction")]}
    await_that(lambda: engine.get_status("items").source == engine.get_status("orders").source)
    # Paused, a stream holds what its source may forget; deleted, it leaves the source to the other.
    engine.pause("items")
    script.insert("public.orders", id=3, note="after")
    await_that(lambda: engine.get_status("orders").events_replicated == 3)
    held = script.confirmed("main")
    done = engine.delete_stream("items")
    assert done["source"] == "in use by orders"
    await_that(lambda: script.confirmed("main") == script.end)
    assert held is not None
    assert held < script.end
    script.insert("public.items", id=4, note="nobody wants it any more")
    script.insert("public.orders", id=4, note="last")
    await_that(lambda: engine.get_status("orders").events_replicated == 4)
    assert [id_ for id_, _ in delivered(tmp_path, "orders")["public.orders"]] == [1, 2, 3, 4]


def test_what_was_captured_for_a_stream_that_is_gone_is_nobody_elses(
    engine: Engine, script: Script, tmp_path: Path
) -> None:
    names = ("orders", "items")
    engine.upsert_streams([stream(script, tmp_path, name, tables=(f"public.{name}",)) for name in names])
    engine.pause("orders")
    with engine:
        engine.await_ready("items", 120)
        script.insert("public.items", id=1, note="an item")
        script.insert("public.orders", id=1, note="an order")
        await_that(lambda: engine.get_status("orders").lag_events == 2)
        engine.delete_stream("items")
    engine.resume("orders")
    with engine:
        await_that(lambda: engine.get_status("orders").lag_events == 0)
        assert delivered(tmp_path, "orders") == {"public.orders": [(1, "an order")]}
        engine.upsert_stream(stream(script, tmp_path, "late", tables=("public.items",)))
        await_that(lambda: delivered(tmp_path, "late") == {"public.items": [(1, "an item")]})


def test_a_lane_passes_batches_that_have_nothing_of_its_stream(engine: Engine, script: Script, tmp_path: Path) -> None:
    orders = stream(script, tmp_path, "orders", tables=("public.orders",))
    lane = replace(orders.targets[0], kind="sqlite", options={"path": str(tmp_path / "orders.db")})
    engine.start()
    engine.upsert_streams(
        [replace(orders, targets=(lane,)), stream(script, tmp_path, "items", tables=("public.items",))]
    )
    engine.await_ready("orders", 120)
    for id_ in (1, 2, 3):
        script.insert("public.items", id=id_, note="not for the lane")
        await_that(lambda id_=id_: engine.get_status("items").events_replicated == id_)  # type: ignore[misc]
        await_that(lambda: engine.get_status("orders").lag_events == 0)
    script.insert("public.orders", id=1, note="for the lane")
    await_that(lambda: engine.get_status("orders").events_replicated == 1)
    with closing(sqlite3.connect(tmp_path / "orders.db")) as db:
        ((table,),) = db.execute("select name from sqlite_master where name like '%orders%' and type = 'table'")
        assert db.execute(f'select id, note from "{table}"').fetchall() == [(1, "for the lane")]
        assert db.execute("select count(*) from sqlite_master where name like '%items%'").fetchone() == (0,)


def test_streams_outlive_the_engine_that_ran_them(engine: Engine, script: Script, tmp_path: Path) -> None:
    engine.upsert_stream(stream(script, tmp_path, targets="log copy"))
    engine.pause("shop", "copy")
    assert engine.get_status("shop").state is StreamState.CREATED
    with engine:
        status = engine.await_ready("shop", 120)
        assert [target.state for target in status.targets] == [StreamState.RUNNING, StreamState.PAUSED]
        script.insert("public.orders", id=1, note="one")
        await_that(lambda: delivered(tmp_path) == {"public.orders": [(1, "one")]})
    assert engine.get_status("shop").targets[0].state is StreamState.STOPPED
    engine.resume("shop", "copy")
    with engine:
        await_that(lambda: delivered(tmp_path, target="copy") == {"public.orders": [(1, "one")]})


def test_a_replaced_stream_goes_on_from_its_checkpoint(engine: Engine, script: Script, tmp_path: Path) -> None:
    engine.start()
    engine.upsert_stream(stream(script, tmp_path))
    engine.await_ready("shop", 120)
    script.insert("public.orders", id=1, note="one")
    await_that(lambda: engine.get_status("shop").events_replicated == 1)
    started = [thread for thread in threading.enumerate() if thread.name == "delivery-shop-log"]
    engine.upsert_stream(stream(script, tmp_path, targets="log copy"))
    assert [thread.is_alive() for thread in started] == [True], "a target that stays as it is goes on"
    engine.await_ready("shop", 120)
    script.insert("public.orders", id=2, note="two")
    for target in ("log", "copy"):
        has = partial(delivered, tmp_path, target=target)
        await_that(lambda has=has: has() == {"public.orders": [(1, "one"), (2, "two")]})  # type: ignore[misc]


def test_what_cannot_be_is_refused(engine: Engine, script: Script, tmp_path: Path) -> None:
    shop = stream(script, tmp_path)
    engine.upsert_stream(shop)
    for wrong, said in (
        (replace(shop, targets=()), "has no target"),
        (replace(shop, name="../shop"), "is no name"),
        (replace(shop, commit="quorum:2"), "does not fit 1 target"),
        (replace(shop, targets=shop.targets * 2), "two targets named log"),
        (replace(shop, source=script.source("other")), "reads source main, not other"),
        (replace(shop, source=replace(shop.source, kind="mysql")), "unknown kind"),
        (replace(shop, name="bank", source=replace(shop.source, max_source_wal=1)), "describe source main differently"),
    ):
        with pytest.raises(ConfigError, match=said):
            engine.upsert_stream(wrong)
    with pytest.raises(ConfigError, match="has no tables to copy"):
        engine.upsert_stream(replace(shop, mode=Mode.SNAPSHOT))
    assert engine.list_streams() == [shop]
    with pytest.raises(UnknownStream, match=r"no stream shup: did you mean shop\?"):
        engine.pause("shup")
    with pytest.raises(UnknownStream, match=r"no target lag: did you mean log\?"):
        engine.resume("shop", "lag")
    with pytest.raises(ConfigError, match=r"stream shop has no table other\.orders"):
        engine.verify("shop", tables=("public.orders", "other.orders"))


def test_a_journal_that_goes_away_under_a_running_engine_stops_its_streams_alone(
    engine: Engine, script: Script, tmp_path: Path
) -> None:
    other = Script(tmp_path / "other script")
    other.table("public.orders", {"id": "integer", "note": "text"}, key=["id"])
    engine.start()
    engine.upsert_stream(stream(script, tmp_path))
    bank = stream(other, tmp_path, "bank")
    engine.upsert_stream(replace(bank, source=other.source("other", ("public.*",))))
    for name in ("shop", "bank"):
        engine.await_ready(name, 120)
    engine.home.journal_path("main").rename(tmp_path / "gone")
    await_that(lambda: engine.get_status("shop").state is StreamState.FAILED)
    other.insert("public.orders", id=1, note="goes on")
    await_that(lambda: delivered(tmp_path, "bank") == {"public.orders": [(1, "goes on")]})
    assert engine.failure is None


def test_a_second_engine_is_told_who_runs_the_home(engine: Engine, tmp_path: Path) -> None:
    engine.start()
    with pytest.raises(HomeLocked, match=f"process {os.getpid()}"):
        Engine(tmp_path / "home").start()


def test_a_lost_journal_fails_its_streams_and_is_re_based_for_all_of_them(
    engine: Engine, script: Script, tmp_path: Path
) -> None:
    names = ("orders", "items")
    with engine:
        engine.upsert_streams([stream(script, tmp_path, name, tables=(f"public.{name}",)) for name in names])
        for name in names:
            engine.await_ready(name, 120)
        with script.transaction() as changes:
            changes.insert("public.orders", id=1, note="before")
            changes.insert("public.items", id=1, note="before")
        for name in names:
            await_that(lambda name=name: delivered(tmp_path, name) != {})  # type: ignore[misc]
    shutil.rmtree(engine.home.journal_path("main"))
    with engine:
        for name in names:
            with pytest.raises(NotReady, match="but there is no journal"):
                engine.await_ready(name, 120)
    assert not engine.home.journal_path("main").exists(), "nothing is made anew behind a cursor's back"
    rebase(engine.home, "orders", confirm=True)
    with engine:
        with script.transaction() as changes:
            changes.insert("public.items", id=2, note="after")
            changes.insert("public.orders", id=2, note="after")
        for name in names:
            expected = {f"public.{name}": [(1, "before"), (2, "after")]}
            await_that(lambda n=name, e=expected: delivered(tmp_path, n) == e)  # type: ignore[misc]


def test_a_source_that_halts_fails_its_stream_and_resume_tries_again(
    engine: Engine, script: Script, tmp_path: Path
) -> None:
    engine.start()
    engine.upsert_stream(stream(script, tmp_path))
    engine.await_ready("shop", 120)
    (tmp_path / "script" / "slot-main.json").rename(tmp_path / "slot")
    script.fail("the connection is lost")
    await_that(lambda: engine.get_status("shop").state is StreamState.FAILED)
    with pytest.raises(NotReady, match="has no slot"):
        engine.await_ready("shop", 120)
    await_that(lambda: engine.get_status("shop").errors_last_hour >= 2)
    status = engine.get_status("shop")
    assert "has no slot" in (status.last_error or "")
    (tmp_path / "slot").rename(tmp_path / "script" / "slot-main.json")
    engine.resume("shop")
    script.insert("public.orders", id=1, note="again")
    await_that(lambda: delivered(tmp_path) == {"public.orders": [(1, "again")]})
