"""Where a target's delivery begins: pure decisions over cursors, epochs and the journal.

A delivery epoch is a Spark checkpoint directory and the seq it starts from. Spark's own logs only
schedule; the truth is the target's cursor, or the state store's for a target that keeps none. When
they cannot be brought together, a new epoch starts at the truth.
"""

from __future__ import annotations

from dataclasses import dataclass

from millstream.errors import JournalMismatch, OutOfRange
from millstream.journal.format import Header
from millstream.model import Cursor
from millstream.state.base import EpochRecord
from millstream.targets.base import TargetCursor

BASELINE = "baseline"
"""The reason of an epoch that begins after a baseline."""


@dataclass(frozen=True)
class Situation:
    """Everything the decision depends on."""

    header: Header
    first_seq: int
    """The lowest seq that the journal retains."""
    saved: Cursor | None
    target: TargetCursor | None
    keeps_cursor: bool
    epoch: EpochRecord | None
    checkpoint_exists: bool
    last_batch: int | None = None
    """Where the last delivered batch began: Spark may ask for it once more."""
    beyond: int | None = None
    """Up to where the target says it has all changes, if that is beyond its seq."""


@dataclass(frozen=True)
class Decision:
    """Go on at `seq`: in the current epoch, or (with a `reason`) in a new one of this number."""

    epoch: int
    seq: int
    after_position: int | None
    reason: str | None


def decide(now: Situation, distrust: str | None = None) -> Decision:
    """Where to go on. `distrust` is a reason to give up the current epoch whatever else is true.

    Raises JournalMismatch when the truth names another journal and nobody re-based it, OutOfRange
    when the truth lies before what the journal retains.
    """
    epoch = now.epoch if now.epoch and now.epoch.journal_id == now.header.journal_id else None
    truth = _truth(now, epoch)
    reason = distrust or truth.reason or _why_not_current(now, epoch, truth.seq)
    if truth.seq + 1 < now.first_seq:
        raise OutOfRange(
            f"delivery would go on after seq {truth.seq}, but the journal begins at {now.first_seq}",
            hint="what lies between was pruned and cannot be delivered from here: copy all of its tables anew "
            "(millstream reload), or give the stream a new target (another name, an empty place), which begins at the "
            "earliest change there is",
        )
    if epoch is not None and reason is None:
        return Decision(epoch.epoch, truth.seq, truth.after_position, None)
    last = max(
        now.epoch.epoch if now.epoch else 0,
        now.target.epoch if now.target else 0,
        now.saved.epoch if now.saved else 0,
    )
    return Decision(last + 1, truth.seq, truth.after_position, reason or "first start")


@dataclass(frozen=True)
class _Truth:
    """The seq that is delivered for sure, what to leave out after it, and why that needs a new epoch (if it does)."""

    seq: int
    after_position: int | None = None
    reason: str | None = None


def _truth(now: Situation, epoch: EpochRecord | None) -> _Truth:
    own: TargetCursor | Cursor | None = now.target if now.keeps_cursor else now.saved
    after = epoch.after_position if epoch else None
    if own is None:
        return _beginning(now, epoch)
    if own.journal_id == now.header.journal_id:
        gone_back = now.saved and now.saved.journal_id == own.journal_id and now.saved.seq > own.seq
        reason = "the target is behind the saved cursor" if gone_back else None
        if after is not None and epoch is not None and now.target is not None and now.target.epoch < epoch.epoch:
            # It was restored from before the epoch: what a later baseline had, it may not have. Its position tells.
            reason = reason or ("the target is older than its epoch" if after != now.beyond else None)
            after = None
        after = max(filter(None, (after, now.beyond)), default=None)
        return _Truth(own.seq, after, reason)
    if epoch is not None and after is not None and epoch.epoch > own.epoch:
        # Re-based. What the target had was read from the saved cursor; it may have been one batch further.
        if own.position > after:
            return _Truth(epoch.start_seq, own.position, "the target was ahead of the re-based position")
        return _Truth(epoch.start_seq, after)
    raise JournalMismatch(
        f"the target was filled from journal {own.journal_id} up to seq {own.seq}, "
        f"but this is journal {now.header.journal_id}",
        hint="give the target an empty place; or put the journal back that it had, or re-base the stream "
        "(millstream journal rebase)",
    )


def _beginning(now: Situation, epoch: EpochRecord | None) -> _Truth:
    """The target has nothing: begin where the first epoch does, or all over if it had something once."""
    if epoch is not None and epoch.reason == BASELINE:
        # It is after rows that never came, or that are gone: what a stream without baselines can have is the changes.
        if now.saved is None or now.saved.epoch != epoch.epoch:
            return _Truth(now.first_seq - 1, None, "the baseline did not come to its end")
        lost = True
    else:
        lost = now.saved is not None and epoch is not None and now.saved.seq > epoch.start_seq
    if epoch is not None and not lost:
        return _Truth(epoch.start_seq, epoch.after_position)
    if not lost:
        return _Truth(now.first_seq - 1)
    if now.header.incarnation > 1 or now.first_seq > now.header.first_seq:
        raise OutOfRange(
            "the target has lost what was delivered to it, and the journal no longer holds all of it",
            hint="restore the target from a copy",
        )
    return _Truth(now.header.first_seq - 1, None, "the target is empty")


def _why_not_current(now: Situation, epoch: EpochRecord | None, seq: int) -> str | None:
    if epoch is None:
        return None
    if now.target and now.target.journal_id == epoch.journal_id and now.target.epoch > epoch.epoch:
        return "the target has seen a later epoch"
    if not now.checkpoint_exists and seq != epoch.start_seq:
        return "Spark's checkpoint is missing"
    if seq < epoch.start_seq:
        return "the target is behind the epoch's start"
    if now.last_batch is not None and now.last_batch + 1 < now.first_seq:
        return "the last batch is no longer in the journal"
    return None
