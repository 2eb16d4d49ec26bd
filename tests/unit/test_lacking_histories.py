"""Values that nobody sent and filters need, in random histories and any cut: they are read at the source."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.engine import letters
from millstream.engine.repair import Repair, repair
from millstream.model import Relation
from millstream.spark.changes import Shaped
from millstream.targets.rejects import Outstanding
from millstream.transforms.shape import FieldFilter, Shape, Shaping, Step
from tests.fixtures.examples import examples
from tests.fixtures.histories import History, Row
from tests.fixtures.rereading import Rereading

BY_DOC = FieldFilter("doc", "regex", ("[0-4]$",))
BY_NOTE = FieldFilter("note", "prefix", ("a note",))
RENAMED = Step("rename", (("doc", "words"),))


def inside(row: Row, by: FieldFilter) -> bool:
    if by is BY_NOTE:
        return row[2] is not None and row[2].startswith("a note")
    return row[3] is not None and row[3][-1] in "01234"


@settings(max_examples=examples(20), deadline=None)
@given(
    decides=st.randoms(use_true_random=False),
    index=st.booleans(),
    steps=st.integers(1, 60),
    cuts=st.lists(st.integers(0, 60), max_size=5),
    ahead=st.integers(0, 60),
    by=st.sampled_from([BY_DOC, BY_NOTE]),
)
def test_a_filtered_mirror_is_right_though_values_were_not_sent(
    tmp_path_factory: pytest.TempPathFactory,
    decides: random.Random,
    index: bool,
    steps: int,
    cuts: list[int],
    ahead: int,
    by: FieldFilter,
) -> None:
    """However far the source has gone on, and wherever batches are cut: in the end all rows are right, no letters."""
    history = History(decides, False, index, alike=True).play(steps)
    with pytest.MonkeyPatch.context() as patched:
        mirror = delivered(history, by, tmp_path_factory.mktemp("mirror"), cuts, ahead, patched)
    assert [one for one in mirror.store.letters() if one.state.value == "waiting"] == []
    assert rows(mirror) == {(int(row[0]), *row[1:]) for row in history.rows.values() if inside(row, by)}


def test_such_histories_find_a_value_that_goes_along_with_another_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Were nothing in doubt, a row could get the value of the one that took its key: they must be drawn so."""

    def sure(*asked: Any) -> Repair:
        return replace(repair(*asked), doubts=(), lasting=())

    monkeypatch.setattr(letters, "repair", sure)

    def is_wrong(seed: int) -> bool:
        history = History(seed, alike=True).play(seed)
        mirror = delivered(history, BY_NOTE, tmp_path / str(seed), [seed // 2], seed, monkeypatch)
        return rows(mirror) != {(int(row[0]), *row[1:]) for row in history.rows.values() if inside(row, BY_NOTE)}

    assert any(is_wrong(seed) for seed in range(1, 31))


def delivered(
    history: History, by: FieldFilter, directory: Path, cuts: list[int], ahead: int, patched: pytest.MonkeyPatch
) -> Rereading:
    """A mirror of the history behind a filter, with a batch that ends where it is late to ask the source."""
    shape = Shape(fields=(by,), transforms=(RENAMED,))
    shaping = Shaping("shop", shape, True)

    def shaped(
        batches: list[pa.RecordBatch], known: Outstanding | None, isolate: bool
    ) -> tuple[Relation, list[pa.RecordBatch]]:
        made = Shaped(shaping, history.relation, 1, batches, known)
        return made.relation, list(made)

    directory.mkdir(exist_ok=True)
    mirror = Rereading(history, shape, shaped, directory, ahead)
    mirror.deliver([*cuts, *history.late], patched)
    return mirror


def rows(mirror: Rereading) -> set[tuple[Any, ...]]:
    there = mirror.copy.exists()
    return set(mirror.copy.rows("SELECT shop, id, note, words, amount FROM {t}")) if there else set()
