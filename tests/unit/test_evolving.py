"""Columns of mirrors follow those of the source: constants of older rows, new names, names that changed places."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from millstream.changelog import assemble
from millstream.errors import TargetRefused
from millstream.model import Column, Relation, SeqRange
from millstream.targets.base import LaneBatch, Part, TargetContext
from millstream.targets.delta import DeltaOptions, DeltaTarget
from millstream.targets.evolving import evolution
from tests.fixtures.copies import Copy
from tests.fixtures.tuples import OID, Change, insert, journal_rows, update

INT4, TEXT, TIMESTAMPTZ = 23, 25, 1184


def table(*columns: tuple[int, str] | tuple[int, str, int] | tuple[int, str, int, str], oid: int = OID) -> Relation:
    """A relation from (number, name, type, constant of older rows) of its columns; the first is the key."""
    made = [(*one, TEXT, None)[:4] if len(one) == 2 else (*one, None)[:4] for one in columns]
    described = tuple(
        Column(str(name), int(kind or 0), key=not at, attnum=int(number), missing=missing)  # type: ignore[arg-type, call-overload]
        for at, (number, name, kind, missing) in enumerate(made)
    )
    key = (described[0].name,)
    return Relation(oid, "public", "t", "d", described, key, key, enriched=True)


@dataclass
class Mirror:
    """A target of any kind that a test delivers to and reads."""

    deliver: Callable[..., None]
    read: Callable[[str], list[tuple[Any, ...]]]
    again: Callable[[Relation, Change], bool]


def in_a_file(path: Path, kind: str) -> Mirror:
    copy = Copy(path / "copy.db", kind)

    def deliver(*parts: tuple[Relation, Sequence[Change]]) -> None:
        copy.deliver(*parts)

    def again(relation: Relation, change: Change) -> bool:
        rows = pa.Table.from_batches([assemble(journal_rows([change], 1), relation, 1, "aaaa")])
        return bool(copy.target.stager().redeliver(relation, 1, rows))  # type: ignore[union-attr]

    return Mirror(deliver, lambda names: copy.rows(f"SELECT {names} FROM {{t}} ORDER BY 1"), again)


CONTEXT = TargetContext("shop", "lake", "journal-a", "aaaa", 1, "run-1")


class Lake:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.target = DeltaTarget(DeltaOptions(path=path))
        self.target.open(CONTEXT)
        self.seq = 0

    def deliver(self, *parts: tuple[Relation, Sequence[Change]]) -> None:
        start, made = self.seq, []
        for number, (of, changes) in enumerate(parts):
            made.append(Part(of, number + 1, iter([assemble(journal_rows(changes, self.seq + 1), of, 1, "aaaa")])))
            self.seq += len(changes)
        span = SeqRange(start, self.seq)
        self.target.stager().deliver(LaneBatch(span, span.end, made, lambda: None))
        self.target.publish(span, span.end, [])

    def read(self, names: str) -> list[tuple[Any, ...]]:
        wanted = names.split(", ")
        rows = DeltaTable(str(self.path / "public.t")).to_pyarrow_table().select(wanted).sort_by(wanted[0])
        return [tuple(row.values()) for row in rows.to_pylist()]

    def again(self, relation: Relation, change: Change) -> bool:
        rows = pa.Table.from_batches([assemble(journal_rows([change], 1), relation, 1, "aaaa")])
        return self.target.redeliver(relation, 1, rows)


@pytest.fixture(params=["sqlite", "duckdb", "delta"])
def mirror(tmp_path: Path, request: pytest.FixtureRequest) -> Mirror:
    if request.param == "delta":
        lake = Lake(tmp_path)
        return Mirror(lake.deliver, lake.read, lake.again)
    return in_a_file(tmp_path, request.param)


FIRST = table((1, "id", INT4), (2, "a"), (3, "b"))
ROWS = [insert("1", "a1", "b1"), insert("2", "a2", "b2")]


def test_rows_that_are_older_than_a_column_have_its_constant(mirror: Mirror) -> None:
    added = table((1, "id", INT4), (2, "a"), (3, "b"), (4, "n", INT4, "7"), (5, "word", TEXT, "it's {x},\\"))
    mirror.deliver((FIRST, ROWS), (added, [insert("3", "a3", "b3", None, "new"), update(["1", "A", "b1", "8", "w"])]))
    expected = [(1, "A", 8, "w"), (2, "a2", 7, "it's {x},\\"), (3, "a3", None, "new")]
    assert mirror.read("id, a, n, word") == expected
    mirror.deliver((added, [update(["2", "a2", "b2", None, "w"])]))
    assert mirror.read("id, n") == [(1, 8), (2, None), (3, None)], "only once: what is written later stays"


def test_a_column_that_the_table_had_from_the_beginning_gets_nothing(mirror: Mirror) -> None:
    mirror.deliver((table((1, "id", INT4), (4, "n", INT4, "7")), [insert("1", None), insert("2", "5")]))
    assert mirror.read("id, n") == [(1, None), (2, 5)]


def test_a_column_keeps_its_values_under_a_new_name(mirror: Mirror) -> None:
    renamed = table((1, "id", INT4), (2, "text"), (3, "b"))
    mirror.deliver((FIRST, ROWS), (renamed, [update(["1", "new", ...])]))
    assert mirror.read("id, text, b") == [(1, "new", "b1"), (2, "a2", "b2")]
    mirror.deliver((FIRST, [insert("3", "a3", "b3")]))
    assert mirror.read("id, a, b") == [(1, "new", "b1"), (2, "a2", "b2"), (3, "a3", "b3")]


def test_the_key_may_have_a_new_name(mirror: Mirror) -> None:
    renamed = table((1, "number", INT4), (2, "a"), (3, "b"))
    mirror.deliver((FIRST, ROWS), (renamed, [update(["1", "new", ...])]))
    assert mirror.read("number, a, b") == [(1, "new", "b1"), (2, "a2", "b2")]


def test_names_that_change_places_take_their_values_along(mirror: Mirror) -> None:
    swapped = table((1, "id", INT4), (2, "b"), (3, "a"))
    mirror.deliver((FIRST, ROWS), (swapped, [insert("3", "b3", "a3")]))
    assert mirror.read("id, a, b") == [(1, "b1", "a1"), (2, "b2", "a2"), (3, "a3", "b3")]
    moved_on = table((1, "id", INT4), (2, "a"), (3, "c"))
    mirror.deliver((moved_on, [insert("4", "a4", "c4")]))
    assert mirror.read("id, a, c") == [(1, "a1", "b1"), (2, "a2", "b2"), (3, "b3", "a3"), (4, "a4", "c4")]


def test_a_column_made_anew_under_an_old_name_inherits_nothing(mirror: Mirror) -> None:
    without, anew = table((1, "id", INT4), (3, "b")), table((1, "id", INT4), (3, "b"), (4, "a", TEXT, "c"))
    mirror.deliver((FIRST, ROWS), (without, [insert("3", "b3")]))
    assert mirror.read("id, b") == [(1, "b1"), (2, "b2"), (3, "b3")]
    mirror.deliver((anew, [insert("4", "b4", None)]))
    assert mirror.read("id, a") == [(1, "c"), (2, "c"), (3, "c"), (4, None)]


def test_a_change_under_names_that_are_gone_is_not_written_late(mirror: Mirror) -> None:
    renamed = table((1, "id", INT4), (2, "text"), (3, "b"))
    mirror.deliver((FIRST, ROWS), (renamed, [update(["1", "new", "b"])]))
    with pytest.raises(TargetRefused, match="other names now"):
        mirror.again(FIRST, insert("9", "a9", "b9"))
    assert mirror.read("id, text") == [(1, "new"), (2, "a2")]


def test_an_infinite_constant_is_exact(mirror: Mirror, request: pytest.FixtureRequest) -> None:
    added = table((1, "id", INT4), (2, "a"), (3, "b"), (4, "until", TIMESTAMPTZ, "infinity"))
    mirror.deliver((FIRST, ROWS), (added, [insert("3", "a3", "b3", None)]))
    if "sqlite" in request.node.name:
        assert mirror.read("id, until") == [(1, "infinity"), (2, "infinity"), (3, None)]
        return
    said = [(id, until, dict(special or ())) for id, until, special in mirror.read("id, until, _ms_special")]
    assert said == [(1, None, {"until": "infinity"}), (2, None, {"until": "infinity"}), (3, None, {})]
    later = replace(added, columns=(*added.columns[:3], replace(added.columns[3], name="end")))
    mirror.deliver((later, [insert("4", "a4", "b4", None)]))
    said = [(id, dict(special or ())) for id, special in mirror.read("id, _ms_special")]
    assert said == [(1, {"end": "infinity"}), (2, {"end": "infinity"}), (3, {}), (4, {})]


def test_a_table_restored_with_other_numbers_goes_on_by_its_names(mirror: Mirror) -> None:
    restored = table((1, "id", INT4), (2, "b"), (3, "a"), oid=OID + 1)
    mirror.deliver((FIRST, ROWS), (restored, [insert("3", "b3", "a3", oid=OID + 1)]))
    assert mirror.read("id, a, b") == [(1, "a1", "b1"), (2, "a2", "b2"), (3, "a3", "b3")]


def test_a_name_that_a_strange_column_has_is_refused() -> None:
    with pytest.raises(TargetRefused, match="has another one of that name"):
        evolution("public.t", {"1.2": "a"}, {"1.2": "mine"}, ["a", "mine"])


KILLED = """
from pathlib import Path
from tests.unit.test_evolving import Lake, deliver_renamed
deliver_renamed(Lake(Path({path!r})))
"""


def deliver_renamed(lake: Lake) -> None:
    added = table((1, "id", INT4), (2, "text"), (3, "b"), (4, "n", INT4, "7"))
    lake.deliver((FIRST, ROWS))
    lake.deliver((FIRST, [insert("3", "a3", "b3")]), (added, [update(["1", "new", "b1", "8"])]))


def test_a_kill_after_the_table_was_written_anew_changes_nothing(tmp_path: Path) -> None:
    environment = {**os.environ, "MILLSTREAM_FAILPOINT": "delta.columns_rewritten"}
    body = KILLED.format(path=str(tmp_path))
    root = Path(__file__).parents[2]
    killed = subprocess.run([sys.executable, "-c", body], env=environment, cwd=root, capture_output=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    lake = Lake(tmp_path)
    deliver_renamed(lake)
    assert lake.read("id, text, b, n") == [(1, "new", "b1", 8), (2, "a2", "b2", 7), (3, "a3", "b3", 7)]
