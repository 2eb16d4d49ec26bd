"""Delivering once more: from a checkpoint, from a time, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from millstream import Checkpoint, Cursor, Engine, Mode, StreamState
from millstream.engine.holders import holders
from millstream.errors import NotReady, OutOfRange
from millstream.state.memory import MemoryStateStore
from millstream.testing import Script
from tests.fixtures.delivery import commits_of
from tests.fixtures.engines import await_that, delivered, stream
from tests.fixtures.journals import Journal

EVERY = {"public.orders": [(id_, "one of them") for id_ in (1, 2, 3)]}


def deliver_three(engine: Engine, script: Script, root: Path) -> list[datetime]:
    """Three batches of one row each; when each was there."""
    engine.start()
    engine.upsert_stream(stream(script, root))
    engine.await_ready("shop", 120)
    times = []
    for id_ in (1, 2, 3):
        script.insert("public.orders", id=id_, note="one of them")
        await_that(lambda id_=id_: engine.get_status("shop").events_replicated == id_)  # type: ignore[misc]
        times.append(datetime.now(UTC))
    return times


def test_what_came_after_a_checkpoint_or_a_time_comes_again_and_is_there_once(
    engine: Engine, script: Script, tmp_path: Path
) -> None:
    times = deliver_three(engine, script, tmp_path)
    files = tmp_path / "shop" / "log" / "public.orders"
    first = sorted(files.iterdir())[0]
    for lost in sorted(files.iterdir())[1:]:
        lost.unlink()
    engine.replay("shop", Checkpoint(1, 0, times[0]))
    await_that(lambda: engine.get_status("shop").events_replicated == 5)
    assert delivered(tmp_path) == EVERY
    assert sorted(files.iterdir())[0] == first, "what lies before the checkpoint is left alone"
    assert [commit["epoch"] for commit in commits_of(tmp_path / "shop" / "log")] == [1, 2]
    engine.replay("shop", times[1], "log")
    await_that(lambda: engine.get_status("shop").events_replicated == 7)
    assert delivered(tmp_path) == EVERY
    engine.replay("shop", Checkpoint(0, 0, times[0]))
    await_that(lambda: engine.get_status("shop").events_replicated == 10)
    assert delivered(tmp_path) == EVERY


def test_a_paused_stream_is_replayed_when_it_goes_on(engine: Engine, script: Script, tmp_path: Path) -> None:
    deliver_three(engine, script, tmp_path)
    engine.pause("shop")
    engine.stop()
    engine.replay("shop", Checkpoint(2, 0, datetime.now(UTC)))
    assert len(commits_of(tmp_path / "shop" / "log")) == 2
    engine.start()
    await_that(lambda: engine.get_status("shop").source.state == "running")
    assert engine.get_status("shop").state is StreamState.PAUSED
    engine.resume("shop")
    await_that(lambda: engine.get_status("shop").events_replicated == 4)
    assert delivered(tmp_path) == EVERY


def test_the_journal_is_kept_for_a_target_that_was_taken_back(tmp_path: Path) -> None:
    journal = Journal.create(tmp_path / "journal")
    header, store = journal.writer.header, MemoryStateStore()
    store.put_stream("shop", {"source": {"name": "main"}, "targets": [{"name": "log"}]})
    for epoch, seq in ((1, 70), (1, 80), (1, 90), (2, 10)):
        store.save_cursor(Cursor("shop", "log", header.journal_id, epoch, seq, seq))
    assert [holder.seq for holder in holders(store, "main", header)] == [10]
    journal.writer.close()


def test_what_cannot_be_replayed_is_refused_and_left_alone(engine: Engine, script: Script, tmp_path: Path) -> None:
    deliver_three(engine, script, tmp_path)
    engine.stop()
    with pytest.raises(OutOfRange, match="before the beginning of the journal") as gone:
        engine.replay("shop", datetime.now(UTC) - timedelta(days=1))
    assert gone.value.hint == ("replay from there on, or copy the tables anew from the source: millstream reload shop")
    shop = stream(script, tmp_path)
    lane = replace(shop.targets[0], name="mirror", kind="sqlite", options={"path": str(tmp_path / "mirror.db")})
    engine.upsert_stream(replace(shop, targets=(*shop.targets, lane)))
    with pytest.raises(NotReady, match="target mirror of stream shop has got nothing from this journal yet"):
        engine.replay("shop", Checkpoint(0, 0, datetime.now(UTC)))
    engine.upsert_stream(replace(shop, mode=Mode.SNAPSHOT_THEN_CDC))
    with pytest.raises(OutOfRange, match="what it began with is not in the journal"):
        engine.replay("shop", Checkpoint(0, 0, datetime.now(UTC)))
    assert len(commits_of(tmp_path / "shop" / "log")) == 3
    assert delivered(tmp_path) == EVERY
