"""Row messages of every shape become columns, row for row; bytes that are no message are refused."""

from __future__ import annotations

import pickle
import struct
from types import EllipsisType
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.errors import JournalCorrupt
from millstream.model import Relation
from millstream.sources.base import Decoded
from millstream.sources.decoders import decoder
from millstream.sources.postgres import decode as module
from tests.fixtures.examples import examples
from tests.fixtures.tuples import OID, Cell, Change, cells, columns, delete, insert, relation, truncate, update

TABLE = relation(("id", 20), ("a", 25), ("b", 23), key=["id"])


def decoded(of: Relation, changes: list[Change]) -> Decoded:
    result = decoder(of).decode(*columns(changes))
    for part in (result.after, result.before, result.unchanged, result.special):
        part.validate(full=True)
    return result


def rows(batch: pa.RecordBatch) -> list[tuple[Any, ...]]:
    return [tuple(row.values()) for row in batch.to_pylist()]


def test_every_shape_comes_out_in_the_order_it_came_in() -> None:
    result = decoded(
        TABLE,
        [
            insert("1", "x", "10"),
            update(["1", "y", None]),
            truncate(),
            update(["2", ..., "12"], key=["1", None, None]),
            delete(key=["2", None, None]),
            insert("3", "", "-7"),
            update(["3", ..., "8"], row=["3", "large", "-7"]),
            delete(row=["3", "large", "8"]),
        ],
    )
    nothing = (None, None, None)
    assert rows(result.after) == [
        (1, "x", 10),
        (1, "y", None),
        nothing,
        (2, None, 12),
        (2, None, None),
        (3, "", -7),
        (3, None, 8),
        (3, "large", 8),
    ]
    assert rows(result.before) == [
        nothing,
        nothing,
        nothing,
        (1, None, None),
        (2, None, None),
        nothing,
        (3, "large", -7),
        (3, "large", 8),
    ]
    assert result.has_before.tolist() == [False, False, False, True, True, False, True, True]
    assert result.unchanged.to_pylist() == [[], [], [], ["a"], [], [], ["a"], []]
    assert result.special.to_pylist() == [[]] * 8


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_chunks_change_nothing(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = [
        insert("1", b"\xff", "10"),
        update(["1", ..., "5"], row=["1", b"\xfe", "10"]),
        truncate(),
        insert("2", ..., "bad"),
        delete(key=["2", None, None]),
    ]
    whole = decoded(TABLE, changes)
    monkeypatch.setattr(module, "CHUNK_ROWS", size)
    cut = decoded(TABLE, changes)
    assert cut.after.equals(whole.after)
    assert cut.before.equals(whole.before)
    assert cut.has_before.tolist() == whole.has_before.tolist()
    assert cut.unchanged.equals(whole.unchanged)
    assert (
        cut.special.to_pylist()
        == whole.special.to_pylist()
        == [
            [("a", "\\xff")],
            [("_ms_before.a", "\\xfe")],
            [],
            [("b", "bad")],
            [],
        ]
    )


def test_a_chunk_ends_before_it_has_too_many_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    _, payload = columns([insert("1", "x" * size, "1") for size in (10, 10, 500, 10, 10, 10)])
    monkeypatch.setattr(module, "CHUNK_BYTES", 120)
    assert list(module.chunks(payload, 3)) == [(0, 2), (2, 3), (3, 6)]
    monkeypatch.setattr(module, "CHUNK_CELLS", 6)
    assert list(module.chunks(payload.slice(3), 3)) == [(0, 2), (2, 3)]


def test_a_row_too_large_for_small_offsets_decodes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    of = relation(("id", 20), ("a", 25), ("b", 17), ("c", 16), ("d", 1082), key=["id"])
    changes = [
        insert("1", "x" * 300, "\\x00ff", "t", "2024-01-01"),
        update(["2", ..., None, "f", "infinity"], row=["1", b"\xff", "\\x00ff", "t", "2024-01-01"]),
    ]
    small = decoded(of, changes)
    monkeypatch.setattr("millstream.sources.postgres.cells._SMALL", 10)
    large = decoded(of, changes)
    assert large.after.equals(small.after)
    assert large.before.equals(small.before)
    assert large.special.equals(small.special)
    assert large.after["a"].to_pylist() == ["x" * 300, None]


def test_a_slice_of_an_array_decodes_like_an_array_of_its_own() -> None:
    changes = [insert(str(i), "x" * i, None) for i in range(20)]
    op, payload = columns(changes)
    part = decoder(TABLE).decode(op[7:12], payload.slice(7, 5))
    assert rows(part.after) == [(i, "x" * i, None) for i in range(7, 12)]


def test_no_rows_have_a_schema() -> None:
    result = decoded(TABLE, [])
    assert result.after.schema == pa.schema([("id", pa.int64()), ("a", pa.string()), ("b", pa.int32())])
    assert result.after.num_rows == result.before.num_rows == len(result.unchanged) == len(result.special) == 0


def test_only_truncates() -> None:
    result = decoded(TABLE, [truncate(), truncate()])
    assert rows(result.after) == [(None, None, None)] * 2
    assert not result.has_before.any()


def test_a_table_without_columns_has_rows() -> None:
    result = decoded(relation(), [insert(), insert(), delete(row=())])
    assert (result.after.num_rows, result.after.num_columns) == (3, 0)
    assert result.has_before.tolist() == [False, False, True]


def test_the_widest_table_decodes() -> None:
    wide = relation(*[(f"c{i}", 23) for i in range(1600)])
    result = decoded(wide, [insert(*[str(i + row) if i % 7 else None for i in range(1600)]) for row in range(700)])
    assert result.after.num_rows == 700
    assert result.after["c1599"].to_pylist() == [1599 + row for row in range(700)]
    assert result.after["c1596"].null_count == 700


def test_a_decoder_is_picklable_and_made_once() -> None:
    assert decoder(TABLE) is decoder(TABLE)
    copy = pickle.loads(pickle.dumps(decoder(TABLE)))  # noqa: S301
    assert rows(copy.decode(*columns([insert("1", "x", "2")])).after) == [(1, "x", 2)]


GOOD = insert("1", "abc", "10")[1]
CORRUPT = {
    "another relation": insert("1", "abc", "10", oid=OID + 1),
    "too few columns": insert("1", "abc"),
    "too many columns": insert("1", "abc", "10", "11"),
    "cut": ("c", GOOD[:-1]),
    "cut to its tag": ("c", b"I"),
    "cut in its head": ("c", GOOD[:7]),
    "empty": ("c", b""),
    "longer than its row": ("c", GOOD + b"\0"),
    "another operation": ("d", GOOD),
    "an operation without rows": ("m", GOOD),
    "a message": ("m", b"M\0" + b"\0" * 20),
    "a binary cell": ("c", GOOD.replace(b"t\0\0\0\1", b"b\0\0\0\1", 1)),
    "an unknown cell": ("c", GOOD.replace(b"t\0\0\0\1", b"x\0\0\0\1", 1)),
    "a negative length": ("c", GOOD.replace(b"t\0\0\0\1", b"t\xff\xff\xff\xff", 1)),
    "a length that reaches the next message": ("c", GOOD.replace(b"t\0\0\0\3abc", b"t\0\0\0\x30abc", 1)),
    "an insert with an old row": ("c", b"I" + struct.pack(">I", OID) + b"O" + cells(["1", "2", "3"])),
    "a delete with a new row": ("d", b"D" + struct.pack(">I", OID) + b"N" + cells(["1", "2", "3"])),
    "an update with an old row alone": ("u", b"U" + struct.pack(">I", OID) + b"O" + cells(["1", "2", "3"])),
    "an update with two old rows": (
        "u",
        b"U" + struct.pack(">I", OID) + b"O" + cells(["1", "2", "3"]) + b"O" + cells(["1", "2", "3"]),
    ),
}


@pytest.mark.parametrize("place", ["first", "between", "last", "alone"])
@pytest.mark.parametrize("name", CORRUPT)
def test_bytes_that_are_no_message_are_refused(name: str, place: str) -> None:
    good = insert("1", "abc", "10")
    changes = {
        "first": [CORRUPT[name], good],
        "between": [good, CORRUPT[name], good],
        "last": [good, CORRUPT[name]],
        "alone": [CORRUPT[name]],
    }[place]
    with pytest.raises(JournalCorrupt):
        decoder(TABLE).decode(*columns(changes))


def reference(raw: bytes, width: int) -> tuple[list[Cell] | None, list[Cell] | None]:
    """The plain way: one message, cell by cell. Returns (old tuple, new tuple)."""
    found: dict[bool, list[Cell]] = {}
    at = 5
    while at < len(raw):
        old = raw[at : at + 1] in (b"K", b"O")
        assert int.from_bytes(raw[at + 1 : at + 3], "big") == width
        at += 3
        row: list[Cell] = []
        for _ in range(width):
            kind = raw[at : at + 1]
            at += 1
            if kind == b"t":
                length = int.from_bytes(raw[at : at + 4], "big")
                row.append(raw[at + 4 : at + 4 + length])
                at += 4 + length
            else:
                row.append(None if kind == b"n" else ...)
        found[old] = row
    return found.get(True), found.get(False)


CELL = st.one_of(
    st.none(), st.just(...), st.text(max_size=6), st.sampled_from(["I", "U\0\0\0", "N\0\2", "tttt", "n", "u"])
)
ROW = st.tuples(CELL, CELL, CELL)
OLD = st.tuples(*[st.one_of(st.none(), st.text(max_size=4))] * 3)
CHANGE = st.one_of(
    ROW.map(lambda row: insert(*row)),
    ROW.map(update),
    st.tuples(ROW, OLD).map(lambda both: update(both[0], row=both[1])),
    st.tuples(ROW, OLD).map(lambda both: update(both[0], key=both[1])),
    OLD.map(lambda old: delete(key=old)),
    st.just(truncate()),
)


@settings(max_examples=examples(80), deadline=None)
@given(changes=st.lists(CHANGE, max_size=12), cut=st.integers(1, 5))
def test_random_changes_decode_as_the_plain_way_does(changes: list[Change], cut: int) -> None:
    texts = relation(("a", 25), ("b", 25), ("c", 25))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CHUNK_ROWS", cut)
        result = decoded(texts, changes)
    for i, (op, raw) in enumerate(changes):
        old, new = (None, None) if op == "t" else reference(raw, 3)
        shown = (old if op == "d" else new) or [None] * 3
        assert list(result.after.slice(i, 1).to_pylist()[0].values()) == [_text(cell) for cell in shown]
        assert list(result.before.slice(i, 1).to_pylist()[0].values()) == [_text(cell) for cell in old or [None] * 3]
        assert result.has_before[i] == (old is not None)
        assert result.unchanged[i].as_py() == [n for n, cell in zip("abc", shown, strict=True) if cell is ...]


def _text(cell: Cell) -> str | None:
    return (
        None if cell is None or isinstance(cell, EllipsisType) else cell.decode() if isinstance(cell, bytes) else cell
    )


@settings(max_examples=examples(50), deadline=None)
@given(changes=st.lists(CHANGE, min_size=1, max_size=4), data=st.data())
def test_a_flipped_byte_never_does_more_than_change_a_value(changes: list[Change], data: st.DataObject) -> None:
    texts = relation(("a", 25), ("b", 25), ("c", 25))
    which = data.draw(st.integers(0, len(changes) - 1))
    op, raw = changes[which]
    at = data.draw(st.integers(0, len(raw) - 1))
    changed = bytearray(raw)
    changed[at] = data.draw(st.integers(0, 255))
    changes[which] = op, bytes(changed)
    try:
        result = decoded(texts, changes)
    except JournalCorrupt:
        return
    assert result.after.num_rows == len(changes)
    assert len(result.has_before) == len(changes)
    assert np.asarray(result.has_before).dtype == bool
