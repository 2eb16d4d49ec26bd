"""Rows that a target cannot take: they become dead letters, and everything else arrives."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from deltalake import DeltaTable

from millstream.engine import batches, delivery, redelivery
from millstream.engine.batch import run_batch
from millstream.engine.home import Home
from millstream.engine.redelivery import Outcome, Redelivery
from millstream.engine.reload import RELOAD, AskedTables, waiting
from millstream.engine.reloading import Reloading
from millstream.engine.repair import Repair
from millstream.model import BatchLimits, DeadLetters, Mode, OnOverflow, OnReject, SourceSpec, StreamSpec, TargetSpec
from millstream.state.base import Letter
from millstream.targets.rejects import packed, unpacked
from tests.fixtures.delivery import EVERYTHING, Bench
from tests.fixtures.inprocess import FakeSpark, InProcessQuery
from tests.fixtures.journals import Journal, shop_table
from tests.fixtures.tuples import delete, insert, truncate, update

ORDERS = shop_table("orders", 16_400, "doc")
LETTERS = DeadLetters()
FIVE = BatchLimits(max_ms=0, max_bytes=1 << 30, max_events=5)


class Shop(Bench):
    """A delivery into a SQLite file that takes no body which begins with `bad`."""

    @property
    def file(self) -> Path:
        return self.root / "copy.db"

    def make_table(self, write: str = "mirror") -> None:
        more = ", _ms_op TEXT, _ms_event_id TEXT" if write == "changelog" else ""
        key = ", PRIMARY KEY (id)" if write == "mirror" else ""
        with closing(sqlite3.connect(self.file)) as db:
            db.execute(
                f"CREATE TABLE \"public.orders\" (id INTEGER, body TEXT CHECK (body NOT LIKE 'bad%'), doc TEXT, "
                f"_ms_seq INTEGER{more}{key})"
            )

    def repair_table(self) -> None:
        """The copy takes everything from now on."""
        with closing(sqlite3.connect(self.file)) as db:
            db.execute('ALTER TABLE "public.orders" RENAME TO old')
            db.execute('CREATE TABLE "public.orders" (id INTEGER PRIMARY KEY, body TEXT, doc TEXT, _ms_seq INTEGER)')
            db.execute('INSERT INTO "public.orders" SELECT id, body, doc, _ms_seq FROM old')
            db.commit()

    def rows(self) -> list[tuple[Any, ...]]:
        with closing(sqlite3.connect(self.file)) as db:
            return db.execute('SELECT id, body, doc FROM "public.orders" ORDER BY id, _ms_seq').fetchall()

    def letters(self) -> list[tuple[int, str, str, str]]:
        return [(one.seq, one.op, one.kind, one.state.value) for one in self.store.letters("shop", "log")]

    def deliver(self, policy: DeadLetters = LETTERS, limits: BatchLimits = EVERYTHING) -> Any:
        query = self.query(once=True, limits=limits)
        query._letters._spec = replace(query._letters._spec, dead_letters=policy)
        query.start()
        assert query.wait(120)
        return query.error

    def retry(self, *letters: Letter) -> list[Outcome]:
        target = TargetSpec("log", self.kind, EVERYTHING, options=self.options)
        stream = StreamSpec("shop", SourceSpec("journal", "postgres", "", None, ()), Mode.CDC, (target,))
        home = Home(self.root / "home")
        (home.path / "journals").mkdir(parents=True, exist_ok=True)
        if not home.journal_path("journal").exists():
            home.journal_path("journal").symlink_to(self.journal.path)
        ids = [one.id for one in letters or self.store.letters("shop")]
        return Redelivery(home, self.store, stream, "log").run(ids)


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shop:
    monkeypatch.setattr(delivery, "SliceQuery", InProcessQuery)
    journal = Journal.create(tmp_path / "journal")
    journal.register(ORDERS)
    made = Shop(
        FakeSpark(),  # type: ignore[arg-type]
        tmp_path,
        journal,
        kind="sqlite",
        options={"path": str(tmp_path / "copy.db")},
    )
    made.make_table()
    return made


def test_a_row_that_is_refused_is_a_letter_and_the_others_arrive(shop: Shop) -> None:
    rows = [insert(str(number), f"{'bad' if number in (7, 40) else 'good'} {number}", "d") for number in range(100)]
    shop.journal.append(ORDERS, rows)
    assert shop.deliver() is None
    assert [row[0] for row in shop.rows()] == [number for number in range(100) if number not in (7, 40)]
    assert shop.letters() == [(8, "c", "constraint", "waiting"), (41, "c", "constraint", "waiting")]
    letter = shop.store.letters("shop")[0]
    assert (letter.table, letter.key, letter.payload) == ("public.orders", "7", b"")
    (told,) = shop.watching.of("letters.added")
    assert told.fields["letters"] == 2
    assert "bad" not in told.message
    assert "bad" not in letter.reason


def test_a_later_change_of_a_rejected_row_applies_and_makes_the_letter_obsolete(shop: Shop) -> None:
    shop.journal.append(ORDERS, [insert("1", "bad", "d")])
    assert shop.deliver() is None
    shop.journal.append(ORDERS, [update(["1", "better", "d"]), insert("2", "good", "d")])
    assert shop.deliver() is None
    assert shop.rows() == [(1, "better", "d"), (2, "good", "d")]
    assert shop.letters() == [(1, "c", "constraint", "superseded")]
    (outcome,) = shop.retry()
    assert outcome.outcome == "superseded"
    assert "seq 2" in outcome.detail
    assert shop.rows() == [(1, "better", "d"), (2, "good", "d")]
    assert shop.letters() == []


def test_a_letter_does_not_bring_back_a_row_that_was_deleted_or_truncated_since(shop: Shop) -> None:
    shop.journal.append(ORDERS, [insert("1", "bad", "d"), insert("2", "bad", "d")])
    assert shop.deliver() is None
    shop.journal.append(ORDERS, [delete(key=["1", None, None])])
    assert shop.deliver() is None
    shop.journal.append(ORDERS, [truncate()])
    assert shop.deliver() is None
    shop.repair_table()
    assert {one.outcome for one in shop.retry()} == {"superseded"}
    assert shop.rows() == []
    assert shop.letters() == []


def test_a_letter_is_delivered_when_its_target_takes_it(shop: Shop) -> None:
    shop.journal.append(ORDERS, [insert("1", "bad", "d"), insert("2", "good", "d"), update(["2", "bad 2", "d"])])
    assert shop.deliver() is None
    assert shop.rows() == [(2, "good", "d")]
    (first, second) = shop.retry()
    assert (first.outcome, second.outcome) == ("rejected", "rejected")
    assert [one.tries for one in shop.store.letters("shop")] == [1, 1]
    shop.repair_table()
    assert [one.outcome for one in shop.retry()] == ["delivered", "delivered"]
    assert shop.rows() == [(1, "bad", "d"), (2, "bad 2", "d")]
    assert shop.letters() == []


def test_no_value_is_taken_from_a_row_whose_change_is_a_letter(shop: Shop) -> None:
    """The letter brought a new `doc`; the change after it does not send it, and the target still has the old one."""
    shop.journal.append(ORDERS, [insert("1", "good", "old doc")])
    assert shop.deliver() is None
    shop.journal.append(ORDERS, [update(["1", "bad", "new doc"])])
    assert shop.deliver() is None
    shop.journal.append(ORDERS, [update(["1", "fine", ...]), insert("2", "good", "d")])
    assert shop.deliver() is None
    assert shop.rows() == [(1, "good", "old doc"), (2, "good", "d")]
    assert shop.letters() == [(2, "u", "constraint", "waiting"), (3, "u", "missing_base", "waiting")]
    shop.journal.append(ORDERS, [update(["1", "finer", ...])])
    assert shop.deliver() is None
    assert shop.rows()[0] == (1, "good", "old doc")
    shop.journal.append(ORDERS, [update(["1", "whole", "newest doc"])])
    assert shop.deliver() is None
    assert shop.rows()[0] == (1, "whole", "newest doc")
    assert shop.letters() == [(2, "u", "constraint", "superseded")]


def test_a_bad_row_is_no_trouble_when_a_change_of_the_same_batch_mends_it(shop: Shop) -> None:
    shop.journal.append(ORDERS, [update(["1", "bad", "new doc"]), update(["1", "fine", ...]), insert("2", "good", "d")])
    assert shop.deliver() is None
    assert shop.rows() == [(1, "fine", "new doc"), (2, "good", "d")]
    assert shop.letters() == []


def test_letters_of_a_row_that_are_retried_together_build_on_each_other(shop: Shop) -> None:
    shop.journal.append(ORDERS, [insert("1", "good", "old doc")])
    shop.journal.append(ORDERS, [update(["1", "bad", "new doc"])])
    assert shop.deliver() is None
    shop.journal.append(ORDERS, [update(["1", "fine", ...])])
    assert shop.deliver() is None
    shop.repair_table()
    last = shop.store.letters("shop")[-1]
    (outcome,) = shop.retry(last)
    assert outcome.outcome == "rejected"
    assert [one.outcome for one in shop.retry()] == ["delivered", "delivered"]
    assert shop.rows() == [(1, "fine", "new doc")]


def test_a_rejected_move_leaves_nothing_under_the_old_key(shop: Shop) -> None:
    shop.journal.append(ORDERS, [insert("1", "good", "d")])
    assert shop.deliver() is None
    shop.journal.append(ORDERS, [update(["5", "bad", "d"], key=["1", None, None]), insert("1", "another", "d")])
    assert shop.deliver() is None
    assert shop.rows() == [(1, "another", "d")]
    shop.repair_table()
    assert [one.outcome for one in shop.retry()] == ["delivered"]
    assert shop.rows() == [(1, "another", "d"), (5, "bad", "d")]


def test_many_bad_rows_in_a_row_and_small_batches(shop: Shop) -> None:
    for number in range(20):
        shop.journal.append(ORDERS, [insert(str(number), f"{'bad' if number % 3 == 0 else 'good'} {number}", "d")])
    assert shop.deliver(limits=FIVE) is None
    assert [row[0] for row in shop.rows()] == [number for number in range(20) if number % 3]
    assert [letter[0] for letter in shop.letters()] == [number + 1 for number in range(20) if number % 3 == 0]


def test_on_reject_halt_stops_the_target_and_writes_nothing(shop: Shop) -> None:
    shop.journal.append(ORDERS, [insert("1", "bad", "d"), insert("2", "good", "d")])
    error = shop.deliver(DeadLetters(OnReject.HALT))
    assert "SQLITE_CONSTRAINT" in str(error)
    assert shop.rows() == []
    assert shop.letters() == []


def test_too_many_letters_halt_the_target_before_anything_of_the_batch_is_written(shop: Shop) -> None:
    shop.journal.append(ORDERS, [insert(str(n), "bad", "d") for n in range(4)] + [insert("9", "good", "d")])
    error = shop.deliver(DeadLetters(max=3))
    assert "there may be 3" in str(error)
    assert "dlq list shop" in str(error)
    assert shop.rows() == []
    assert shop.letters() == []


def test_a_blocked_target_goes_on_when_letters_are_purged(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    shop.journal.append(ORDERS, [insert("1", "bad", "d")])
    policy = DeadLetters(max=1, on_overflow=OnOverflow.BLOCK)
    assert shop.deliver(policy) is None
    shop.journal.append(ORDERS, [insert("2", "bad", "d"), insert("3", "good", "d")])

    def purge(self: Any) -> float:
        assert shop.rows() == []
        shop.store.remove_letters([one.id for one in shop.store.letters()])
        self.attempts += 1
        return 0.001

    monkeypatch.setattr(delivery.Backoff, "next", purge)
    monkeypatch.setattr(delivery.Backoff, "attempts", 0, raising=False)
    assert shop.deliver(policy) is None
    (told,) = shop.watching.of("delivery.retry")
    assert "there may be 1" in told.message
    assert shop.rows() == [(3, "good", "d")]
    assert [letter[0] for letter in shop.letters()] == [2]


@pytest.mark.parametrize("on_overflow", OnOverflow)
def test_a_target_whose_rows_are_still_to_come_goes_on_with_any_number_of_letters(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, on_overflow: OnOverflow
) -> None:
    """It is for the delivery that the copy waits, which brings the rows. The copy itself is not of interest here."""
    monkeypatch.setattr(Reloading, "due", lambda _: None)
    shop.store.save_note("shop", "log", RELOAD, {**waiting(AskedTables()), "baseline": True})
    shop.journal.append(ORDERS, [update([str(n), "changed", ...]) for n in range(3)])
    assert shop.deliver(DeadLetters(max=2, on_overflow=on_overflow)) is None
    assert [letter[2] for letter in shop.letters()] == ["missing_base"] * 3
    shop.journal.append(ORDERS, [insert(str(n), "bad", "d") for n in range(5, 8)])
    if on_overflow is OnOverflow.HALT:
        assert "3 dead letters there, and 3 more changes refused" in str(shop.deliver(DeadLetters(max=2)))


def test_changes_of_one_row_that_all_lack_a_value_are_found_in_few_tries(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[int] = []

    def counted(*arguments: Any) -> Any:
        tries.append(1)
        return run_batch(*arguments)

    monkeypatch.setattr(batches, "run_batch", counted)
    busy = [update(["5", f"state {n}", ...]) for n in range(8)]
    shop.journal.append(ORDERS, [insert("6", "six", "doc 6"), *busy, update(["6", "again", ...])])
    assert shop.deliver() is None
    assert [letter[2] for letter in shop.letters()] == ["missing_base"] * 8
    assert len(tries) == 4, "as it is, to find the last of them, to find the others, and without them"
    assert shop.rows() == [(6, "again", "doc 6")]
    shop.journal.append(ORDERS, [update(["5", "whole", "doc 5"])])
    assert shop.deliver() is None
    assert shop.letters() == []
    assert shop.rows() == [(5, "whole", "doc 5"), (6, "again", "doc 6")]


def test_the_oldest_letters_are_dropped_where_that_was_asked_for(shop: Shop) -> None:
    shop.journal.append(ORDERS, [insert(str(n), "bad", "d") for n in range(6)] + [insert("9", "good", "d")])
    assert shop.deliver(DeadLetters(max=2, on_overflow=OnOverflow.DROP_OLDEST)) is None
    assert shop.rows() == [(9, "good", "d")]
    assert [letter[0] for letter in shop.letters()] == [5, 6]
    assert sum(event.fields["letters"] for event in shop.watching.of("letters.dropped")) == 4


def test_a_changelog_gets_a_retried_change_exactly_once(shop: Shop) -> None:
    shop.file.unlink()
    shop.make_table("changelog")
    shop.options = {**shop.options, "write": "changelog"}
    shop.journal.append(ORDERS, [insert("1", "bad", "d"), insert("1", "good", "d")])
    assert shop.deliver() is None
    shop.journal.append(ORDERS, [update(["1", "later", "d"])])
    assert shop.deliver() is None
    assert shop.letters() == [(1, "c", "constraint", "waiting")]
    (letter,) = shop.store.letters()
    assert shop.retry()[0].outcome == "rejected"
    with closing(sqlite3.connect(shop.file)) as db:
        columns = [f"{name} {kind}" for _, name, kind, *_ in db.execute('PRAGMA table_info("public.orders")')]
        db.execute('ALTER TABLE "public.orders" RENAME TO old')
        db.execute(f'CREATE TABLE "public.orders" ({", ".join(columns)})')
        db.execute('INSERT INTO "public.orders" SELECT * FROM old')
        db.commit()
    whole = shop.store.get_letter(letter.id)
    assert whole is not None
    assert shop.retry()[0].outcome == "delivered"
    assert [row[1] for row in shop.rows()] == ["bad", "good", "later"]
    shop.store.add_letters([whole])
    assert shop.retry()[0].outcome == "superseded"
    assert [row[1] for row in shop.rows()] == ["bad", "good", "later"]


def in_duckdb(path: Path) -> list[tuple[Any, ...]]:
    with closing(duckdb.connect(str(path))) as db:
        return db.execute("SELECT id, body, doc FROM public.orders ORDER BY id").fetchall()


def in_delta(path: Path) -> list[tuple[Any, ...]]:
    rows = DeltaTable(str(path / "public.orders")).to_pyarrow_table().sort_by("id")
    return list(zip(*(rows[name].to_pylist() for name in ("id", "body", "doc")), strict=True))


@pytest.mark.parametrize(("kind", "read"), [("duckdb", in_duckdb), ("delta", in_delta)])
def test_a_change_without_its_base_is_a_letter_at_other_targets_too(
    shop: Shop, kind: str, read: Callable[[Path], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = shop.root / kind
    shop.kind, shop.options = kind, {"path": str(path)}
    shop.journal.append(ORDERS, [insert("1", "one", "doc 1"), update(["5", "five", ...]), update(["6", "six", ...])])
    assert shop.deliver() is None
    assert read(path) == [(1, "one", "doc 1")]
    assert shop.letters() == [(2, "u", "missing_base", "waiting"), (3, "u", "missing_base", "waiting")]
    assert "the source cannot be asked" in shop.store.letters()[0].reason
    shop.journal.append(ORDERS, [update(["6", "six again", "doc 6"])])
    assert shop.deliver() is None
    assert read(path) == [(1, "one", "doc 1"), (6, "six again", "doc 6")]
    (letter,) = shop.store.letters()
    assert [one.outcome for one in shop.retry()] == ["rejected"]
    whole = shop.store.get_letter(letter.id)
    assert whole is not None
    changes = unpacked(whole.payload)
    for name, value in (("doc", "doc 5"), ("_ms_unchanged", [])):
        at = changes.column_names.index(name)
        changes = changes.set_column(at, changes.schema.field(at), pa.array([value], changes.schema.field(at).type))
    completed = Repair({letter.event_id: packed(changes)}, ())
    monkeypatch.setattr(redelivery, "repair", lambda *_: completed)
    assert [one.outcome for one in shop.retry()] == ["delivered"]
    assert read(path) == [(1, "one", "doc 1"), (5, "five", "doc 5"), (6, "six again", "doc 6")]
    shop.store.add_letters([whole])
    assert [one.outcome for one in shop.retry()] == ["superseded"]
    shop.journal.append(ORDERS, [insert("7", "seven", "doc 7")])
    assert shop.deliver() is None
    assert read(path)[-1] == (7, "seven", "doc 7")
