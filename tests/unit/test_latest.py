"""The latest row per key, folded by column, against a table that is played row by row."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream import latest as folding
from millstream.changelog import assemble
from millstream.latest import Latest, latest
from tests.fixtures.examples import examples
from tests.fixtures.histories import History, table
from tests.fixtures.tuples import Change, delete, insert, journal_rows, relation, truncate, update

KEY = ("shop", "id")
THINGS = relation(("id", 23), ("a", 25), ("doc", 25), key=("id",))

Mirror = dict[tuple[Any, ...], tuple[dict[str, Any], int]]


def write(mirror: Mirror, found: Latest, key: tuple[str, ...] = KEY) -> None:
    """What a target does, a row at a time."""
    assert not found.missing
    if found.truncated is not None:
        for old in [k for k, (_, seq) in mirror.items() if seq < found.truncated]:
            del mirror[old]
    rows = found.rows.to_pylist()
    for number, row in enumerate(rows):
        for name, texts in found.special.items():
            row[name] = texts[number].as_py() or row[name]
    before = dict(mirror)
    for name, kept in found.kept.items():
        assert found.base is not None
        for row, is_kept, base in zip(rows, kept, found.base.to_pylist(), strict=True):
            if is_kept:
                row[name] = before[tuple(base[k] for k in key)][0][name]
    for gone in found.gone.to_pylist():
        mirror.pop(tuple(gone[k] for k in key), None)
    for row in rows:
        seq = row.pop("_ms_seq")
        mirror[tuple(row[k] for k in key)] = row, seq
    assert len(rows) == len({tuple(row[k] for k in key) for row in rows}), "one row per key"


def content(mirror: Mirror) -> set[tuple[Any, ...]]:
    return {tuple(row.values()) for row, _ in mirror.values()}


def expected(history: History) -> set[tuple[Any, ...]]:
    def value(text: str | None) -> Any:
        return text if text in (None, "NaN") else Decimal(text)

    return {(int(shop), key, note, doc, value(amount)) for shop, key, note, doc, amount in history.rows.values()}


@settings(max_examples=examples(40), deadline=None)
@given(st.integers(0, 10**9), st.booleans(), st.integers(0, 80), st.lists(st.integers(0, 10**6), max_size=6))
def test_a_mirror_is_the_table_whatever_happens_to_it_and_however_it_is_cut(
    seed: int, full: bool, steps: int, cuts: list[int]
) -> None:
    history = History(seed, full).play(steps)
    mirror: Mirror = {}
    for batch in history.batches(cuts):
        write(mirror, latest(batch, KEY))
    assert content(mirror) == expected(history)


@settings(max_examples=examples(40), deadline=None)
@given(st.integers(0, 10**9), st.booleans(), st.integers(0, 80), st.lists(st.integers(0, 10**6), max_size=6))
def test_few_changes_are_folded_to_what_many_are(seed: int, full: bool, steps: int, cuts: list[int]) -> None:
    """Row by row, or by column: the same rows, in the same order."""
    history = History(seed, full).play(steps)
    for batch in history.batches(cuts):
        few = latest(batch, KEY)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(folding, "FEW", 0)
            many = latest(batch, KEY)
        assert few.rows.equals(many.rows)
        assert sorted(few.gone.to_pylist(), key=str) == sorted(many.gone.to_pylist(), key=str)
        assert (few.truncated, few.missing, few.kept.keys()) == (many.truncated, many.missing, many.kept.keys())


def folded(*changes: Change, first: int = 1) -> Latest:
    return latest(pa.Table.from_batches([assemble(journal_rows(changes, first), THINGS, 1, "aaaa")]), ("id",))


def test_one_row_per_key_with_the_version_of_its_last_change() -> None:
    found = folded(insert("1", "x", "d"), insert("2", "y", "e"), update(["1", "z", "d"]), delete(key=["2", None, None]))
    assert found.rows.to_pylist() == [{"id": 1, "a": "z", "doc": "d", "_ms_seq": 3}]
    assert found.gone.to_pylist() == [{"id": 2, "_ms_seq": 4}]
    assert (found.truncated, dict(found.kept), found.base) == (None, {}, None)


def test_a_value_that_was_not_sent_comes_from_an_earlier_change_of_the_row() -> None:
    found = folded(insert("1", "x", "the doc"), update(["1", "y", ...]), update(["1", "z", ...]))
    assert found.rows.to_pylist() == [{"id": 1, "a": "z", "doc": "the doc", "_ms_seq": 3}]
    assert not found.kept


def test_it_follows_a_chain_of_keys() -> None:
    found = folded(
        insert("1", "x", "the doc"),
        update(["2", "y", ...], key=["1", None, None]),
        update(["3", "z", ...], key=["2", None, None]),
    )
    assert found.rows.to_pylist() == [{"id": 3, "a": "z", "doc": "the doc", "_ms_seq": 3}]
    assert sorted(row["id"] for row in found.gone.to_pylist()) == [1, 2]


def test_what_nobody_sent_is_kept_from_the_target_under_the_key_it_had() -> None:
    found = folded(update(["2", "y", ...], key=["1", None, None]), update(["7", "z", ...]), insert("8", "p", "q"))
    rows = {row["id"]: (row["doc"], kept) for row, kept in zip(found.rows.to_pylist(), found.kept["doc"], strict=True)}
    assert rows == {2: (None, True), 7: (None, True), 8: ("q", False)}
    assert found.base is not None
    ids = found.rows["id"].to_pylist()
    assert [base for id_, base in zip(ids, found.base["id"].to_pylist(), strict=True) if id_ in (2, 7)].count(1) == 1
    assert dict(zip(ids, found.base["id"].to_pylist(), strict=True))[7] == 7


def test_a_row_made_anew_never_takes_a_value_of_the_one_before_it() -> None:
    again = folded(delete(key=["1", None, None]), insert("1", "x", ...))
    assert list(again.missing) == [2]
    moved = folded(update(["2", "a", "b"], key=["1", None, None]), insert("1", "x", ...))
    assert list(moved.missing) == [2]


def test_what_is_older_than_a_truncate_is_gone() -> None:
    found = folded(insert("1", "x", "d"), truncate(), insert("2", "y", "e"), truncate(), insert("3", "z", "f"))
    assert found.truncated == 4
    assert found.rows["id"].to_pylist() == [3]
    assert found.gone.num_rows == 0
    empty = folded(insert("1", "x", "d"), truncate(), first=10)
    assert (empty.truncated, empty.rows.num_rows, empty.gone.num_rows) == (11, 0, 0)


def test_two_rows_that_swap_a_deferrable_key_keep_their_own_values() -> None:
    things = relation(("id", 23), ("a", 25), ("doc", 25), key=("id",), identity="f")
    changes = [
        update(["2", "one", ...], row=["1", "one", "first"]),
        update(["1", "two", ...], row=["2", "two", "second"]),
    ]
    found = latest(pa.Table.from_batches([assemble(journal_rows(changes), things, 1, "aaaa")]), ("id",))
    assert {(row["id"], row["a"], row["doc"]) for row in found.rows.to_pylist()} == {
        (1, "two", "second"),
        (2, "one", "first"),
    }
    assert found.gone.num_rows == 0


def whole(*changes: Change) -> Latest:
    """The same with old rows that are sent whole, and a float."""
    things = relation(("id", 23), ("a", 25), ("x", 701), ("list", 1007), key=("id",), identity="f")
    return latest(pa.Table.from_batches([assemble(journal_rows(changes), things, 1, "aaaa")]), ("id",))


def test_a_row_that_took_a_deferrable_key_early_outlives_the_one_before_it() -> None:
    old, new = ["2", "old", "1.5", "{1}"], ["2", "new", "1.5", "{1}"]
    found = whole(insert(*new), delete(row=old))
    assert [(row["id"], row["a"], row["_ms_seq"]) for row in found.rows.to_pylist()] == [(2, "new", 1)]
    assert found.gone.num_rows == 0
    found = whole(insert(*new), delete(row=new))
    assert (found.rows.num_rows, found.gone["id"].to_pylist()) == (0, [2])


@pytest.mark.parametrize("x", ["NaN", "1.5", None])
@pytest.mark.parametrize("numbers", ["{1,NULL}", "{{1}}", None])
def test_a_row_is_known_again_whatever_its_values(x: str | None, numbers: str | None) -> None:
    found = whole(insert("1", "a", x, numbers), update(["2", "b", x, numbers], row=["1", "a", x, numbers]))
    found_again = whole(insert("1", "a", x, numbers), delete(row=["1", "a", x, numbers]))
    assert (found.rows["id"].to_pylist(), found.gone["id"].to_pylist()) == ([2], [1])
    assert (found_again.rows.num_rows, found_again.gone["id"].to_pylist()) == (0, [1])


def test_a_value_without_a_home_keeps_its_text_wherever_it_was_sent() -> None:
    row = ["1", "a", "n", "doc", "NaN"]
    changes = [insert(*row), update(["1", "b", "n", ..., "NaN"], key=["1", "a", None, None, None])]
    found = latest(pa.Table.from_batches([assemble(journal_rows(changes), table(), 1, "aaaa")]), KEY)
    assert found.special["amount"].to_pylist() == ["NaN"]
    assert found.rows["doc"].to_pylist() == ["doc"]


@pytest.mark.parametrize("rows", [0, 1])
def test_few_changes_fold_too(rows: int) -> None:
    found = folded(*[insert("1", "x", "d")] * rows)
    assert (found.rows.num_rows, found.gone.num_rows) == (rows, 0)


@pytest.mark.parametrize(
    ("kinds", "keys"),
    [
        ((23,), [("3",), ("1",), ("2",)]),
        ((25, 1700), [("b", "1.5"), ("a", "2"), ("a", "1")]),
        ((1005,), [("{3}",), ("{1}",), ("{2}",)]),
        ((17, 16), [("\\x02", "t"), ("\\x01", "t"), ("\\x01", "f")]),
    ],
)
def test_rows_come_in_the_order_of_their_keys(kinds: tuple[int, ...], keys: list[tuple[str, ...]]) -> None:
    names = [f"k{number}" for number in range(len(kinds))]
    of = relation(*zip(names, kinds, strict=True), ("doc", 25), key=tuple(names))
    changes = [insert(*key, "-".join(key)) for key in keys]
    found = latest(pa.Table.from_batches([assemble(journal_rows(changes), of, 1, "x")]), names)
    assert found.rows["doc"].to_pylist() == ["-".join(key) for key in sorted(keys)]
