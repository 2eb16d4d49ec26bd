"""Readers of Postgres's binary form, given what no server sends: clear errors, and nothing else."""

from __future__ import annotations

import random
import struct
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest

from millstream.errors import JournalCorrupt
from millstream.model import Column
from millstream.sources.decoders import decoder
from millstream.sources.postgres.casts import text
from millstream.sources.postgres.types import BY_OID, CHOICES, TYPES, ColumnType, array_of, column_type
from tests.fixtures.tuples import NUMERIC_12_2, relation

INT4_ARRAY = struct.pack(">iiiiiiiii", 1, 1, 23, 2, 1, 4, 7, -1, 0)[:-4]
SAMPLES: dict[int, bytes] = {
    16: b"\1",
    20: struct.pack(">q", -5),
    23: struct.pack(">i", 7),
    701: struct.pack(">d", 0.1),
    1700: struct.pack(">HhHHHH", 2, 0, 0x4000, 2, 12, 3400),
    1114: struct.pack(">q", 1),
    1082: struct.pack(">i", 0),
    1186: struct.pack(">qii", 1, 2, 3),
    2950: bytes(range(16)),
    869: bytes([2, 32, 0, 4, 10, 0, 0, 1]),
    1562: struct.pack(">i", 3) + b"\xa0",
    3802: b"\1{}",
    600: struct.pack(">dd", 1.5, -2),
    604: struct.pack(">idd", 1, 1.5, -2),
    1007: INT4_ARRAY,
}
READ = [entry for entry in TYPES if entry.becomes.binary is not None]


def both(kind: ColumnType) -> list[ColumnType]:
    """The type itself, and the same as a key."""
    return [kind, kind.as_text()]


@pytest.mark.parametrize("oid", SAMPLES)
@pytest.mark.parametrize("large", [False, True])
def test_a_reader_reads_any_binary_array(oid: int, large: bool) -> None:
    """Sliced, with 64-bit offsets, with NULLs that have bytes under them."""
    kind = pa.large_binary() if large else pa.binary()
    value = SAMPLES[oid]
    whole = pa.array([b"??", value, b"hidden", value, b"??"], kind)
    masked = pa.Array.from_buffers(kind, 5, [pa.py_buffer(bytes([0b11011])), *whole.buffers()[1:]]).slice(1, 3)
    for to in both(column_type(Column("c", oid, NUMERIC_12_2 if oid == 1700 else -1))):
        array, odd = to.read_binary(masked)
        array.validate(full=True)
        one = to.read_binary(pa.array([value]))[0][0].as_py()
        assert one is not None
        assert array.type == to.arrow
        assert array.to_pylist() == [one, None, one]
        assert odd.tolist() == []
        assert to.read_binary(pa.array([], kind))[0].to_pylist() == []
        assert to.read_binary(pa.nulls(2, kind))[0].to_pylist() == [None, None]


@pytest.mark.parametrize("entry", READ, ids=lambda entry: entry.name)
def test_bytes_that_are_no_value_are_refused_and_break_nothing(entry: object) -> None:
    assert hasattr(entry, "becomes")
    chance = random.Random(7)
    kinds = (
        [entry.becomes, column_type(Column("c", 1700, NUMERIC_12_2))] if entry.name == "numeric" else [entry.becomes]
    )
    kinds += [kind for (name, _), kind in CHOICES.items() if name == entry.name]
    for to in [each for kind in (*kinds, array_of(kinds[-1])) for each in both(kind)]:
        for _ in range(150):
            size = chance.choice((0, 1, 3, 4, 5, 8, 12, 16, 20, 24, 33, 40))
            few = bytes(chance.choice((0, 0, 0, 1, 2, 4, 255)) for _ in range(size))
            raw = few if chance.random() < 0.7 else chance.randbytes(size)
            try:
                array, odd = to.read_binary(pa.array([raw, None, raw]))
            except JournalCorrupt:
                continue
            array.validate(full=to.binary is not text)
            assert array.is_valid().to_pylist() == [0 not in odd, False, 0 not in odd]


def test_a_numeric_is_counted_or_read_from_its_text_alike() -> None:
    to = column_type(Column("c", 1700, NUMERIC_12_2))
    values = ["0", "0.01", "-0.10", "9999999999.99", "-10000", "12345678.9", "4000.05"]
    cells = pa.array([_numeric(Decimal(value)) for value in values])
    wide = ColumnType(pa.decimal128(20, 2), "decimal(20,2)", binary=to.binary)
    counted, from_text = to.read_binary(cells)[0], wide.read_binary(cells)[0]
    assert (
        counted.to_pylist() == from_text.to_pylist() == [Decimal(value).quantize(Decimal("0.01")) for value in values]
    )


def _numeric(value: Decimal) -> bytes:
    """With two places, as the server sends it: no groups of zeros around the digits."""
    whole, part = divmod(int(abs(value) * 100), 100)
    groups: list[int] = [part * 100]
    weight = -1
    while whole:
        whole, group = divmod(whole, 10_000)
        groups.insert(0, group)
        weight += 1
    while groups and groups[-1] == 0:
        groups.pop()
    if not groups:
        weight = 0
    sign = 0x4000 if value < 0 else 0
    return struct.pack(f">HhHH{len(groups)}H", len(groups), weight, sign, 2, *groups)


def test_a_value_in_a_form_that_is_not_read_is_an_error() -> None:
    table = relation(("a", 23), ("b", 99_999))
    cells = b"b" + struct.pack(">ii", 4, 1) + b"b" + struct.pack(">i", 1) + b"?"
    raw = b"I" + struct.pack(">I", table.oid) + b"N" + struct.pack(">H", 2) + cells
    with pytest.raises(JournalCorrupt, match="binary form that this version cannot read"):
        decoder(table).decode(np.array([ord("c")], np.uint8), pa.array([raw], pa.large_binary()))


@pytest.mark.parametrize("sizes", [(0,), (2**31 - 1,), (2**31 - 1, 2**31 - 1, 2**31 - 1), (-1,)])
def test_an_array_that_promises_more_than_it_has_is_refused(sizes: tuple[int, ...]) -> None:
    header = struct.pack(">iii", len(sizes), 0, 23) + b"".join(struct.pack(">ii", size, 1) for size in sizes)
    raw = header + struct.pack(">ii", 4, 7)
    for to in both(column_type(Column("c", 1007))):
        if len(sizes) == 1 or pa.types.is_string(to.arrow):
            with pytest.raises(JournalCorrupt, match="a value of type array"):
                to.read_binary(pa.array([raw]))


def test_types_that_are_text_in_both_forms_are_read_alike() -> None:
    for name in ("text", "varchar", "json"):
        (entry,) = [entry for entry in BY_OID.values() if entry.name == name]
        array, odd = entry.becomes.read_binary(pa.array([b"a", b"\xff", None]))
        assert array.to_pylist() == ["a", None, None]
        assert entry.becomes.binary_text(pa.array([b"a", b"\xff"]), odd).to_pylist() == [None]
