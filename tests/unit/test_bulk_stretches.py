"""How much of the log one call of a bulk reading decodes."""

from __future__ import annotations

from millstream.sources.postgres.bulk import FIRST_BYTES, LONGEST_BYTES, SHORTEST_BYTES, STRETCH_BYTES, stretch_bytes

MIB = 1 << 20


def test_far_from_the_end_every_call_takes_a_whole_stretch() -> None:
    assert stretch_bytes(STRETCH_BYTES, 0, 4096 * MIB) == STRETCH_BYTES


def test_the_first_call_is_short_unless_much_is_read_again_for_it() -> None:
    assert stretch_bytes(FIRST_BYTES, 0, 4096 * MIB) == FIRST_BYTES
    assert stretch_bytes(FIRST_BYTES, 20 * MIB, 4096 * MIB) == 20 * MIB


def test_near_the_end_something_is_left_to_decode_while_the_rest_is_worked_on() -> None:
    assert stretch_bytes(STRETCH_BYTES, 0, 80 * MIB) == 40 * MIB
    assert stretch_bytes(STRETCH_BYTES, 100 * MIB, 40 * MIB) == 20 * MIB


def test_what_is_short_is_taken_at_once() -> None:
    assert stretch_bytes(STRETCH_BYTES, 0, MIB) == SHORTEST_BYTES


def test_nothing_is_divided_when_much_would_be_read_again() -> None:
    assert stretch_bytes(STRETCH_BYTES, 96 * MIB, 31 * MIB) == 96 * MIB


def test_what_is_read_again_is_at_most_half_of_a_call() -> None:
    assert stretch_bytes(STRETCH_BYTES, 100 * MIB, 4096 * MIB) == 100 * MIB
    assert stretch_bytes(STRETCH_BYTES, 4096 * MIB, 4096 * MIB) == LONGEST_BYTES
