"""Replica identity: which columns tell a row, and whether publishing updates would hurt the application.

Postgres refuses the application's UPDATE and DELETE on a published table whose identity it cannot
write to the log. The rules here are the server's own (CheckCmdReplicaIdentity and the checks of a
publication's row filters and column lists), so that we know before anything is published.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class IdentityFacts:
    """A table's replica identity (`d`, `i`, `f`, `n`) and the indexes it may rest on."""

    identity: str
    primary_key: tuple[str, ...]
    deferrable: bool
    """True when the primary key may be violated until commit: the server does not use it then."""
    identity_columns: tuple[str, ...] | None
    """The columns of the identity's index; None when there is none the server can use."""

    @classmethod
    def of(cls, identity: str, indexes: Sequence[Mapping[str, Any]]) -> IdentityFacts:
        primary = next((i for i in indexes if i["primary"]), None)
        chosen = {"d": primary, "i": next((i for i in indexes if i["identity"]), None)}.get(identity)
        sound = chosen is not None and chosen["usable"] and chosen["immediate"]
        return cls(
            identity=identity,
            primary_key=tuple(primary["columns"]) if primary else (),
            deferrable=primary is not None and not primary["immediate"],
            identity_columns=tuple(chosen["columns"]) if chosen is not None and sound else None,
        )

    def key(self, columns: tuple[str, ...]) -> tuple[str, ...]:
        """The columns that identify a row of the changes; `columns` are the published ones.

        With FULL the primary key if it is there, whole and never violated, else all columns, where
        equal rows are told apart by their number only.
        """
        if self.identity == "f":
            sound = self.primary_key and not self.deferrable and set(self.primary_key) <= set(columns)
            return self.primary_key if sound else columns
        identity = self.identity_columns or ()
        return identity if set(identity) <= set(columns) else ()


def usable_identity(
    facts: IdentityFacts, table: str, *, published: frozenset[str], virtual: bool
) -> tuple[str | None, str | None]:
    """(why updates cannot be published, the SQL that helps), or (None, None) when they can.

    `table` is the quoted name, `published` the columns that would be sent, `virtual` whether it has
    virtual generated columns.
    """
    full = f"ALTER TABLE {table} REPLICA IDENTITY FULL"
    primary = f"ALTER TABLE {table} ADD PRIMARY KEY (...)"
    if facts.identity == "f":
        if virtual:
            return "its replica identity is FULL and it has virtual generated columns", _by_key(facts, table) or primary
        return None, None
    if facts.identity_columns is None:
        other = full if facts.primary_key else f"{primary}, or {full}"
        return _no_identity(facts), _by_key(facts, table) or other
    hidden = [name for name in facts.identity_columns if name not in published]
    if hidden:
        return f"its replica identity has columns that are not published: {', '.join(hidden)}", full
    return None, None


def partition_mismatch(
    root: IdentityFacts, leaves: Sequence[tuple[str, IdentityFacts]]
) -> tuple[str | None, str | None]:
    """The same for the partitions of a table whose own identity is usable.

    The server checks, and logs, by the identity of the partition, but describes the row by that of
    the table above: where the two differ, writes fail or old rows are described wrongly.
    """
    for leaf, facts in leaves:
        same_columns = set(facts.identity_columns or ()) == set(root.identity_columns or ())
        if (facts.identity == "f") != (root.identity == "f") or not same_columns:
            fix = {"f": "FULL", "d": "DEFAULT"}.get(root.identity, "USING INDEX <the partition's index>")
            return (
                f"its partition {leaf} has another replica identity than the table itself",
                f"ALTER TABLE {leaf} REPLICA IDENTITY {fix}",
            )
    return None, None


def filter_dangers(
    facts_identity: str, identity_columns: Sequence[str], columns: Sequence[str] | None, filter_columns: Sequence[str]
) -> list[str]:
    """Why a column list or row filter would make the application's updates fail; empty when it would not."""
    dangers = []
    if columns is not None and facts_identity == "f":
        dangers.append("a column list is not possible with REPLICA IDENTITY FULL")
    elif columns is not None and (missing := [name for name in identity_columns if name not in columns]):
        dangers.append(f"the column list lacks {', '.join(missing)} of the replica identity")
    if facts_identity != "f" and (foreign := [name for name in filter_columns if name not in identity_columns]):
        dangers.append(f"the row filter uses {', '.join(foreign)}, not of the replica identity")
    return dangers


def _no_identity(facts: IdentityFacts) -> str:
    if facts.identity == "n":
        return "its replica identity is NOTHING"
    if facts.identity == "i":
        return "the index of its replica identity was dropped or is invalid"
    return "its primary key is deferrable" if facts.deferrable else "it has no primary key"


def _by_key(facts: IdentityFacts, table: str) -> str | None:
    """The default identity, where a primary key makes it usable."""
    usable = facts.primary_key and not facts.deferrable and facts.identity != "d"
    return f"ALTER TABLE {table} REPLICA IDENTITY DEFAULT" if usable else None
