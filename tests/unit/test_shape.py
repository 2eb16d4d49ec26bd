"""Filters and transforms on single changes, what cannot be compiled, and streams of an engine that have them."""

from __future__ import annotations

import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pyarrow as pa
import pytest

from millstream import Engine, StreamSpec, TargetSpec
from millstream.changelog import assemble
from millstream.errors import ConfigError, TargetRefused
from millstream.model import Relation
from millstream.testing import Script
from millstream.transforms.check import shape_findings
from millstream.transforms.compiled import Compiled, compiled
from millstream.transforms.shape import FieldFilter, Shape, Shaping, Step
from tests.fixtures.engines import QUICK, await_that, delivered, stream
from tests.fixtures.tuples import Change, delete, insert, journal_rows, relation, truncate, update

ORDERS = relation(("id", 23), ("status", 25), ("total", 1700, ((12 << 16) | 2) + 4), ("raw", 17), key=("id",))
WHOLE = replace(ORDERS, identity="f")
PAID = Shape(fields=(FieldFilter("status", "equals", ("paid",)),))


def bound(shape: Shape, of: Relation = ORDERS, *, mirrors: bool = False) -> Compiled:
    found = compiled(Shaping("shop", shape, mirrors), of)
    assert found is not None
    return found


def shaped(shape: Shape, changes: list[Change], of: Relation = ORDERS) -> list[dict[str, Any]]:
    made = bound(shape, of).changes(assemble(journal_rows(changes), of, 1, "aaaa"))
    made.validate(full=True)
    return pa.Table.from_batches([made]).to_pylist()


def seen(found: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Operation, key, status, the old key and the old status, of each change."""
    olds = [one["_ms_before"] or {"id": None, "status": None} for one in found]
    return [
        (one["_ms_op"], one["id"], one["status"], old["id"], old["status"])
        for one, old in zip(found, olds, strict=True)
    ]


def test_a_salt_that_cannot_be_read_is_found_before_anything_runs(
    script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SALT", "pepper")
    steps = [Step("hash", (("status", reference),), ("public.*",)) for reference in ("env:SALT", "env:NO_SALT")]

    def findings(*transforms: Step) -> list[tuple[str, str]]:
        shop = replace(stream(script, tmp_path), shape=Shape(transforms=transforms))
        return [(one.severity.value, one.message) for one in shape_findings(shop, [ORDERS], never)]

    def never(*_: object) -> NoReturn:
        raise AssertionError("nothing of it is in SQL")

    assert [severity for severity, _ in findings(steps[0])] == ["ok"]
    assert findings(*steps) == [
        ("error", "stream shop: the salt of a hash cannot be read: the environment variable NO_SALT is not set")
    ]


def test_rows_enter_and_leave_when_only_keys_are_known() -> None:
    nothing = [None] * 3
    found = shaped(
        PAID,
        [
            insert("1", "paid", "1.00", None),
            insert("2", "open", "1.00", None),
            update(["2", "paid", "1.00", None]),
            update(["1", "open", "1.00", None]),
            update(["9", "open", "1.00", None], key=["2", *nothing]),
            update(["8", "paid", "1.00", None], key=["9", *nothing]),
            delete(key=["8", *nothing]),
            truncate(),
        ],
    )
    assert seen(found) == [
        ("c", 1, "paid", None, None),
        ("u", 2, "paid", None, None),
        ("d", 1, None, 1, None),
        ("d", 2, None, 2, None),
        ("u", 8, "paid", 9, None),
        ("d", 8, None, 8, None),
        ("t", None, None, None, None),
    ]
    assert [one["_ms_seq"] for one in found] == [1, 3, 4, 5, 6, 7, 8]
    assert [one["_ms_deleted"] for one in found] == [False, False, True, True, False, True, True]


def test_rows_enter_and_leave_when_old_rows_are_known() -> None:
    paid, open_ = ["1", "paid", "1.00", None], ["1", "open", "NaN", None]
    found = shaped(
        PAID,
        [
            update(open_, row=open_),
            update(paid, row=open_),
            update(["2", "paid", ..., None], row=paid),
            update(open_, row=["2", "paid", "1.00", None]),
            delete(row=open_),
            delete(row=paid),
        ],
        WHOLE,
    )
    assert seen(found) == [
        ("c", 1, "paid", None, None),
        ("u", 2, "paid", 1, "paid"),
        ("d", 2, "paid", 2, "paid"),
        ("d", 1, "paid", 1, "paid"),
    ]
    assert [str(one["total"]) for one in found] == ["1.00"] * 4
    assert [one["_ms_unchanged"] for one in found] == [[]] * 4


def test_a_filter_on_the_key_knows_old_keys() -> None:
    shape = Shape(fields=(FieldFilter("id", "in", (1, 2)),))
    nothing = [None] * 3
    found = shaped(
        shape,
        [
            update(["1", "a", None, None], key=["7", *nothing]),
            update(["8", "a", None, None], key=["7", *nothing]),
            update(["7", "a", None, None], key=["2", *nothing]),
            delete(key=["7", *nothing]),
        ],
    )
    assert seen(found) == [("c", 1, "a", None, None), ("d", 2, None, 2, None)]


def test_only_the_operations_that_are_asked_for() -> None:
    shape = replace(PAID, ops=("insert", "update"))
    found = shaped(shape, [insert("1", "paid", None, None), update(["1", "open", None, None]), truncate()])
    assert seen(found) == [("c", 1, "paid", None, None)]


def test_what_is_added_is_not_in_rows_that_are_not_there() -> None:
    shape = Shape(transforms=(Step("add", (("origin", "eu"),)), Step("rename", (("id", "code"),))))
    made = bound(shape)
    changes = [insert("1", "a", None, None), update(["2", "a", None, None], key=["1", None, None, None]), truncate()]
    found = made.changes(assemble(journal_rows([*changes, delete(key=["2", None, None, None])]), ORDERS, 1, "aaaa"))
    table = pa.Table.from_batches([found])
    assert made.relation.key == ("code",)
    assert table["origin"].to_pylist() == ["eu", "eu", None, None]
    assert table["code"].to_pylist() == [1, 2, None, 2]
    assert [old and (old["code"], old["origin"]) for old in table["_ms_before"].to_pylist()] == [
        *(None, (1, None)),
        *(None, (2, None)),
    ]


def test_exact_texts_follow_their_columns() -> None:
    row = ["1", "a", "NaN", None]
    renamed = shaped(Shape(transforms=(Step("rename", (("total", "sum"),)),)), [update(row, row=row)], WHOLE)
    assert (renamed[0]["sum"], dict(renamed[0]["_ms_special"])) == (None, {"sum": "NaN", "_ms_before.sum": "NaN"})
    cast = shaped(Shape(transforms=(Step("cast", (("total", "string"),)),)), [update(row, row=row)], WHOLE)
    assert (cast[0]["total"], cast[0]["_ms_before"]["total"], cast[0]["_ms_special"]) == ("NaN", "NaN", [])


def test_a_value_that_a_cast_cannot_hold_is_an_error_without_the_value() -> None:
    shape = Shape(transforms=(Step("cast", (("total", "int"),)),))
    assert shaped(shape, [insert("1", "a", "12.00", None)])[0]["total"] == 12
    for total in ("12.34", "NaN"):
        with pytest.raises(TargetRefused, match=r"public\.t\.total: a value has no exact form as int32") as refused:
            shaped(shape, [insert("1", "a", total, None)])
        assert "12.34" not in str(refused.value)


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        (Shape(fields=(FieldFilter("gone", "equals", (1,)),)), "equals: public.t has no column gone"),
        (Shape(fields=(FieldFilter("id", "prefix", ("a",)),)), "public.t.id is int32, and prefix is for text"),
        (Shape(fields=(FieldFilter("id", "equals", ("one",)),)), "public.t.id is int32, and `one` is not"),
        (Shape(fields=(FieldFilter("total", "equals", (0.1,)),)), r"public.t.total is decimal128\(12, 2\), and `0.1`"),
        (Shape(fields=(FieldFilter("status", "regex", ("(",)),)), "public.t.status: not a regular expression"),
        (Shape(transforms=(Step("drop", (("gone", None),)),)), "drop: public.t has no column gone"),
        (Shape(transforms=(Step("drop", (("id", None),)),)), "drop: public.t.id is part of the key"),
        (Shape(transforms=(Step("mask", (("id", "x"),)),)), "mask: public.t.id is part of the key"),
        (Shape(transforms=(Step("cast", (("id", "smallint"),)),)), "cast to smallint: public.t.id is part of the key"),
        (Shape(transforms=(Step("cast", (("total", "money"),)),)), "cast: public.t.total: there is no type money"),
        (Shape(transforms=(Step("cast", (("raw", "string"),)),)), "cast: public.t.raw is binary, of which no value"),
        (Shape(transforms=(Step("rename", (("total", "id"),)),)), "rename: public.t has a column id already"),
        (Shape(transforms=(Step("rename", (("total", "_ms_op"),)),)), "names that begin with _ms_ are ours"),
        (Shape(transforms=(Step("add", (("total", 1),)),)), "add: public.t has a column total already"),
        (Shape(transforms=(Step("truncate", (("total", 1),)),)), "truncate: public.t.total is decimal128"),
    ],
)
def test_what_does_not_fit_the_table_names_stream_table_and_column(shape: Shape, said: str) -> None:
    with pytest.raises(ConfigError, match=f"^stream shop: .*{said}"):
        bound(shape, mirrors=True)


def test_a_changelog_may_lose_its_key() -> None:
    made = bound(Shape(transforms=(Step("drop", (("id", None),)),)))
    assert (made.relation.key, [column.name for column in made.relation.columns]) == ((), ["status", "total", "raw"])


def test_a_table_that_nothing_is_for_goes_through() -> None:
    elsewhere = Shape(transforms=(Step("drop", (("id", None),), ("public.other",)),))
    assert compiled(Shaping("shop", elsewhere, True), ORDERS) is None


def with_copy(script: Script, root: Path, shape: Shape) -> StreamSpec:
    spec = stream(script, root)
    copy = TargetSpec("copy", "sqlite", QUICK, options={"path": str(root / "copy.db")})
    return replace(spec, targets=(*spec.targets, copy), shape=shape)


def copied(root: Path) -> list[tuple[Any, ...]]:
    with sqlite3.connect(root / "copy.db") as db:
        try:
            return db.execute('SELECT id, note, origin FROM "public.orders" ORDER BY id').fetchall()
        except sqlite3.OperationalError:
            return []


def test_the_targets_of_a_stream_get_what_its_shape_leaves(engine: Engine, script: Script, tmp_path: Path) -> None:
    shape = Shape(fields=(FieldFilter("note", "prefix", ("a",)),), transforms=(Step("add", (("origin", "eu"),)),))
    engine.start()
    engine.upsert_stream(with_copy(script, tmp_path, shape))
    engine.await_ready("shop", 120)
    with script.transaction() as changes:
        for number, note in enumerate(("a", "b", "ab")):
            changes.insert("public.orders", id=number, note=note)
    script.insert("public.items", id=5, note="b")
    await_that(lambda: copied(tmp_path) == [(0, "a", "eu"), (2, "ab", "eu")])
    with script.transaction() as changes:
        changes.update("public.orders", {"id": 0, "note": "b"})
        changes.update("public.orders", {"id": 1, "note": "aa"})
    await_that(lambda: copied(tmp_path) == [(1, "aa", "eu"), (2, "ab", "eu")])
    await_that(lambda: len(delivered(tmp_path).get("public.orders", ())) == 4)
    assert delivered(tmp_path) == {"public.orders": [(0, "a"), (2, "ab"), (0, None), (1, "aa")]}
    await_that(lambda: [one.events_replicated for one in engine.get_status("shop").targets] == [4, 4])
    with pytest.raises(ConfigError, match=r"its filters or transforms were changed, and copy has the rows"):
        engine.upsert_stream(with_copy(script, tmp_path, Shape()))
    # A changelog has from then on what the new ones say.
    engine.upsert_stream(replace(stream(script, tmp_path), shape=replace(shape, fields=())))
    engine.await_ready("shop", 120)
    script.insert("public.items", id=6, note="b")
    await_that(lambda: delivered(tmp_path).get("public.items") == [(6, "b")])


def test_a_shape_that_does_not_fit_stops_the_target_and_says_why(
    engine: Engine, script: Script, tmp_path: Path
) -> None:
    engine.start()
    engine.upsert_stream(with_copy(script, tmp_path, Shape(transforms=(Step("drop", (("id", None),)),))))
    engine.await_ready("shop", 120)
    script.insert("public.orders", id=1, note="a")
    await_that(lambda: engine.get_status("shop").targets[1].error is not None)
    assert "stream shop: drop: public.orders.id is part of the key" in str(engine.get_status("shop").targets[1].error)
