"""The words for schema changes and for what is done about them. Light: stream files and the state store know them."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from datetime import datetime


class Kind(enum.StrEnum):
    """What can be different between two versions of a table."""

    CREATE_TABLE = "create_table"
    RENAME_TABLE = "rename_table"
    """Another name for the same table."""
    REPLACE_TABLE = "replace_table"
    """Another table under the same name: its rows are not those that were there."""
    ADD_COLUMN = "add_column"
    DROP_COLUMN = "drop_column"
    RENAME_COLUMN = "rename_column"
    MAYBE_RENAME_COLUMN = "rename_column?"
    """A column is gone and one of its type stands in its place, and nobody can say whether it is the same."""
    RETYPE_COLUMN = "retype_column"
    KEY = "key"
    """Other columns identify a row,"""
    IDENTITY = "identity"
    """or the log says it in another way."""
    NULLABILITY = "nullability"
    DEFAULT = "default"
    GENERATED = "generated"
    LABELS = "labels"
    """The labels of an enum."""
    DROP_TABLE = "drop_table"
    """This one and those that follow are in no log: who looks at the catalog finds them."""
    PARTITION_ATTACHED = "partition_attached"
    PARTITION_DETACHED = "partition_detached"
    PARTITION_DROPPED = "partition_dropped"
    PARTITION_TRUNCATED = "partition_truncated"
    """Or written anew as it was: the catalog does not tell these apart."""
    REWRITE = "rewrite"
    """The table was altered and written anew: rows may have other values."""
    MAYBE_ALTER = "alter?"
    """The table was altered once more before capture came to it: nobody can say what older rows got by it."""


class Policy(enum.StrEnum):
    """What delivery does when a table's changes begin to have another schema; the last of them wins."""

    IGNORE = "ignore"
    """It goes on, and the change is not listed. Only for what concerns no target (`IGNORABLE`)."""
    APPLY = "apply"
    GATE = "gate"
    """It waits, before the transaction with the first such change, until somebody approves."""
    HALT = "halt"
    """It fails there; once it is approved and resumed it goes on."""


NOTICED = frozenset(
    {
        *(Kind.CREATE_TABLE, Kind.DROP_TABLE, Kind.REWRITE, Kind.MAYBE_ALTER, Kind.PARTITION_ATTACHED),
        *(Kind.PARTITION_DETACHED, Kind.PARTITION_DROPPED, Kind.PARTITION_TRUNCATED),
    }
)
"""Kinds that a look at the catalog finds. Ignored, targets keep the rows that they have."""

IGNORABLE = NOTICED | {Kind.IDENTITY, Kind.NULLABILITY, Kind.DEFAULT, Kind.GENERATED, Kind.LABELS}
"""Those, and kinds by which no target's columns, rows or keys become others."""


class Decision(enum.StrEnum):
    """What a person said of a schema change that is not simply applied."""

    APPROVED = "approved"
    REJECTED = "rejected"


@dataclass(frozen=True)
class Decided:
    """A decision, and when it was made."""

    decision: Decision
    at: datetime
