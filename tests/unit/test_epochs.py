"""Where delivery goes on, and when that needs a new epoch."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from millstream.engine.epochs import Decision, Situation, decide
from millstream.errors import JournalMismatch, OutOfRange
from millstream.journal.format import Header
from millstream.model import Cursor
from millstream.state.base import EpochRecord
from millstream.targets.base import TargetCursor

HEADER = Header("j", 1, 1, 1000, "shop", "postgres", {}, "")


def saved(seq: int, epoch: int = 1, journal: str = "j", position: int = 0) -> Cursor:
    return Cursor("s", "t", journal, epoch, seq, position)


def own(seq: int, epoch: int = 1, journal: str = "j", position: int = 0) -> TargetCursor:
    return TargetCursor(journal, epoch, seq, position)


def epoch(number: int = 1, start: int = 0, journal: str = "j", after: int | None = None) -> EpochRecord:
    return EpochRecord("s", "t", number, journal, start, after, "", datetime.now(UTC))


NEW = Situation(
    header=HEADER, first_seq=1, saved=None, target=None, keeps_cursor=True, epoch=None, checkpoint_exists=False
)
RUNNING = replace(NEW, saved=saved(50), target=own(50), epoch=epoch(), checkpoint_exists=True)


def test_a_first_start_begins_with_the_journal() -> None:
    assert decide(NEW) == Decision(1, 0, None, "first start")


def test_a_new_target_begins_with_what_the_journal_retains() -> None:
    assert decide(replace(NEW, first_seq=41)) == Decision(1, 40, None, "first start")


def test_a_restart_goes_on_in_its_epoch() -> None:
    assert decide(RUNNING) == Decision(1, 50, None, None)


def test_an_epoch_without_a_batch_goes_on_too() -> None:
    assert decide(replace(NEW, saved=saved(0), epoch=epoch())) == Decision(1, 0, None, None)


def test_a_crash_between_publish_and_saving_needs_no_new_epoch() -> None:
    assert decide(replace(RUNNING, target=own(60))) == Decision(1, 60, None, None)


def test_a_target_that_keeps_no_cursor_is_where_the_store_says() -> None:
    now = replace(RUNNING, keeps_cursor=False, target=None)
    assert decide(now) == Decision(1, 50, None, None)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"checkpoint_exists": False}, Decision(2, 50, None, "Spark's checkpoint is missing")),
        ({"target": own(30)}, Decision(2, 30, None, "the target is behind the saved cursor")),
        ({"target": own(50, epoch=4)}, Decision(5, 50, None, "the target has seen a later epoch")),
        ({"target": None}, Decision(2, 0, None, "the target is empty")),
        ({"epoch": None, "saved": None}, Decision(2, 50, None, "first start")),
    ],
)
def test_what_cannot_be_brought_together_starts_a_new_epoch_at_the_truth(
    change: dict[str, object], expected: Decision
) -> None:
    assert decide(replace(RUNNING, **change)) == expected  # type: ignore[arg-type]


def test_a_distrusted_epoch_is_left_at_the_cursor() -> None:
    assert decide(RUNNING, "because") == Decision(2, 50, None, "because")


def test_another_journal_halts() -> None:
    with pytest.raises(JournalMismatch, match="filled from journal old up to seq 50"):
        decide(replace(RUNNING, target=own(50, journal="old"), saved=saved(50, journal="old"), epoch=epoch()))


def test_an_empty_target_halts_when_the_journal_cannot_fill_it_again() -> None:
    with pytest.raises(OutOfRange, match="no longer holds all of it"):
        decide(replace(RUNNING, target=None, first_seq=10))


def test_a_cursor_before_the_retained_journal_halts() -> None:
    with pytest.raises(OutOfRange, match="the journal begins at 60"):
        decide(replace(RUNNING, first_seq=60))


def rebased() -> Situation:
    return Situation(
        header=replace(HEADER, journal_id="new", incarnation=2, first_seq=101),
        first_seq=101,
        saved=saved(100, epoch=2, journal="new", position=4000),
        target=own(50, journal="j", position=4000),
        keeps_cursor=True,
        epoch=epoch(2, start=100, journal="new", after=4000),
        checkpoint_exists=False,
    )


def test_a_rebased_journal_goes_on_above_all_old_seqs() -> None:
    assert decide(rebased()) == Decision(2, 100, 4000, None)


def test_a_target_that_was_ahead_of_the_rebase_leaves_out_what_it_has() -> None:
    now = replace(rebased(), target=own(60, journal="j", position=4500))
    assert decide(now) == Decision(3, 100, 4500, "the target was ahead of the re-based position")


def test_a_later_epoch_of_a_rebased_journal_still_leaves_out_what_was_delivered() -> None:
    now = replace(rebased(), target=own(120, epoch=2, journal="new"), saved=saved(120, 2, "new"))
    assert decide(now) == Decision(3, 120, 4000, "Spark's checkpoint is missing")


def test_a_restart_whose_last_batch_was_pruned_opens_an_epoch_at_the_cursor() -> None:
    """Spark may ask for that batch once more, and the journal could only refuse."""
    now = replace(RUNNING, first_seq=41, last_batch=30)
    assert decide(now) == Decision(2, 50, None, "the last batch is no longer in the journal")
    assert decide(replace(now, last_batch=40)) == Decision(1, 50, None, None)


def test_a_target_whose_next_change_was_pruned_halts_and_says_what_to_do() -> None:
    with pytest.raises(OutOfRange, match="after seq 50, but the journal begins at 52") as refused:
        decide(replace(RUNNING, first_seq=52))
    assert "new target" in (refused.value.hint or "")


BASELINE = replace(epoch(3, start=70, after=5000), reason="baseline")


def test_changes_begin_after_the_baseline_that_the_target_has() -> None:
    now = replace(NEW, epoch=BASELINE, target=own(70, epoch=3))
    assert decide(now) == Decision(3, 70, 5000, None)


def test_a_target_from_before_a_baseline_gets_what_that_one_had() -> None:
    """It came back from a copy, or a snapshot: changes that the later baseline had are not left out for it."""
    older = replace(NEW, epoch=BASELINE, target=own(60, epoch=1), saved=saved(90, epoch=3))
    assert decide(older) == Decision(4, 60, None, "the target is behind the saved cursor")
    at_its_start = replace(older, target=own(70, epoch=1), saved=saved(70, epoch=3))
    assert decide(at_its_start) == Decision(4, 70, None, "the target is older than its epoch")
    assert decide(replace(at_its_start, beyond=4000)) == Decision(4, 70, 4000, "the target is older than its epoch")


def test_without_the_rows_of_a_baseline_the_changes_begin_at_the_first_there_is() -> None:
    """The stream was killed in its baseline, and then made one of changes alone."""
    assert decide(replace(NEW, epoch=BASELINE)) == Decision(4, 0, None, "the baseline did not come to its end")
    emptied = replace(NEW, epoch=BASELINE, saved=saved(70, epoch=3))
    assert decide(emptied) == Decision(4, 0, None, "the target is empty")
    with pytest.raises(OutOfRange, match="no longer holds all of it"):
        decide(replace(emptied, first_seq=10))


def test_a_target_that_alone_knows_of_its_baseline_says_what_to_leave_out() -> None:
    assert decide(replace(NEW, target=own(70), beyond=5000)) == Decision(2, 70, 5000, "first start")
    assert decide(replace(NEW, epoch=BASELINE, target=own(70, epoch=3), beyond=4000)).after_position == 5000
