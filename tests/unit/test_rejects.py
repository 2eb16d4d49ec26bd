"""Changes that leave a task: packed and unpacked many at a time, and no more of them than may leave it at once."""

from __future__ import annotations

import pyarrow as pa
import pytest

from millstream.changelog import assemble
from millstream.errors import MissingBase, RowRefused
from millstream.targets import rejects
from millstream.targets.rejects import packed, packed_apart, rejected, substituted, unpacked, unpacked_together
from tests.fixtures.tuples import insert, journal_rows, relation, update

RELATION = relation(("id", 20), ("tags", 1009), ("price", 1700), ("doc", 25), key=("id",))
CHANGES = [
    insert("1", "{a,b}", "NaN", "long"),
    update(["2", None, "1.5", ...], key=["1", None, None, None]),
    update(["3", "{}", None, ...]),
]


def changes() -> pa.Table:
    return pa.Table.from_batches([assemble(journal_rows(CHANGES), RELATION, 1, "aaaa")])


def test_rows_that_are_packed_apart_are_unpacked_one_by_one_and_together() -> None:
    rows = changes()
    apart = packed_apart(pa.concat_tables([rows, rows.slice(1)]))
    assert [unpacked(one) for one in apart] == [rows.slice(at, 1) for at in (0, 1, 2, 1, 2)]
    assert unpacked_together(apart[:3]).equals(rows)
    assert unpacked_together(apart[1:2]).equals(unpacked(apart[1]))
    assert packed_apart(rows.slice(0, 0)) == []


def test_streams_whose_schemas_are_not_written_alike_are_unpacked_together() -> None:
    rows = changes()
    other = rows.replace_schema_metadata({"said": "by somebody else"})
    found = unpacked_together([packed(rows.slice(0, 1)), packed(other.slice(1, 1))])
    assert found.equals(rows.slice(0, 2))


def test_completed_changes_stand_in_the_places_of_those_that_lack_values() -> None:
    (batch,) = changes().to_batches()
    whole = changes().slice(2).set_column(batch.schema.get_field_index("doc"), batch.schema.field("doc"), [["came"]])
    found = substituted(batch, {whole["_ms_event_id"][0].as_py(): packed(whole), "of another table": b""})
    assert found["doc"].to_pylist() == ["long", None, "came"]
    assert found["id"].to_pylist() == [1, 2, 3]


def test_no_more_rejects_leave_a_task_than_may(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = changes()
    found = rejected(RELATION, 1, rows, ("id",), MissingBase("it lacks"))
    assert [(one.seq, one.key, one.kind) for one in found] == [
        (1, "1", "missing_base"),
        (2, "2", "missing_base"),
        (3, "3", "missing_base"),
    ]
    assert [unpacked(one.row) for one in found] == [rows.slice(at, 1) for at in range(3)]
    monkeypatch.setattr(rejects, "AT_ONCE", 2)
    assert len(rejected(RELATION, 1, rows, ("id",), RowRefused("no"))) == 2
    assert len(rejected(RELATION, 1, rows, ("id",), MissingBase("it lacks"))) == 3
    monkeypatch.setattr(rejects, "BYTES_AT_ONCE", 1)
    assert len(rejected(RELATION, 1, rows, (), MissingBase("it lacks"))) == 1
