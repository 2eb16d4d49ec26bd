"""Changes taken apart for SQL and joined again are those that are shaped by column, whatever happens in between.

Without Spark, and without SQL: what both ways have in common, on histories that Hypothesis can shorten.
"""

from __future__ import annotations

import random
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.engine.batch import named_error
from millstream.spark.changes import Shaped
from millstream.spark.images import Binding, split
from millstream.spark.packed import pack, unpack
from millstream.targets.rejects import Outstanding
from millstream.transforms.shape import FieldFilter, Shape, Shaping, Step
from tests.fixtures.histories import History
from tests.fixtures.shaped import with_letters

SHAPE = Shape(
    fields=(FieldFilter("note", "in", ("", "a note")), FieldFilter("shop", "in", (0, 1))),
    transforms=(
        Step("drop", (("doc", None),)),
        Step("cast", (("amount", "decimal(12,1)"),)),
        Step("rename", (("id", "code"),)),
        Step("add", (("origin", "eu"),)),
    ),
)


def by_images(
    shaping: Shaping, history: History, batches: list[pa.RecordBatch], known: Outstanding, scratch: Path
) -> list[pa.RecordBatch]:
    binding = Binding(shaping, history.relation, ())
    images = split(binding, batches, lambda: 0, 1, known)
    packed = list(pack(binding, 1, 0, isolate=True)(images))
    found = unpack(packed, {1: binding.bound().relation}, scratch)
    if found.error is not None:
        raise named_error(found.error)
    return list(found.tables[1].batches())


@settings(max_examples=12, deadline=None)
@given(
    st.randoms(use_true_random=False),
    st.sampled_from(["default", "full", "index"]),
    st.integers(1, 60),
    st.lists(st.integers(0, 60), max_size=4),
)
def test_both_ways_give_the_same_changes_and_letters(
    tmp_path_factory: pytest.TempPathFactory, decides: random.Random, identity: str, steps: int, cuts: list[int]
) -> None:
    """Rows enter and leave the filters, some cannot be cast, and the changes are cut anywhere."""
    history = History(decides, identity == "full", identity == "index").play(steps)
    shaping, scratch = Shaping("shop", SHAPE, True), tmp_path_factory.mktemp("images")
    batches = [batch for table in history.batches(cuts) for batch in table.to_batches()]
    expected, letters = with_letters(lambda known: list(Shaped(shaping, history.relation, 1, batches, known)))
    found, others = with_letters(lambda known: by_images(shaping, history, batches, known, scratch))
    told = [{(one.event_id, one.key, one.kind, one.reason) for one in some} for some in (letters, others)]
    assert told[0] == told[1]
    rows = [[row for batch in some for row in batch.to_pylist()] for some in (expected, found)]
    assert rows[0] == rows[1]
