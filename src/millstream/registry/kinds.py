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


class Policy(enum.StrEnum):
    """What delivery does when a table's changes begin to have another schema; the last of them wins."""

    IGNORE = "ignore"
    """It goes on, and the change is not listed. Only for what concerns no target (`IGNORABLE`)."""
    APPLY = "apply"
    GATE = "gate"
    """It waits, before the transaction with the first such change, until somebody approves."""
    HALT = "halt"
    """It fails there; once it is approved and resumed it goes on."""


IGNORABLE = frozenset({Kind.IDENTITY, Kind.NULLABILITY, Kind.DEFAULT, Kind.GENERATED, Kind.LABELS})
"""Kinds by which no target's columns, rows or keys become others."""


class Decision(enum.StrEnum):
    """What a person said of a schema change that is not simply applied."""

    APPROVED = "approved"
    REJECTED = "rejected"


@dataclass(frozen=True)
class Decided:
    """A decision, and when it was made."""

    decision: Decision
    at: datetime
