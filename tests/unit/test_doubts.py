"""Rows read at the source that may be others than those that were changed: at mirrors, at changelogs, through kills."""

from __future__ import annotations

import os
import signal
import sqlite3
import struct
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from millstream.engine import delivery, doubts, repair, witness
from millstream.model import Relation, SourceSpec
from millstream.sources.base import KeyRows
from millstream.state.sqlite import SqliteStateStore
from millstream.targets.rejects import EVERY_ROW
from millstream.transforms.shape import FieldFilter, Shape
from tests.fixtures import delivering
from tests.fixtures.delivery import Bench
from tests.fixtures.forks import run
from tests.fixtures.inprocess import FakeSpark, InProcessQuery
from tests.fixtures.journals import Journal, shop_table
from tests.fixtures.tuples import delete, insert, truncate, update

ORDERS = shop_table("orders", 16_400, "doc")
BY_DOC = Shape(fields=(FieldFilter("doc", "prefix", ("d",)),))
Found = dict[str, tuple[str, str, int]]
"""By key what the source has: body, doc, and who wrote it."""


def reading(found: Found, until: int) -> Any:
    """`sources.read_keys` of a source that has these rows."""

    def read(_: SourceSpec, relation: Relation, names: Any, keys: Sequence[Sequence[str]], txids: Any) -> KeyRows:
        there = [key for (key,) in keys if key in found]
        raw = []
        for key in there:
            body, doc = (text.encode() for text in found[key][:2])
            texts = b"".join(struct.pack(">i", len(text)) + text for text in (body, doc))
            raw.append(struct.pack(">hii", 3, 4, int(key)) + texts)
        return KeyRows(pa.array(raw, pa.large_binary()), [found[key][2] for key in there], until)

    return read


def bench(root: Path, **options: Any) -> Bench:
    journal = Journal.create(root / "journal")
    journal.register(ORDERS)
    options = {"path": str(root / "copy.db"), **options}
    return Bench(FakeSpark(), root, journal, kind="sqlite", options=options)  # type: ignore[arg-type]


def rows(root: Path) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(root / "copy.db")) as db:
        return db.execute('SELECT id, body, doc FROM "public.orders" ORDER BY id, _ms_seq').fetchall()


class Shop:
    """A stream to a SQLite file whose source has been asked by the time each batch comes."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
        self.root = root
        self.bench = bench(root, **options)
        self._patch = monkeypatch
        monkeypatch.setattr(delivery, "SliceQuery", InProcessQuery)

    @property
    def journal(self) -> Journal:
        return self.bench.journal

    def deliver(self, found: Found, until: int) -> None:
        self._patch.setattr(repair, "read_keys", reading(found, until))
        query = self.bench.query(once=True)
        query.start()
        assert query.wait(60)
        assert query.error is None

    def doubts(self) -> list[tuple[str, int]]:
        return [(one.key, one.until) for one in self.bench.store.doubts("shop", "log")]

    def letters(self) -> list[tuple[int, str]]:
        return [(one.seq, one.kind) for one in self.bench.store.letters("shop", "log")]


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shop:
    return Shop(tmp_path, monkeypatch)


MOVED: Found = {"1": ("b", "other", 1300), "2": ("b", "doc", 1200)}
"""The first row has gone to 2, and another one has come to 1."""
AFTER_ALL = 1301


def test_a_row_in_doubt_is_written_and_nothing_of_it_goes_to_another_key(shop: Shop) -> None:
    shop.journal.append(ORDERS, [update(["1", "b", ...])])
    shop.deliver(MOVED, AFTER_ALL)
    assert (rows(shop.root), shop.doubts()) == ([(1, "b", "other")], [("1", AFTER_ALL)])
    shop.journal.append(ORDERS, [update(["2", "b", ...], key=["1", None, None])])
    shop.deliver(MOVED, AFTER_ALL)
    assert (rows(shop.root), shop.doubts()) == ([(2, "b", "doc")], []), "who takes the key away ends the doubt"
    shop.journal.append(ORDERS, [insert("1", "b", "other")])
    shop.deliver({}, 0)
    assert rows(shop.root) == [(1, "b", "other"), (2, "b", "doc")]
    assert shop.letters() == []


def test_a_row_that_its_own_transaction_wrote_is_in_doubt_only_for_what_that_did_later(shop: Shop) -> None:
    own = {"1": ("b", "other", 1100), "2": ("b", "doc", 1100), "3": ("b", "own", 1100)}
    moves = [
        update(["1", "b", ...]),
        update(["3", "b", ...]),
        update(["2", "b", ...], key=["1", None, None]),
        insert("1", "b", "other"),
    ]
    shop.journal.append(ORDERS, moves)
    shop.deliver(own, 9000)
    assert (rows(shop.root), shop.doubts()) == ([(1, "b", "other"), (2, "b", "doc"), (3, "b", "own")], [])
    shop.journal.append(ORDERS, [update(["4", "b", ...], key=["3", None, None])])
    shop.deliver({}, 0)
    assert rows(shop.root)[-1] == (4, "b", "own"), "its value is known to be its own: the source need not be asked"
    assert shop.letters() == []


def test_a_doubt_stays_with_changes_of_its_row_and_ends_where_the_row_was_read(shop: Shop) -> None:
    now = {"1": ("b", "doc", 77), "5": ("b", "doc", 77), "9": ("b", "doc", 77)}
    shop.journal.append(ORDERS, [update([key, "b", ...]) for key in ("1", "5", "9")])
    shop.deliver(now, 1250)
    shop.journal.append(ORDERS, [update(["1", "c", ...])])
    shop.deliver({}, 0)
    assert rows(shop.root)[0] == (1, "c", "doc"), "of the row itself it can be taken: the source is not asked"
    assert shop.doubts() == [("1", 1250), ("5", 1250), ("9", 1250)]
    shop.journal.append(ORDERS, [update(["2", "c", ...], key=["1", None, None]), delete(key=["5", None, None])])
    shop.deliver({}, 0)
    assert rows(shop.root) == [(2, "c", "doc"), (9, "b", "doc")], "this one comes after the row was read"
    assert (shop.doubts(), shop.letters()) == ([], [])


def test_who_empties_the_table_or_writes_the_row_whole_ends_the_doubt(shop: Shop) -> None:
    now = {"1": ("b", "doc", 77), "2": ("b", "doc", 77), "3": ("b", "doc", 77)}
    shop.journal.append(ORDERS, [update([key, "b", ...]) for key in now])
    shop.deliver(now, 5000)
    shop.journal.append(ORDERS, [update(["1", "b", "new"]), insert("8", "b", "moves"), delete(key=["2", None, None])])
    shop.journal.append(ORDERS, [update(["2", "b", ...], key=["8", None, None])])
    shop.deliver({}, 0)
    assert shop.doubts() == [("3", 5000)]
    shop.journal.append(ORDERS, [update([str(int(key) + 10), "b", ...], key=[key, None, None]) for key in ("1", "2")])
    shop.deliver({}, 0)
    assert rows(shop.root) == [(3, "b", "doc"), (11, "b", "new"), (12, "b", "moves")]
    shop.journal.append(ORDERS, [truncate()])
    shop.deliver({}, 0)
    assert (rows(shop.root), shop.doubts(), shop.letters()) == ([], [], [])


def test_of_too_many_rows_in_doubt_only_the_table_is_remembered(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doubts, "MOST_DOUBTS", 2)
    now = dict.fromkeys(("1", "2", "3"), ("b", "doc", 77))
    shop.journal.append(ORDERS, [insert("6", "b", "old"), insert("7", "b", "old")])
    shop.deliver({}, 0)
    shop.journal.append(ORDERS, [update([key, "b", ...]) for key in now])
    shop.deliver(now, 1600)
    assert shop.doubts() == [("*", 1600)]
    moves = [update(["8", "b", ...], key=["7", None, None]), update(["6", "c", ...]), update(["1", "b", "whole"])]
    shop.journal.append(ORDERS, moves)
    shop.deliver({"8": ("b", "read", 1300)}, 1700)
    expected = [(1, "b", "whole"), (2, "b", "doc"), (3, "b", "doc"), (6, "c", "old"), (8, "b", "read")]
    assert rows(shop.root) == expected, "any row may be one in doubt: what moves is read at the source"
    assert shop.doubts() == [("*", 1600)], "a row that is written whole was not the only one"
    assert shop.letters() == []
    shop.journal.append(ORDERS, [insert(str(key), "b", "d") for key in (20, 21)])
    shop.journal.append(ORDERS, [insert(str(key), "b", "d") for key in (22, 23)])
    shop.deliver({}, 0)
    shop.journal.append(ORDERS, [update([key, "c", ...], key=[other, None, None]) for key, other in (("9", "8"),)])
    shop.deliver({}, 0)
    assert (rows(shop.root)[4], shop.doubts()) == ((9, "c", "read"), []), "it is over where the rows were read"


def test_a_changelog_is_given_a_value_only_if_it_was_the_rows_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop = Shop(tmp_path, monkeypatch, write="changelog")
    shop.bench.shape = BY_DOC
    monkeypatch.setattr(witness, "PATIENCE_SECONDS", 0.0)
    changes = [
        update(["1", "b", ...]),
        update(["2", "b", ...]),
        update(["3", "b", ...]),
        update(["3", "b", ...]),
        update(["4", "b", ...]),
        update(["4", "b", "doc now"]),
        update(["5", "b", ...]),
    ]
    shop.journal.append(ORDERS, changes)
    shop.journal.append(ORDERS, [update(["9", "b", "doc"], key=["1", None, None]), insert("1", "b", "doc of another")])
    now = {
        "1": ("b", "doc of another", 1200),
        "2": ("b", "doc", 77),
        "3": ("b", "doc", 1100),
        "4": ("b", "doc now", 1100),
        "5": ("b", "doc", 1100),
    }
    shop.deliver(now, 1201)
    written = [(3, "doc"), (3, "doc"), (4, "doc now"), (5, "doc")]
    assert [(id, doc) for id, _, doc in rows(shop.root)] == [(1, "doc of another"), (2, "doc"), *written, (9, "doc")]
    assert shop.letters() == [(1, "unsent"), (5, "unsent")]
    shop.journal.append(ORDERS, [update(["2", "c", ...])])
    shop.deliver({"2": ("c", "doc", 77)}, 5000)
    assert shop.letters()[-1] == (10, "unsent"), "the journal has not come to where the row was read"
    (reason,) = {one.reason for one in shop.bench.store.letters("shop", "log")}
    assert reason.endswith("it is not certain that the source's row is still the same")


def deliver_moved(root: str) -> int:
    """In a process of its own, with the source as it is after the row has moved."""
    vars(repair)["read_keys"] = reading(MOVED, AFTER_ALL)
    vars(doubts)["MOST_DOUBTS"] = int(os.environ.get("MOST_DOUBTS", doubts.MOST_DOUBTS))
    return delivering.deliver(root, "sqlite", {"path": f"{root}/copy.db"})


@pytest.mark.parametrize(
    ("at", "most", "known"),
    [("state.doubts_added", 1, "1"), ("state.doubts_set", 0, EVERY_ROW), ("lane.committed", 1, "1")],
)
def test_what_is_in_doubt_is_known_to_who_comes_after_a_kill(tmp_path: Path, at: str, most: int, known: str) -> None:
    journal = Journal.create(tmp_path / "journal")
    journal.append(ORDERS, [update(["1", "b", ...])])
    limited = {"MOST_DOUBTS": str(most)}
    killed = run(deliver_moved, str(tmp_path), environment=limited | {"MILLSTREAM_FAILPOINT": at})
    assert killed.code == -signal.SIGKILL, killed.stderr
    with closing(SqliteStateStore(tmp_path / "state.db")) as store:
        assert [one.key for one in store.doubts("shop", "log")] == [known]
    journal.append(ORDERS, [update(["2", "b", ...], key=["1", None, None])])
    journal.append(ORDERS, [insert("1", "b", "other")])
    ended = run(deliver_moved, str(tmp_path), environment=limited)
    assert ended.code == 0, ended.stderr
    assert rows(tmp_path) == [(1, "b", "other"), (2, "b", "doc")]
    with closing(SqliteStateStore(tmp_path / "state.db")) as store:
        assert (store.doubts("shop", "log"), store.letters()) == ([], [])
    journal.writer.close()
