"""Rows enter and leave filters, in random histories and any cut: mirrors and changelogs have just the rows inside."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.errors import MissingBase
from millstream.fold import fold
from millstream.model import SeqRange
from millstream.spark.changes import Shaped
from millstream.targets.base import Part
from millstream.targets.rejects import Guard, Held, Outstanding, Reject
from millstream.transforms.compiled import Compiled, compiled
from millstream.transforms.shape import FieldFilter, Shape, Shaping, Step
from tests.fixtures.copies import Copy
from tests.fixtures.examples import examples
from tests.fixtures.histories import History, Row
from tests.fixtures.shaped import with_letters

NOTES = FieldFilter("note", "in", ("", "a note"))
SHOPS = FieldFilter("shop", "equals", (1,))
WITHOUT_DOC = Step("drop", (("doc", None),))

HISTORIES = given(
    st.integers(0, 10**9),
    st.booleans(),
    st.integers(1, 60),
    st.lists(st.integers(0, 10**6), max_size=5),
    st.sampled_from([(NOTES,), (SHOPS,), (NOTES, SHOPS)]),
)


def inside(row: Row, filters: tuple[FieldFilter, ...]) -> bool:
    return (NOTES not in filters or row[2] in NOTES.values) and (SHOPS not in filters or row[0] == "1")


def bound(history: History, *, mirrors: bool = True, **shape: Any) -> Compiled:
    found = compiled(Shaping("shop", Shape(**shape), mirrors), history.relation)
    assert found is not None
    return found


def shaped(history: History, cuts: list[int], to: Compiled) -> Iterator[tuple[SeqRange, list[pa.RecordBatch]]]:
    for changes in history.batches(cuts):
        span = SeqRange(changes["_ms_seq"][0].as_py() - 1, changes["_ms_seq"][-1].as_py())
        batches = [to.changes(batch) for batch in changes.to_batches()]
        yield span, [batch for batch in batches if batch.num_rows]


def expected(history: History, filters: tuple[FieldFilter, ...]) -> set[tuple[Any, ...]]:
    return {(int(row[0]), *row[1:]) for row in history.rows.values() if inside(row, filters)}


@settings(max_examples=examples(15), deadline=None)
@HISTORIES
def test_a_mirror_has_the_rows_that_are_inside(
    tmp_path_factory: pytest.TempPathFactory,
    seed: int,
    full: bool,
    steps: int,
    cuts: list[int],
    filters: tuple[FieldFilter, ...],
) -> None:
    history = History(seed, full).play(steps)
    copy = Copy(tmp_path_factory.mktemp("mirror") / "copy.db", "duckdb" if seed % 8 == 0 else "sqlite")
    # Where a value that nobody sent would be needed, the column is left out: the next test is about that.
    to = bound(history, fields=filters, transforms=() if full else (WITHOUT_DOC,))
    for span, batches in shaped(history, cuts, to):
        copy.batch(span, [Part(to.relation, 1, iter(batches))])
    doc = "doc, " if full else ""
    wanted = {row if full else (*row[:3], row[4]) for row in expected(history, filters)}
    if history.changes and copy.exists():
        assert set(copy.rows(f"SELECT shop, id, note, {doc}{{amount}} FROM {{t}}")) == wanted
    else:
        assert not wanted


@settings(max_examples=examples(12), deadline=None)
@HISTORIES
def test_a_mirror_is_right_or_says_what_it_lacks(
    tmp_path_factory: pytest.TempPathFactory,
    seed: int,
    full: bool,
    steps: int,
    cuts: list[int],
    filters: tuple[FieldFilter, ...],
) -> None:
    history = History(seed).play(steps)
    copy = Copy(tmp_path_factory.mktemp("mirror") / "copy.db")
    to = bound(history, fields=filters)
    try:
        for span, batches in shaped(history, cuts, to):
            copy.batch(span, [Part(to.relation, 1, iter(batches))])
    except MissingBase:
        return
    if copy.exists():
        found = set(copy.rows("SELECT shop, id, note, doc, {amount} FROM {t}"))
        assert found == expected(history, filters)


@settings(max_examples=examples(12), deadline=None)
@HISTORIES
def test_a_changelog_folds_to_the_rows_that_are_inside(
    seed: int, full: bool, steps: int, cuts: list[int], filters: tuple[FieldFilter, ...]
) -> None:
    history = History(seed, full).play(steps)
    to = bound(history, mirrors=False, fields=filters, transforms=() if full else (WITHOUT_DOC,))
    changes = [batch for _, batches in shaped(history, cuts, to) for batch in batches]
    wanted = {row if full else (*row[:3], row[4]) for row in expected(history, filters)}
    if not changes:
        assert not wanted
        return
    assert rows_of(fold(changes, to.relation.key), full) == wanted
    if full:
        # Whole old rows tell what was inside: there is no delete of a row that was not.
        living: set[tuple[Any, ...]] = set()
        for change in pa.Table.from_batches(changes).to_pylist():
            key = (change["shop"], change["id"])
            old = change["_ms_before"] and (change["_ms_before"]["shop"], change["_ms_before"]["id"])
            match change["_ms_op"]:
                case "t":
                    living.clear()
                case "c":
                    assert key not in living
                    living.add(key)
                case "u":
                    living.remove(old)
                    living.add(key)
                case "d":
                    living.remove(old)


def rows_of(table: pa.Table, full: bool) -> set[tuple[Any, ...]]:
    found = set()
    for row in table.to_pylist():
        special = dict(row["_ms_special"])
        amount = special.get("amount", row["amount"])
        doc = (row["doc"],) if full else ()
        found.add((row["shop"], row["id"], row["note"], *doc, None if amount is None else str(amount)))
    return found


@settings(max_examples=examples(10), deadline=None)
@given(st.integers(0, 10**9), st.booleans(), st.integers(1, 60), st.lists(st.integers(0, 10**6), max_size=5))
def test_a_transformed_mirror_follows_moves_and_values_that_were_not_sent(
    tmp_path_factory: pytest.TempPathFactory, seed: int, full: bool, steps: int, cuts: list[int]
) -> None:
    directory = tmp_path_factory.mktemp("mirror")
    (directory / "salt").write_text("pepper")
    history = History(seed, full).play(steps)
    salt = f"file:{directory}/salt"
    to = bound(
        history,
        transforms=(
            Step("rename", (("id", "code"), ("doc", "text"))),
            Step("hash", (("code", salt),)),
            Step("cast", (("amount", "string"), ("shop", "bigint"))),
            Step("mask", (("note", "x"),)),
            Step("truncate", (("text", 5),)),
            Step("add", (("origin", "eu"), ("level", 7))),
        ),
    )
    copy = Copy(directory / "copy.db", "duckdb" if seed % 8 == 0 else "sqlite")
    for span, batches in shaped(history, cuts, to):
        copy.batch(span, [Part(to.relation, 1, iter(batches))])
    wanted = {
        (
            int(shop),
            hashlib.sha256(b"pepper" + id.encode()).hexdigest(),
            None if note is None else "x",
            None if doc is None else doc[:5],
            amount,
            "eu",
            7,
        )
        for shop, id, note, doc, amount in history.rows.values()
    }
    found = copy.rows("SELECT shop, code, note, text, amount, origin, level FROM {t}")
    assert set(found) == wanted


@settings(max_examples=examples(10), deadline=None)
@given(st.integers(0, 10**9), st.integers(1, 40))
def test_the_rows_of_a_source_give_the_rows_of_its_mirror(seed: int, steps: int) -> None:
    """What `rows` says of the source's rows is what the changes lead to."""
    history = History(seed, True).play(steps)
    shape: dict[str, Any] = {"fields": (NOTES,), "transforms": (Step("cast", (("amount", "string"),)),)}
    to = bound(history, **shape)
    changes = [batch for table in history.batches([]) for batch in table.to_batches()]
    source = fold(changes, history.relation.key)
    mirrored = fold([to.changes(batch) for batch in changes], to.relation.key)
    if not source.num_rows:
        assert not mirrored.num_rows
        return
    found = pa.Table.from_batches([to.rows(batch) for batch in source.combine_chunks().to_batches()])
    order = [("shop", "ascending"), ("id", "ascending")]
    assert found.sort_by(order).to_pylist() == mirrored.select(found.column_names).sort_by(order).to_pylist()


@settings(max_examples=15, deadline=None)
@given(
    st.randoms(use_true_random=False),
    st.sampled_from(["default", "full", "index"]),
    st.integers(1, 60),
    st.lists(st.integers(0, 60), max_size=5),
)
def test_a_mirror_is_right_but_for_the_rows_that_are_letters(
    tmp_path_factory: pytest.TempPathFactory, decides: random.Random, identity: str, steps: int, cuts: list[int]
) -> None:
    """Some amounts cannot be cast: whatever happens to their rows later, in whatever batch, the others are right."""
    history = History(decides, identity == "full", identity == "index").play(steps)
    shape = Shape(fields=(NOTES,), transforms=(WITHOUT_DOC, Step("cast", (("amount", "decimal(12,1)"),))))
    shaping, copy = Shaping("shop", shape, True), Copy(tmp_path_factory.mktemp("mirror") / "copy.db")
    letters, superseded = list[Reject](), set[str]()
    for changes in history.batches(cuts):
        span = SeqRange(changes["_ms_seq"][0].as_py() - 1, changes["_ms_seq"][-1].as_py())
        batches = changes.to_batches()
        made, more = with_letters(
            lambda known, of=batches: list(Shaped(shaping, history.relation, 1, of, known)),  # type: ignore[misc]
            letters,
        )
        letters += more
        held = [Held(one.event_id, one.seq, one.table, one.key) for one in letters if one.event_id not in superseded]
        guard = Guard(Outstanding(True, tuple(held), frozenset(one.event_id for one in letters)))
        relation = Shaped(shaping, history.relation, 1, []).relation
        copy.batch(span, [Part(relation, 1, guard.passed(relation, 1, iter(made)))])
        guard.check()
        superseded.update(guard.superseded)
    open_keys = {one.key for one in letters if one.event_id not in superseded}
    wanted = {(int(row[0]), row[1]): row for row in history.rows.values() if inside(row, (NOTES,))}
    lost = {key for key, row in wanted.items() if row[4] in ("NaN", "-0.01")}
    assert {f'{shop},"{id}"' for shop, id in lost} <= open_keys
    if not copy.exists():
        assert not wanted.keys() - lost
        return
    found = {
        (shop, id): (note, amount) for shop, id, note, amount in copy.rows("SELECT shop, id, note, amount FROM {t}")
    }
    right = {key: row for key, row in found.items() if f'{key[0]},"{key[1]}"' not in open_keys}
    assert right == {
        key: (row[2], row[4] and row[4][:-1]) for key, row in wanted.items() if f'{key[0]},"{key[1]}"' not in open_keys
    }
