"""Part of what `files` have had, delivered once more: in its place, by whole batches, and nothing twice."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from millstream import BatchLimits, Engine, TargetSpec
from millstream.errors import ConfigError, OutOfRange
from millstream.testing import Script
from tests.fixtures.delivery import commits_of
from tests.fixtures.engines import await_that, delivered, stream

EVERY = {
    "public.items": [(id_, "item") for id_ in range(1, 7)],
    "public.orders": [(id_, "order") for id_ in range(1, 7)],
}


@pytest.fixture
def shop(engine: Engine, script: Script, tmp_path: Path) -> Iterator[Engine]:
    """Six batches: an order and an item each, with the seqs 2n - 1 and 2n."""
    wanted = stream(script, tmp_path)
    few = TargetSpec("log", "files", BatchLimits(0, 1 << 30, 2), options=wanted.targets[0].options)
    engine.start()
    engine.upsert_stream(wanted.__class__(**{**vars(wanted), "targets": (few,)}))
    engine.await_ready("shop", 120)
    for id_ in range(1, 7):
        with script.transaction() as changes:
            changes.insert("public.orders", id=id_, note="order")
            changes.insert("public.items", id=id_, note="item")
        await_that(lambda id_=id_: engine.get_status("shop").targets[0].seq == 2 * id_)  # type: ignore[misc]
    yield engine
    engine.stop()


def names(root: Path) -> dict[str, set[str]]:
    """The files of each table, as their first seq and their epoch."""
    found: dict[str, set[str]] = {}
    for path in (root / "shop" / "log").glob("public.*/*.parquet"):
        epoch, first = path.name.split("-")[:2]
        found.setdefault(path.parent.name, set()).add(f"{int(first)} of {int(epoch)}")
    return found


def finished(engine: Engine) -> bool:
    record = engine.get_status("shop").targets[0].replay
    assert record is None or record["error"] is None, record
    return record is not None and record["state"] == "done"


def test_the_batches_of_one_table_between_two_places_come_anew(shop: Engine, tmp_path: Path) -> None:
    orders = sorted((tmp_path / "shop" / "log" / "public.orders").iterdir())
    for lost in (orders[0], orders[3]):
        lost.unlink()
    shop.replay("shop", 6, tables=["public.orders"], until=7)
    await_that(lambda: finished(shop))
    record = shop.get_status("shop").targets[0].replay
    assert record is not None
    # Seq 6 and 7 stand in the batches of seq 5 to 6 and 7 to 8.
    assert (record["from_seq"], record["until_seq"], record["events"], record["epoch"]) == (4, 8, 2, 2)
    assert record["progress"] == 1.0
    assert names(tmp_path) == {
        "public.orders": {"3 of 1", "5 of 2", "7 of 2", "9 of 1", "11 of 1"},
        "public.items": {f"{2 * id_} of 1" for id_ in range(1, 7)},
    }
    assert delivered(tmp_path) == {**EVERY, "public.orders": EVERY["public.orders"][1:]}, "seq 1 was not asked for"
    assert [commit.get("replayed") for commit in commits_of(tmp_path / "shop" / "log")] == [
        None,
        None,
        2,
        2,
        None,
        None,
    ]


def test_what_is_asked_for_while_it_is_paused_comes_when_it_goes_on_and_then_the_rest(
    shop: Engine, script: Script, tmp_path: Path
) -> None:
    shop.pause("shop")
    script.insert("public.orders", id=7, note="later")
    shop.replay("shop", 1, until=4)
    shop.replay("shop", 3, until=4)
    waiting = shop.get_status("shop").targets[0].replay
    assert waiting is not None
    assert (waiting["state"], waiting["from_seq"], waiting["until_seq"]) == ("waiting", 2, 4)
    shop.resume("shop")
    await_that(lambda: shop.get_status("shop").targets[0].seq == 13)
    assert finished(shop)
    assert delivered(tmp_path) == {**EVERY, "public.orders": [*EVERY["public.orders"], (7, "later")]}
    assert names(tmp_path)["public.items"] == {"2 of 1", "4 of 2", "6 of 1", "8 of 1", "10 of 1", "12 of 1"}
    # All of it, the replayed ones too, can be taken back and delivered anew.
    before = shop.get_status("shop").events_replicated
    shop.replay("shop", 1)
    await_that(lambda: shop.get_status("shop").events_replicated == before + 13)
    assert delivered(tmp_path) == {**EVERY, "public.orders": [*EVERY["public.orders"], (7, "later")]}


def test_what_cannot_be_is_refused_and_nothing_is_changed(shop: Engine, tmp_path: Path) -> None:
    before = names(tmp_path)
    with pytest.raises(ConfigError, match="nothing lies between the beginning and the end"):
        shop.replay("shop", 5, until=4)
    with pytest.raises(ConfigError, match=r"did you mean public\.orders\?"):
        shop.replay("shop", 5, tables=["public.order"])
    with pytest.raises(OutOfRange, match="before the beginning of the journal"):
        shop.replay("shop", datetime(2020, 1, 1, tzinfo=UTC), until=4)
    assert shop.get_status("shop").targets[0].replay is None
    assert names(tmp_path) == before
