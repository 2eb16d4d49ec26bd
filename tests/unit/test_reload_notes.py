"""What is written down of copies: one table at a time, and what becomes of those that cannot be copied."""

from __future__ import annotations

import pytest

from millstream.engine.reload import RELOAD, AskedTables, progress_of, table_waiting, waiting
from millstream.engine.reload_notes import ReloadNotes
from millstream.state.memory import MemoryStateStore


@pytest.fixture
def notes() -> ReloadNotes:
    found = ReloadNotes(MemoryStateStore(), "shop", "copy")
    assert found.due() is None
    found.save(waiting(AskedTables(names=("public.orders", "public.items")), None))
    return found


def states(notes: ReloadNotes) -> dict[str, tuple[str, str | None]]:
    return {name: (one["state"], one["error"]) for name, one in notes.record()["tables"].items()}


def test_a_table_is_written_down_and_the_others_stay(notes: ReloadNotes) -> None:
    assert notes.is_left(), "which tables there are is not known yet"
    tables = {"public.orders": table_waiting(), "public.items": table_waiting()}
    notes.save({**notes.record(), "state": "running", "resolved": True, "tables": tables})
    notes.save_table("public.orders", state="done", rows=7)
    assert states(notes) == {"public.orders": ("done", None), "public.items": ("waiting", None)}
    assert notes.is_left()
    notes.fail_table("public.items", "id < 5", "it has no key")
    assert states(notes)["public.items"] == ("failed", "it has no key")
    assert notes.record()["tables"]["public.items"]["where"] == "id < 5"
    assert not notes.is_left()
    found = notes.due()
    assert found is not None
    assert (progress_of(found) or {})["tables_done"] == 1
    notes.save({**found, "state": "done"})
    assert notes.due() is None


def test_what_is_left_fails_together(notes: ReloadNotes) -> None:
    notes.fail_rest("the source is gone")
    assert states(notes) == {
        "public.orders": ("failed", "the source is gone"),
        "public.items": ("failed", "the source is gone"),
    }
    assert not notes.is_left()
    done = {"public.orders": {**table_waiting(), "state": "done"}, "public.items": table_waiting()}
    notes.save({**notes.record(), "tables": done})
    notes.fail_rest("the disk is full")
    assert states(notes) == {"public.orders": ("done", None), "public.items": ("failed", "the disk is full")}


def test_how_tables_are_cut_is_kept_beside_the_record() -> None:
    store = MemoryStateStore()
    notes, others = ReloadNotes(store, "shop", "copy"), ReloadNotes(store, "shop", "other")
    notes.save_cut({"table": "public.orders", "plans": {}})
    assert (notes.cut()["table"], others.cut()) == ("public.orders", {})
    assert store.notes("shop", RELOAD) == {}
    notes.save_cut({})
    assert notes.cut() == {}
