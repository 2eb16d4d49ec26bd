"""Rows that a transform fails on: they become dead letters, and everything else arrives."""

from __future__ import annotations

import re
import sqlite3
import struct
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from millstream.engine import delivery, repair
from millstream.engine.home import Home
from millstream.engine.redelivery import Outcome, Redelivery
from millstream.engine.replay import waiting
from millstream.errors import NotSupported
from millstream.model import DeadLetters, Mode, OnReject, Relation, SourceSpec, StreamSpec, TargetSpec
from millstream.sources.base import KeyRows
from millstream.transforms.shape import FieldFilter, Shape, Step
from tests.fixtures.delivery import EVERYTHING, Bench
from tests.fixtures.inprocess import FakeSpark, InProcessQuery
from tests.fixtures.journals import Journal, shop_table
from tests.fixtures.tuples import delete, insert, update

ORDERS = shop_table("orders", 16_400, "doc")
NUMBERS = Shape(transforms=(Step("cast", (("body", "int"),)), Step("rename", (("id", "code"),))))
MASKED = Shape(transforms=(Step("mask", (("body", "0"),)), *NUMBERS.transforms))
REASON = "public.orders.body: a value has no exact form as int32"


def bench(root: Path, kind: str = "sqlite", table: Relation = ORDERS, **options: Any) -> Bench:
    journal = Journal.create(root / "journal")
    journal.register(table)
    options = {"path": str(root / "copy"), **options}
    return Bench(FakeSpark(), root, journal, kind=kind, options=options, shape=NUMBERS)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "SliceQuery", InProcessQuery)


def deliver(shop: Bench, policy: DeadLetters | None = None) -> Any:
    query = shop.query(once=True)
    query._letters._spec = replace(query._letters._spec, dead_letters=policy or DeadLetters())
    query.start()
    assert query.wait(60)
    return query.error


def rows(shop: Bench) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(shop.options["path"])) as db:
        return db.execute('SELECT code, body, doc FROM "public.orders" ORDER BY code, _ms_seq').fetchall()


def letters(shop: Bench) -> list[tuple[int, str, str, str | None, str]]:
    return [(one.seq, one.op, one.kind, one.key, one.state.value) for one in shop.store.letters("shop", "log")]


def retry(shop: Bench, shape: Shape) -> list[Outcome]:
    target = TargetSpec("log", shop.kind, EVERYTHING, options=shop.options)
    source = SourceSpec("journal", "postgres", "", None, ())
    home = Home(shop.root / "home")
    (home.path / "journals").mkdir(parents=True, exist_ok=True)
    if not home.journal_path("journal").exists():
        home.journal_path("journal").symlink_to(shop.journal.path)
    stream = StreamSpec("shop", source, Mode.CDC, (target,), shape=shape)
    return Redelivery(home, shop.store, stream, "log").run([one.id for one in shop.store.letters("shop")])


def test_a_row_that_cannot_be_cast_is_a_letter_and_the_others_arrive(tmp_path: Path) -> None:
    shop = bench(tmp_path)
    shop.journal.append(ORDERS, [insert(str(n), "bad" if n in (7, 40) else str(n), "d") for n in range(100)])
    assert deliver(shop) is None
    assert rows(shop) == [(n, n, "d") for n in range(100) if n not in (7, 40)]
    assert letters(shop) == [(8, "c", "transform", "7", "waiting"), (41, "c", "transform", "40", "waiting")]
    assert {one.reason for one in shop.store.letters("shop")} == {REASON}
    # Later batches know them, and a later change of the row replaces them.
    shop.journal.append(ORDERS, [update(["7", "77", "d"]), insert("200", "bad", "d"), delete(key=["40", None, None])])
    assert deliver(shop) is None
    assert rows(shop) == [(n, 77 if n == 7 else n, "d") for n in range(100) if n != 40]
    assert [(one[0], one[4]) for one in letters(shop)] == [(8, "superseded"), (41, "superseded"), (102, "waiting")]


FILTERED = Shape(fields=(FieldFilter("doc", "equals", ("d",)),), transforms=NUMBERS.transforms)


def test_a_change_without_what_a_filter_needs_is_a_letter_if_the_source_does_not_have_it(tmp_path: Path) -> None:
    shop = bench(tmp_path)
    shop.shape = FILTERED
    shop.journal.append(ORDERS, [insert(str(n), str(n), "d") for n in range(1, 5)])
    assert deliver(shop) is None
    changes = [update(["1", "11", ...]), update(["2", "22", ...]), update(["3", "33", "d"]), update(["4", "44", ...])]
    shop.journal.append(ORDERS, [*changes, update(["4", "44", "e"])])
    assert deliver(shop) is None
    assert rows(shop) == [(1, 1, "d"), (2, 2, "d"), (3, 33, "d")]
    # The letter of a row that a later change of the batch wrote, or removed, is gone.
    assert letters(shop) == [(5, "u", "unsent", "1", "waiting"), (6, "u", "unsent", "2", "waiting")]
    first, _ = shop.store.letters("shop")
    assert first.reason.startswith("public.orders: a filter needs doc, whose value is large, did not change")
    assert "the source cannot be asked" in first.reason
    shop.journal.append(ORDERS, [update(["1", "111", "d"]), delete(key=["2", None, None])])
    assert deliver(shop) is None
    assert (rows(shop), letters(shop)) == ([(1, 111, "d"), (3, 33, "d")], [])


def test_a_change_without_what_a_filter_needs_is_retried_with_the_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop = bench(tmp_path)
    shop.shape = FILTERED
    shop.journal.append(ORDERS, [insert("1", "1", "d"), update(["1", "11", ...])])
    assert deliver(shop) is None
    assert [one.outcome for one in retry(shop, FILTERED)] == ["rejected"]
    read_as(monkeypatch, (1, "11", "d"))
    assert [one.outcome for one in retry(shop, FILTERED)] == ["delivered"]
    assert (rows(shop), letters(shop)) == ([(1, 11, "d")], [])


def read_as(monkeypatch: pytest.MonkeyPatch, *found: tuple[int, str, str]) -> None:
    """The source has these rows of `ORDERS`."""
    texts = [(struct.pack(">hii", 3, 4, id), [body.encode(), doc.encode()]) for id, body, doc in found]
    raw = [head + b"".join(struct.pack(">i", len(text)) + text for text in rest) for head, rest in texts]
    found_now = KeyRows(pa.array(raw, pa.large_binary()), [0] * len(raw), 0)
    monkeypatch.setattr(repair, "read_keys", lambda *_: found_now)


def test_a_row_that_changes_often_is_at_most_one_letter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was before the last of its changes is nobody's matter any more; letters are few."""
    shop = bench(tmp_path)
    shop.shape = FILTERED
    shop.journal.append(ORDERS, [insert("1", "1", "d"), insert("2", "2", "d")])
    hot = [update([id, str(n), ...]) for n in range(10, 20) for id in ("1", "2")]
    shop.journal.append(ORDERS, hot)
    # Of the first row the source has what the last change left, of the other one it has gone on.
    read_as(monkeypatch, (1, "19", "d"), (2, "20", "d"))
    assert deliver(shop, DeadLetters(max=1)) is None
    assert rows(shop) == [(1, 19, "d"), (2, 2, "d")]
    assert letters(shop) == [(22, "u", "unsent", "2", "waiting")]
    shop.journal.append(ORDERS, [update(["2", "20", ...])])
    assert deliver(shop, DeadLetters(max=1)) is None
    assert (rows(shop), letters(shop)) == ([(1, 19, "d"), (2, 20, "d")], [])


def test_a_row_that_enters_without_all_of_its_values_is_completed_from_the_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No filter needs what was not sent, but the mirror does not have it."""
    shop = bench(tmp_path)
    shop.shape = Shape(fields=(FieldFilter("body", "prefix", ("1",)),), transforms=NUMBERS.transforms)
    shop.journal.append(ORDERS, [insert("1", "2", "d"), insert("2", "2", "d")])
    assert deliver(shop) is None
    shop.journal.append(ORDERS, [update(["1", "11", ...]), update(["2", "12", ...])])
    read_as(monkeypatch, (1, "11", "d"), (2, "13", "d"))
    assert deliver(shop) is None
    assert rows(shop) == [(1, 11, "d")]
    assert letters(shop) == [(4, "u", "unsent", "2", "waiting")]
    (letter,) = shop.store.letters("shop")
    said = "public.orders: it leaves out values that did not change, which the target does not have, and the source has"
    assert letter.reason.startswith(said)
    shop.journal.append(ORDERS, [update(["2", "13", ...])])
    assert deliver(shop) is None
    assert (rows(shop), letters(shop)) == ([(1, 11, "d"), (2, 13, "d")], [])


def test_on_reject_halt_names_table_column_and_change_and_not_the_value(tmp_path: Path) -> None:
    shop = bench(tmp_path)
    shop.journal.append(ORDERS, [insert("1", "1", "d"), insert("2", "hunter2", "d")])
    error = deliver(shop, DeadLetters(OnReject.HALT))
    assert re.match(re.escape(REASON) + r" \(change \S+-1 of public\.orders\)", str(error))
    assert "hunter" not in str(error)
    assert letters(shop) == []


def test_a_move_that_cannot_be_cast_frees_the_old_key(tmp_path: Path) -> None:
    shop = bench(tmp_path)
    moves = [insert("1", "1", "d"), update(["2", "bad", "d"], key=["1", None, None]), insert("1", "11", "e")]
    shop.journal.append(ORDERS, moves)
    assert deliver(shop) is None
    assert rows(shop) == [(1, 11, "e")]
    assert letters(shop) == [(2, "u", "transform", "2", "waiting")]


def test_an_old_row_that_cannot_be_cast_holds_neither_a_repair_nor_a_delete(tmp_path: Path) -> None:
    """With whole old rows the bad value comes again with the change that takes it away."""
    table = replace(ORDERS, identity="f")
    shop = bench(tmp_path, table=table)
    bad = ["1", "bad", "d"]
    shop.journal.append(table, [insert(*bad), update(["1", "5", "d"], row=bad), insert("2", "bad", "d")])
    shop.journal.append(table, [delete(row=["2", "bad", "d"]), insert("3", "3", "d")])
    assert deliver(shop) is None
    assert rows(shop) == [(1, 5, "d"), (3, 3, "d")]
    assert [(one[0], one[4]) for one in letters(shop)] == [(1, "superseded"), (3, "superseded")]


@pytest.mark.parametrize("kind", ["sqlite", "files"])
def test_a_changelog_goes_on_without_the_row(tmp_path: Path, kind: str) -> None:
    shop = bench(tmp_path, kind, **({"write": "changelog"} if kind == "sqlite" else {}))
    shop.journal.append(ORDERS, [insert("1", "1", "d"), insert("2", "bad", "d"), insert("3", "3", "d")])
    assert deliver(shop) is None
    assert letters(shop) == [(2, "c", "transform", None, "waiting")]
    if kind == "sqlite":
        assert [row[0] for row in rows(shop)] == [1, 3]
        assert [one.outcome for one in retry(shop, NUMBERS)] == ["rejected"]
    else:
        files = (tmp_path / "copy").glob("public.orders/*.parquet")
        found = pa.concat_tables([pq.read_table(path, partitioning=None) for path in files])
        assert sorted(found["code"].to_pylist()) == [1, 3]
        with pytest.raises(NotSupported, match="cannot be given single changes"):
            retry(shop, NUMBERS)


def test_a_letter_is_delivered_when_the_stream_no_longer_fails_on_it(tmp_path: Path) -> None:
    shop = bench(tmp_path, write="changelog")
    shop.journal.append(ORDERS, [insert("1", "1", "d"), insert("2", "bad", "d")])
    assert deliver(shop) is None
    assert [one.outcome for one in retry(shop, MASKED)] == ["delivered"]
    assert rows(shop) == [(1, 1, "d"), (2, 0, "d")]
    assert letters(shop) == []


@pytest.mark.parametrize("write", ["mirror", "changelog"])
def test_a_replay_of_a_change_that_was_given_up_says_which_and_why(tmp_path: Path, write: str) -> None:
    shop = bench(tmp_path, write=write)
    shop.journal.append(ORDERS, [insert("1", "1", "d"), insert("2", "bad", "d"), insert("3", "3", "d")])
    assert deliver(shop) is None
    (letter,) = shop.store.letters("shop")
    shop.store.remove_letters([letter.id])
    shop.store.save_replay("shop", "log", waiting(0, 3, newest_first=write == "mirror"))
    assert deliver(shop) is None, "the replay ends, and not the delivery"
    found = shop.store.replays("shop")["log"]
    assert (found["state"], found["error"]) == (
        "failed",
        f"{REASON} (change {letter.event_id} of public.orders, seq 2, which is no dead letter any more)",
    )
    assert [row[0] for row in rows(shop)] == [1, 3]
    # What is told to be done helps.
    shop.store.save_replay("shop", "log", waiting(2, 3, newest_first=write == "mirror"))
    assert deliver(shop) is None
    assert shop.store.replays("shop")["log"]["state"] == "done"
