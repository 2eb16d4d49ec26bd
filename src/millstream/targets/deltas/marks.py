"""What commits to Delta tables say of themselves: whose they are, how far the table is, and what is a baseline's."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from millstream.targets.base import TargetContext
from millstream.targets.deltas.tables import BASELINE, Handle
from millstream.targets.directory import OWN

if TYPE_CHECKING:
    from deltalake import CommitProperties


def owner_of(context: TargetContext) -> str:
    """What a table of ours says of who made it."""
    return f"millstream/{context.stream}/{context.target}"


def app_of(context: TargetContext) -> str:
    """Under which name commits say how far a table is."""
    return f"{owner_of(context)}/{context.journal_id}"


def commit(app: str, seq: int | None, *, baseline: bool = False) -> CommitProperties:
    """What a commit says: that the table is at this seq, if it is; and whether it is part of a baseline."""
    from deltalake import CommitProperties, Transaction

    transactions = [] if seq is None else [Transaction(app, seq)]
    # No retry inside delta-rs: it would not look at the transaction again.
    said = BASELINE if baseline else None
    return CommitProperties(custom_metadata=said, app_transactions=transactions, max_commit_retries=0)


def forget_baselines(root: Path, context: TargetContext) -> None:
    """Empty the tables of ours whose rows are a baseline's that was never published; they have no change then."""
    for path in root.iterdir():
        table = Handle.existing(path) if path.is_dir() and path.name != OWN else None
        if table is not None and table.owner() == owner_of(context) and table.ends_with_baseline():
            table.append(table.schema().empty_table(), commit(app_of(context), 0), overwrite=True)
