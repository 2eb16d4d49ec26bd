"""Delta tables with every version of each row: against a table that is played, any cut, and a kill at each step."""

from __future__ import annotations

import random
from dataclasses import replace
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from deltalake import DeltaTable
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from millstream.changelog import assemble
from millstream.engine.verify import Asked, check_asked
from millstream.errors import MissingBase, TargetRefused
from millstream.journal.format import JOURNAL
from millstream.model import BatchLimits, Relation, SeqRange, TargetSpec
from millstream.targets.base import Correction, LaneBatch, Part, ReloadStep, TargetContext
from millstream.targets.delta import DeltaOptions, DeltaTarget
from tests.fixtures.capture import drive
from tests.fixtures.examples import examples
from tests.fixtures.journals import Journal, shop_table
from tests.fixtures.postgres import Database
from tests.fixtures.timelines import Timeline, told
from tests.fixtures.tuples import OID, Change, delete, insert, journal_rows, relation, truncate, update
from tests.integration.test_delivery_kills import failpoints, run_until_it_ends

THINGS = relation(("id", 23), ("a", 25), ("doc", 25), key=("id",))
CONTEXT = TargetContext("shop", "lake", "journal-a", "aaaa", 1, "run-1")


class History:
    """A target of histories, to which transactions are delivered: the n-th commits in second n."""

    def __init__(self, path: Path, **options: Any) -> None:
        self.path = path
        self.target = DeltaTarget(DeltaOptions(path=path, write="scd2", **options))
        self.target.open(CONTEXT)
        self.seq = self.transactions = 0
        self.remembers = False

    def batch(self, span: SeqRange, parts: list[Part], *, replay: bool = False) -> None:
        lane = self.target.remembering(frozenset()) if self.remembers else self.target.stager()
        lane = self.target.replayer(2, only=None, current=frozenset()) if replay else lane
        lane.deliver(LaneBatch(span, span.end, parts, lambda: None))

    def rows(self, about: Relation, transactions: tuple[list[Change], ...]) -> pa.RecordBatch:
        numbers = [n for n, changes in enumerate(transactions, self.transactions + 1) for _ in changes]
        flat = [change for changes in transactions for change in changes]
        times = {"commit_position": [n * 100 for n in numbers], "commit_ts": [n * 1_000_000 for n in numbers]}
        return assemble(journal_rows(flat, self.seq + 1, **times), about, 1, "aaaa")

    def deliver(self, about: Relation, *transactions: list[Change]) -> None:
        rows = self.rows(about, transactions)
        span = SeqRange(self.seq, self.seq + rows.num_rows)
        self.batch(span, [Part(about, 1, iter([rows]))])
        self.seq, self.transactions = span.end, self.transactions + len(transactions)

    def read(self, about: Relation, second: int, *changes: Change) -> pa.RecordBatch:
        """Rows that were read at the source in this second, at the version that the target has."""
        count = len(changes)
        times = {"commit_position": [second * 100] * count, "commit_ts": [second * 1_000_000] * count}
        rows = assemble(journal_rows(list(changes), 1, **times), about, 1, "aaaa")
        for name, values in (
            ("_ms_op", pa.array(["r"] * count, pa.string())),
            ("_ms_seq", pa.array([self.seq] * count, pa.int64())),
        ):
            rows = rows.set_column(rows.schema.get_field_index(name), rows.schema.field(name), values)
        return rows

    def copy(self, about: Relation, rows: pa.RecordBatch, seq: int, second: int) -> None:
        """Copy the table anew."""
        taken_at = datetime(1970, 1, 1, 0, 0, second, tzinfo=UTC)
        step = ReloadStep(1, seq, second * 100, taken_at, first=True, last=True, since=seq)
        parts = [Part(about, 1, iter([rows]))]
        self.target.reloader(step).deliver(LaneBatch(SeqRange(seq, seq), second * 100, parts, lambda: None))

    def table(self) -> pa.Table:
        return DeltaTable(str(self.path / "public.t")).to_pyarrow_table()

    def spans(self, *columns: str) -> list[tuple[Any, ...]]:
        """These columns, and the seconds from and to which they were valid."""
        rows = self.table().sort_by([("valid_from", "ascending"), (columns[0], "ascending")]).to_pylist()
        times = [(row["valid_from"].second, row["valid_to"] and row["valid_to"].second) for row in rows]
        return [(*(row[name] for name in columns), *time) for row, time in zip(rows, times, strict=True)]


@settings(max_examples=examples(6), deadline=None)
@given(
    st.integers(0, 10**9), st.booleans(), st.integers(1, 50), st.lists(st.integers(0, 10**6), max_size=4), st.booleans()
)
def test_every_version_is_there_and_what_is_current_is_the_table(
    tmp_path_factory: pytest.TempPathFactory, seed: int, full: bool, steps: int, cuts: list[int], parted: bool
) -> None:
    """Cut anywhere, also within transactions. The replay of all of it finds nothing to do."""
    timeline = Timeline(seed, full, steps)
    by = {"partition_by": {"public.t": ["is_current"]}} if parted else {}
    history = History(tmp_path_factory.mktemp("lake"), **by)
    for changes in timeline.batches(cuts):
        span = SeqRange(changes["_ms_seq"][0].as_py() - 1, changes["_ms_seq"][-1].as_py())
        history.batch(span, [Part(timeline.history.relation, 1, iter(changes.to_batches()))])
    rows = history.table().to_pylist()
    assert told(rows) == timeline.versions()
    reader, about = history.target.reader(), timeline.history.relation
    held = [row for part in reader.parts(about) for some in reader.read(about, part) for row in some.to_pylist()]
    assert {(str(row["shop"]), row["id"], row["doc"]) for row in held} == {
        (shop, id_, doc) for shop, id_, _, doc, _ in timeline.history.rows.values()
    }
    version = DeltaTable(str(history.path / "public.t")).version()
    (everything,) = timeline.batches([])
    span = SeqRange(0, everything.num_rows)
    history.batch(span, [Part(about, 1, iter(everything.to_batches()))], replay=True)
    assert DeltaTable(str(history.path / "public.t")).version() == version


def test_what_the_row_was_at_a_time_and_at_a_position(tmp_path: Path) -> None:
    """The queries of docs/targets/delta.md."""
    history = History(tmp_path)
    history.deliver(THINGS, [insert("1", "new", "d"), insert("2", "new", "d")], [update(["1", "paid", ...])])
    history.deliver(THINGS, [delete(key=["1", None, None])], [insert("1", "again", "e")])
    assert history.spans("id", "a") == [(1, "new", 1, 2), (2, "new", 1, None), (1, "paid", 2, 3), (1, "again", 4, None)]
    rows = history.table().to_pylist()
    second = datetime(1970, 1, 1, 0, 0, 2, 500_000, UTC)
    at_a_time = [r for r in rows if r["valid_from"] <= second and (r["valid_to"] is None or r["valid_to"] > second)]
    place = f"00000000/{300:08X}"
    at_a_place = [
        r
        for r in rows
        if r["_ms_position"] <= place and (r["_ms_end_position"] is None or r["_ms_end_position"] > place)
    ]
    assert sorted((row["id"], row["a"], row["doc"]) for row in at_a_time) == [(1, "paid", "d"), (2, "new", "d")]
    assert sorted((row["id"], row["a"]) for row in at_a_place) == [(2, "new")]


def test_a_baseline_begins_with_its_snapshot_and_changes_end_its_rows(tmp_path: Path) -> None:
    history = History(tmp_path)
    read = history.rows(THINGS, ([insert("1", "x", "d"), insert("2", "y", "e")],))
    for name, values in (("_ms_op", pa.array(["r", "r"])), ("_ms_seq", pa.array([0, 0], pa.int64()))):
        read = read.set_column(read.schema.get_field_index(name), read.schema.field(name), values)
    history.batch(SeqRange(0, 0), [Part(THINGS, 1, iter([read]))])
    history.transactions = 1
    history.deliver(THINGS, [update(["1", "z", ...])], [truncate()])
    assert history.spans("id", "a", "doc") == [(1, "x", "d", 1, 2), (2, "y", "e", 1, 3), (1, "z", "d", 2, 3)]
    assert not any(history.table()["is_current"].to_pylist())


def test_a_table_without_a_key_is_added_to_and_truncated(tmp_path: Path) -> None:
    keyless = relation(("a", 25))
    history = History(tmp_path)
    history.deliver(keyless, [insert("x"), insert("x")], [insert("gone"), truncate(), insert("y")])
    assert history.spans("a") == [("x", 1, 2), ("x", 1, 2), ("y", 2, None)]
    with pytest.raises(TargetRefused, match="has no key"):
        history.deliver(keyless, [delete(row=["y"])])


def test_versions_that_had_ended_before_a_column_came_never_had_it(tmp_path: Path) -> None:
    def numbered(*added: tuple[int, str, str]) -> Relation:
        about = relation(("id", 23), ("a", 25), *((name, 23) for _, name, _ in added), key=("id",))
        missing = {name: text for _, name, text in added}
        columns = [
            replace(column, attnum=number, missing=missing.get(column.name))
            for number, column in enumerate(about.columns, 1)
        ]
        return replace(about, columns=tuple(columns))

    history = History(tmp_path)
    history.deliver(numbered(), [insert("1", "x"), insert("2", "y")], [update(["1", "z"])])
    history.deliver(numbered((3, "n", "7")), [update(["1", "zz", "8"])])
    ended, current = [(1, "x", None, 1, 2)], [(2, "y", 7, 1, None), (1, "z", 7, 2, 3), (1, "zz", 8, 3, None)]
    assert history.spans("id", "a", "n") == ended + current


def test_what_nobody_sent_is_refused_and_so_are_names_and_forms_that_collide(tmp_path: Path) -> None:
    history = History(tmp_path / "one")
    history.deliver(THINGS, [insert("1", "x", "d")])
    with pytest.raises(MissingBase, match="a value of 1 changed row was not sent"):
        history.deliver(THINGS, [update(["77", "y", ...])])
    named = relation(("id", 23), ("Valid_To", 1184), key=("id",))
    with pytest.raises(TargetRefused, match=r"public\.t has a column Valid_To, which write: scd2 has itself"):
        History(tmp_path / "two").deliver(named, [insert("1", None)])
    mirror = DeltaTarget(DeltaOptions(path=tmp_path / "one"))
    mirror.open(replace(CONTEXT, run_id="run-2"))
    rows = history.rows(THINGS, ([insert("2", "x", "d")],))
    with pytest.raises(TargetRefused, match=r"was made with write: scd2, and this target says mirror"):
        mirror.stager().deliver(LaneBatch(SeqRange(1, 2), 2, [Part(THINGS, 1, iter([rows]))], lambda: None))
    with pytest.raises(ValidationError, match="deletes: soft is for mirrors"):
        DeltaOptions(path=tmp_path, write="scd2", deletes="soft")


def test_a_replay_of_a_history_that_lacks_a_version_says_so(tmp_path: Path) -> None:
    history = History(tmp_path)
    changes = [insert("1", "x", "d")], [update(["1", "y", "d"])], [insert("2", "z", "d")]
    history.deliver(THINGS, *changes)
    DeltaTable(str(tmp_path / "public.t")).delete("a = 'x'")
    history.seq = history.transactions = 0
    rows = history.rows(THINGS, changes)
    with pytest.raises(TargetRefused, match=r"public\.t: the history lacks 1 versions"):
        history.batch(SeqRange(0, 3), [Part(THINGS, 1, iter([rows]))], replay=True)


def second(number: int) -> datetime:
    return datetime(1970, 1, 1, 0, 0, number, tzinfo=UTC)


def test_no_version_ends_before_it_begins_though_the_clock_is_set_back(tmp_path: Path) -> None:
    history = History(tmp_path)
    history.transactions = 6
    history.deliver(THINGS, [insert("1", "x", "d"), insert("2", "x", "d")])
    history.transactions = 4
    # In a batch of its own, and within one.
    history.deliver(THINGS, [update(["1", "y", "d"])])
    history.transactions = 2
    history.deliver(THINGS, [update(["1", "z", "d"])], [truncate()])
    assert history.spans("id", "a") == [(1, "z", 3, 4), (1, "y", 5, 5), (1, "x", 7, 7), (2, "x", 7, 7)]
    assert not any(history.table()["is_current"].to_pylist())
    rows = history.rows(THINGS, ([insert("3", "x", "d")], [update(["3", "y", "d"])]))
    times = pa.array([second(9), second(8)], pa.timestamp("us", "UTC"))
    rows = rows.set_column(rows.schema.get_field_index("_ms_commit_ts"), rows.schema.field("_ms_commit_ts"), times)
    history.batch(SeqRange(history.seq, history.seq + 2), [Part(THINGS, 1, iter([rows]))])
    assert history.spans("id", "a")[-2:] == [(3, "y", 8, None), (3, "x", 9, 9)]


def test_a_repair_ends_what_is_wrong_and_lets_what_is_right_begin(tmp_path: Path) -> None:
    spec = TargetSpec("past", "delta", BatchLimits(1, 1, 1), options={"path": "lake", "write": "scd2"})
    check_asked(spec, Asked(repair=True))
    history = History(tmp_path)
    history.deliver(THINGS, *([insert(key, "x", "d")] for key in "1234"))
    table = DeltaTable(str(tmp_path / "public.t"))
    table.update(updates={"a": "'damaged'"}, predicate="id = 1")
    table.delete("id = 2")
    # What the source has and the target lacks is there when the same comes once more.
    for there in ([1], [1, 2]):
        right = history.read(THINGS, 9, insert("1", "x", "d"), insert("2", "x", "d"))
        stale, gone = (pa.table({"id": pa.array(ids, pa.int32())}) for ids in (there, [3]))
        wrong = Correction(THINGS, 1, iter([right]), stale, gone, 900, second(9))
        history.target.repairer().repair(4, [wrong])
        begun = [(1, "x", 9, None), (2, "x", 9, None)]
        assert history.spans("id", "a") == [(1, "damaged", 1, 9), (3, "x", 3, 9), (4, "x", 4, None), *begun]
    nothing = pa.table({"id": pa.array([], pa.string())})
    wrong = Correction(THINGS, 1, iter(()), nothing, pa.table({"id": pa.array([4], pa.int32())}), 1000, second(10))
    history.target.repairer().repair(4, [wrong])
    history.transactions = 10
    history.deliver(THINGS, [update(["1", "y", "d"])])
    assert history.spans("id", "a")[2:] == [(4, "x", 4, 10), (1, "x", 9, 11), (2, "x", 9, None), (1, "y", 11, None)]


def test_a_copy_ends_what_the_source_does_not_have_and_leaves_what_is_newer(tmp_path: Path) -> None:
    history = History(tmp_path)
    history.deliver(THINGS, [insert(key, "x", "d") for key in "12345"])
    table = DeltaTable(str(tmp_path / "public.t"))
    table.update(updates={"a": "'damaged'"}, predicate="id = 2")
    table.delete("id = 3")
    copied = [insert("1", "x", "d"), insert("2", "x", "d"), insert("3", "x", "d"), insert("6", "x", "d")]
    rows, seq = history.read(THINGS, 8, *copied), history.seq
    history.transactions = 8
    history.remembers = True
    changes = [update(["1", "later", "d"]), delete(key=["3", None, None]), insert("4", "again", "d")]
    history.deliver(THINGS, changes)
    expected = [
        *((1, "x", 1, 9), (2, "damaged", 1, 8), (4, "x", 1, 9), (5, "x", 1, 8)),
        *((2, "x", 8, None), (6, "x", 8, None), (1, "later", 9, None), (4, "again", 9, None)),
    ]
    for _ in range(2):
        history.copy(THINGS, rows, seq, 8)
        assert history.spans("id", "a") == expected
    assert history.table().sort_by("id")["_ms_end_position"].to_pylist().count(f"00000000/{800:08X}") == 2
    # The same once more, and nothing at all.
    history.transactions = 9
    unchanged = [insert("1", "later", "d"), insert("2", "x", "d"), insert("4", "again", "d"), insert("6", "x", "d")]
    history.copy(THINGS, history.read(THINGS, 10, *unchanged), history.seq, 10)
    assert history.spans("id", "a") == expected
    history.copy(THINGS, history.read(THINGS, 11), history.seq, 11)
    assert not any(history.table()["is_current"].to_pylist())


def test_a_copy_of_a_table_without_a_key_begins_all_of_its_rows(tmp_path: Path) -> None:
    keyless = relation(("a", 25))
    history = History(tmp_path)
    history.deliver(keyless, [insert("x"), insert("x"), insert("y")])
    rows, seq = history.read(keyless, 8, insert("x"), insert("z")), history.seq
    history.transactions = 8
    history.remembers = True
    history.deliver(keyless, [insert("later")])
    for _ in range(2):
        history.copy(keyless, rows, seq, 8)
        begun = [("x", 8, None), ("z", 8, None), ("later", 9, None)]
        assert history.spans("a") == [("x", 1, 8), ("x", 1, 8), ("y", 1, 8), *begun]


KEPT_BY_TRIGGERS = """
    CREATE TABLE t (id int PRIMARY KEY, note text, doc text);
    ALTER TABLE t ALTER doc SET STORAGE EXTERNAL;
    CREATE TABLE log (
        n serial, txid int8 DEFAULT pg_current_xact_id()::text::int8, gone int, id int, note text, doc text
    );
    CREATE FUNCTION keep() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
        IF TG_OP = 'TRUNCATE' THEN INSERT INTO log (gone) SELECT id FROM t; RETURN NULL; END IF;
        INSERT INTO log (gone, id, note, doc) VALUES (OLD.id, NEW.id, NEW.note, NEW.doc); RETURN NULL; END $$;
    CREATE TRIGGER each AFTER INSERT OR UPDATE OR DELETE ON t FOR EACH ROW EXECUTE FUNCTION keep();
    CREATE TRIGGER every BEFORE TRUNCATE ON t FOR EACH STATEMENT EXECUTE FUNCTION keep();
"""
"""A table of Postgres that keeps a log of itself. Transactions come one after another, so their ids are in order."""


def random_statement(draw: random.Random) -> str:
    one, other = draw.sample(range(8), 2)
    long = f"repeat('{draw.choice('abc')}', {draw.choice([3, 3000])})"
    return draw.choice(
        [
            *[f"INSERT INTO t VALUES ({one}, '{draw.random()}', {long}) ON CONFLICT DO NOTHING"] * 3,
            *[f"UPDATE t SET note = '{draw.random()}' WHERE id = {one}"] * 3,
            f"UPDATE t SET doc = {long} WHERE id = {one}",
            f"UPDATE t SET id = {other} WHERE id = {one} AND NOT EXISTS (SELECT 1 FROM t WHERE id = {other})",
            f"DELETE FROM t WHERE id = {one}",
            "TRUNCATE t" if draw.random() < 0.2 else "SELECT 1",
        ]
    )


def versions_by_triggers(database: Database) -> list[tuple[Any, ...]]:
    """id, note, doc, transaction in which it begins, the one in which it ends."""
    found, there = [], {}
    logged = database.sql("SELECT txid, gone, id, note, doc FROM log ORDER BY n")
    for txid, changes in groupby(logged, key=lambda row: row[0]):
        after: dict[int, tuple[Any, ...] | None] = {}
        for _, gone, id_, note, doc in changes:
            after |= {gone: None} if gone is not None else {}
            after |= {id_: (note, doc)} if id_ is not None else {}
        for id_, row in after.items():
            if id_ in there:
                found.append((id_, *there.pop(id_), txid))
            if row is not None:
                there[id_] = (*row, txid)
    return sorted([*found, *((id_, *row, None) for id_, row in there.items())], key=repr)


@pytest.mark.postgres
def test_what_triggers_at_the_source_have_logged_is_what_the_history_has(database: Database, tmp_path: Path) -> None:
    database.sql(KEPT_BY_TRIGGERS)
    draw = random.Random(11)
    with drive(database, tmp_path / "work", "public.t") as driver:
        for _ in range(120):
            statements = [random_statement(draw) for _ in range(draw.randint(1, 4))]
            database.sql("; ".join(["BEGIN", *statements, "COMMIT"]))
        driver.catch_up()
    captured = pa.Table.from_batches([block.rows for block in driver.blocks if block.rows is not None])
    captured = captured.filter(pc.greater(captured["relation"], 0)).combine_chunks()
    seqs = pa.array(range(1, captured.num_rows + 1), pa.int64())
    (rows,) = captured.add_column(0, JOURNAL.field("seq"), seqs).to_batches()
    transaction = dict(zip(captured["commit_position"].to_pylist(), captured["txid"].to_pylist(), strict=True))
    history = History(tmp_path / "lake")
    for begin in range(0, rows.num_rows, 70):
        some = rows.slice(begin, 70)
        span = SeqRange(begin, begin + some.num_rows)
        history.batch(span, [Part(driver.relations[0], 1, iter([assemble(some, driver.relations[0], 1, "aaaa")]))])
    found = [
        (row["id"], row["note"], row["doc"], *(transaction.get(_place(row[name])) for name in POSITIONS))
        for row in history.table().to_pylist()
    ]
    assert len(found) > 100
    assert sorted(found, key=repr) == versions_by_triggers(database)


POSITIONS = ("_ms_position", "_ms_end_position")


def _place(position: str | None) -> int | None:
    return None if position is None else int(position.replace("/", ""), 16)


@pytest.mark.chaos
def test_a_kill_after_each_step_changes_nothing(tmp_path: Path) -> None:
    """Transactions that write several tables, rows that change and go, truncates in between."""
    journal = Journal.create(tmp_path / "journal")
    orders = shop_table("orders", OID)
    draw, there, wanted = random.Random(7), {}, []
    for number in range(60):
        changes: list[Change] = []
        if number == 40:
            changes.append(truncate())
            wanted += [(id_, body, True) for id_, body in there.items()]
            there.clear()
        for id_ in draw.sample(range(12), 3):
            body = f"{number}"
            if id_ in there:
                wanted.append((id_, there.pop(id_), True))
                gone = draw.random() < 0.3
                changes.append(delete(key=[str(id_), None]) if gone else update([str(id_), body]))
                if gone:
                    continue
            else:
                changes.append(insert(str(id_), body))
            there[id_] = body
        journal.append(orders, changes)
    journal.writer.close()
    armed = [name for name in failpoints("delta") if "baseline" not in name and "columns" not in name]
    assert len(armed) == 6
    options = {"path": str(tmp_path / "lake"), "write": "scd2"}
    assert run_until_it_ends(tmp_path, armed, "delta", options) == sorted(armed)
    rows = DeltaTable(str(tmp_path / "lake" / "public.orders")).to_pyarrow_table().to_pylist()
    found = sorted((row["id"], row["body"], row["valid_to"] is not None) for row in rows)
    assert found == sorted([*wanted, *((id_, body, False) for id_, body in there.items())])
