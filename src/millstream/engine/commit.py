"""The commit policy: what may be acknowledged to a source, given how far its targets are."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from millstream.errors import ConfigError
from millstream.journal.format import Head
from millstream.model import Cursor, TargetSpec


def ack_position(
    policy: str,
    targets: Sequence[TargetSpec],
    cursors: Mapping[str, Cursor],
    *,
    journal_id: str,
    head: Head | None,
    start_position: int,
    lost: Collection[str] = (),
) -> int:
    """The position up to which the targets of one stream, by its policy, need nothing from the source any more.

    `all`: every target has it. `required`: every required one has (all of them, when none is
    required). `quorum:N`: at least N targets have. A target that is at the journal's head has
    everything the journal covers, rows or not; one without a cursor in this journal has nothing,
    and holds at `start_position`. Targets that are `lost` must begin anew, and hold nothing: a quorum is then of
    the others, and of all of them if they are fewer.
    """
    covered = {target.name: _covered(cursors.get(target.name), journal_id, head, start_position) for target in targets}
    quorum = _quorum(policy, len(covered)) if policy not in ("all", "required") and covered else 0
    covered = {name: position for name, position in covered.items() if name not in lost}
    if not covered:
        return start_position if not targets or head is None else head.covered
    if policy == "all":
        return min(covered.values())
    if policy == "required":
        required = [covered[target.name] for target in targets if target.required and target.name in covered]
        return min(required or covered.values())
    return sorted(covered.values(), reverse=True)[min(quorum, len(covered)) - 1]


def _covered(cursor: Cursor | None, journal_id: str, head: Head | None, start_position: int) -> int:
    if cursor is None or cursor.journal_id != journal_id:
        return start_position
    if head is not None and head.journal_id == journal_id and cursor.seq == head.seq:
        return max(cursor.position, head.covered)
    return max(cursor.position, start_position)


def _quorum(policy: str, targets: int) -> int:
    kind, _, number = policy.partition(":")
    if kind != "quorum" or not number.isdigit() or not 1 <= int(number) <= targets:
        raise ConfigError(
            f"commit policy {policy!r} does not fit {targets} target(s)",
            hint="all, required, or a quorum between 1 and the number of targets",
        )
    return int(number)
