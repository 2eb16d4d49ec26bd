"""What a changelog in a database adds up to is what its table holds, whatever happened to it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.changelog import exposed
from millstream.errors import VerifyFailed
from millstream.fold import fold
from millstream.model import Relation, SeqRange
from millstream.targets.base import Part, Reader, Verifiable
from millstream.targets.forms import told
from millstream.targets.lanes.tables import mirror_key
from tests.fixtures.copies import Copy
from tests.fixtures.histories import History


def filled(directory: Any, kind: str, history: History, cuts: list[int]) -> tuple[Copy, Reader]:
    copy = Copy(directory / "log.db", kind, write="changelog")
    for changes in history.batches(cuts):
        span = SeqRange(changes["_ms_seq"][0].as_py() - 1, changes["_ms_seq"][-1].as_py())
        copy.batch(span, [Part(history.relation, 1, iter(changes.to_batches()))])
    assert isinstance(copy.target, Verifiable)
    return copy, copy.target.reader()


def texts(relation: Relation, rows: pa.Table) -> Counter[tuple[str | None, str]]:
    keys, all_of_it = told(rows, [c.name for c in exposed(relation).columns], mirror_key(relation))
    return Counter(zip(keys.to_pylist(), all_of_it.to_pylist(), strict=True))


def held(reader: Reader, relation: Relation) -> Counter[tuple[str | None, str]]:
    parts = [rows for part in reader.parts(relation) for rows in reader.read(relation, part)]
    return sum((texts(relation, rows) for rows in parts), Counter[tuple[str | None, str]]())


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**9), st.booleans(), st.integers(1, 60), st.lists(st.integers(0, 10**6), max_size=5))
def test_a_changelog_adds_up_to_the_table(
    tmp_path_factory: pytest.TempPathFactory, seed: int, full: bool, steps: int, cuts: list[int]
) -> None:
    history = History(seed, full).play(steps)
    kind = "duckdb" if seed % 4 == 0 else "sqlite"
    _, reader = filled(tmp_path_factory.mktemp("log"), kind, history, cuts)
    changes = [batch for table in history.batches([]) for batch in table.to_batches()]
    source = fold(changes, history.relation.key)
    wanted = Counter[tuple[str | None, str]]()
    for batch in source.combine_chunks().to_batches():
        wanted += texts(history.relation, reader.expected(history.relation, batch))
    assert wanted.total() == len(history.rows)
    assert held(reader, history.relation) == wanted


@pytest.mark.parametrize("kind", ["sqlite", "duckdb"])
def test_a_change_that_is_lost_or_altered_is_found(tmp_path_factory: pytest.TempPathFactory, kind: str) -> None:
    history = History(7).play(30)
    copy, reader = filled(tmp_path_factory.mktemp("log"), kind, history, [])
    before = held(reader, history.relation)
    copy.rows("UPDATE {t} SET note = 'planted' WHERE note IS NOT NULL; SELECT 1")
    assert held(reader, history.relation) != before
    copy.rows("DELETE FROM {t} WHERE _ms_op = 'c'; SELECT 1")
    with pytest.raises(VerifyFailed, match="is not whole"):
        held(reader, history.relation)
