"""Values that nobody sent and filters need, in random histories and any cut: they are read at the source."""

from __future__ import annotations

import random

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
    shape = Shape(fields=(by,), transforms=(RENAMED,))
    shaping = Shaping("shop", shape, True)

    def shaped(
        batches: list[pa.RecordBatch], known: Outstanding | None, isolate: bool
    ) -> tuple[Relation, list[pa.RecordBatch]]:
        made = Shaped(shaping, history.relation, 1, batches, known)
        return made.relation, list(made)

    mirror = Rereading(history, shape, shaped, tmp_path_factory.mktemp("mirror"), ahead)
    with pytest.MonkeyPatch.context() as patched:
        mirror.deliver(cuts, patched)
    assert [one for one in mirror.store.letters() if one.state.value == "waiting"] == []
    wanted = {(int(row[0]), *row[1:]) for row in history.rows.values() if inside(row, by)}
    if mirror.copy.exists():
        assert set(mirror.copy.rows("SELECT shop, id, note, words, amount FROM {t}")) == wanted
    else:
        assert not wanted
