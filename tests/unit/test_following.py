"""What capture found in the catalog is brought to each target once, whenever the process is killed."""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from millstream.engine import following
from millstream.engine import gate as gating
from millstream.engine.following import Following
from millstream.engine.gate import Gate, events
from millstream.engine.home import Home
from millstream.engine.reload import RELOAD, AskedTables, waiting
from millstream.errors import ConfigError
from millstream.journal import JournalReader
from millstream.model import BatchLimits, Cursor, Mode, SeqRange, SourceSpec, StreamSpec, TargetSpec
from millstream.observe import Event
from millstream.registry.kinds import Decided, Decision, Policy
from millstream.sources.base import Found, Look
from millstream.state.base import EpochRecord, StateStore
from millstream.state.sqlite import SqliteStateStore
from tests.fixtures.forks import run
from tests.fixtures.journals import Journal, shop_table

NOW = datetime(2026, 1, 31, tzinfo=UTC)
FOUND = (
    Found("partition_truncated", "public.orders", 1, "public.orders_1", copies=True),
    Found("partition_attached", "public.items", 2, "public.items_1"),
)


def stream(root: Path, **ddl: str) -> StreamSpec:
    options = {"path": str(root / "there.db")}
    targets = tuple(TargetSpec(name, "sqlite", BatchLimits(0, 1, 1), options=options) for name in ("copy", "spare"))
    source = SourceSpec("shop", "postgres", "postgresql://nowhere/shop", None, ("public.*",))
    return StreamSpec("shop", source, Mode.SNAPSHOT_THEN_CDC, targets, ddl=tuple(sorted(ddl.items())))


def journal_with(root: Path, *found: Found) -> JournalReader:
    """Two changes, what was found, and a third one."""
    path = Home(root).journal_path("shop")
    journal = Journal.create(path)
    journal.register(shop_table("orders", 1))
    journal.transaction([("public.orders", 1, "a"), ("public.orders", 2, "b")])
    journal.writer.note_look(Look({}, 1000, journal.position + 8, NOW, found))
    journal.transaction([("public.orders", 3, "c")])
    journal.writer.close()
    return JournalReader([str(path)])


def begun(store: StateStore, journal: str, *, after_position: int | None = None) -> None:
    """Both targets have got everything."""
    for target in ("copy", "spare"):
        store.open_epoch(EpochRecord("shop", target, 1, journal, 0, after_position, "first start", NOW))
        store.save_cursor(Cursor("shop", target, journal, 1, 3, 1208, NOW, NOW))


class Asking:
    """Writes down what is asked for, as operations do."""

    def __init__(self, store: StateStore, fails: bool = False) -> None:
        self._store, self._fails = store, fails
        self.asked: list[tuple[str, str]] = []
        self.events: list[Event] = []
        self.recaptured: list[str] = []

    def __call__(self, stream: StreamSpec, target: str, table: str) -> bool:
        if self._fails:
            raise ConfigError("not this one")
        self.asked.append((target, table))
        before = self._store.notes(stream.name, RELOAD).get(target)
        self._store.save_note(stream.name, target, RELOAD, waiting(AskedTables((table,)), before))
        return True

    def recapture(self, source: str) -> None:
        self.recaptured.append(source)

    def on_event(self, event: Event) -> None:
        self.events.append(event)


Serve = Callable[..., Asking]


@pytest.fixture
def store(tmp_path: Path) -> SqliteStateStore:
    return SqliteStateStore(tmp_path / "state.db")


@pytest.fixture
def reader(tmp_path: Path) -> JournalReader:
    return journal_with(tmp_path, *FOUND)


@pytest.fixture
def serve(tmp_path: Path, store: SqliteStateStore) -> Serve:
    def once(spec: StreamSpec, *, fails: bool = False) -> Asking:
        asking = Asking(store, fails)
        Following(Home(tmp_path), store, asking, asking.recapture, asking).serve([spec])
        return asking

    return once


def told(store: StateStore, spec: StreamSpec, reader: JournalReader) -> dict[str, tuple[str, list[str]]]:
    """By id, the state and the receipts of what the catalog told."""
    found = [one for one in events(spec, reader, None, store) if isinstance(one.id, str)]
    return {str(one.id): (one.state, sorted(one.receipts.values())) for one in found}


def end_copies(store: StateStore, state: str = "done") -> None:
    for target, note in store.notes("shop", RELOAD).items():
        tables = {name: {"state": state, "rows": 1} for name in note["names"]}
        store.save_note("shop", target, RELOAD, {**note, "state": state, "tables": tables})


def test_each_target_gets_a_copy_once(
    tmp_path: Path, store: SqliteStateStore, reader: JournalReader, serve: Serve
) -> None:
    spec = stream(tmp_path)
    assert serve(spec).asked == [], "nobody has begun"
    begun(store, reader.header().journal_id)
    assert serve(spec).asked == [("copy", "public.orders"), ("spare", "public.orders")]
    assert told(store, spec, reader) == {
        "c1": ("new", ["copying", "copying"]),
        "c2": ("applied", ["applied", "applied"]),
    }
    assert serve(spec).asked == []
    end_copies(store)
    assert serve(spec).asked == []
    assert told(store, spec, reader)["c1"] == ("applied", ["applied", "applied"])


def test_a_target_that_came_back_from_before_it_gets_it_once_more(
    tmp_path: Path, store: SqliteStateStore, reader: JournalReader, serve: Serve
) -> None:
    spec, journal = stream(tmp_path), reader.header().journal_id
    begun(store, journal)
    serve(spec)
    end_copies(store)
    store.open_epoch(EpochRecord("shop", "copy", 2, journal, 1, None, "the target is behind its saved cursor", NOW))
    store.open_epoch(EpochRecord("shop", "spare", 2, journal, 3, None, "the checkpoint cannot be read", NOW))
    assert serve(spec).asked == [("copy", "public.orders")]
    end_copies(store)
    assert serve(spec).asked == []
    asking = Asking(store)
    once_more = Following(Home(tmp_path), store, asking, asking.recapture, asking)
    once_more.repeat(spec, ["spare"], 3)
    once_more.repeat(spec, ["spare"], 0)
    once_more.serve([spec])
    assert asking.asked == [("spare", "public.orders")], "what is replayed from before it brings rows that are gone"


def test_a_table_that_comes_is_captured_once_for_all_targets(
    tmp_path: Path, store: SqliteStateStore, serve: Serve
) -> None:
    reader, spec = journal_with(tmp_path, Found("create_table", "public.more", 3, copies=True)), stream(tmp_path)
    begun(store, reader.header().journal_id)
    served = serve(spec)
    assert (len(served.asked), served.recaptured) == (2, ["shop"])
    assert serve(spec).recaptured == []


def test_a_target_whose_baseline_is_younger_has_it_already(
    tmp_path: Path, store: SqliteStateStore, reader: JournalReader, serve: Serve
) -> None:
    spec = stream(tmp_path, partition_truncated="gate")
    begun(store, reader.header().journal_id, after_position=2000)
    assert serve(spec).asked == []
    assert told(store, spec, reader)["c1"] == ("applied", ["applied", "applied"])


def test_what_failed_is_told_and_tried_again_once_it_is_approved(
    tmp_path: Path, store: SqliteStateStore, reader: JournalReader, serve: Serve
) -> None:
    from millstream.engine.ddl import decide

    spec, journal = stream(tmp_path), reader.header().journal_id
    begun(store, journal)
    failed = serve(spec, fails=True)
    assert [event.kind for event in failed.events] == ["stream.ddl_failed"] * 2
    assert told(store, spec, reader)["c1"] == ("failed", ["failed", "failed"])
    decide(Home(tmp_path), store, spec, "c1", approved=True)
    assert len(serve(spec).asked) == 2
    end_copies(store, "failed")
    serve(spec)
    assert told(store, spec, reader)["c1"][0] == "failed"


def test_a_gate_holds_delivery_where_it_is_until_somebody_decides(
    tmp_path: Path, store: SqliteStateStore, reader: JournalReader, serve: Serve
) -> None:
    spec, journal = stream(tmp_path, partition_truncated="gate"), reader.header().journal_id
    gate = Gate(spec, "copy", reader.locations, store, None, reloads=True)
    closed = gate.cut(SeqRange(0, 3))
    assert closed is not None
    assert (closed.seq, closed.waits) == (2, True), "what was there when it was found is delivered"
    assert "ddl show shop c1" in str(closed.error("shop").hint)
    behind = gate.after(3)
    assert behind is not None
    assert behind.seq == 3, "one that is further waits where it is"
    assert gate.after(3, after_position=2000) is None, "its baseline was taken later"
    begun(store, journal)
    assert serve(spec).asked == []
    store.decide_ddl("shop", journal, -1, Decided(Decision.REJECTED, NOW))
    rejected = gate.after(3)
    assert rejected is not None
    assert not rejected.waits
    store.decide_ddl("shop", journal, -1, Decided(Decision.APPROVED, NOW))
    assert gate.after(3) is None
    assert len(serve(spec).asked) == 2


def test_a_target_that_cannot_get_a_table_anew_waits_for_somebody_to_say_so(
    tmp_path: Path, store: SqliteStateStore, reader: JournalReader, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (following, gating):
        monkeypatch.setattr(module, "reloads", lambda _: False)
    spec, journal = replace(stream(tmp_path), targets=stream(tmp_path).targets[:1]), reader.header().journal_id
    store.save_cursor(Cursor("shop", "copy", journal, 1, 3, 1208, NOW, NOW))
    gate = Gate(spec, "copy", reader.locations, store, None, reloads=False)
    closed = gate.after(3)
    assert closed is not None
    assert closed.policy is Policy.GATE
    serve(spec)
    assert told(store, spec, reader)["c1"] == ("pending", ["waiting"])
    store.decide_ddl("shop", journal, -1, Decided(Decision.APPROVED, NOW))
    assert serve(spec).asked == []
    assert told(store, spec, reader)["c1"] == ("applied", ["left"])


def served_once(root: str) -> None:
    with closing(SqliteStateStore(Path(root) / "state.db")) as store:
        asking = Asking(store)
        Following(Home(root), store, asking, asking.recapture, asking).serve([stream(Path(root))])


@pytest.mark.parametrize("nth", [1, 2, 3, 4])
def test_killed_after_any_receipt_it_goes_on_with_the_rest(
    tmp_path: Path, store: SqliteStateStore, reader: JournalReader, serve: Serve, nth: int
) -> None:
    spec = stream(tmp_path)
    begun(store, reader.header().journal_id)
    ended = run(served_once, str(tmp_path), environment={"MILLSTREAM_FAILPOINT": f"catalog.receipt_saved:{nth}"})
    assert ended.code == -signal.SIGKILL, ended.stderr
    asked = serve(spec).asked
    assert asked == ([("spare", "public.orders")] if nth < 3 else [])
    assert {target: note["names"] for target, note in store.notes("shop", RELOAD).items()} == {
        "copy": ["public.orders"],
        "spare": ["public.orders"],
    }
    assert told(store, spec, reader) == {
        "c1": ("new", ["copying", "copying"]),
        "c2": ("applied", ["applied", "applied"]),
    }
