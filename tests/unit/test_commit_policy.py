"""What may be acknowledged, given the cursors of the targets."""

from __future__ import annotations

import pytest

from millstream.engine.commit import ack_position
from millstream.errors import ConfigError
from millstream.journal.format import Head
from millstream.model import BatchLimits, Cursor, TargetSpec

LIMITS = BatchLimits(1, 1, 1)
HEAD = Head("j", 1, 100, 5000, 5008, 9000, 0, "00000001", 1, 0, 0, 0, 0, 0, 0)


def target(name: str, required: bool = True) -> TargetSpec:
    return TargetSpec(name, "files", LIMITS, required)


def cursor(target: str, seq: int, position: int, journal: str = "j") -> Cursor:
    return Cursor("s", target, journal, 1, seq, position)


def ack(policy: str, targets: list[TargetSpec], *cursors: Cursor, head: Head | None = HEAD) -> int:
    known = {one.target: one for one in cursors}
    return ack_position(policy, targets, known, journal_id="j", head=head, start_position=1000)


def test_a_target_at_the_head_covers_what_the_journal_covers() -> None:
    assert ack("all", [target("a")], cursor("a", 100, 5008)) == 9000


def test_a_target_behind_the_head_covers_its_own_position_only() -> None:
    assert ack("all", [target("a")], cursor("a", 99, 4008)) == 4008


def test_a_target_without_a_cursor_holds_at_the_start() -> None:
    assert ack("all", [target("a"), target("b")], cursor("a", 100, 5008)) == 1000


def test_a_cursor_of_another_journal_counts_for_nothing() -> None:
    assert ack("all", [target("a")], cursor("a", 100, 5008, journal="old")) == 1000


def test_all_takes_the_slowest() -> None:
    assert ack("all", [target("a"), target("b")], cursor("a", 100, 5008), cursor("b", 50, 3008)) == 3008


def test_required_leaves_optional_targets_out() -> None:
    targets = [target("a"), target("b", required=False)]
    assert ack("required", targets, cursor("a", 99, 4008), cursor("b", 10, 2008)) == 4008


def test_required_with_nothing_required_means_all() -> None:
    targets = [target("a", required=False), target("b", required=False)]
    assert ack("required", targets, cursor("a", 99, 4008), cursor("b", 10, 2008)) == 2008


@pytest.mark.parametrize(("quorum", "expected"), [(1, 9000), (2, 4008), (3, 2008)])
def test_a_quorum_takes_what_that_many_targets_have(quorum: int, expected: int) -> None:
    targets = [target("a"), target("b"), target("c")]
    known = [cursor("a", 10, 2008), cursor("b", 100, 5008), cursor("c", 99, 4008)]
    assert ack(f"quorum:{quorum}", targets, *known) == expected


@pytest.mark.parametrize("policy", ["quorum:0", "quorum:2", "quorum:x", "some"])
def test_a_policy_that_does_not_fit_is_refused(policy: str) -> None:
    with pytest.raises(ConfigError, match="does not fit 1 target"):
        ack(policy, [target("a")], cursor("a", 100, 5008))


def test_no_targets_hold_everything() -> None:
    assert ack("all", []) == 1000


def test_an_empty_journal_holds_at_the_cursor() -> None:
    assert ack("all", [target("a")], cursor("a", 0, 1000), head=None) == 1000


def test_a_target_that_must_begin_anew_holds_nothing() -> None:
    targets = [target("a"), target("b"), target("c")]
    known = {"a": cursor("a", 99, 4008), "b": cursor("b", 10, 2008), "c": cursor("c", 50, 3008)}

    def acked(policy: str, *lost: str) -> int:
        return ack_position(policy, targets, known, journal_id="j", head=HEAD, start_position=1000, lost=lost)

    assert [acked("all", *lost) for lost in ((), ("b",), ("b", "c"))] == [2008, 3008, 4008]
    assert acked("required", "b") == 3008
    assert [acked("quorum:2"), acked("quorum:2", "a"), acked("quorum:2", "a", "c")] == [3008, 2008, 2008]
    assert acked("all", "a", "b", "c") == 9000
