"""What every state store must do, run on each of them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from millstream.errors import StateError
from millstream.model import Cursor, StreamState
from millstream.registry.kinds import Decided, Decision
from millstream.state.base import Doubt, EpochRecord, Fault, Letter, LetterState, Runtime, StateStore, Tally, Total
from millstream.state.memory import HISTORY, MemoryStateStore
from millstream.state.sqlite import SqliteStateStore
from tests.fixtures.cursors import AT, cursor


@pytest.fixture(params=["memory", "sqlite"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StateStore]:
    made: StateStore = MemoryStateStore() if request.param == "memory" else SqliteStateStore(tmp_path / "state.db")
    yield made
    made.close()


def epoch_record(epoch: int, *, target: str = "log", after: int | None = None) -> EpochRecord:
    return EpochRecord("shop", target, epoch, "j1", 7, after, "first start", AT)


def letter(seq: int, *, target: str = "copy", kind: str = "value") -> Letter:
    return Letter(
        *("shop", target, "public.orders", f"aaaa-{seq}", seq, "c", kind, "it does not fit", AT, str(seq)),
        relation_id=3,
        relation={"name": "orders"},
        payload=b"row",
    )


def numbers(letters: list[Letter]) -> list[int]:
    return [one.seq for one in letters]


def test_a_stream_is_remembered_replaced_and_listed(store: StateStore) -> None:
    assert store.get_stream("shop") is None
    store.put_stream("shop", {"name": "shop", "targets": [{"name": "log"}]})
    store.put_stream("bank", {"name": "bank"})
    store.put_stream("shop", {"name": "shop", "targets": []})
    assert store.list_streams() == ["bank", "shop"]
    assert store.get_stream("shop") == {"name": "shop", "targets": []}


def test_what_was_read_can_be_changed_without_changing_the_store(store: StateStore) -> None:
    store.put_stream("shop", {"targets": [1]})
    read = store.get_stream("shop")
    assert read is not None
    read["targets"].append(2)
    assert store.get_stream("shop") == {"targets": [1]}


def test_a_cursor_comes_back_exactly_as_it_was_saved(store: StateStore) -> None:
    assert store.get_cursor("shop", "log") is None
    store.save_cursor(cursor(5))
    assert store.get_cursor("shop", "log") == cursor(5)
    bare = Cursor("shop", "copy", "j1", 1, 0, 0, None, AT)
    store.save_cursor(bare)
    assert store.get_cursor("shop", "copy") == bare


def test_large_seqs_and_positions_survive(store: StateStore) -> None:
    largest = Cursor("shop", "log", "j1", 1, 2**63 - 1, 2**63 - 1, AT, AT)
    store.save_cursor(largest)
    assert store.get_cursor("shop", "log") == largest


def test_cursors_are_listed_per_stream_or_all(store: StateStore) -> None:
    for one in (cursor(1), cursor(2, target="copy"), cursor(3, stream="bank")):
        store.save_cursor(one)
    assert [(c.stream, c.target, c.seq) for c in store.cursors()] == [
        ("bank", "log", 3),
        ("shop", "copy", 2),
        ("shop", "log", 1),
    ]
    assert [c.target for c in store.cursors("shop")] == ["copy", "log"]


def test_a_cursor_never_goes_back_within_a_journal_and_an_epoch(store: StateStore) -> None:
    store.save_cursor(cursor(5))
    with pytest.raises(StateError, match=r"go back from seq 5 .* to seq 4"):
        store.save_cursor(cursor(4))
    with pytest.raises(StateError, match="go back"):
        store.save_cursor(Cursor("shop", "log", "j1", 1, 5, 49, AT, AT))
    assert store.get_cursor("shop", "log") == cursor(5)
    assert store.cursor_history("shop", "log") == []


def test_a_new_epoch_or_a_new_journal_may_start_earlier(store: StateStore) -> None:
    store.save_cursor(cursor(5))
    store.save_cursor(cursor(2, epoch=2))
    store.save_cursor(cursor(1, epoch=2, journal="j2"))
    assert store.get_cursor("shop", "log") == cursor(1, epoch=2, journal="j2")


def test_an_epoch_that_was_replaced_cannot_move_the_cursor(store: StateStore) -> None:
    store.save_cursor(cursor(5, epoch=2))
    with pytest.raises(StateError, match="epoch 1 is over"):
        store.save_cursor(cursor(9, epoch=1))
    assert store.get_cursor("shop", "log") == cursor(5, epoch=2)


def test_the_same_cursor_may_be_saved_again(store: StateStore) -> None:
    store.save_cursor(cursor(5))
    store.save_cursor(cursor(5))
    assert store.get_cursor("shop", "log") == cursor(5)


def test_history_holds_the_former_cursors_newest_first(store: StateStore) -> None:
    for seq in (1, 2, 3, 4):
        store.save_cursor(cursor(seq))
        store.save_cursor(cursor(seq * 100, target="copy"))
    assert [c.seq for c in store.cursor_history("shop", "log")] == [3, 2, 1]
    assert [c.seq for c in store.cursor_history("shop", "log", limit=2)] == [3, 2]
    assert [c.seq for c in store.cursor_history("shop", "copy")] == [300, 200, 100]


def test_history_is_bounded_per_target(store: StateStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millstream.state.sqlite.HISTORY", 20)
    monkeypatch.setattr("millstream.state.memory.HISTORY", 20)
    assert HISTORY == 1000
    store.save_cursor(cursor(1, target="copy"))
    store.save_cursor(cursor(2, target="copy"))
    for seq in range(1, 61):
        store.save_cursor(cursor(seq))
    assert [c.seq for c in store.cursor_history("shop", "log", limit=10_000)] == list(range(59, 39, -1))
    assert [c.seq for c in store.cursor_history("shop", "copy")] == [1]


def test_epochs_only_go_up(store: StateStore) -> None:
    assert store.current_epoch("shop", "log") is None
    store.open_epoch(epoch_record(1))
    store.open_epoch(epoch_record(3, after=2**62))
    assert store.current_epoch("shop", "log") == epoch_record(3, after=2**62)
    for stale in (2, 3):
        with pytest.raises(StateError, match=rf"epoch {stale} .* is not above epoch 3"):
            store.open_epoch(epoch_record(stale))
    assert store.current_epoch("shop", "copy") is None


def test_an_acknowledgement_is_remembered_and_never_goes_back(store: StateStore) -> None:
    assert store.get_ack("shop") is None
    store.save_ack("shop", 200)
    store.save_ack("shop", 100)
    store.save_ack("other", 1 << 62)
    assert store.get_ack("shop") == 200
    assert store.get_ack("other") == 1 << 62


def test_runtime_state_is_replaced_and_stamped(store: StateStore) -> None:
    store.set_runtime(Runtime("shop", "", StreamState.RUNNING))
    store.set_runtime(Runtime("shop", "log", StreamState.CREATED))
    store.set_runtime(Runtime("shop", "log", StreamState.FAILED, {"error": "no room", "batches": 3}, AT))
    whole, target = store.runtimes("shop")
    assert (whole.state, whole.fields) == (StreamState.RUNNING, {})
    assert whole.updated_at is not None
    assert whole.updated_at.tzinfo is not None
    assert target == Runtime("shop", "log", StreamState.FAILED, {"error": "no room", "batches": 3}, AT)
    assert store.runtimes("bank") == []
    assert len(store.runtimes()) == 2


def test_deleting_a_stream_forgets_all_of_it_and_nothing_else(store: StateStore) -> None:
    for name in ("shop", "bank"):
        store.put_stream(name, {"name": name})
        store.save_cursor(cursor(1, stream=name))
        store.save_cursor(cursor(2, stream=name))
        store.open_epoch(EpochRecord(name, "log", 1, "j1", 0, None, "first start", AT))
        store.set_runtime(Runtime(name, "log", StreamState.RUNNING))
    store.delete_stream("shop")
    assert store.list_streams() == ["bank"]
    assert store.get_cursor("shop", "log") is None
    assert store.cursor_history("shop", "log") == []
    assert store.current_epoch("shop", "log") is None
    assert [r.stream for r in store.runtimes()] == ["bank"]
    assert [c.seq for c in store.cursor_history("bank", "log")] == [1]


def test_totals_move_with_the_cursor_and_only_with_it(store: StateStore) -> None:
    store.save_cursor(cursor(5), [Tally("public.orders", 3, 100, 4), Tally("public.items", 2, 50, 5)])
    store.save_cursor(cursor(7), [Tally("public.orders", 2, 30, 7)])
    with pytest.raises(StateError, match="go back"):
        store.save_cursor(cursor(6), [Tally("public.orders", 99, 99, 6)])
    store.save_cursor(cursor(1, stream="bank"), [Tally("public.orders", 1, 1, 1)])
    assert store.totals("shop") == [
        Total("shop", "log", "public.items", 2, 50, 5),
        Total("shop", "log", "public.orders", 5, 130, 7),
    ]
    store.delete_stream("shop")
    assert store.totals() == [Total("bank", "log", "public.orders", 1, 1, 1)]


def test_pauses_and_deletions_are_remembered_until_the_stream_is_gone(store: StateStore) -> None:
    store.set_paused("shop", "log", True)
    store.set_paused("shop", "log", True)
    store.set_paused("shop", "", True)
    store.set_paused("bank", "", True)
    store.set_paused("shop", "", False)
    store.set_paused("shop", "", False)
    assert (store.paused("shop"), store.paused("bank"), store.paused("none")) == ({"log"}, {""}, set())
    store.begin_deletion("shop", {"keep_slot": False})
    store.begin_deletion("shop", {"keep_slot": True})
    store.begin_deletion("bank", {})
    assert store.deletions() == {"shop": {"keep_slot": True}, "bank": {}}
    store.save_ack("main", 7)
    store.save_ack("other", 8)
    store.add_captured("main", ["public.b", "public.a"])
    store.add_captured("main", ["public.c", "public.b"])
    store.add_captured("other", ["public.*"])
    assert store.captured("main") == ["public.a", "public.b", "public.c"]
    store.delete_stream("shop", source="main")
    store.delete_stream("bank")
    store.delete_stream("bank")
    assert (store.deletions(), store.paused("shop"), store.paused("bank")) == ({}, set(), set())
    assert (store.get_ack("main"), store.get_ack("other")) == (None, 8)
    assert (store.captured("main"), store.captured("other")) == ([], ["public.*"])


def test_faults_come_newest_first_and_are_bounded(store: StateStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millstream.state.sqlite.FAULTS", 3)
    monkeypatch.setattr("millstream.state.memory.FAULTS", 3)
    for number in range(5):
        store.add_fault(Fault("shop", "log", "delivery.retry", f"number {number}", AT))
    store.add_fault(Fault("bank", "", "capture.halted", "the slot is gone", AT))
    assert [fault.message for fault in store.faults("shop")] == ["number 4", "number 3", "number 2"]
    assert store.faults("bank") == [Fault("bank", "", "capture.halted", "the slot is gone", AT)]
    store.delete_stream("shop")
    assert store.faults("shop") == []


def test_the_last_comparison_of_each_target_is_remembered(store: StateStore) -> None:
    store.save_verification("shop", "log", {"equal": False})
    store.save_verification("shop", "log", {"equal": True})
    store.save_verification("shop", "copy", {"equal": None, "error": "no answer"})
    assert store.verifications("shop") == {"log": {"equal": True}, "copy": {"equal": None, "error": "no answer"}}
    store.delete_stream("shop")
    assert store.verifications("shop") == {}


def test_the_replay_of_a_target_is_kept_until_the_next_one(store: StateStore) -> None:
    store.save_replay("shop", "log", {"state": "waiting"})
    store.save_replay("shop", "log", {"state": "done"})
    store.save_replay("bank", "log", {"state": "running"})
    assert store.replays("shop") == {"log": {"state": "done"}}
    store.delete_stream("shop")
    assert (store.replays("shop"), store.replays("bank")) == ({}, {"log": {"state": "running"}})


def test_notes_of_a_target_are_kept_by_their_kind_until_the_next_one(store: StateStore) -> None:
    store.save_note("shop", "log", "restore", {"state": "waiting"})
    store.save_note("shop", "log", "snapshot", {"id": "1"})
    store.save_note("shop", "log", "snapshot", {"id": "2"})
    store.save_note("bank", "log", "snapshot", {"id": "3"})
    assert store.notes("shop", "restore") == {"log": {"state": "waiting"}}
    assert store.notes("shop", "snapshot") == {"log": {"id": "2"}}
    store.delete_stream("shop")
    assert (store.notes("shop", "snapshot"), store.notes("shop", "restore")) == ({}, {})
    assert store.notes("bank", "snapshot") == {"log": {"id": "3"}}


def test_what_comes_beside_batches_is_added_to_the_totals(store: StateStore) -> None:
    store.save_cursor(cursor(4), [Tally("public.orders", 3, 30, 4)])
    store.add_totals("shop", "log", [Tally("public.orders", 2, 20, 3), Tally("public.items", 1, 10, 3)])
    found = {total.table: (total.events, total.bytes, total.last_seq) for total in store.totals("shop")}
    assert found == {"public.orders": (5, 50, 4), "public.items": (1, 10, 3)}


def test_a_request_is_answered_or_withdrawn_never_both(store: StateStore) -> None:
    first, second = store.submit("pause", {"name": "shop"}), store.submit("delete", {"name": "bank"})
    assert [(one.id, one.verb, one.arguments) for one in store.pending()] == [
        (first, "pause", {"name": "shop"}),
        (second, "delete", {"name": "bank"}),
    ]
    store.answer(first, {"result": {}})
    assert not store.withdraw(first)
    answered = store.get_request(first)
    assert answered is not None
    assert answered.answer == {"result": {}}
    assert store.withdraw(second)
    assert not store.withdraw(second)
    store.answer(second, {"result": {}})
    assert (store.get_request(second), store.pending()) == (None, [])
    assert store.submit("resume", {}) > second, "an id never means another request"


def test_threads_may_write_and_read_at_once(store: StateStore) -> None:
    errors: list[Exception] = []

    def write(target: str) -> None:
        try:
            for seq in range(1, 41):
                store.save_cursor(cursor(seq, target=target))
                seen = store.get_cursor("shop", target)
                assert seen is not None
                assert seen.seq == seq
        except Exception as error:  # noqa: BLE001 - reported by the test's thread
            errors.append(error)

    threads = [threading.Thread(target=write, args=(f"t{n}",)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert [c.seq for c in store.cursors("shop")] == [40] * 4


def test_letters_are_listed_without_their_rows_and_read_with_them(store: StateStore) -> None:
    assert store.add_letters([letter(5), letter(6), letter(5, target="other")]) == []
    listed = store.letters("shop", "copy")
    assert numbers(listed) == [5, 6]
    assert numbers(store.letters()) == [5, 6, 5]
    assert [(one.payload, one.relation, one.key) for one in listed] == [(b"", {}, "5"), (b"", {}, "6")]
    whole = store.get_letter(listed[0].id)
    assert whole == replace(letter(5), id=listed[0].id)
    assert store.get_letter(1000) is None


def test_a_letter_that_is_there_already_stays_as_it_is(store: StateStore) -> None:
    store.add_letters([letter(5)])
    (first,) = store.letters()
    store.mark_letter(first.id, reason="still not")
    store.add_letters([letter(5), letter(6)])
    assert [(one.seq, one.reason, one.tries) for one in store.letters()] == [
        (5, "still not", 1),
        (6, "it does not fit", 0),
    ]


def test_only_the_newest_letters_of_a_target_are_kept_where_that_is_asked_for(store: StateStore) -> None:
    store.add_letters([letter(1, target="other"), letter(2), letter(3)])
    assert numbers(store.add_letters([letter(4), letter(5)], keep=3)) == [2]
    assert numbers(store.letters("shop", "copy")) == [3, 4, 5]
    assert numbers(store.letters("shop", "other")) == [1]


def test_letters_are_made_obsolete_together_with_the_cursor(store: StateStore) -> None:
    store.add_letters([letter(5), letter(6, kind="missing_base"), letter(7), letter(5, target="other")])
    store.save_cursor(cursor(9, target="copy"), superseded={"aaaa-5": 8, "aaaa-6": 9})
    store.save_cursor(cursor(10, target="copy"), superseded={"aaaa-5": 10})
    assert [(one.target, one.seq, one.state, one.superseded_by) for one in store.letters()] == [
        ("copy", 5, LetterState.SUPERSEDED, 8),
        ("copy", 7, LetterState.WAITING, None),
        ("other", 5, LetterState.WAITING, None),
    ]
    with pytest.raises(StateError):
        store.save_cursor(cursor(3, target="copy"), superseded={"aaaa-7": 10})
    assert store.letters("shop", "copy")[-1].state is LetterState.WAITING


def test_letters_are_removed_and_go_with_their_stream(store: StateStore) -> None:
    store.add_letters([letter(5), letter(6)])
    (first, _) = store.letters()
    assert store.remove_letters([first.id, 1000]) == 1
    assert numbers(store.letters()) == [6]
    store.put_stream("shop", {})
    store.delete_stream("shop")
    assert store.letters() == []


def doubt(seq: int, *, target: str = "copy", until: int = 1000) -> Doubt:
    return Doubt("shop", target, "public.orders", f"aaaa-{seq}", seq, str(seq), until)


def test_what_is_in_doubt_ends_with_a_later_write_of_the_row_or_when_the_cursor_comes_to_its_end(
    store: StateStore,
) -> None:
    end = cursor(9, target="copy").position
    store.add_doubts([doubt(7), doubt(6, until=1), doubt(5, until=end), doubt(4, until=end + 1)])
    store.add_doubts([doubt(6, until=end + 1), doubt(5, target="other", until=end)])
    assert [(one.seq, one.until) for one in store.doubts("shop", "copy")] == [
        (4, end + 1), (5, end), (6, end + 1), (7, 1000),
    ]  # fmt: skip
    store.save_cursor(cursor(9, target="copy"), superseded={"aaaa-7": 8})
    assert store.doubts("shop", "copy") == [doubt(4, until=end + 1), doubt(6, until=end + 1)]
    assert store.doubts("shop", "other") == [doubt(5, target="other", until=end)]
    store.set_doubts("shop", "copy", [doubt(9), doubt(8)])
    assert store.doubts("shop", "copy") == [doubt(8), doubt(9)]
    store.set_doubts("shop", "copy", [])
    assert store.doubts("shop", "copy") == []
    store.put_stream("shop", {})
    store.delete_stream("shop")
    assert store.doubts("shop", "other") == []


def test_targets_that_must_begin_anew_are_remembered_until_they_did(store: StateStore) -> None:
    store.set_needs_reload("shop", "copy", "changes are gone")
    store.set_needs_reload("shop", "log", "other changes are gone")
    assert store.needs_reload("shop") == {"copy": "changes are gone", "log": "other changes are gone"}
    store.set_needs_reload("shop", "copy", None)
    assert store.needs_reload("shop") == {"log": "other changes are gone"}
    assert store.needs_reload("bank") == {}


def test_the_last_decision_of_a_schema_change_counts(store: StateStore) -> None:
    at = datetime(2026, 1, 1, tzinfo=UTC)
    rejected, approved = Decided(Decision.REJECTED, at), Decided(Decision.APPROVED, at + timedelta(hours=1))
    for journal, seq, decided in (("a", 4, rejected), ("a", 7, rejected), ("b", 4, rejected), ("a", 4, approved)):
        store.decide_ddl("shop", journal, seq, decided)
    assert store.ddl_decisions("shop", "a") == {4: approved, 7: rejected}
    assert store.ddl_decisions("shop", "b") == {4: rejected}
    assert store.ddl_decisions("bank", "a") == {}
    store.put_stream("shop", {})
    store.delete_stream("shop")
    assert store.ddl_decisions("shop", "a") == {}
