"""What lanes write to SQLite and DuckDB, after random histories and after each kind of change."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.changelog import assemble
from millstream.errors import MissingBase, TargetRefused, TargetUnavailable
from millstream.model import SeqRange
from millstream.targets.base import Part
from millstream.targets.lanes import runs
from tests.fixtures.copies import CONTEXT, Copy
from tests.fixtures.examples import examples
from tests.fixtures.histories import History
from tests.fixtures.journals import shop_table
from tests.fixtures.tuples import OID, delete, insert, journal_rows, relation, truncate, update

THINGS = relation(("id", 23), ("a", 25), ("doc", 25), key=("id",))


@pytest.fixture(params=["duckdb", "sqlite"])
def copy(tmp_path: Path, request: pytest.FixtureRequest) -> Copy:
    return Copy(tmp_path / "copy.db", request.param)


def expected(history: History) -> set[tuple[Any, ...]]:
    return {(int(shop), *rest) for shop, *rest in history.rows.values()}


HISTORIES = given(
    st.integers(0, 10**9),
    st.booleans(),
    st.integers(1, 60),
    st.lists(st.integers(0, 10**6), max_size=5),
    st.sampled_from(["hard", "soft"]),
)


def mirror(path: Path, kind: str, history: History, cuts: list[int], deletes: str) -> None:
    """Deliver a history, cut in this way, and compare."""
    copy = Copy(path / "copy.db", kind, deletes=deletes)
    for changes in history.batches(cuts):
        span = SeqRange(changes["_ms_seq"][0].as_py() - 1, changes["_ms_seq"][-1].as_py())
        copy.batch(span, [Part(history.relation, 1, iter(changes.to_batches()))])
    living = " WHERE NOT _ms_deleted" if deletes == "soft" else ""
    assert set(copy.rows(f"SELECT shop, id, note, doc, {{amount}} FROM {{t}}{living}")) == expected(history)


@settings(max_examples=examples(12), deadline=None)
@HISTORIES
def test_a_mirror_in_sqlite_equals_the_table_whatever_happens_to_it(
    tmp_path_factory: pytest.TempPathFactory, seed: int, full: bool, steps: int, cuts: list[int], deletes: str
) -> None:
    mirror(tmp_path_factory.mktemp("mirror"), "sqlite", History(seed, full).play(steps), cuts, deletes)


@settings(max_examples=examples(6), deadline=None)
@HISTORIES
def test_a_mirror_in_duckdb_equals_the_table_whatever_happens_to_it(
    tmp_path_factory: pytest.TempPathFactory, seed: int, full: bool, steps: int, cuts: list[int], deletes: str
) -> None:
    mirror(tmp_path_factory.mktemp("mirror"), "duckdb", History(seed, full).play(steps), cuts, deletes)


def test_a_value_that_was_not_sent_is_the_targets_own_where_the_row_was(copy: Copy) -> None:
    copy.deliver((THINGS, [insert("1", "x", "first"), insert("2", "y", "second"), insert("3", "z", "third")]))
    copy.deliver(
        (
            THINGS,
            [
                update(["9", "x", ...], key=["1", None, None]),
                update(["1", "y", ...], key=["2", None, None]),
                update(["3", "changed", ...]),
            ],
        )
    )
    assert copy.rows() == [(1, "y", "second"), (3, "changed", "third"), (9, "x", "first")]


def test_a_value_that_nobody_has_is_never_a_null(copy: Copy) -> None:
    copy.deliver((THINGS, [insert("1", "x", "first")]))
    with pytest.raises(MissingBase, match=r"public\.t: a value of 1 changed row was not sent"):
        copy.deliver((THINGS, [insert("5", "p", "q"), update(["2", "y", ...])]))
    assert copy.rows() == [(1, "x", "first")]


def test_relations_that_take_turns_in_a_batch_are_written_in_order(copy: Copy) -> None:
    wider = relation(("id", 23), ("a", 25), ("doc", 25), ("more", 25), key=("id",))
    narrow = [insert("1", "x", "d"), insert("2", "y", "e")], [update(["1", "last", ...])]
    first = [
        assemble(journal_rows(changes, seq), THINGS, 1, "aaaa") for changes, seq in zip(narrow, (1, 4), strict=True)
    ]
    second = assemble(journal_rows([update(["2", "wide", ..., "new"])], 3), wider, 2, "aaaa")
    parts = [Part(THINGS, 1, iter([pa.concat_batches(first)])), Part(wider, 2, iter([second]))]
    copy.batch(SeqRange(0, 4), parts)
    assert copy.rows("SELECT id, a, doc, more FROM {t} ORDER BY id") == [
        (1, "last", "d", None),
        (2, "wide", "e", "new"),
    ]


def test_a_batch_larger_than_memory_allows_is_written_in_runs(copy: Copy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "RUN_ROWS", 3)
    history = History(7).play(60)
    batches = [batch for table in history.batches(list(range(0, 300, 2))) for batch in table.to_batches()]
    copy.batch(SeqRange(0, len(history.changes)), [Part(history.relation, 1, iter(batches))])
    assert set(copy.rows("SELECT shop, id, note, doc, {amount} FROM {t}")) == expected(history)


@pytest.mark.parametrize("kind", ["duckdb", "sqlite"])
def test_soft_deletes_keep_the_row_and_say_so(tmp_path: Path, kind: str) -> None:
    copy = Copy(tmp_path / "copy.db", kind, deletes="soft")
    copy.deliver((THINGS, [insert("1", "x", "d"), insert("2", "y", "e"), delete(key=["1", None, None])]))
    copy.deliver((THINGS, [delete(key=["2", None, None])]))
    sql = "SELECT id, a, _ms_deleted, _ms_seq FROM {t} ORDER BY id"
    assert copy.rows(sql) == [(2, "y", 1, 4)]
    copy.deliver((THINGS, [insert("2", "again", "e")]))
    assert copy.rows(sql) == [(2, "again", 0, 5)]
    copy.deliver((THINGS, [truncate()]))
    assert copy.rows(sql) == [(2, "again", 1, 6)]


def test_a_table_without_a_key_takes_inserts_and_truncates_only(copy: Copy) -> None:
    bag = relation(("a", 25), ("amount", 1700, 786438), identity="n")
    copy.deliver((bag, [insert("x", "1.50"), insert("x", "1.50"), insert("y", "NaN")]))
    assert copy.rows("SELECT a, {amount} FROM {t} ORDER BY _ms_seq") == [("x", "1.50"), ("x", "1.50"), ("y", "NaN")]
    copy.deliver((bag, [truncate(), insert("z", None)]))
    assert copy.rows("SELECT a, amount FROM {t}") == [("z", None)]
    full = replace(bag, identity="f", key=("a", "amount"))
    with pytest.raises(TargetRefused, match=r"public\.t has no key"):
        copy.deliver((full, [delete(row=["z", None])]))


def test_values_are_exact_in_sqlite(tmp_path: Path) -> None:
    copy = Copy(tmp_path / "copy.db")
    of = relation(
        *(
            ("id", 20),
            ("yes", 16),
            ("small", 21),
            ("real", 700),
            ("double", 701),
            ("money", 1700, ((38 << 16) | 4) + 4),
        ),
        *(("raw", 17), ("day", 1082), ("at", 1114), ("instant", 1184), ("list", 1007), ("json", 3802)),
        *(("hour", 1083), ("span", 1186), ("none", 1186), ("late", 1083)),
        key=("id",),
        types=(("interval", "struct"), ("time", "time")),
    )
    far = "9007199254740993"
    row = (far, "t", "-3", "1.5", "NaN", "1234567890123456789012345678901234.0010", "\\x00ff", "2026-01-31")
    ours = ("12:30:00.5", "1 mon -2 days 00:00:01", None, "24:00:00")
    copy.deliver((of, [insert(*row, "infinity", "2026-01-31 12:30:00.000001+00", "{1,NULL}", '{"a": 1}', *ours)]))
    assert copy.rows("SELECT * FROM {t}") == [
        (
            *(int(far), 1, -3, 1.5, "NaN", "1234567890123456789012345678901234.0010", b"\x00\xff", "2026-01-31"),
            *("infinity", "2026-01-31 12:30:00.000001Z", "[1,null]", '{"a": 1}'),
            *("12:30:00.500000", '{"months":1,"days":-2,"microseconds":1000000}', None, "24:00:00", 1),
        )
    ]


@pytest.mark.parametrize("kind", ["duckdb", "sqlite"])
def test_a_changelog_has_every_change(tmp_path: Path, kind: str) -> None:
    copy = Copy(tmp_path / "log.db", kind, write="changelog")
    copy.deliver((THINGS, [insert("1", "x", "d"), update(["2", "y", ...], key=["1", None, None]), truncate()]))
    found = copy.rows("SELECT id, a, doc, _ms_op, _ms_seq, _ms_before, _ms_unchanged, _ms_deleted FROM {t}")
    assert found == [
        (1, "x", "d", "c", 1, None, "[]", 0),
        (2, "y", None, "u", 2, '{"id":1,"a":null,"doc":null}', '["doc"]', 0),
        (None, None, None, "t", 3, None, "[]", 1),
    ]


def test_a_copy_without_a_row_is_taken_over_by_a_state_that_knows_less(copy: Copy) -> None:
    copy.target.open(replace(CONTEXT, epoch=5, run_id="run-5"))
    copy.target.open(replace(CONTEXT, run_id="run-6"))
    copy.deliver((THINGS, [insert("1", "x", "d")]))
    copy.target.open(replace(CONTEXT, epoch=5, run_id="run-7"))
    with pytest.raises(TargetRefused, match="epoch 5 has taken over"):
        copy.target.open(replace(CONTEXT, run_id="run-8"))


def test_a_table_that_was_there_is_taken_over_with_its_rows(copy: Copy) -> None:
    schema = "CREATE SCHEMA public; " if copy.kind == "duckdb" else ""
    made = "CREATE TABLE {t} (id INTEGER PRIMARY KEY, a TEXT, mine TEXT); "
    copy.rows(f"{schema}{made} INSERT INTO {{t}} VALUES (1, 'old', 'kept'), (2, 'old', 'kept')")
    copy.deliver((THINGS, [update(["1", "new", "d"]), insert("3", "x", "d")]))
    assert copy.rows("SELECT id, a, doc, mine FROM {t} ORDER BY id") == [
        (1, "new", "d", "kept"),
        (2, "old", None, "kept"),
        (3, "x", "d", None),
    ]


def test_a_type_that_does_not_fit_names_table_and_column(copy: Copy) -> None:
    copy.deliver((THINGS, [insert("1", "x", "d")]))
    changed = relation(("id", 23), ("a", 23), ("doc", 25), key=("id",))
    with pytest.raises(TargetRefused, match=r"public\.t\.a was oid 25 at the source and is oid 23 now"):
        copy.deliver((changed, [insert("2", "5", "d")]))


def test_columns_that_differ_in_case_alone_are_refused(copy: Copy) -> None:
    twins = relation(("id", 23), ("A", 25), ("a", 25), key=("id",))
    with pytest.raises(TargetRefused, match="cannot tell the columns A and a apart"):
        copy.deliver((twins, [insert("1", "x", "y")]))


def test_a_table_dropped_under_us_stops_the_target(copy: Copy) -> None:
    copy.deliver((THINGS, [insert("1", "x", "d")]))
    copy.rows("DROP TABLE {t}")
    with pytest.raises(TargetRefused, match=r"the table public\.t at .* was dropped"):
        copy.deliver((THINGS, [insert("2", "x", "d")]))


def test_a_file_that_the_driver_made_and_a_task_does_not_see_is_not_made_again(copy: Copy) -> None:
    copy.path.unlink()
    with pytest.raises(TargetUnavailable, match="does not see"):
        copy.deliver((THINGS, [insert("1", "x", "d")]))
    assert not copy.path.exists()


def test_a_mirror_does_not_become_a_changelog(copy: Copy) -> None:
    copy.deliver((THINGS, [insert("1", "x", "d")]))
    other = Copy(copy.path, copy.kind, write="changelog")
    other.seq = copy.seq
    with pytest.raises(TargetRefused, match=r"is a mirror, not a changelog"):
        other.deliver((THINGS, [insert("2", "x", "d")]))


def test_our_names_in_a_users_table_do_no_harm(copy: Copy) -> None:
    odd = relation(("id", 23), ("_ms_seq", 25), ('qu"ote', 25), key=("id",))
    copy.deliver((odd, [insert("1", "mine", "x")]))
    assert copy.rows('SELECT id, _ms__seq, "qu""ote", _ms_seq FROM {t}') == [(1, "mine", "x", 1)]


def test_tables_whose_names_only_look_alike_are_two(copy: Copy) -> None:
    one = replace(shop_table("b.c", OID), schema="a")
    other = replace(shop_table("c", OID), schema="a.b")
    copy.deliver((one, [insert("1", "one")]), (other, [insert("1", "other")]))
    tables = ('"a.b%2Ec"', '"a%2Eb.c"') if copy.kind == "sqlite" else ('a."b.c"', '"a.b".c')
    assert [copy.rows(f"SELECT body FROM {table}") for table in tables] == [[("one",)], [("other",)]]


def test_a_file_that_another_writes_to_is_tried_again_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = Copy(tmp_path / "copy.db")
    monkeypatch.setattr("millstream.targets.sqlite.BUSY_SECONDS", 0.05)
    with closing(sqlite3.connect(copy.path, isolation_level=None)) as db:
        db.execute("BEGIN IMMEDIATE")
        with pytest.raises(TargetUnavailable, match="SQLITE_BUSY"):
            copy.deliver((THINGS, [insert("1", "x", "d")]))
    copy.deliver((THINGS, [insert("1", "x", "d")]))
    assert copy.rows() == [(1, "x", "d")]


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("no database at all, only some words that a person wrote down here" * 20)
    with pytest.raises(TargetRefused, match="SQLITE_NOTADB"):
        Copy(tmp_path / "x")
    with pytest.raises(TargetRefused, match="SQLITE_CANTOPEN"):
        Copy(tmp_path / "nowhere" / "x")
