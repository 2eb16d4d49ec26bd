"""How much of the log one call of a bulk reading decodes."""

from __future__ import annotations

import pytest

from millstream.sources.postgres.bulk import (
    FIRST_BYTES,
    LONG_REREAD_BYTES,
    LONGEST_BYTES,
    LONGEST_REST_SECONDS,
    SHORTEST_BYTES,
    STRETCH_BYTES,
    is_worth_a_call,
    stretch_bytes,
)
from millstream.sources.postgres.slot_copy import Place

MIB = 1 << 20


def caught_up(*, reread: int, new: int) -> Place:
    position = 1 << 40
    return Place(position, position - reread, position + new, 0, 0)


def test_far_from_the_end_every_call_takes_a_whole_stretch() -> None:
    assert stretch_bytes(STRETCH_BYTES, 0, 4096 * MIB) == STRETCH_BYTES


def test_the_first_call_is_short_unless_much_is_read_again_for_it() -> None:
    assert stretch_bytes(FIRST_BYTES, 0, 4096 * MIB) == FIRST_BYTES
    assert stretch_bytes(FIRST_BYTES, 20 * MIB, 4096 * MIB) == 25 * MIB


def test_near_the_end_something_is_left_to_decode_while_the_rest_is_worked_on() -> None:
    assert stretch_bytes(STRETCH_BYTES, 0, 84 * MIB) == 48 * MIB
    assert stretch_bytes(STRETCH_BYTES, 100 * MIB, 35 * MIB) == 20 * MIB


def test_what_is_short_is_taken_at_once() -> None:
    assert stretch_bytes(STRETCH_BYTES, 0, MIB) == SHORTEST_BYTES


def test_nothing_is_divided_when_much_would_be_read_again() -> None:
    assert stretch_bytes(STRETCH_BYTES, 96 * MIB, 31 * MIB) == 120 * MIB


def test_what_is_read_again_is_less_than_half_of_a_call() -> None:
    assert stretch_bytes(STRETCH_BYTES, 100 * MIB, 4096 * MIB) == 125 * MIB
    assert stretch_bytes(STRETCH_BYTES, 4096 * MIB, 4096 * MIB) == LONGEST_BYTES


def test_a_source_whose_log_has_not_grown_is_not_asked_for_more() -> None:
    assert not is_worth_a_call(caught_up(reread=0, new=0), 3600.0)
    assert is_worth_a_call(caught_up(reread=0, new=1), 0.0)


def test_much_is_asked_for_at_once_whatever_is_read_again() -> None:
    assert is_worth_a_call(caught_up(reread=200 * MIB, new=20 * MIB), 0.0)
    assert not is_worth_a_call(caught_up(reread=200 * MIB, new=19 * MIB), 0.0)


@pytest.mark.parametrize(
    ("reread", "seconds"),
    [(LONG_REREAD_BYTES // 4, LONGEST_REST_SECONDS / 4), (100 * LONG_REREAD_BYTES, LONGEST_REST_SECONDS)],
)
def test_a_little_waits_the_longer_the_more_is_read_again_but_not_for_ever(reread: int, seconds: float) -> None:
    assert not is_worth_a_call(caught_up(reread=reread, new=1), seconds - 0.01)
    assert is_worth_a_call(caught_up(reread=reread, new=1), seconds)
