"""`millstream journal prune`: by age and size, beside a writer and without one, never past a target unless forced."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from millstream.cli.app import app
from millstream.config import load_streams
from millstream.config.definition import definition
from millstream.engine import prune as prune_module
from millstream.engine.captures import Capture
from millstream.engine.holders import holders
from millstream.engine.home import Home
from millstream.journal import JournalReader, verify
from millstream.model import Cursor, Json
from millstream.observe import Observers
from tests.fixtures.journals import Journal, shop_table

FILE = """\
name: {name}
source:
  name: main
  kind: postgres
  uri: postgresql://app@localhost/shop
  tables: [public.*]
{retention}
mode: cdc
targets:
  - {{name: log, kind: files, path: ./{name}}}
"""


def know(home: Home, name: str, retention: str = "") -> None:
    """Let the home know a stream on the source `main`."""
    file = home.path / f"{name}.yaml"
    file.write_text(FILE.format(name=name, retention=retention))
    store = home.open_state()
    store.put_stream(name, definition(load_streams([file])[0]))
    store.close()


def stand(home: Home, journal: Journal, stream: str, *seqs: int) -> None:
    """Let the stream's target stand at the last of these seqs, after the others."""
    store = home.open_state()
    for seq in seqs:
        store.save_cursor(Cursor(stream, "log", journal.writer.header.journal_id, 1, seq, seq))
    store.close()


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home").create()


@pytest.fixture
def journal(home: Home) -> Iterator[Journal]:
    """Ten segments or so of ten rows each, long ago; the stream `shop` stands at seq 60, `copy` at 80."""
    journal = Journal.create(home.journal_path("main"), segment_bytes=1500)
    journal.register(shop_table("orders", 7001))
    for number in range(10):
        journal.transaction([("public.orders", 10 * number + i, "x" * 100) for i in range(10)])
    journal.seal()
    know(home, "shop")
    know(home, "copy")
    stand(home, journal, "shop", 60, 60)
    stand(home, journal, "copy", 70, 80)
    yield journal
    journal.writer.close()


def millstream(home: Home, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["journal", "prune", "main", "--home", str(home.path), *arguments])


def pruned(home: Home, *arguments: str) -> Json:
    result = millstream(home, "--json", *arguments)
    assert result.exit_code == 0, result.output
    found: Json = json.loads(result.stdout)
    return found


def first_seq(journal: Journal) -> int:
    return JournalReader(journal.locations).first_seq()


def test_a_dry_run_only_says_what_would_go(home: Home, journal: Journal) -> None:
    found = pruned(home, "--older-than", "1h", "--dry-run")
    assert (found["done"], found["rows"], found["last_seq"]) == (False, 60, 60)
    assert found["held"]["rows"] > 0
    assert found["held"]["by"][0] == {"stream": "shop", "target": "log", "seq": 60}
    assert first_seq(journal) == 1
    text = millstream(home, "--older-than", "1h", "--dry-run").stdout
    assert "would remove 60 changes" in text
    assert "still needed by shop/log (at seq 60)" in text


def test_without_a_writer_it_prunes_up_to_the_slowest_target(home: Home, journal: Journal) -> None:
    journal.writer.close()
    found = pruned(home, "--max-bytes", "1")
    assert (found["done"], found["rows"], found["last_seq"], found["halted"]) == (True, 60, 60, [])
    assert first_seq(journal) == 61
    assert verify(journal.path) == []
    assert pruned(home, "--max-bytes", "1")["done"] is False
    text = millstream(home, "--max-bytes", "1").stdout
    assert text.startswith("main: nothing to remove\n  "), "what is held is told below"


def test_beside_a_writer_it_asks_the_writer(home: Home, journal: Journal) -> None:
    ended = threading.Event()

    def writes() -> None:
        while not ended.wait(0.02):
            journal.writer.prune_as_requested()

    thread = threading.Thread(target=writes)
    thread.start()
    try:
        found = pruned(home, "--max-bytes", "1")
    finally:
        ended.set()
        thread.join()
    assert (found["done"], found["last_seq"]) == (True, 60)
    assert first_seq(journal) == 61
    assert not (journal.path / "prune-request.json").exists()


def test_a_writer_that_does_not_answer_is_named_and_finds_the_request_later(
    home: Home, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prune_module, "PATIENCE", 0.1)
    result = millstream(home, "--max-bytes", "1")
    assert result.exit_code == 1
    assert "is being written by process" in result.output
    assert "the request stays" in result.output
    journal.writer.prune_as_requested()
    assert first_seq(journal) == 61


def test_forced_it_names_the_targets_that_cannot_go_on(home: Home, journal: Journal) -> None:
    journal.writer.close()
    result = millstream(home, "--max-bytes", "1", "--force")
    assert result.exit_code == 0, result.output
    assert "shop/log is at seq 60: it cannot go on" in result.stdout
    assert "millstream reload shop --target log" in result.stdout
    assert first_seq(journal) > 80


def test_a_target_without_a_cursor_needs_everything(home: Home, journal: Journal) -> None:
    know(home, "late")
    journal.writer.close()
    found = pruned(home, "--max-bytes", "1")
    assert (found["done"], found["held"]["by"][0]) == (False, {"stream": "late", "target": "log", "seq": 0})


def test_a_target_needs_its_last_batch_too_and_others_do_not_count(home: Home, journal: Journal) -> None:
    store = home.open_state()
    found = [(one.stream, one.seq) for one in holders(store, "main", journal.writer.header)]
    assert found == [("shop", 60), ("copy", 70)]
    assert holders(store, "other", journal.writer.header) == []
    store.close()


def test_without_limits_the_sources_own_count(home: Home, journal: Journal) -> None:
    result = millstream(home)
    assert result.exit_code == 2
    assert "nothing says how much" in result.output
    know(home, "shop", "  retention: {age: 1h}")
    journal.writer.close()
    assert pruned(home)["last_seq"] == 60


@pytest.mark.parametrize("wrong", [("--older-than", "soon"), ("--max-bytes", "1 elephant")])
def test_wrong_limits_are_refused(home: Home, journal: Journal, wrong: tuple[str, str]) -> None:
    result = millstream(home, *wrong)
    assert result.exit_code == 2
    assert wrong[0] in result.output
    assert first_seq(journal) == 1


def test_a_journal_that_is_not_there_is_refused(home: Home) -> None:
    result = millstream(home, "--older-than", "1h")
    assert result.exit_code == 2
    assert "has no journal main" in result.output


def test_what_is_kept_is_shown(home: Home, journal: Journal) -> None:
    journal.writer.close()
    pruned(home, "--max-bytes", "1")
    (found,) = json.loads(CliRunner().invoke(app, ["journal", "ls", "--json", "--home", str(home.path)]).stdout)
    assert (found["first_seq"], found["pruned_seq"], found["first_position"]) == (61, 60, "00000000/000006A4")
    assert found["oldest_commit_at"] == "1970-01-01T00:00:01.700000+00:00"
    status = CliRunner().invoke(app, ["status", "shop", "--home", str(home.path)]).stdout
    assert "since 1970-01-01 00:00:01 UTC" in status
    whole = json.loads(CliRunner().invoke(app, ["status", "shop", "--json", "--home", str(home.path)]).stdout)
    source = whole["streams"][0]["source"]
    assert (source["first_seq"], source["oldest_commit_at"]) == (61, "1970-01-01T00:00:01.700000+00:00")
    assert source["journal_bytes"] > 0


def test_a_run_tells_capture_what_nobody_needs(home: Home, journal: Journal) -> None:
    class Told:
        def __init__(self) -> None:
            self.last_status: Json = {}
            self.needs: list[tuple[int, int]] = []

        def send_needs(self, lowest: int, delivered: int) -> None:
            self.needs.append((lowest, delivered))

    know(home, "shop", "  retention: {age: 1h}")
    store = home.open_state()
    (stream,) = load_streams([home.path / "shop.yaml"])
    capture = Capture(stream.source, [stream], home, store, Observers())
    told = Told()
    capture._supervisor = told  # type: ignore[assignment]
    capture.retain()
    told.last_status = {"journal_id": journal.writer.header.journal_id}
    capture.retain()
    assert [lowest for lowest, _ in told.needs] == [60], "the lowest of all streams on the source, running or not"
    store.close()
