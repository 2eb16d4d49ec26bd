"""Delta tables: equal to the source after random histories, any cut and a kill at each step; read by Spark's rules."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.changelog import assemble
from millstream.errors import MissingBase, RowRefused, TargetRefused
from millstream.model import Relation, SeqRange
from millstream.targets.base import LaneBatch, Part, TargetContext
from millstream.targets.delta import DeltaLane, DeltaOptions, DeltaTarget
from millstream.targets.deltas import writer
from millstream.targets.deltas.tables import CHECKPOINT_COMMITS, Handle
from tests.fixtures.baselines import TABLES, write
from tests.fixtures.capture import captured
from tests.fixtures.examples import examples
from tests.fixtures.histories import History
from tests.fixtures.journals import Change, Journal
from tests.fixtures.postgres import Database
from tests.fixtures.tuples import NUMERIC_12_2, delete, insert, journal_rows, relation, update
from tests.integration.test_baseline_kills import Deliveries
from tests.integration.test_delivery_kills import failpoints, fill, run_until_it_ends
from tests.unit.test_lanes import expected
from tests.unit.test_shape_histories import NOTES, bound, shaped
from tests.unit.test_shape_histories import expected as inside_of

THINGS = relation(("id", 23), ("a", 25), ("doc", 25), key=("id",))


def existing(path: Path) -> Handle:
    found = Handle.existing(path)
    assert found is not None
    return found


class Lake:
    """A target of which a test sees all tables."""

    def __init__(self, path: Path, **options: Any) -> None:
        self.path = path
        self._target = DeltaTarget(DeltaOptions(path=path, **options))
        self._target.open(TargetContext("shop", "lake", "journal-a", "aaaa", 1, "run-1"))
        self._seq = 0

    @property
    def lane(self) -> DeltaLane:
        return self._target.stager()

    def batch(self, span: SeqRange, parts: list[Part]) -> bool:
        written = self.lane.deliver(LaneBatch(span, span.end, parts, lambda: None))
        self._target.publish(span, span.end, [])
        return written

    def deliver(self, about: Relation, changes: list[Any]) -> None:
        end = self._seq + len(changes)
        rows = assemble(journal_rows(changes, self._seq + 1), about, 1, "aaaa")
        self.batch(SeqRange(self._seq, end), [Part(about, 1, iter([rows]))])
        self._seq = end

    def table(self, name: str = "public.t") -> pa.Table:
        return DeltaTable(str(self.path / name)).to_pyarrow_table()


@settings(max_examples=examples(6), deadline=None)
@given(
    st.integers(0, 10**9),
    st.booleans(),
    st.integers(1, 50),
    st.lists(st.integers(0, 10**6), max_size=4),
    st.sampled_from(["hard", "soft"]),
)
def test_a_mirror_equals_the_table_whatever_happens_to_it(
    tmp_path_factory: pytest.TempPathFactory,
    seed: int,
    full: bool,
    steps: int,
    cuts: list[int],
    deletes: Literal["hard", "soft"],
) -> None:
    history = History(seed, full).play(steps)
    lake = Lake(tmp_path_factory.mktemp("lake"), deletes=deletes)
    for changes in history.batches(cuts):
        span = SeqRange(changes["_ms_seq"][0].as_py() - 1, changes["_ms_seq"][-1].as_py())
        lake.batch(span, [Part(history.relation, 1, iter(changes.to_batches()))])
    found = set()
    for row in lake.table().to_pylist():
        if not row.get("_ms_deleted"):
            special = dict(row["_ms_special"] or ())
            amount = special.get("amount", None if row["amount"] is None else str(row["amount"]))
            found.add((row["shop"], row["id"], row["note"], row["doc"], amount))
    assert found == expected(history)


@settings(max_examples=examples(4), deadline=None)
@given(st.integers(0, 10**9), st.integers(1, 50), st.lists(st.integers(0, 10**6), max_size=4))
def test_a_filtered_mirror_has_the_rows_inside_and_no_others(
    tmp_path_factory: pytest.TempPathFactory, seed: int, steps: int, cuts: list[int]
) -> None:
    history = History(seed, True).play(steps)
    to = bound(history, fields=(NOTES,))
    lake = Lake(tmp_path_factory.mktemp("lake"))
    for span, batches in shaped(history, cuts, to):
        lake.batch(span, [Part(to.relation, 1, iter(batches))])
    there = lake.table().to_pylist() if (lake.path / "public.t").exists() else []
    found = {(row["shop"], row["id"], row["note"], row["doc"]) for row in there}
    assert found == {row[:4] for row in inside_of(history, (NOTES,))}


@settings(max_examples=examples(6), deadline=None)
@given(st.integers(0, 10**9), st.booleans(), st.integers(1, 50), st.lists(st.integers(0, 10**6), max_size=4))
def test_a_changelog_leaves_the_table_whatever_happens_to_it(
    tmp_path_factory: pytest.TempPathFactory, seed: int, full: bool, steps: int, cuts: list[int]
) -> None:
    """What `verify` reads of it: old keys come out of JSON."""
    history = History(seed, full).play(steps)
    lake = Lake(tmp_path_factory.mktemp("lake"), write="changelog")
    for changes in history.batches(cuts):
        span = SeqRange(changes["_ms_seq"][0].as_py() - 1, changes["_ms_seq"][-1].as_py())
        lake.batch(span, [Part(history.relation, 1, iter(changes.to_batches()))])
    assert held(lake, history.relation) == expected(history)


def held(lake: Lake, about: Relation) -> set[tuple[Any, ...]]:
    """The rows as the target's own reader has them."""
    reader = lake._target.reader()
    rows = [row for part in reader.parts(about) for rows in reader.read(about, part) for row in rows.to_pylist()]
    found = set()
    for row in rows:
        special = dict(row["_ms_special"] or ())
        amount = special.get("amount", None if row["amount"] is None else str(row["amount"]))
        found.add((row["shop"], row["id"], row["note"], row["doc"], amount))
    assert len(found) == len(rows)
    return found


KEYS = {
    "text": (25, ('a "b", \\', "ü\n")),
    "time": (1184, ("2026-01-02 03:04:05.000006+00", "1999-12-31 23:59:59+00")),
    "local": (1114, ("2026-01-02 03:04:05.000006", "1999-12-31 23:59:59")),
    "day": (1082, ("2026-01-02", "1999-12-31")),
    "decimal": (1700, ("10.50", "-0.01"), NUMERIC_12_2),
    "truth": (16, ("t", "f")),
    "bytes": (17, ("\\x00ff", "\\x")),
    "uuid": (2950, ("a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11", "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a12")),
}


@pytest.mark.parametrize("kind", KEYS)
def test_rows_of_a_changelog_are_followed_through_keys_of_every_kind(tmp_path: Path, kind: str) -> None:
    oid, (one, other), *modifier = KEYS[kind]
    about = relation(("id", oid, *modifier), ("a", 25), key=("id",))
    lake = Lake(tmp_path, write="changelog")
    lake.deliver(about, [insert(one, "x")])
    lake.deliver(about, [update([other, ...], key=[one, None])])
    reader = lake._target.reader()
    rows = [row for part in reader.parts(about) for rows in reader.read(about, part) for row in rows.to_pylist()]
    assert [row["a"] for row in rows] == ["x"]
    lake.deliver(about, [delete(key=[other, None])])
    assert [row for part in reader.parts(about) for rows in reader.read(about, part) for row in rows.to_pylist()] == []


def test_a_value_that_was_not_sent_is_the_tables_own_where_the_row_was(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    lake.deliver(THINGS, [insert("1", "x", "first"), insert("2", "y", "second"), insert("3", "z", "third")])
    moves = [update(["9", "x", ...], key=["1", None, None]), update(["1", "y", ...], key=["2", None, None])]
    lake.deliver(THINGS, [*moves, update(["3", "changed", ...])])
    rows = lake.table().select(["id", "a", "doc"]).sort_by("id").to_pylist()
    assert [tuple(row.values()) for row in rows] == [(1, "y", "second"), (3, "changed", "third"), (9, "x", "first")]
    with pytest.raises(MissingBase, match=r"public\.t: a value of 1 changed row was not sent"):
        lake.deliver(THINGS, [update(["77", "y", ...])])


def test_new_columns_are_added_and_another_type_is_refused(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    lake.deliver(THINGS, [insert("1", "x", "first")])
    lake.deliver(relation(("id", 23), ("a", 25), ("doc", 25), ("n", 20), key=("id",)), [insert("2", "y", "d", "7")])
    assert lake.table().select(["id", "n"]).sort_by("id").to_pylist() == [{"id": 1, "n": None}, {"id": 2, "n": 7}]
    with pytest.raises(TargetRefused, match=r"public\.t\.a was oid 25 at the source and is oid 20 now"):
        lake.deliver(relation(("id", 23), ("a", 20), key=("id",)), [insert("3", "4")])
    with pytest.raises(TargetRefused, match="Delta has no columns named like 'a b'"):
        lake.deliver(relation(("id", 23), ("a b", 25), key=("id",)), [insert("3", "4")])


EMPTY = ("", "__HIVE_DEFAULT_PARTITION__", "x/y z=ü%41", None)
"""Texts that Delta's paths cannot say, or say only in other words."""


@pytest.mark.parametrize("form", ["mirror", "changelog"])
def test_files_are_kept_apart_by_values_and_a_row_moves_with_its_own(tmp_path: Path, form: str) -> None:
    lake = Lake(tmp_path, write=form, partition_by={"public.t": ["a"]})
    lake.deliver(THINGS, [insert(str(at), text, "d") for at, text in enumerate(EMPTY)])
    lake.deliver(THINGS, [insert("8", "here", "first"), insert("9", "here", "second")])
    lake.deliver(THINGS, [update(["8", "there", ...]), update(["9", "", ...])])
    table = DeltaTable(str(tmp_path / "public.t"))
    assert table.metadata().partition_columns == ["a"]
    if form == "mirror":
        assert not [path for path in table.file_uris() if "a=here" in path]
        assert [path for path in table.file_uris() if "a=there" in path]
    lane = lake._target.reader()
    held = [row for part in lane.parts(THINGS) for rows in lane.read(THINGS, part) for row in rows.to_pylist()]
    texts = {row["id"]: (row["a"], row["doc"], dict(row["_ms_special"] or ())) for row in held}
    expected_texts = {at: (text, "d", {}) for at, text in enumerate(EMPTY)}
    assert texts == {**expected_texts, 8: ("there", "first", {}), 9: ("", "second", {})}
    if form == "mirror":
        rows = {row["id"]: (row["a"], dict(row["_ms_special"] or ())) for row in lake.table().to_pylist()}
        assert (rows[0], rows[9], rows[2]) == ((None, {"a": ""}), (None, {"a": ""}), ("x/y z=ü%41", {}))


def test_partitions_that_cannot_be_are_refused(tmp_path: Path) -> None:
    def lake(**partitions: list[str]) -> Lake:
        return Lake(tmp_path, partition_by={"public.t": partitions["by"]})

    with pytest.raises(TargetRefused, match=r"public\.t has no column region to be partitioned by"):
        lake(by=["region"]).deliver(THINGS, [insert("1", "x", "y")])
    lake(by=["a"]).deliver(THINGS, [insert("1", "x", "y")])
    other = lake(by=["doc"])
    other._seq = 1
    with pytest.raises(TargetRefused, match="the Delta table is partitioned by a, and partition_by says doc"):
        other.deliver(THINGS, [insert("2", "x", "y")])
    names = relation(("id", 25), ("a", 25), key=("id",))
    with pytest.raises(RowRefused, match="id, by which the Delta table is partitioned, is an empty text in a key"):
        Lake(tmp_path / "keys", partition_by={"public.t": ["id"]}).deliver(names, [insert("", "x")])


def test_a_table_that_somebody_else_has_made_is_left_alone(tmp_path: Path) -> None:
    theirs = pa.table({"id": [1]})
    write_deltalake(str(tmp_path / "public.t"), theirs)
    with pytest.raises(TargetRefused, match="a Delta table that this target did not make"):
        Lake(tmp_path).deliver(THINGS, [insert("1", "x", "first")])
    assert Lake(tmp_path).table() == theirs


def test_many_small_files_are_written_together(tmp_path: Path) -> None:
    lake = Lake(tmp_path, write="changelog", compact_files=3)
    for number in range(8):
        lake.deliver(THINGS, [insert(str(number), "x", "y")])
    assert len(DeltaTable(str(tmp_path / "public.t")).file_uris()) <= 4
    assert sorted(lake.table()["_ms_seq"].to_pylist()) == list(range(1, 9))


def compactions(path: Path) -> int:
    return sum(commit["operation"] == "OPTIMIZE" for commit in DeltaTable(str(path)).history())


def test_tables_that_are_written_alike_are_compacted_one_after_another(tmp_path: Path) -> None:
    lake = Lake(tmp_path, write="changelog", compact_files=3)
    tables = [replace(THINGS, name=name) for name in "abc"]
    seen = []
    for number in range(6):
        rows = [assemble(journal_rows([insert("1", "x", "y")], 3 * number + n), THINGS, n, "aaaa") for n in (1, 2, 3)]
        parts = [Part(about, n, iter([row])) for n, (about, row) in enumerate(zip(tables, rows, strict=True), 1)]
        lake.batch(SeqRange(3 * number, 3 * number + 3), parts)
        seen.append([compactions(tmp_path / f"public.{name}") for name in "abc"])
    assert seen[2:] == [[0, 0, 0], [1, 0, 0], [1, 1, 0], [1, 1, 1]]


def test_what_a_compaction_cannot_write_together_is_no_reason_for_another(tmp_path: Path) -> None:
    lake = Lake(tmp_path, write="changelog", compact_files=4, partition_by={"public.t": ["a"]})
    for number in range(30):
        lake.deliver(THINGS, [insert(str(number), f"x{number % 6}", "y")])
    assert len(DeltaTable(str(tmp_path / "public.t")).file_uris()) <= 6 + 4
    assert compactions(tmp_path / "public.t") == 6, "six files that stay, then four more each time"


@pytest.mark.parametrize("form", ["mirror", "changelog", "scd2"])
def test_opening_a_table_does_not_become_slower_with_its_commits(tmp_path: Path, form: str) -> None:
    lake = Lake(tmp_path, write=form)
    log = tmp_path / "public.t" / "_delta_log"
    for number in range(2 * CHECKPOINT_COMMITS + 2):
        lake.deliver(THINGS, [insert(str(number), "x", "y")])
        commits = sorted(int(path.stem) for path in log.glob("*.json"))
        summed_up = max([int(path.name.partition(".")[0]) for path in log.glob("*.checkpoint.parquet")], default=-1)
        assert len([one for one in commits if one > summed_up]) <= CHECKPOINT_COMMITS
        listed = json.loads((tmp_path / "_millstream" / "commits" / f"{number + 1:020d}.json").read_text())
        assert [file["version"] for file in listed["files"]] == commits[-1:], "a commit lists the newest version"


def test_small_files_between_large_ones_wait_for_others(tmp_path: Path) -> None:
    def add(count: int) -> Handle:
        for _ in range(count):
            write_deltalake(str(tmp_path), pa.table({"id": list(range(1000))}), mode="append")
        return existing(tmp_path)

    table = add(8)
    size = table._table.get_add_actions(flatten=True)["size_bytes"][0].as_py()
    assert table.is_scattered(3)
    table._table.optimize.compact(target_size=2 * size + 10)
    assert len(existing(tmp_path)._table.file_uris()) == 4
    assert not existing(tmp_path).is_scattered(3)
    assert not add(2).is_scattered(3)
    assert add(1).is_scattered(3)


def test_a_mirror_of_one_file_is_swept_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    swept: list[int] = []
    monkeypatch.setattr(writer, "SWEEP_COMMITS", 4)
    monkeypatch.setattr(Handle, "sweep", lambda table: swept.append(table.version()))
    lake = Lake(tmp_path)
    for number in range(10):
        lake.deliver(THINGS, [insert(str(number), "x", "y")])
    assert swept == [4, 8]


@pytest.mark.chaos
@pytest.mark.parametrize("form", ["mirror", "changelog"])
def test_a_kill_after_each_step_changes_nothing(tmp_path: Path, form: str) -> None:
    journal = Journal.create(tmp_path / "journal")
    fill(journal, transactions=20)
    # The tables keep their columns here; tests/unit/test_evolving.py kills where they do not. Histories have a test
    # of their own (test_delta_history.py).
    elsewhere = ("baseline", "columns", "history")
    armed = [name for name in failpoints("delta") if not any(word in name for word in elsewhere)]
    assert len(armed) == 4
    options = {"path": str(tmp_path / "lake"), "write": form}
    assert run_until_it_ends(tmp_path, armed, "delta", options) == sorted(armed)
    rows = [
        (row["_ms_seq"], Change(table, row["id"], row["body"]))
        for table in ("public.orders", "public.items")
        for row in DeltaTable(str(tmp_path / "lake" / table)).to_pyarrow_table().to_pylist()
    ]
    assert list((tmp_path / "lake" / "_millstream" / "staging").iterdir()) == []
    if form == "changelog":
        assert Counter(rows) == Counter(journal.written.items())
    else:
        last = {(change.table, change.id): (seq, change) for seq, change in sorted(journal.written.items())}
        assert Counter(rows) == Counter(last.values())


@pytest.mark.postgres
def test_a_baseline_that_is_killed_in_its_middle_starts_again(tmp_path: Path, database: Database) -> None:
    database.sql(TABLES)
    database.sql("ALTER TABLE keyless ADD id serial PRIMARY KEY")
    write(database, 1, 500)
    with captured(database, tmp_path / "journal") as capture:
        capture.await_log_end()
        deliveries = Deliveries(tmp_path, capture, "delta", {"path": str(tmp_path / "lake")})
        armed = ["delta.baseline_part_committed:2", "delta.written"]
        assert deliveries.run(armed) == ["delta.baseline_part_committed", "delta.written"]
        deliveries.run([])
        found = DeltaTable(str(tmp_path / "lake" / "public.item")).to_pyarrow_table()
        expected_rows = database.sql("SELECT id, note, flag FROM item ORDER BY id")
        held = found.select(["id", "note", "flag"]).sort_by("id").to_pylist()
        assert [tuple(row.values()) for row in held] == expected_rows
