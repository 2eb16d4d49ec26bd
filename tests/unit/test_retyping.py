"""Columns that get another type at the source, another key, or are dropped there: what targets do and refuse."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import pytest
from deltalake import DeltaTable

from millstream.changelog import assemble
from millstream.errors import TargetRefused
from millstream.model import BatchLimits, Column, Relation, SeqRange, TargetSpec
from millstream.targets import open_target
from millstream.targets.base import Lane, LaneBatch, Part, TargetContext
from millstream.targets.retyping import HeldType, keeps_values
from tests.fixtures.tuples import OID, Change, delete, insert, journal_rows, update

INT2, INT4, INT8, TEXT, VARCHAR, CHAR, NUMERIC, REAL, DOUBLE, TIMESTAMP = (
    21,
    23,
    20,
    25,
    1043,
    1042,
    1700,
    700,
    701,
    1114,
)
CONTEXT = TargetContext("shop", "copy", "journal-a", "aaaa", 1, "run-1")
KINDS = ("sqlite", "duckdb", "delta")


def numeric(precision: int, scale: int) -> int:
    return ((precision << 16) | scale) + 4


def table(*columns: tuple[int, str, int] | tuple[int, str, int, int], key: Sequence[str] = ("id",)) -> Relation:
    """A relation from (number, name, type, modifier) of its columns."""
    made = tuple(Column(name, kind, *rest, key=name in key, attnum=number) for number, name, kind, *rest in columns)
    return Relation(OID, "public", "t", "d", made, tuple(key), tuple(key), enriched=True)


class Held:
    """A target of any kind, and what it holds."""

    def __init__(self, kind: str, root: Path, **options: Any) -> None:
        root.mkdir(exist_ok=True)
        self.kind, self.path, self.seq = kind, root / "copy", 0
        self._special = "NULL" if kind == "sqlite" or "write" in options else "_ms_special"
        spec = TargetSpec("copy", kind, BatchLimits(1, 1, 1), options={"path": str(self.path), **options})
        self.target = open_target(spec)
        self.target.open(CONTEXT)

    def deliver(self, *parts: tuple[Relation, Sequence[Change]], baseline: bool = False) -> None:
        start, made = self.seq, []
        for number, (of, changes) in enumerate(parts):
            versions = {"seq": [start + 1] * len(changes)} if baseline else {}
            rows = journal_rows(changes, self.seq + 1, **versions)
            made.append(Part(of, number + 1, iter([assemble(rows, of, 1, "aaaa")])))
            self.seq += 1 if baseline else len(changes)
        span = SeqRange(self.seq if baseline else start, self.seq)
        lane = self.target.stager()
        assert isinstance(lane, Lane)
        try:
            lane.deliver(LaneBatch(span, span.end, made, lambda: None))
        except BaseException:
            self.seq = start
            raise
        self.target.publish(span, span.end, [])

    def columns(self) -> set[str]:
        """Without ours."""
        if self.kind == "delta":
            names = self._lake().schema().to_arrow().names
        elif self.kind == "sqlite":
            names = [row[1] for row in self._rows('PRAGMA table_info("public.t")')]
        else:
            names = [row[0] for row in self._rows("DESCRIBE public.t")]
        return {name for name in names if not name.startswith("_ms_")}

    def read(self, *names: str) -> list[tuple[Any, ...]]:
        """Exact texts stand in the place of values that have no home in their column."""
        if self.kind == "delta":
            found = [[*(row[n] for n in names), dict(row["_ms_special"] or ())] for row in self._lake_rows()]
        else:
            table = '"public.t"' if self.kind == "sqlite" else "public.t"
            found = [list(row) for row in self._rows(f"SELECT {', '.join(names)}, {self._special} FROM {table}")]
        return sorted(
            tuple((row[-1] or {}).get(n, v) for n, v in zip(names, map(_said, row[:-1]), strict=True)) for row in found
        )

    def _lake(self) -> DeltaTable:
        return DeltaTable(str(self.path / "public.t"))

    def _lake_rows(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = self._lake().to_pyarrow_table().to_pylist()
        return rows

    def _rows(self, query: str) -> list[tuple[Any, ...]]:
        connect: Any = sqlite3.connect if self.kind == "sqlite" else duckdb.connect
        with closing(connect(str(self.path))) as db:
            found: list[tuple[Any, ...]] = db.execute(query).fetchall()
            return found


def _said(value: Any) -> Any:
    return str(value) if isinstance(value, Decimal) else value


@pytest.fixture(params=KINDS)
def held(request: pytest.FixtureRequest, tmp_path: Path) -> Held:
    return Held(request.param, tmp_path)


FIRST = table((1, "id", INT4), (2, "n", INT2), (3, "w", VARCHAR, 13), (4, "d", NUMERIC, numeric(6, 2)), (5, "f", REAL))
ROWS = [insert("1", "7", "a", "1.50", "0.5"), insert("2", None, None, "NaN", None)]


def test_columns_become_wider_and_keep_their_values(held: Held) -> None:
    wide = table((1, "id", INT8), (2, "n", INT4), (3, "w", TEXT), (4, "d", NUMERIC, numeric(12, 4)), (5, "f", DOUBLE))
    held.deliver((FIRST, ROWS))
    big = str(2**40)
    held.deliver((wide, [insert(big, "100000", "a long word", "12345678.0001", "0.1")]))
    held.deliver((wide, [update(["2", "8", "b", "NaN", "1.5"])]))
    assert held.read("id", "n", "w", "d", "f") == [
        (1, 7, "a", "1.5000", 0.5),
        (2, 8, "b", "NaN", 1.5),
        (2**40, 100000, "a long word", "12345678.0001", 0.1),
    ]


def test_numbers_become_texts_as_the_source_writes_them(held: Held) -> None:
    texts = table((1, "id", INT4), (2, "n", NUMERIC), (3, "w", TEXT), (4, "d", NUMERIC), (5, "f", REAL))
    held.deliver((FIRST, ROWS), (texts, [insert("3", "7.25", "c", "9.999", None)]))
    assert held.read("id", "n", "d") == [(1, "7", "1.50"), (2, None, "NaN"), (3, "7.25", "9.999")]
    held.deliver((texts, [update(["2", "1", ..., "NaN", None])]))
    assert held.read("id", "n", "w", "d") == [(1, "7", "a", "1.50"), (2, "1", None, "NaN"), (3, "7.25", "c", "9.999")]


def test_a_type_that_became_narrower_changes_nothing(held: Held) -> None:
    narrow = table(
        (1, "id", INT2), (2, "n", INT2), (3, "w", VARCHAR, 7), (4, "d", NUMERIC, numeric(6, 2)), (5, "f", REAL)
    )
    held.deliver((FIRST, ROWS))
    held.deliver((narrow, [insert("3", "9", "c", "2.00", None), update(["1", "8", ..., "3.00", None])]))
    assert held.read("id", "n", "w", "d") == [(1, 8, "a", "3.00"), (2, None, None, "NaN"), (3, 9, "c", "2.00")]


def test_an_index_and_a_view_of_the_user_outlive_a_wider_type(tmp_path: Path) -> None:
    held = Held("sqlite", tmp_path)
    held.deliver((FIRST, ROWS))
    with closing(sqlite3.connect(held.path)) as db:
        db.execute('CREATE INDEX by_w ON "public.t" (w)')
        db.execute('CREATE VIEW mine AS SELECT id, n FROM "public.t"')
        db.commit()
    texts = table(
        (1, "id", INT4), (2, "n", TEXT), (3, "w", VARCHAR, 13), (4, "d", NUMERIC, numeric(6, 2)), (5, "f", REAL)
    )
    held.deliver((texts, [update(["2", "word", "w", "2.00", None])]))
    with closing(sqlite3.connect(held.path)) as db:
        assert db.execute("SELECT id, n FROM mine ORDER BY id").fetchall() == [(1, "7"), (2, "word")]
        assert db.execute("SELECT name FROM sqlite_master WHERE name = 'by_w'").fetchall() == [("by_w",)]


def test_a_type_that_may_have_changed_values_is_refused_and_a_baseline_brings_them(held: Held) -> None:
    retyped = table((1, "id", INT4), (2, "n", INT2), (3, "w", INT4), (4, "d", NUMERIC, numeric(6, 1)), (5, "f", REAL))
    held.deliver((FIRST, ROWS))
    with pytest.raises(TargetRefused, match=r"public\.t\.[wd] was .* and is .* now: .* is in no log") as refused:
        held.deliver((retyped, [insert("3", "1", "5", "1.0", None)]))
    assert "millstream reload shop --table public.t" in str(refused.value.hint)
    assert held.read("id", "w") == [(1, "a"), (2, None)], "nothing was written"
    if held.kind == "delta":
        return  # A baseline comes to a target that has nothing; a database takes one that is next, too.
    held.deliver((retyped, [insert("1", "7", "10", "1.5", None), insert("3", "1", "5", "1.0", None)]), baseline=True)
    assert held.read("id", "w", "d") == [(1, 10, "1.5"), (3, 5, "1.0")]
    held.deliver((retyped, [update(["3", "1", "6", "1.0", None])]))
    assert held.read("id", "w") == [(1, 10), (3, 6)]


def test_rows_are_told_by_another_key(held: Held) -> None:
    other = replace(
        FIRST, columns=tuple(replace(c, key=c.name == "w") for c in FIRST.columns), key=("w",), primary_key=("w",)
    )
    held.deliver((FIRST, [insert("1", "7", "a", "1.00", None), insert("2", "8", "b", "2.00", None)]))
    held.deliver(
        (other, [update(["1", "9", "a", "1.00", None]), insert("1", "5", "c", "3.00", None)]),
        (other, [delete(key=[None, None, "b", None, None])]),
    )
    assert held.read("w", "id", "n") == [("a", 1, 9), ("c", 1, 5)]
    both = replace(other, columns=tuple(replace(c, key=c.name in ("n", "w")) for c in FIRST.columns), key=("n", "w"))
    held.deliver((replace(both, primary_key=("n", "w")), [insert("4", "6", "a", "4.00", None)]))
    assert held.read("w", "n", "id") == [("a", 6, 4), ("a", 9, 1), ("c", 5, 1)]


@pytest.mark.parametrize("kind", ["sqlite", "duckdb"])
def test_a_key_that_does_not_tell_the_rows_apart_is_refused(tmp_path: Path, kind: str) -> None:
    held = Held(kind, tmp_path)
    other = replace(
        FIRST, columns=tuple(replace(c, key=c.name == "w") for c in FIRST.columns), key=("w",), primary_key=("w",)
    )
    held.deliver((FIRST, ROWS))
    with pytest.raises(TargetRefused, match=r"was \(id\) and is \(w\) at the source now") as refused:
        held.deliver((other, [insert("3", "7", "c", "1.00", None)]))
    assert "millstream reload shop --table public.t" in str(refused.value.hint)
    assert held.read("id", "w") == [(1, "a"), (2, None)]


@pytest.mark.parametrize("kind", KINDS)
def test_columns_that_the_source_has_no_more_stay_or_go(tmp_path: Path, kind: str) -> None:
    without = table((1, "id", INT4), (3, "w", VARCHAR, 13), (5, "f", REAL))
    for dropped, expected in (("keep", {"id", "n", "w", "d", "f"}), ("drop", {"id", "w", "f"})):
        held = Held(kind, tmp_path / dropped, dropped=dropped)
        held.deliver((FIRST, ROWS), (without, [insert("3", "c", "2")]))
        assert held.columns() == expected
        assert held.read("id", "w", "f") == [(1, "a", 0.5), (2, None, None), (3, "c", 2.0)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_changelog_becomes_wider(tmp_path: Path, kind: str) -> None:
    held = Held(kind, tmp_path, write="changelog")
    wide = table((1, "id", INT8), (2, "n", INT2), (3, "w", TEXT), (4, "d", NUMERIC, numeric(12, 4)), (5, "f", REAL))
    held.deliver((FIRST, [ROWS[0]]), (wide, [insert("5000000000", "1", "long enough word", "2.5000", None)]))
    assert held.read("id", "w", "d", "_ms_seq") == [
        (1, "a", "1.5000", 1),
        (5_000_000_000, "long enough word", "2.5000", 2),
    ]


@pytest.mark.parametrize(
    ("before", "after", "kept"),
    [
        ((INT4, -1), (INT8, -1), True),
        ((INT8, -1), (INT4, -1), True),
        ((INT4, -1), (TEXT, -1), True),
        ((TEXT, -1), (INT4, -1), False),
        ((VARCHAR, 14), (TEXT, -1), True),
        ((CHAR, 14), (TEXT, -1), False),
        ((NUMERIC, numeric(6, 2)), (NUMERIC, numeric(12, 4)), True),
        ((NUMERIC, numeric(12, 4)), (NUMERIC, numeric(12, 2)), False),
        ((NUMERIC, -1), (NUMERIC, numeric(12, 2)), False),
        ((NUMERIC, numeric(12, 2)), (NUMERIC, numeric(50, 2)), True),
        ((NUMERIC, numeric(12, 2)), (NUMERIC, numeric(50, 3)), False),
        ((INT8, -1), (NUMERIC, numeric(20, 3)), True),
        ((NUMERIC, numeric(12, 2)), (NUMERIC, -1), True),
        ((REAL, -1), (DOUBLE, -1), True),
        ((DOUBLE, -1), (REAL, -1), False),
        ((TIMESTAMP, 3), (TIMESTAMP, -1), True),
        ((TIMESTAMP, -1), (TIMESTAMP, 3), False),
        ((TIMESTAMP, -1), (1184, -1), False),
    ],
)
def test_which_conversions_keep_every_value(before: tuple[int, int], after: tuple[int, int], kept: bool) -> None:
    assert keeps_values(HeldType(*before, "was"), HeldType(*after, "is")) is kept


def test_a_domain_is_the_same_when_the_catalog_could_not_tell_that_it_is_one() -> None:
    known, bare = HeldType(INT4, -1, "positive", domain=20_000), HeldType(20_000, -1, "oid 20000")
    assert keeps_values(known, bare)
    assert keeps_values(bare, known)
    assert not keeps_values(known, HeldType(20_001, -1, "oid 20001"))
