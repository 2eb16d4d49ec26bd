"""The changelog's own columns, exact and the same for the same change."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from millstream import changelog
from millstream.sources.decoders import messages
from tests.fixtures.tuples import NUMERIC_12_2, delete, insert, journal_rows, relation, truncate, update

TABLE = relation(("id", 20), ("price", 1700, NUMERIC_12_2), ("note", 25), key=["id"])
PREFIX = "0123456789ab"


def test_a_change_has_its_columns_and_ours() -> None:
    rows = journal_rows(
        [insert("1", "NaN", "x"), update(["2", "1.50", ...], key=["1", None, None])],
        first_seq=41,
        commit_position=[0x1_6B37_48AA, 2**62],
        tx_index=[0, 1_234_567],
    )
    batch = changelog.assemble(rows, TABLE, 3, PREFIX)
    batch.validate(full=True)
    assert batch.schema == changelog.schema(TABLE)
    assert batch.schema.names == ["id", "price", "note", *changelog.METADATA]
    created, updated = batch.to_pylist()
    assert created == {
        "id": 1,
        "price": None,
        "note": "x",
        "_ms_op": "c",
        "_ms_seq": 41,
        "_ms_position": "00000001/6B3748AA",
        "_ms_tx_index": 0,
        "_ms_commit_ts": datetime(1970, 1, 1, 0, 0, 41, tzinfo=UTC),
        "_ms_txid": 741,
        "_ms_event_id": "0123456789ab-000000016b3748aa-0",
        "_ms_deleted": False,
        "_ms_schema": 3,
        "_ms_before": None,
        "_ms_unchanged": [],
        "_ms_special": [("price", "NaN")],
    }
    assert updated["_ms_op"] == "u"
    assert updated["_ms_position"] == "40000000/00000000"
    assert updated["_ms_event_id"] == "0123456789ab-4000000000000000-1234567"
    assert updated["_ms_before"] == {"id": 1, "price": None, "note": None}
    assert updated["_ms_unchanged"] == ["note"]


def test_deletes_and_truncates_say_that_rows_are_gone() -> None:
    changes = [insert("1", None, None), truncate(), delete(key=["1", None, None]), update(["1", None, None])]
    batch = changelog.assemble(journal_rows(changes), TABLE, 1, PREFIX)
    assert batch["_ms_op"].to_pylist() == ["c", "t", "d", "u"]
    assert batch["_ms_deleted"].to_pylist() == [False, True, True, False]
    assert batch["_ms_before"].to_pylist() == [None, None, {"id": 1, "price": None, "note": None}, None]


def test_the_same_change_gets_the_same_event_id_however_it_is_cut() -> None:
    rows = journal_rows([insert(str(i), None, None) for i in range(50)])
    whole = changelog.assemble(rows, TABLE, 1, PREFIX)
    parts = [changelog.assemble(rows.slice(at, 7), TABLE, 1, PREFIX) for at in range(0, 50, 7)]
    assert pa.Table.from_batches(parts).equals(pa.Table.from_batches([whole]))
    assert len(set(whole["_ms_event_id"].to_pylist())) == 50


@pytest.mark.parametrize("most", [1, 9, 10, 12])
def test_an_event_id_tells_the_place_whatever_the_length_of_its_number(most: int) -> None:
    rows = journal_rows([insert(str(i), None, None) for i in range(30)])
    position = [1000 + i // (most + 1) for i in range(30)]
    index = [i % (most + 1) for i in range(30)]
    for name, values in (("commit_position", position), ("tx_index", index)):
        at = rows.schema.get_field_index(name)
        rows = rows.set_column(at, rows.schema.field(at), pa.array(values, rows.schema.field(at).type))
    found = changelog.assemble(rows, TABLE, 1, PREFIX)["_ms_event_id"].to_pylist()
    assert found == [f"{PREFIX}-{place:016x}-{number}" for place, number in zip(position, index, strict=True)]


def test_pieces_hold_whole_rows_and_all_of_them() -> None:
    rows = journal_rows([insert("1", None, "x" * size) for size in (10, 10, 900, 10, 10)]).slice(1)
    sizes = [piece.num_rows for piece in changelog.pieces(rows, 100)]
    assert sizes == [1, 1, 2]
    assert pa.Table.from_batches(changelog.pieces(rows, 100)).equals(pa.Table.from_batches([rows]))
    assert list(changelog.pieces(rows.slice(0, 0))) == []


def test_a_users_column_called_like_ours_is_renamed() -> None:
    clashing = relation(
        ("_ms_seq", 20), ("_MS_Op", 25), ("_ms__seq", 25), ("_ms_mine", 25), ("_ms_before.x", 25), key=["_ms_seq"]
    )
    names = ["_ms___seq", "_MS__Op", "_ms__seq", "_ms_mine", "_ms__before.x"]
    assert changelog.schema(clashing).names[:5] == names
    assert changelog.exposed(clashing).key == changelog.exposed(clashing).primary_key == ("_ms___seq",)
    rows = journal_rows([update(["7", ..., "b", "c", b"\xff"], row=["6", "a", "b", "c", b"\xfe"])])
    (row,) = changelog.assemble(rows, clashing, 1, PREFIX).to_pylist()
    assert [row[name] for name in names] == [7, None, "b", "c", None]
    assert row["_ms_seq"] == 1
    assert row["_ms_unchanged"] == ["_MS__Op"]
    assert row["_ms_special"] == [("_ms__before.x", "\\xff"), ("_ms_before._ms__before.x", "\\xfe")]


def test_a_table_without_columns_has_a_changelog() -> None:
    batch = changelog.assemble(journal_rows([insert(), insert()]), relation(), 1, PREFIX)
    assert batch.schema.names == [name for name in changelog.METADATA if name != "_ms_before"]
    assert batch["_ms_seq"].to_pylist() == [1, 2]


def test_no_rows_have_a_changelog() -> None:
    batch = changelog.assemble(journal_rows([insert("1", None, None)]).slice(1), TABLE, 1, PREFIX)
    assert batch.num_rows == 0
    assert batch.schema == changelog.schema(TABLE)


def test_messages_have_a_changelog() -> None:
    of = messages("postgres")
    raw = b"M\1" + bytes(8) + b"audit\0\0\0\0\2hi"
    batch = changelog.assemble(journal_rows([("m", raw)]), of, 0, PREFIX)
    (row,) = batch.to_pylist()
    assert (row["prefix"], row["content"], row["transactional"], row["_ms_op"]) == ("audit", b"hi", True, "m")


def test_a_changelog_survives_parquet(tmp_path: Path) -> None:
    changes = [insert("1", "NaN", "x"), update(["1", "2.00", ...], row=["1", "1.00", "y"]), truncate()]
    batch = changelog.assemble(journal_rows(changes), TABLE, 1, PREFIX)
    pq.write_table(pa.Table.from_batches([batch]), tmp_path / "part.parquet")
    assert pq.read_table(tmp_path / "part.parquet").to_pylist() == batch.to_pylist()
