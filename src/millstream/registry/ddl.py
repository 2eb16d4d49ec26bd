"""Changes of schemas on their way to targets: what a stream does about each kind, and what became of each.

Nothing but decisions is stored. What changed is counted from the journal, and a target has a change once its
cursor is at or behind the first row under it: so a crash can neither lose nor repeat any of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from millstream.model import Json
from millstream.registry.kinds import Decided, Kind, Policy
from millstream.registry.structure import Change
from millstream.registry.versions import Version

DEFAULTS: Mapping[Kind, Policy] = {
    Kind.MAYBE_RENAME_COLUMN: Policy.GATE,
    Kind.REPLACE_TABLE: Policy.GATE,
    Kind.RENAME_TABLE: Policy.GATE,
}
"""Kinds that are not simply applied: what is only guessed, and rows that are not those that were there."""

_ORDER = list(Policy)


def policy_of(changes: Iterable[Change], chosen: Mapping[str, str]) -> Policy:
    """The strictest of what the stream says, or the default, of each change."""
    found = [Policy(chosen.get(one.kind.value, DEFAULTS.get(one.kind, Policy.APPLY))) for one in changes]
    return max(found, key=_ORDER.index, default=Policy.APPLY)


@dataclass(frozen=True)
class DdlEvent:
    """A schema change of a table, to one stream."""

    stream: str
    version: Version
    policy: Policy
    decided: Decided | None
    receipts: Mapping[str, str]
    """By target: `applied`, or `waiting` while its cursor is before the change."""

    @property
    def id(self) -> int:
        """The seq of the first change under the new schema."""
        return self.version.seq

    @property
    def state(self) -> str:
        """pending, approved, rejected, or applied once every target has it; `new` for one that nobody has to decide."""
        if self.receipts and all(one == "applied" for one in self.receipts.values()):
            return "applied"
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
            "checkpoint": found["checkpoint"],
            "fingerprint": self.version.fingerprint,
        }
