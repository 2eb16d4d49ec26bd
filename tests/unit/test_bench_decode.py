"""The benchmark measures what it says: both ways give the same values."""

from __future__ import annotations

from millstream.bench import decode, decode_types
from millstream.sources.postgres.types import TYPES


def test_both_ways_give_the_same_values() -> None:
    result = decode.run(rows=2_000, loop_rows=2_000, runs=1)
    assert result["equal"] is True
    assert result["rows"] == 2_000
    assert result["value"] > 0
    assert result["ratio"] > 0


def test_a_wrong_value_is_noticed() -> None:
    op, payload = decode.inserts(50)
    plain = decode.row_at_a_time(payload.to_pylist())
    typed = decode.decoder(decode.TABLE).decode(op, payload).after
    assert decode._equal(typed, plain)
    for column in range(len(plain[7])):
        kept = plain[7][column]
        plain[7][column] = None
        assert not decode._equal(typed, plain)
        plain[7][column] = kept
    assert not decode._equal(typed.slice(1), plain)


def test_each_type_is_measured_and_each_value_is_right() -> None:
    result = decode_types.run(rows=1_000, runs=1)
    assert result["equal"] is True
    assert [table["columns"] for table in result["tables"]] == [len(TYPES), sum(entry.array > 0 for entry in TYPES)]
    assert [len(table["slowest"]) for table in result["tables"]] == [decode_types.SLOWEST] * 2
    assert all("slowest, ns a value: " in note for note in decode_types.notes(result))
