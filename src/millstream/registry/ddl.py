"""Changes of schemas on their way to targets: what a stream does about each kind, and what became of each.

What changed is counted from the journal. A target has a version once its cursor is at or behind the first row under
it: so a crash can neither lose nor repeat any of it. What only the catalog told has receipts of its own
(`engine.following`). Decisions are stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from millstream.model import Json
from millstream.registry.kinds import Decided, Kind, Policy
from millstream.registry.noticed import Noticed
from millstream.registry.structure import Change
from millstream.registry.versions import Version

DEFAULTS: Mapping[Kind, Policy] = {
    Kind.MAYBE_RENAME_COLUMN: Policy.GATE,
    Kind.REPLACE_TABLE: Policy.GATE,
    Kind.RENAME_TABLE: Policy.GATE,
}
"""Kinds that are not simply applied: what is only guessed, and rows that are not those that were there."""

_ORDER = list(Policy)

APPLIED, LEFT, COPYING, FAILED, WAITING = "applied", "left", "copying", "failed", "waiting"
"""What can have become of a change at a target. `left`: it goes on without what it cannot do, as somebody said."""


def policy_of(changes: Iterable[Change], chosen: Mapping[str, str]) -> Policy:
    """The strictest of what the stream says, or the default, of each change."""
    found = [Policy(chosen.get(one.kind.value, DEFAULTS.get(one.kind, Policy.APPLY))) for one in changes]
    return max(found, key=_ORDER.index, default=Policy.APPLY)


def policy_at(one: Noticed, chosen: Mapping[str, str], *, reloads: bool) -> Policy:
    """The same of what the catalog told, at a target that can get tables anew, or cannot: then somebody must know."""
    policy = policy_of(one.changes, chosen)
    return Policy.GATE if policy is Policy.APPLY and one.copies and not reloads else policy


@dataclass(frozen=True)
class DdlEvent:
    """A schema change of a table, to one stream."""

    stream: str
    version: Version | Noticed
    policy: Policy
    decided: Decided | None
    receipts: Mapping[str, str]
    """By target: `applied`, or `waiting` while its cursor is before the change. Of what the catalog told also
    `copying`, `failed` and `left`."""

    @property
    def id(self) -> int | str:
        """The seq of the first change under the new schema; `c` and a number for what the catalog told."""
        return self.version.title if isinstance(self.version, Noticed) else self.version.seq

    @property
    def key(self) -> int:
        """Under which a decision is kept."""
        return self.version.key if isinstance(self.version, Noticed) else self.version.seq

    @property
    def state(self) -> str:
        """pending, approved, rejected, failed, or applied once every target has it; `new` for one that nobody has to
        decide."""
        if self.receipts and all(one in (APPLIED, LEFT) for one in self.receipts.values()):
            return "applied"
        if FAILED in self.receipts.values():
            return "failed"
        if self.decided is not None:
            return self.decided.decision.value
        return "pending" if self.policy in (Policy.GATE, Policy.HALT) else "new"

    def to_json(self) -> Json:
        found = self.version.to_json()
        return {
            "stream": self.stream,
            "id": self.id,
            "table": self.version.table,
            "version": self.version.version,
            "state": self.state,
            "policy": self.policy.value,
            "decided_at": self.decided.at.isoformat() if self.decided else None,
            "receipts": dict(self.receipts),
            "changes": found["changes"],
            "since": found.get("since"),
            "checkpoint": found["checkpoint"],
            "fingerprint": self.version.fingerprint,
        }
