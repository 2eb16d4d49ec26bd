"""Every version of every row, found by column, against a table that is played row by row."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.changelog import assemble
from millstream.versions import Versions, versions
from tests.fixtures.examples import examples
from tests.fixtures.timelines import Timeline, told
from tests.fixtures.tuples import Change, delete, insert, journal_rows, relation, update

KEY = ("shop", "id")
THINGS = relation(("id", 23), ("a", 25), ("doc", 25), key=("id",))


class Table:
    """A table of versions that is written a row at a time."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def write(self, batch: pa.Table) -> None:
        begin = 0
        for at, op in enumerate(batch["_ms_op"].to_pylist()):
            if op == "t":
                self._write(batch.slice(begin, at - begin))
                end = batch.slice(at, 1).to_pylist()[0]
                for row in self._current():
                    self._end(row, end["_ms_position"], end["_ms_commit_ts"])
                begin = at + 1
        self._write(batch.slice(begin))

    def _write(self, changes: pa.Table) -> None:
        if not changes.num_rows:
            return
        found = versions(changes, KEY)
        assert not found.missing
        rows = self._completed(found)
        for ended in found.ended.to_pylist():
            for row in self._current():
                if all(row[name] == ended[name] for name in KEY):
                    self._end(row, ended["_ms_end_position"], ended["valid_to"])
        self.rows += rows

    def _completed(self, found: Versions) -> list[dict[str, Any]]:
        rows = found.rows.to_pylist()
        bases = found.base.to_pylist() if found.base is not None else [None] * len(rows)
        for at, (row, base) in enumerate(zip(rows, bases, strict=True)):
            row["_ms_special"] = {n: texts[at].as_py() for n, texts in found.special.items() if texts[at].is_valid}
            for name, kept in found.kept.items():
                if kept[at]:
                    (held,) = [one for one in self._current() if all(one[n] == base[n] for n in KEY)]
                    row[name] = held[name]
                    text = held["_ms_special"].get(name)
                    row["_ms_special"] |= {name: text} if text else {}
        return rows

    def _current(self) -> list[dict[str, Any]]:
        return [row for row in self.rows if row["is_current"]]

    def _end(self, row: dict[str, Any], position: str, time: Any) -> None:
        if row["_ms_position"] == position:
            self.rows.remove(row)
        else:
            row.update(is_current=False, valid_to=time, _ms_end_position=position)


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(0, 10**9), st.booleans(), st.integers(1, 80), st.lists(st.integers(0, 10**6), max_size=6))
def test_every_version_is_there_whatever_happens_and_however_it_is_cut(
    seed: int, full: bool, steps: int, cuts: list[int]
) -> None:
    timeline = Timeline(seed, full, steps)
    table = Table()
    for batch in timeline.batches(cuts):
        table.write(batch)
    assert told(table.rows) == timeline.versions()


def found(*transactions: list[Change]) -> Versions:
    numbers = [number for number, changes in enumerate(transactions, 1) for _ in changes]
    flat = [change for changes in transactions for change in changes]
    rows = journal_rows(flat, 1, commit_position=[n * 100 for n in numbers], commit_ts=[n * 10**6 for n in numbers])
    return versions(pa.Table.from_batches([assemble(rows, THINGS, 1, "aaaa")]), ("id",))


def spans(it: Versions) -> list[tuple[Any, ...]]:
    rows = it.rows.sort_by("_ms_seq").to_pylist()
    return [(row["id"], row["a"], row["valid_from"].second, row["valid_to"] and row["valid_to"].second) for row in rows]


def test_a_transaction_leaves_one_version_of_a_row_and_a_later_one_ends_it() -> None:
    it = found(
        [insert("1", "a", "d"), update(["1", "b", "d"])],
        [update(["1", "c", "d"])],
        [delete(key=["1", None, None]), insert("1", "again", "d")],
        [delete(key=["1", None, None])],
    )
    assert spans(it) == [(1, "b", 1, 2), (1, "c", 2, 3), (1, "again", 3, 4)]
    assert [(row["id"], row["valid_to"].second) for row in it.ended.to_pylist()] == [(1, 1)]


def test_a_row_that_comes_and_goes_in_one_transaction_was_never_there() -> None:
    it = found([insert("1", "a", "d"), delete(key=["1", None, None])], [insert("2", "b", "d")])
    assert spans(it) == [(2, "b", 2, None)]


def test_a_row_ends_under_its_old_key_and_begins_under_the_new_one_with_what_was_not_sent() -> None:
    it = found([insert("1", "a", "long")], [update(["2", "b", ...], key=["1", None, None])])
    assert spans(it) == [(1, "a", 1, 2), (2, "b", 2, None)]
    assert it.rows.sort_by("_ms_seq")["doc"].to_pylist() == ["long", "long"]


def test_what_only_the_target_can_know_is_asked_for_each_version() -> None:
    it = found([update(["1", "a", ...])], [update(["1", "b", ...])])
    assert it.kept["doc"].tolist() == [True, True]
    assert it.base is not None
    assert it.base.to_pylist() == [{"id": 1}, {"id": 1}]
