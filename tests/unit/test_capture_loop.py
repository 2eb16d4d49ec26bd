"""The loop between a source and its journal, with a source made of plain lists."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from millstream.engine import capture_loop, retainer
from millstream.engine.backoff import Backoff
from millstream.engine.capture_loop import CaptureLoop
from millstream.engine.capture_order import CaptureOrder, Control, Rebase
from millstream.errors import JournalFull, JournalLocked, PreflightError, SourceHalted, SourceUnavailable
from millstream.journal import JournalReader, JournalWriter, rows
from millstream.journal.format import Head
from millstream.journal.head import HeadFile
from millstream.model import AckPolicy, Column, Json, OnLimit, Relation, Retention, SeqRange, SourceSpec
from millstream.observe import Event
from millstream.sources.base import CAPTURED, Block, Finding, Found, Look, Registrar, Severity, SourceIdentity

TABLE = Relation(1, "public", "t", "d", (Column("id", 23, key=True),), ("id",), ("id",), enriched=True)
START = 100

Step = Block | Exception | Callable[[], None]


def changes(position: int, count: int = 1, *, open_transaction: bool = False, first: int = 0) -> Block:
    """One transaction (or a piece of one) at this position; it ends eight bytes later."""
    values = {
        "tx_index": np.arange(first, first + count),
        "op": np.full(count, ord("c")),
        "commit_position": np.full(count, position),
        "resume_position": np.full(count, position + 8),
        "commit_ts": np.full(count, position),
        "txid": np.full(count, 1),
        "relation": np.full(count, 1),
    }
    columns = [pa.array(column).cast(CAPTURED.field(name).type) for name, column in values.items()]
    columns.append(pa.array([b"I"] * count, pa.large_binary()))
    return Block(pa.RecordBatch.from_arrays(columns, schema=CAPTURED), open_transaction)


@dataclass
class ListSource:
    """Plays one list of steps per connection; when the last is played it stops the loop."""

    control: Control
    sessions: list[list[Step]]
    kind = "list"
    findings: list[Finding] = field(default_factory=list)
    start: int = START
    unreachable: int = 0
    said: Json = field(default_factory=dict)
    moved: Json = field(default_factory=dict)
    """What is different of it since it was prepared."""
    calls: list[Any] = field(default_factory=list)

    def preflight(self) -> list[Finding]:
        return self.findings

    def relations(self, patterns: Sequence[str]) -> list[Relation]:
        if self.unreachable:
            self.unreachable -= 1
            raise SourceUnavailable("nobody answers")
        return [TABLE]

    def prepare(self) -> SourceIdentity:
        self.calls.append("prepare")
        return SourceIdentity(self.kind, {"who": "me"}, self.start)

    def recall(self, descriptions: Sequence[Relation], end: int, look: Json | None = None) -> None:
        if look is not None:
            self.calls.append(("recall", look["state"], look["position"]))

    def check(self, identity: SourceIdentity, end: int) -> SourceIdentity:
        self.calls.append(("check", dict(identity.facts), end))
        return replace(identity, facts={**identity.facts, **self.moved})

    def capture(self, start: int, register: Registrar) -> Iterator[Block]:
        assert register(TABLE) == 1
        for step in self.sessions.pop(0):
            if isinstance(step, Exception):
                raise step
            if isinstance(step, Block):
                yield step
            else:
                step()
        if not self.sessions:
            self.control.stopping.set()
        while True:
            yield Block()

    def ack(self, position: int) -> None:
        self.calls.append(("ack", position))

    def status(self) -> Json:
        return self.said

    def format_position(self, position: int) -> str:
        return f"@{position}"

    def close(self) -> None:
        self.calls.append("close")

    @property
    def acks(self) -> list[int]:
        return [call[1] for call in self.calls if call[0] == "ack"]


@dataclass
class Heard:
    events: list[Event] = field(default_factory=list)
    statuses: list[Json] = field(default_factory=list)

    def event(self, event: Event) -> None:
        self.events.append(event)

    def status(self, status: Json) -> None:
        self.statuses.append(status)

    @property
    def kinds(self) -> list[str]:
        return [event.kind for event in self.events]


@dataclass
class Rig:
    path: Path
    control: Control = field(default_factory=Control)
    heard: Heard = field(default_factory=Heard)

    def run(self, *sessions: list[Step], order: dict[str, Any] | None = None, **fields: Any) -> ListSource:
        spec = {key: fields.pop(key) for key in ("ack", "max_source_wal", "on_limit", "retention") if key in fields}
        source = ListSource(self.control, list(sessions), **fields)
        made = CaptureOrder(SourceSpec("s", "list", "", None, ("t",), **spec), self.path, **(order or {}))
        try:
            CaptureLoop(made, lambda _: source, self.control, self.heard).run()
        finally:
            self.source = source
            self.control = Control()
        return source

    def rows(self) -> list[tuple[int, int, int]]:
        reader = JournalReader([str(self.path)])
        head = reader.head()
        assert head is not None
        found = rows(reader, SeqRange(reader.first_seq() - 1, head.seq))
        return [(r["seq"], r["commit_position"], r["tx_index"]) for b in found for r in b.to_pylist()]

    @property
    def end(self) -> int:
        head = JournalReader([str(self.path)]).head()
        assert head is not None
        return head.covered


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
    monkeypatch.setattr(capture_loop, "Backoff", lambda: Backoff(first=0.01, limit=0.02))
    monkeypatch.setattr(capture_loop, "LOOK_SECONDS", 0.0)
    return Rig(tmp_path / "journal")


def test_a_first_start_prepares_and_begins_where_the_source_does(rig: Rig) -> None:
    source = rig.run([changes(200, 2), changes(300)])
    assert source.calls[:2] == ["prepare", ("check", {"who": "me"}, START)]
    assert rig.rows() == [(1, 200, 0), (2, 200, 1), (3, 300, 0)]
    assert JournalReader([str(rig.path)]).header().start_position == START
    assert rig.heard.statuses[-1]["end"] == rig.end == 308


def test_the_journal_tells_how_much_of_the_log_is_being_read_and_when_nothing_is(rig: Rig) -> None:
    told: list[tuple[int, int]] = []

    def seen() -> None:
        head = JournalReader([str(rig.path)]).head()
        assert head is not None
        told.append((head.seq, head.left))

    behind = [replace(changes(200), behind=True, left=70), Block(progress=250, left=70), seen, Block(left=70), seen]
    last = [replace(changes(300), behind=True, left=9), Block(progress=350, left=9), seen, Block(), seen]
    rig.run([*behind, *last])
    assert told == [(1, 70), (1, 70), (2, 9), (2, 0)]


def test_the_last_rows_of_a_backlog_are_visible_when_nothing_is_left(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits for the end of a backlog would go without them otherwise."""
    told: list[tuple[int, int]] = []
    publish = HeadFile.publish

    def seen(file: HeadFile, head: Head) -> None:
        told.append((head.seq, head.left))
        publish(file, head)

    monkeypatch.setattr(HeadFile, "publish", seen)
    first = [replace(changes(200), behind=True, left=70), Block(progress=250, left=70)]
    rig.run([*first, replace(changes(300), behind=True), Block(progress=350)])
    assert list(dict.fromkeys(told)) == [(0, 0), (1, 70), (2, 0)]


def test_nothing_is_left_of_a_log_whose_connection_is_lost(rig: Rig) -> None:
    told: list[int] = []

    def seen() -> None:
        head = JournalReader([str(rig.path)]).head()
        assert head is not None
        told.append(head.left)

    first = [replace(changes(200), behind=True, left=70), Block(progress=250, left=70), seen]
    rig.run([*first, SourceUnavailable("gone")], [seen])
    assert told == [70, 0]


def look(position: int, *found: Found) -> Block:
    return Block(look=Look({"seen": position}, position - 50, position, datetime(2026, 1, 31, tzinfo=UTC), found))


def test_what_a_look_at_the_catalog_found_stands_behind_the_changes_before_it(rig: Rig) -> None:
    emptied = Found("partition_truncated", "public.p", 7, "public.p_1", copies=True)
    rig.run([look(150), changes(200, 2), look(250, emptied), changes(300)])
    (found,) = JournalReader([str(rig.path)]).catalog_changes()
    assert (found.number, found.kind, found.table, found.part) == (1, "partition_truncated", "public.p", "public.p_1")
    assert (found.since, found.position, found.seq, found.copies) == (200, 250, 2, True)
    assert [event.fields["id"] for event in rig.heard.events if event.kind == "source.catalog_changed"] == ["c1"]
    source = rig.run([look(400, Found("drop_table", "public.t", 1))])
    assert ("recall", {"seen": 250}, 250) in source.calls
    assert [(one.number, one.kind, one.seq) for one in JournalReader([str(rig.path)]).catalog_changes()] == [
        (1, "partition_truncated", 2),
        (2, "drop_table", 3),
    ]


def test_a_later_start_goes_on_from_the_journals_end(rig: Rig) -> None:
    rig.run([changes(200)])
    source = rig.run([changes(300)])
    assert source.calls[0] == ("check", {"who": "me"}, 208)
    assert rig.rows() == [(1, 200, 0), (2, 300, 0)]


def test_the_journal_is_bound_to_what_took_the_place_of_its_source_before_a_row_comes_from_there(rig: Rig) -> None:
    rig.run([changes(200)])
    bound = JournalReader([str(rig.path)]).header

    def see() -> None:
        assert bound().identity == {"who": "me", "timeline": 2}

    rig.run([see, changes(300)], moved={"timeline": 2})
    (said,) = [event for event in rig.heard.events if event.kind == "capture.source_moved"]
    assert said.fields["changed"] == ["timeline"]
    source = rig.run([changes(400)], moved={"timeline": 2})
    assert source.calls[0] == ("check", {"who": "me", "timeline": 2}, 308)
    assert rig.heard.kinds.count("capture.source_moved") == 1
    assert rig.rows() == [(1, 200, 0), (2, 300, 0), (3, 400, 0)]
    assert bound().start_position == START


def test_a_lost_connection_is_opened_again_at_the_journals_end(rig: Rig) -> None:
    source = rig.run([changes(200), SourceUnavailable("gone")], [SourceUnavailable("again")], [changes(300)])
    assert [call[2] for call in source.calls if call[0] == "check"] == [START, 208, 208]
    assert rig.rows() == [(1, 200, 0), (2, 300, 0)]
    assert rig.heard.kinds.count("capture.unavailable") == 2


def test_a_transaction_that_was_cut_off_is_not_kept_in_part(rig: Rig) -> None:
    rig.run(
        [changes(200), changes(300, 5, open_transaction=True), SourceUnavailable("gone")],
        [changes(300, 5, open_transaction=True), changes(300, 5, first=5)],
    )
    assert rig.rows() == [(1, 200, 0), *((n + 2, 300, n) for n in range(10))]


def test_a_stop_waits_for_the_end_of_a_transaction(rig: Rig) -> None:
    rig.run([changes(200, open_transaction=True), rig.control.stopping.set, changes(200, first=1)])
    assert rig.rows() == [(1, 200, 0), (2, 200, 1)]


def test_a_source_that_is_not_there_yet_is_waited_for(rig: Rig) -> None:
    rig.run([changes(200)], unreachable=3)
    assert rig.heard.kinds.count("capture.unavailable") == 3
    assert rig.rows() == [(1, 200, 0)]


def test_an_unfit_source_is_refused_with_its_findings(rig: Rig) -> None:
    bad = Finding("wal_level", Severity.ERROR, "wal_level is replica", "ALTER SYSTEM SET wal_level = logical")
    meh = Finding("slots", Severity.WARNING, "only one slot is free")
    with pytest.raises(PreflightError, match=r"wal_level is replica.*ALTER SYSTEM"):
        rig.run([], findings=[bad, meh])
    assert "prepare" not in rig.source.calls
    assert "capture.preflight" in rig.heard.kinds


def test_a_missing_journal_that_targets_know_is_never_made_anew(rig: Rig) -> None:
    with pytest.raises(SourceHalted, match=r"no journal.*rebase"):
        rig.run([], order={"expect_journal": True})
    assert rig.source.calls == ["close"]


def test_a_rebase_begins_above_all_old_seqs_at_the_targets_position(rig: Rig) -> None:
    order = {"expect_journal": True, "rebase": Rebase(first_seq=51, incarnation=3, start_position=150)}
    source = rig.run([changes(200)], order=order)
    assert rig.rows() == [(51, 200, 0)]
    header = JournalReader([str(rig.path)]).header()
    assert (header.incarnation, header.first_seq, header.start_position) == (3, 51, 150)
    assert ("check", {"who": "me"}, 150) in source.calls


def test_a_rebase_behind_what_the_source_still_has_is_refused(rig: Rig) -> None:
    order = {"rebase": Rebase(first_seq=51, incarnation=3, start_position=START - 1)}
    with pytest.raises(SourceHalted, match=r"@100 on.*@99.*lost"):
        rig.run([], order=order)
    assert not rig.path.exists()


def test_a_journal_of_another_source_is_refused(rig: Rig) -> None:
    JournalWriter.create(rig.path, source="x", source_kind="list", identity={}, start_position=1).close()
    with pytest.raises(SourceHalted, match="belongs to source x"):
        rig.run([])


def test_a_locked_journal_is_refused(rig: Rig) -> None:
    with (
        JournalWriter.create(rig.path, source="s", source_kind="list", identity={}, start_position=1),
        pytest.raises(JournalLocked),
    ):
        rig.run([])


def test_only_what_targets_have_and_the_journal_holds_is_acknowledged(rig: Rig) -> None:
    def deliver(position: int) -> Callable[[], None]:
        return lambda: setattr(rig.control, "ack", position)

    source = rig.run([changes(200), Block(), deliver(208), Block(), deliver(150), Block(), deliver(9999), changes(300)])
    assert source.acks == [208, 308]


def test_nothing_is_acknowledged_before_anybody_has_said_so(rig: Rig) -> None:
    assert rig.run([changes(200), Block()]).acks == []


def test_with_ack_journaled_the_journals_end_is_acknowledged(rig: Rig) -> None:
    source = rig.run([changes(200), Block(), Block(progress=250)], ack=AckPolicy.JOURNALED)
    assert source.acks[0] in (START, 208)
    assert source.acks[-1] == 250 == rig.end
    assert source.acks == sorted(set(source.acks))


def test_progress_without_rows_is_made_durable_now_and_then(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture_loop, "PROGRESS_SECONDS", 600.0)
    before = threading.Event()

    def look() -> None:
        assert rig.end == START + 1  # the first at once, the others not so soon after it
        before.set()

    rig.run([Block(progress=START + n) for n in (1, 2, 3)] + [look])
    assert before.is_set()
    assert rig.end == START + 3


def test_beyond_the_limit_the_journals_end_is_released_loudly(rig: Rig) -> None:
    said = {"log_end": 1000, "confirmed": 100, "safe_bytes": None}
    source = rig.run([changes(200), Block(), changes(300), Block()], max_source_wal=500, said=said)
    assert source.acks == [208, 308]
    assert "capture.log_released" in rig.heard.kinds
    assert rig.heard.statuses[-1]["released"] >= 1
    assert rig.heard.statuses[-1]["over_limit"]


def test_never_more_than_half_of_what_the_source_can_keep_is_held(rig: Rig) -> None:
    said = {"log_end": 1000, "confirmed": 100, "safe_bytes": 1000}
    rig.run([changes(200), Block()], said=said)
    assert "capture.log_released" in rig.heard.kinds


def test_hold_says_so_and_acknowledges_nothing(rig: Rig) -> None:
    said = {"log_end": 1000, "confirmed": 100, "safe_bytes": None}
    source = rig.run([changes(200), Block()], max_source_wal=500, said=said, on_limit=OnLimit.HOLD)
    assert source.acks == []
    assert rig.heard.kinds.count("capture.log_held") == 1


def test_stop_halts_beyond_the_limit(rig: Rig) -> None:
    said = {"log_end": 1000, "confirmed": 100, "safe_bytes": None}
    with pytest.raises(SourceHalted, match=r"keeps 900 bytes.*limit is 500"):
        rig.run([changes(200), Block()], max_source_wal=500, said=said, on_limit=OnLimit.STOP)
    assert rig.rows() == [(1, 200, 0)]


def test_below_the_limit_nothing_is_said(rig: Rig) -> None:
    said = {"log_end": 1000, "confirmed": 600, "safe_bytes": None}
    source = rig.run([changes(200), Block()], max_source_wal=500, said=said)
    assert source.acks == []
    assert "capture.log_released" not in rig.heard.kinds


def test_a_full_disk_is_waited_out_without_the_source(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    commit, failures = JournalWriter.commit, iter([JournalFull("no room"), JournalFull("no room")])

    def fail_twice(writer: JournalWriter) -> Any:
        if writer.pending_bytes and (failure := next(failures, None)):
            writer._go_back()
            raise failure
        return commit(writer)

    monkeypatch.setattr(JournalWriter, "commit", fail_twice)
    source = rig.run([changes(200), Block()], [changes(200), Block()], [changes(200), Block()])
    assert rig.rows() == [(1, 200, 0)]
    assert [kind for kind in rig.heard.kinds if "disk" in kind] == [
        *("capture.disk_full", "capture.disk_full", "capture.disk_full_over"),
    ]
    assert source.calls.count("close") == 3


def test_a_full_disk_does_not_hold_up_a_stop(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: JournalWriter) -> None:
        rig_control.stopping.set()
        raise JournalFull("no room") from OSError(errno.ENOSPC, "full")

    rig_control = rig.control
    monkeypatch.setattr(JournalWriter, "maintain", full)
    monkeypatch.setattr(capture_loop, "LOOK_SECONDS", 60.0)
    rig.run([changes(200), Block()])
    assert rig.rows() == [(1, 200, 0)]


def many(first: int, count: int) -> list[Step]:
    """Transactions with a pause after each, in which the loop does what it does between two."""
    return [step for n in range(count) for step in (changes(first + 100 * n, 40), Block())]


def test_what_nobody_needs_goes_while_capture_runs(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retainer, "LOOK_SECONDS", 0.0)
    order = {"segment_bytes": 4000}
    rule = Retention(bytes=10_000)
    rig.run(many(1000, 20), order=order, retention=rule)
    assert rig.rows()[0][0] == 1, "until the engine has said who needs what, nothing goes"
    rig.control.lowest = 400
    rig.run(many(5000, 20), order=order, retention=rule)
    kept = rig.rows()
    assert 1 < kept[0][0] <= 401
    assert kept[0][2] == 0, "a transaction stays whole or goes"
    assert [row[0] for row in kept] == list(range(kept[0][0], 1601))
    assert "capture.journal_pruned" in rig.heard.kinds


def test_a_full_disk_is_pruned_while_capture_waits(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retainer, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(capture_loop, "LOOK_SECONDS", 0.01)
    order = {"segment_bytes": 4000}
    rig.run(many(1000, 20), order=order)
    free = iter([0, 0, 1 << 40])
    monkeypatch.setattr(CaptureLoop, "_free", lambda _: next(free, 1 << 40))
    rig.control.lowest = 400
    rig.run([JournalFull("no room")], [changes(9000)], order=order, retention=Retention(bytes=10_000))
    assert rig.heard.kinds.index("capture.disk_full") < rig.heard.kinds.index("capture.journal_pruned")
    assert rig.rows()[0][0] > 1


def test_waits_grow_and_are_never_the_same_for_all() -> None:
    backoff = Backoff(first=1.0, limit=8.0)
    waits = [backoff.next() for _ in range(6)]
    assert all(low / 2 <= wait <= low for wait, low in zip(waits, [1, 2, 4, 8, 8, 8], strict=True))
    backoff.reset()
    assert backoff.next() <= 1.0
    assert len({Backoff().next() for _ in range(10)}) > 1
