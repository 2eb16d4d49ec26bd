"""Opening a target: what is found there only when nobody else can write any more."""

from __future__ import annotations

from pathlib import Path

import pytest

from millstream.engine.opening import Opening
from millstream.errors import TargetUnavailable
from millstream.model import SeqRange
from millstream.state.memory import MemoryStateStore
from millstream.targets.base import TargetContext
from tests.fixtures.copies import CONTEXT, Copy
from tests.fixtures.journals import Journal


def test_a_baseline_that_a_killed_process_still_committed_is_seen_before_another_begins(tmp_path: Path) -> None:
    """The commit came between the look whether the target is new and the moment when it was ours alone."""
    copy = Copy(tmp_path / "copy.db")
    journal = Journal.create(tmp_path / "journal")
    store = MemoryStateStore()
    opening = Opening("shop", "copy", copy.target, tuple(journal.locations), store, tmp_path / "checkpoints")
    assert opening.is_new()
    late = Copy(copy.path)
    late.target.open(TargetContext(**{**vars(CONTEXT), "journal_id": journal.writer.header.journal_id}))
    late.batch(SeqRange(0, 0), [])
    with pytest.raises(TargetUnavailable, match="from an earlier run"):
        opening.begin()
    assert store.current_epoch("shop", "copy") is None, "where that baseline ended is not written over"
