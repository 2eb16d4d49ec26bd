"""What has become, at each target, of changes that only the source's catalog told. One thread writes: the control."""

from __future__ import annotations

from collections.abc import Mapping

from millstream.failpoint import failpoint
from millstream.registry.ddl import COPYING, FAILED, WAITING
from millstream.state.base import StateStore

NOTE = "catalog"
"""The kind of note in which the state store has them: the journal's id, the delivery epoch, and by number what became
of a change."""


def receipts(store: StateStore, stream: str, journal: str) -> dict[str, dict[int, str]]:
    """By target and number."""
    notes = store.notes(stream, NOTE)
    return {
        target: {int(number): word for number, word in note["receipts"].items()}
        for target, note in notes.items()
        if note["journal"] == journal
    }


def receipt(found: Mapping[str, Mapping[int, str]], target: str, number: int) -> str:
    return found.get(target, {}).get(number, WAITING)


def noted_epoch(store: StateStore, stream: str, target: str, journal: str) -> int | None:
    """The delivery epoch in which the target had what its receipts say; None if it has none."""
    note = store.notes(stream, NOTE).get(target)
    return int(note["epoch"]) if note is not None and note["journal"] == journal else None


def save_receipts(
    store: StateStore, stream: str, target: str, journal: str, words: Mapping[int, str], epoch: int | None = None
) -> None:
    """Write down what became of some changes, and in which delivery epoch; what is known of others stays."""
    if not words and epoch is None:
        return
    known = {**receipts(store, stream, journal).get(target, {}), **words}
    kept = noted_epoch(store, stream, target, journal) or 0
    said = {str(number): word for number, word in known.items()}
    note = {"journal": journal, "epoch": kept if epoch is None else epoch, "receipts": said}
    store.save_note(stream, target, NOTE, note)
    failpoint("catalog.receipt_saved")


def forget_failures(store: StateStore, stream: str, journal: str, number: int) -> None:
    """Have what failed of a change tried again."""
    for target, found in receipts(store, stream, journal).items():
        if found.get(number) in (FAILED, COPYING):
            save_receipts(store, stream, target, journal, {number: WAITING})
