from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from millstream.cli.app import app
from millstream.config import load_streams
from millstream.config.definition import definition
from millstream.engine.home import Home
from millstream.engine.reload import RELOAD, AskedTables, progress_of, table_waiting, waiting
from millstream.engine.reports import CaptureReport, TargetReport
from millstream.engine.status import home_status
from millstream.errors import UnknownStream
from millstream.model import Cursor, Json, StreamState
from millstream.state.base import Runtime, Tally
from tests.fixtures.journals import Journal, shop_table

FILE = """\
name: shop
source:
  kind: postgres
  uri: postgresql://app:hunter2@localhost/shop
  tables: [public.*]
mode: cdc
targets:
  - {name: log, kind: files, path: ./log}
  - {name: spare, kind: files, path: ./spare}
"""


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    """The journal of a home in which the stream `shop` is known; three transactions, five changes."""
    home = Home(tmp_path / "home").create()
    (tmp_path / "shop.yaml").write_text(FILE)
    store = home.open_state()
    store.put_stream("shop", definition(load_streams([tmp_path / "shop.yaml"])[0]))
    store.close()
    journal = Journal.create(home.journal_path("shop"))
    journal.register(shop_table("orders", 7001))
    for id_ in (1, 2):
        journal.transaction([("public.orders", id_, "x"), ("public.orders", id_ + 10, "y")])
    journal.transaction([("public.orders", 3, "x")])
    yield journal
    journal.writer.close()


@pytest.fixture
def home(journal: Journal) -> Home:
    return Home(journal.path.parents[1])


def save(home: Home, *runtimes: Runtime, cursors: tuple[Cursor, ...] = ()) -> None:
    store = home.open_state()
    for runtime in runtimes:
        store.set_runtime(runtime)
    for cursor in cursors:
        store.save_cursor(cursor)
    store.close()


def cursor(journal: Journal, seq: int, target: str = "log") -> Cursor:
    at = datetime(2026, 1, 1, tzinfo=UTC)
    return Cursor("shop", target, journal.writer.header.journal_id, 2, seq, 1108, at)


def status(home: Home, *arguments: str) -> Json:
    result = millstream(home, "--json", *arguments)
    assert result.exit_code == 0, result.output
    found: Json = json.loads(result.stdout)
    return found


def millstream(home: Home, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["status", "--home", str(home.path), *arguments])


def test_a_home_that_is_not_there_yet_has_no_streams(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["status", "--home", str(tmp_path / "none")])
    assert result.exit_code == 0
    assert result.stdout == f"{tmp_path}/none: no process runs here\nNo stream is here.\n"
    assert not (tmp_path / "none").exists()


def test_a_stream_that_never_ran_is_created(home: Home) -> None:
    found = status(home)
    (stream,) = found["streams"]
    assert (found["owner"], found["healthy"], stream["state"]) == (None, False, "created")
    assert [target["state"] for target in stream["targets"]] == ["created", "created"]
    assert stream["targets"][0]["lag_events"] == 5


def test_a_running_stream_shows_how_far_it_is(home: Home, journal: Journal) -> None:
    last = {"state": "running", "seq": 5, "retained_bytes": 4096}
    with home.lock() as owner:
        save(
            home,
            Runtime("shop", "", StreamState.RUNNING, CaptureReport("running", 77, source=last).to_json()),
            Runtime("shop", "log", StreamState.RUNNING, TargetReport(2, 100, 1).to_json()),
            Runtime("shop", "spare", StreamState.RUNNING, TargetReport(5, 200, 2).to_json()),
            cursors=(cursor(journal, 2), cursor(journal, 5, "spare")),
        )
        found = status(home)
        text = millstream(home).stdout
    (stream,) = found["streams"]
    assert (found["owner"]["pid"], found["healthy"], stream["state"]) == (owner.pid, True, "running")
    source = stream["source"]
    assert (source["state"], source["pid"], source["retained_bytes"]) == ("running", 77, 4096)
    assert (source["end_seq"], source["end_position"]) == (5, "00000000/0000051C")
    log, spare = stream["targets"]
    assert (log["seq"], log["epoch"], log["position"]) == (2, 2, "00000000/00000454")
    assert (log["lag_events"], spare["lag_events"], spare["lag_seconds"]) == (3, 0, 0.0)
    assert (log["events"], log["bytes"], log["batches"]) == (2, 100, 1)
    assert log["last_event_at"] == "2026-01-01T00:00:00+00:00"
    assert "shop  running" in text
    assert "retained on the source 4.0 KiB" in text
    assert "hunter2" not in text + json.dumps(found)


def test_each_table_shows_how_far_it_is(home: Home, journal: Journal) -> None:
    journal.register(shop_table("items", 7002))
    journal.transaction([("public.items", 1, "x" * 5000)])
    store = home.open_state()
    store.save_cursor(cursor(journal, 2), [Tally("public.orders", 2, 100, 2)])
    store.save_cursor(cursor(journal, 6, "spare"), [Tally("public.orders", 5, 200, 5), Tally("public.items", 1, 50, 6)])
    store.close()
    at = datetime.fromtimestamp(1400 * 1000 / 1_000_000, UTC)
    (found,) = home_status(home, now=at + timedelta(seconds=60)).streams
    items, orders = found.targets[0].tables
    assert (orders.name, orders.seq, orders.position) == ("public.orders", 2, "00000000/00000454")
    assert (orders.events_replicated, orders.lag_events, orders.lag_seconds) == (2, 3, pytest.approx(60.2))
    assert (items.name, items.seq, items.events_replicated, items.lag_events) == ("public.items", None, 0, 1)
    assert items.lag_seconds == pytest.approx(60.0)
    assert 5000 < (items.lag_bytes or 0) < 7000
    assert [(table.lag_events, table.lag_bytes, table.lag_seconds) for table in found.targets[1].tables] == [
        (0, 0, 0.0),
        (0, 0, 0.0),
    ]
    (whole,) = [table for table in found.tables_replicated if table.name == "public.orders"]
    assert (whole.events_replicated, whole.seq, whole.lag_events) == (7, 2, 3)
    text = millstream(home).stdout
    assert [line.split()[:4] for line in text.splitlines() if line.strip().startswith("public.")] == [
        ["public.orders", "2", "00000000/00000454", "3"],
        ["public.items", "-", "-", "1"],
    ]


def test_how_the_log_is_read_is_shown_while_it_is_read(home: Home) -> None:
    said = {"mode": "streaming", "behind_bytes": 3 << 20, "bulk_refused": "no free slot"}
    report = CaptureReport("running", 77, source=said).to_json()
    with home.lock():
        save(home, Runtime("shop", "", StreamState.RUNNING, report))
        source = status(home)["streams"][0]["source"]
        text = millstream(home).stdout
    assert {key: source[key] for key in said} == said
    assert "reading the log: streaming, 3.0 MiB behind" in text
    assert "source shop: not read in bulk: no free slot" in text
    stopped = status(home)["streams"][0]["source"]
    assert (stopped["mode"], stopped["behind_bytes"], stopped["bulk_refused"]) == (None, None, None)


def test_first_rows_show_how_far_they_are(home: Home) -> None:
    far = {"chunks": 12, "done": 3, "rows": 4000, "rows_per_second": 1500, "seconds_left": 35.0}
    running = {**table_waiting(), **far, "state": "running", "points": [{"from": 0, "seq": 5, "position": 9}]}
    record = {**waiting(AskedTables()), "state": "running", "baseline": True}
    record["tables"] = {"public.items": {**table_waiting(), "state": "done", "rows": 7}, "public.orders": running}
    store = home.open_state()
    store.save_note("shop", "spare", RELOAD, record)
    store.close()
    with home.lock():
        save(
            home,
            Runtime("shop", "log", StreamState.SNAPSHOT, TargetReport(baseline=far).to_json()),
            Runtime("shop", "spare", StreamState.SNAPSHOT, TargetReport(baseline=progress_of(record)).to_json()),
        )
        log, spare = status(home)["streams"][0]["targets"]
        text = millstream(home).stdout
    assert log["baseline"] == far
    assert spare["baseline"] == {**far, "rows": 4007, "tables": 2, "tables_done": 1}
    assert spare["reload"]["tables"]["public.orders"] == running
    left = "3 of 12 chunks, 1,500 rows/s, about 35.0 s left"
    assert f"target log: first rows: {left}, about 4,000 rows" in text
    assert "target spare: first rows of public.items: done, 7 rows" in text
    assert f"target spare: first rows of public.orders: running, {left}, 4,000 rows" in text
    assert status(home)["streams"][0]["targets"][0]["baseline"] is None, "nobody runs it any more"


def test_the_lag_is_the_age_of_the_oldest_change_that_is_missing(home: Home, journal: Journal) -> None:
    save(home, cursors=(cursor(journal, 2),))
    committed = datetime.fromtimestamp(1200 * 1000 / 1_000_000, UTC)  # the second transaction's, see the fixture
    found = home_status(home, now=committed + timedelta(seconds=30))
    log = found.streams[0].targets[0]
    assert (log.lag_events, log.lag_seconds) == (3, 30.0)


def test_a_capture_that_cannot_start_shows_why_before_the_stream_runs(home: Home) -> None:
    report = CaptureReport("waiting", restarts=3, error="cannot reach localhost:5432")
    with home.lock():
        save(home, Runtime("shop", "", StreamState.CREATED, report.to_json()))
        (stream,) = status(home)["streams"]
    assert (stream["state"], stream["source"]["state"]) == ("created", "waiting")
    assert stream["source"]["error"] == "cannot reach localhost:5432"


def test_a_dead_process_leaves_no_stream_running(home: Home, journal: Journal) -> None:
    report = CaptureReport("running", 77, source={"log_end": 900, "confirmed": 400})
    save(
        home,
        Runtime("shop", "", StreamState.RUNNING, report.to_json()),
        Runtime("shop", "log", StreamState.RUNNING),
        Runtime("shop", "spare", StreamState.FAILED, TargetReport(error="no room", hint="make some").to_json()),
    )
    found = status(home)
    (stream,) = found["streams"]
    assert (found["healthy"], stream["healthy"], stream["state"]) == (False, False, "stopped")
    assert (stream["source"]["state"], stream["source"]["pid"]) == ("stopped", None)
    assert stream["source"]["retained_bytes"] == 500
    assert [(target["state"], target["error"]) for target in stream["targets"]] == [
        ("stopped", None),
        ("failed", "no room"),
    ]
    text = millstream(home).stdout
    assert "no process runs here" in text
    assert "target spare: no room\n  hint: make some\n" in text


def test_what_an_earlier_process_said_does_not_count_for_this_one(home: Home) -> None:
    before = datetime.now(UTC) - timedelta(seconds=5)
    save(home, Runtime("shop", "", StreamState.RUNNING, {}, before))
    with home.lock():
        assert status(home)["streams"][0]["state"] == "stopped"


def test_a_halted_capture_is_a_failed_stream_with_its_reason(home: Home) -> None:
    report = CaptureReport("halted", error="the slot is gone", hint="re-base the journal")
    with home.lock():
        save(home, Runtime("shop", "", StreamState.FAILED, report.to_json()))
        running = status(home)["streams"][0]
    stopped = status(home)["streams"][0]
    assert (running["state"], running["source"]["state"], running["healthy"]) == ("failed", "halted", False)
    assert (stopped["state"], stopped["source"]["error"]) == ("failed", "the slot is gone")


def test_a_stream_whose_targets_have_all_failed_has_failed(home: Home) -> None:
    with home.lock():
        save(home, *(Runtime("shop", name, StreamState.FAILED) for name in ("log", "spare")))
        save(home, Runtime("shop", "", StreamState.RUNNING))
        assert status(home)["streams"][0]["state"] == "failed"


def test_a_capture_that_ended_because_targets_failed_has_stopped(home: Home) -> None:
    save(home, Runtime("shop", "", StreamState.FAILED, CaptureReport("running").to_json()))
    save(home, *(Runtime("shop", name, StreamState.FAILED) for name in ("log", "spare")))
    (stream,) = status(home)["streams"]
    assert (stream["state"], stream["source"]["state"], stream["source"]["error"]) == ("failed", "stopped", None)


def test_a_process_that_has_gone_silent_is_not_healthy(home: Home) -> None:
    with home.lock():
        save(home, *(Runtime("shop", name, StreamState.RUNNING) for name in ("", "log", "spare")))
        now = datetime.now(UTC)
        assert home_status(home, now=now).healthy
        later = home_status(home, now=now + timedelta(seconds=61))
    assert (later.healthy, later.streams[0].silent) == (False, True)


def test_an_unreadable_journal_is_shown_and_does_not_hide_the_rest(home: Home) -> None:
    (home.journal_path("shop") / "journal.json").write_text("{")
    found = status(home)
    assert found["streams"][0]["source"]["error"]
    assert found["streams"][0]["targets"][0]["lag_events"] is None


def test_a_stream_is_asked_for_by_name(home: Home) -> None:
    assert [stream["name"] for stream in status(home, "shop")["streams"]] == ["shop"]
    result = millstream(home, "bank")
    assert result.exit_code == 2
    assert (
        result.stderr
        == f"error: the home {home.path} has no stream bank: it has shop\nhint: check the name and --home\n"
    )
    with pytest.raises(UnknownStream, match="no stream has run there yet"):
        home_status(Home(home.path / "other"), "shop")


def test_each_field_of_the_json_is_documented(home: Home, journal: Journal) -> None:
    store = home.open_state()
    store.save_cursor(cursor(journal, 2), [Tally("public.orders", 2, 100, 2)])
    store.close()
    with home.lock():
        found = status(home)
    (stream,) = found["streams"]
    target = stream["targets"][0]
    page = (Path(__file__).parents[2] / "docs" / "engine.md").read_text()
    objects = (found, found["owner"], stream, stream["source"], target, target["tables"][0], target["last_checkpoint"])
    for one in objects:
        missing = [key for key in one if f"`{key}`" not in page and f"`targets[].{key}`" not in page]
        assert not missing, f"docs/engine.md does not explain {missing}"
