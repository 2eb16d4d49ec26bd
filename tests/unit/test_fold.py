"""A changelog folds to the table that wrote it, or is refused."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pytest

from millstream import changelog
from millstream.fold import Inconsistent, fold
from millstream.model import Relation
from tests.fixtures.tuples import Cell, Change, delete, insert, journal_rows, relation, truncate, update

TABLE = relation(("id", 20), ("big", 25), ("n", 23), key=["id"])


def log(changes: Sequence[Change], first_seq: int = 1, of: Relation = TABLE) -> pa.RecordBatch:
    return changelog.assemble(journal_rows(changes, first_seq), of, 1, "0123456789ab")


def rows(folded: pa.Table, *names: str) -> list[tuple[Any, ...]]:
    chosen = folded.select(names or ("id", "big", "n"))
    return sorted(tuple(row.values()) for row in chosen.to_pylist())


def test_the_last_change_of_a_row_counts() -> None:
    changes = [insert("1", "a", "1"), insert("2", "b", "2"), update(["1", "c", None]), delete(key=["2", None, None])]
    assert rows(fold([log(changes)], ["id"])) == [(1, "c", None)]


def test_a_deleted_row_can_come_again() -> None:
    changes = [insert("1", "a", "1"), delete(key=["1", None, None]), insert("1", "b", "2")]
    assert rows(fold([log(changes)], ["id"])) == [(1, "b", 2)]


def test_a_truncate_removes_what_is_older() -> None:
    changes = [insert("1", "a", "1"), truncate(), insert("2", "b", "2")]
    assert rows(fold([log(changes)], ["id"])) == [(2, "b", 2)]


def copied(rows_read: Sequence[tuple[str, str, str]], seq: int, position: int) -> list[pa.RecordBatch]:
    """A table that came anew: a truncate, then rows that were read, all with one version."""
    said = log([truncate(), *(insert(*row) for row in rows_read)], 1)
    op = pa.array(["t", *("r" for _ in rows_read)])
    same = {
        "_ms_op": op,
        "_ms_seq": pa.array([seq] * len(op)),
        "_ms_position": pa.array([f"00000000/{position:08X}"] * len(op)),
    }
    made = pa.table({name: same.get(name, said[name]) for name in said.schema.names}, schema=said.schema)
    return [batch for part in (made.slice(1), made.slice(0, 1)) for batch in part.to_batches()]


def test_a_table_that_came_anew_is_what_its_copy_and_later_changes_say() -> None:
    before = [update(["1", ..., "0"]), insert("2", "vanished", "2"), insert("3", "c", "3")]
    after = [update(["1", ..., "9"]), insert("4", "d", "4")]
    changes = [log(after, 4), *copied([("1", "a", "1"), ("3", "c", "3")], 3, 900), log(before, 1)]
    assert rows(fold(changes, ["id"])) == [(1, "a", 9), (3, "c", 3), (4, "d", 4)]
    twice = [log(before, 1), *copied([("3", "c", "3")], 3, 900), *copied([("1", "a", "1")], 3, 901)]
    assert rows(fold(twice, ["id"])) == [(1, "a", 1)], "of two copies at one seq the later one counts"


def test_an_unchanged_value_comes_from_whoever_wrote_it() -> None:
    changes = [insert("1", "LARGE", "1"), update(["1", ..., "2"]), update(["1", ..., "3"])]
    assert rows(fold([log(changes)], ["id"])) == [(1, "LARGE", 3)]


def test_an_unchanged_value_follows_its_row_through_a_chain_of_keys() -> None:
    changes = [
        insert("1", "ONE", "1"),
        insert("2", "TWO", "2"),
        update(["9", ..., "1"], key=["1", None, None]),
        update(["1", ..., "2"], key=["2", None, None]),
        update(["2", ..., "1"], key=["9", None, None]),
    ]
    assert rows(fold([log(changes)], ["id"])) == [(1, "TWO", 2), (2, "ONE", 1)]


def test_an_unchanged_value_of_a_row_older_than_the_log_comes_from_the_whole_old_row() -> None:
    changes = [update(["1", ..., "2"], row=["1", "OLD", "1"]), update(["1", ..., "3"], row=["1", "OLD", "2"])]
    assert rows(fold([log(changes)], ["id"])) == [(1, "OLD", 3)]


def test_order_and_cuts_of_the_input_do_not_matter() -> None:
    changes = [insert("1", "a", "1"), update(["1", ..., "2"]), update(["5", ..., "3"], key=["1", None, None])]
    whole = log(changes)
    parts = [whole.slice(2, 1), pa.Table.from_batches([whole.slice(0, 1)]), whole.slice(1, 1)]
    assert rows(fold(parts, ["id"])) == [(5, "a", 3)]


def test_rows_without_key_are_a_bag() -> None:
    of = relation(("a", 23), ("b", 701), ("c", 25), identity="f")
    nan = ["1", "NaN", "x"]
    changes = [
        insert(*nan),
        insert(*nan),
        insert("2", "1", "LARGE"),
        update(["2", "5", ...], row=["2", "1", "LARGE"]),
        delete(row=nan),
        update(["3", "5", ...], row=["2", "5", "LARGE"]),
    ]
    folded = fold([log(changes, of=of)], [])
    assert sorted(map(repr, rows(folded, "a", "b", "c"))) == ["(1, nan, 'x')", "(3, 5.0, 'LARGE')"]


def test_special_values_are_kept_and_identify_rows() -> None:
    of = relation(("k", 25), ("d", 1082), key=["k"])
    changes = [
        insert(b"\xff", "infinity"),
        insert(b"\xfe", "2024-01-01"),
        update([b"\xff", ...]),
        update([b"\xfd", "-infinity"], key=[b"\xfe", None]),
        insert("gone", "infinity"),
        delete(key=["gone", None]),
    ]
    folded = fold([log(changes, of=of)], ["k"])
    assert [row["_ms_special"] for row in folded.to_pylist()] == [
        [("k", "\\xff"), ("d", "infinity")],
        [("k", "\\xfd"), ("d", "-infinity")],
    ]


def test_columns_are_those_of_the_last_version() -> None:
    wider = relation(("id", 20), ("big", 25), ("n", 20), ("extra", 25), key=["id"])
    first = log([insert("1", "a", "1"), insert("2", "b", "2")])
    second = log([update(["1", ..., "7000000000", "new"])], 3, wider)
    folded = fold([second, first], ["id"])
    assert rows(folded, "id", "big", "n") == [(1, "a", 7_000_000_000), (2, "b", 2)]
    assert dict(zip(folded["id"].to_pylist(), folded["extra"].to_pylist(), strict=True)) == {1: "new", 2: None}
    narrower = relation(("id", 20), key=["id"])
    assert fold([first, second, log([insert("3")], 4, narrower)], ["id"]).column_names == ["id", "_ms_special"]


def test_an_empty_changelog_is_an_empty_table() -> None:
    assert fold([], ["id"]).num_rows == 0
    empty = fold([log([insert("1", "a", "1")]).slice(1)], ["id"])
    assert (empty.num_rows, empty.column_names) == (0, ["id", "big", "n", "_ms_special"])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ([insert("1", "a", "1"), insert("1", "b", "2")], "another row has"),
        ([insert("1", "a", "1"), insert("2", "b", "2"), update(["2", "c", "3"], key=["1", None, None])], "another row"),
        ([update(["1", ..., "2"])], "no change before it has"),
        ([insert("1", "a", "1"), delete(key=["1", None, None]), update(["1", ..., "2"])], "no change before it has"),
    ],
)
def test_a_changelog_that_no_table_can_have_written_is_refused(changes: list[Change], reason: str) -> None:
    with pytest.raises(Inconsistent, match=reason):
        fold([log(changes)], ["id"])


def test_a_change_that_is_there_twice_is_refused() -> None:
    once = log([insert("1", "a", "1")])
    with pytest.raises(Inconsistent, match="seq 1 is there twice"):
        fold([once, once], ["id"])


def test_a_change_of_no_row_is_refused() -> None:
    with pytest.raises(Inconsistent, match="no key"):
        fold([log([update(["1", "a", "1"])])], [])


def test_a_random_life_folds_to_its_end() -> None:
    dice = random.Random(7)
    table: dict[int, tuple[str, int]] = {}
    changes: list[Change] = []
    for step in range(3_000):
        free = dice.randrange(60)
        what = dice.random()
        if what < 0.002:
            table.clear()
            changes.append(truncate())
        elif free not in table and what < 0.5:
            table[free] = (f"big {step}", step)
            changes.append(insert(str(free), f"big {step}", str(step)))
        elif table:
            old = dice.choice(sorted(table))
            if what < 0.6:
                del table[old]
                changes.append(delete(key=[str(old), None, None]))
                continue
            new = free if free not in table and what > 0.8 else old
            big: Cell = ... if dice.random() < 0.5 else f"big {step}"
            table[new] = (table.pop(old)[0] if big is ... else table.pop(old) and f"big {step}", step)
            changes.append(update([str(new), big, str(step)], key=None if new == old else [str(old), None, None]))
    assert rows(fold([log(changes)], ["id"])) == sorted((key, *rest) for key, rest in table.items())


def test_rows_with_lists_are_identified_by_them() -> None:
    of = relation(("a", 1007), ("b", 1022), identity="f")
    changes = [
        insert("{1,2}", "{NaN,NULL}"),
        insert("{{1}}", "{1}"),
        insert("{1}", "{NaN}"),
        delete(row=["{1,2}", "{NaN,NULL}"]),
        delete(row=["{{1}}", "{1}"]),
    ]
    (left,) = fold([log(changes, of=of)], []).to_pylist()
    assert left["a"] == [1]
