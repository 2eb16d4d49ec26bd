from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pytest
from typer.testing import CliRunner, Result

from millstream.cli.app import app
from millstream.cli.journal_list import print_segments
from millstream.engine.home import Home
from millstream.model import Column, Cursor, Op, Relation
from millstream.sources.base import CAPTURED, Block
from millstream.state.base import EpochRecord
from tests.fixtures.journals import Journal, shop_table
from tests.fixtures.tuples import OID, delete, update

ORDERS, ITEMS = shop_table("orders", 7001), shop_table("items", 7002)
NOTES = Relation(OID, "public", "notes", "d", (Column("id", 23, key=True), Column("body", 25)), ("id",), ("id",))


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    """A home with one journal: three transactions of inserts, then an update and a delete of public.notes."""
    home = Home(tmp_path / "home").create()
    journal = Journal.create(home.journal_path("shop"))
    journal.register(ORDERS)
    journal.register(ITEMS)
    journal.transaction([("public.orders", 1, "first"), ("public.items", 10, "nut"), ("public.items", 11, "bolt")])
    journal.transaction([("public.orders", 2, "second")])
    journal.transaction([("public.items", 12, "gear")])
    journal.writer.append(_notes(journal))
    journal.writer.commit()
    yield home
    journal.writer.close()


def _notes(journal: Journal) -> Block:
    relation = journal.writer.register(NOTES)
    _, changed = update(["5", ...], key=["4", None])
    _, removed = delete(key=["5", None])
    rows = [
        {"tx_index": 0, "op": Op.UPDATE, "payload": changed},
        {"tx_index": 1, "op": Op.DELETE, "payload": removed},
    ]
    shared = {"commit_position": 9000, "resume_position": 9008, "commit_ts": 1_800_000_000_000_000, "txid": 77}
    return Block(pa.RecordBatch.from_pylist([{**row, **shared, "relation": relation} for row in rows], schema=CAPTURED))


def millstream(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def cat(home: Home, *arguments: str) -> list[dict[str, object]]:
    result = millstream("journal", "cat", "shop", "--json", "--home", str(home.path), *arguments)
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def seqs(home: Home, *arguments: str) -> list[object]:
    return [change["seq"] for change in cat(home, *arguments)]


def test_ls_lists_the_journals(home: Home) -> None:
    (found,) = json.loads(millstream("journal", "ls", "--json", "--home", str(home.path)).stdout)
    assert (found["source"], found["kind"], found["incarnation"]) == ("shop", "postgres", 1)
    assert (found["first_seq"], found["last_seq"], found["end_position"]) == (1, 7, "00000000/00002330")
    assert found["tables"] == ["public.items", "public.notes", "public.orders"]
    assert found["bytes"] == sum(p.stat().st_size for p in home.journal_path("shop").rglob("*") if p.is_file())
    text = millstream("journal", "ls", "--home", str(home.path)).stdout
    assert "shop" in text
    assert "1..7" in text


def test_ls_lists_the_segments_of_one(home: Home) -> None:
    (segment,) = json.loads(millstream("journal", "ls", "shop", "--json", "--home", str(home.path)).stdout)
    assert (segment["state"], segment["first_seq"], segment["last_seq"]) == ("open", 1, 7)
    assert "open" in millstream("journal", "ls", "shop", "--home", str(home.path)).stdout


def test_a_segment_that_holds_nothing_yet_has_no_seqs(capsys: pytest.CaptureFixture[str]) -> None:
    empty = {"segment": "605", "state": "open", "rows": 0, "first_seq": 605, "last_seq": 604, "end_position": "0/1"}
    print_segments([{**empty, "bytes": 4096}])
    assert capsys.readouterr().out.splitlines()[1].split() == ["605", "open", "0", "-", "0/1", "4.0", "KiB"]


def test_a_home_without_journals_says_so(tmp_path: Path) -> None:
    result = millstream("journal", "ls", "--home", str(tmp_path / "nothing"))
    assert (result.exit_code, result.stdout) == (0, "There is no journal yet.\n")
    assert json.loads(millstream("journal", "ls", "--json", "--home", str(tmp_path / "nothing")).stdout) == []


def test_cat_gives_every_change_in_order_with_its_values(home: Home) -> None:
    found = cat(home)
    assert [(c["seq"], c["op"], c["table"], c["values"]) for c in found] == [
        (1, "c", "public.orders", {"id": 1, "body": "first"}),
        (2, "c", "public.items", {"id": 10, "body": "nut"}),
        (3, "c", "public.items", {"id": 11, "body": "bolt"}),
        (4, "c", "public.orders", {"id": 2, "body": "second"}),
        (5, "c", "public.items", {"id": 12, "body": "gear"}),
        (6, "u", "public.notes", {"id": 5, "body": None}),
        (7, "d", "public.notes", {"id": 5, "body": None}),
    ]
    assert (found[5]["before"], found[5]["unchanged"]) == ({"id": 4, "body": None}, ["body"])
    assert (found[6]["txid"], found[6]["tx_index"], found[6]["position"]) == (77, 1, "00000000/00002328")
    assert found[6]["commit_ts"] == "2027-01-15T08:00:00+00:00"
    assert len({change["event_id"] for change in found}) == 7


def test_cat_is_readable(home: Home) -> None:
    lines = millstream("journal", "cat", "shop", "--home", str(home.path)).stdout.splitlines()
    assert lines[0].split() == [
        *("1", "00000000/0000044C", "1970-01-01T00:00:01.100000Z", "tx", "1100", "insert", "public.orders"),
        *("id=1", "body='first'"),
    ]
    assert lines[5].endswith("update   public.notes  id=5 body=(unchanged) before: id=4 body=NULL")


def test_cat_takes_tables_ranges_and_limits(home: Home) -> None:
    assert seqs(home, "--table", "public.items") == [2, 3, 5]
    assert seqs(home, "--table", "public.orders", "--table", "public.notes") == [1, 4, 6, 7]
    assert seqs(home, "--from", "3", "--to", "5") == [3, 4, 5]
    assert seqs(home, "--limit", "2") == [1, 2]
    assert seqs(home, "--table", "public.items", "--limit", "2") == [2, 3]
    assert seqs(home, "--from", "0/4B0") == [4, 5, 6, 7]
    assert seqs(home, "--to", "0/4B0") == [1, 2, 3]
    assert seqs(home, "--from", "2027-01-01T00:00:00+00:00") == [6, 7]
    assert seqs(home, "--to", "999") == [1, 2, 3, 4, 5, 6, 7]


def test_cat_reads_in_steps_without_losing_any(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millstream.cli.journal_cat.STEP", 2)
    assert seqs(home) == [1, 2, 3, 4, 5, 6, 7]
    assert seqs(home, "--table", "public.items") == [2, 3, 5]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["cat", "shop", "--from", "yesterday"], 2, "error: 'yesterday' is no place in a journal\nhint: give a seq"),
        (["cat", "shop", "--from", "x/y"], 2, "error: 'x/y' is not a log position"),
        (
            ["cat", "shop", "--table", "public.order"],
            2,
            "error: the journal has no changes of public.order: did you mean",
        ),
        (["cat", "bank"], 2, "error: the home has no journal bank: it has shop\n"),
        (["cat", "shop", "--limit", "0"], 2, "--limit"),
        (["cat"], 2, "Missing argument 'NAME'"),
    ],
)
def test_what_cannot_be_shown_is_said_clearly(home: Home, arguments: list[str], code: int, said: str) -> None:
    result = millstream("journal", *arguments, "--home", str(home.path))
    assert result.exit_code == code
    assert said in result.stderr
    assert result.stdout == ""


def test_a_reader_that_leaves_early_ends_the_command_quietly(home: Home) -> None:
    command = [sys.executable, "-m", "millstream", "journal", "cat", "shop", "--home", str(home.path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert "Traceback" not in process.stderr.read()
    process.stderr.close()
    process.wait()


def test_verify_finds_a_whole_journal_whole_and_a_flipped_byte(home: Home) -> None:
    result = millstream("journal", "verify", "--home", str(home.path))
    assert (result.exit_code, result.stdout) == (0, "shop: whole\n")
    segment = next(home.journal_path("shop").glob("segments/*.arrows"))
    raw = bytearray(segment.read_bytes())
    raw[raw.index(b"first") + 1] ^= 1
    segment.write_bytes(raw)
    result = millstream("journal", "verify", "shop", "--json", "--home", str(home.path))
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert found["ok"] is False
    assert segment.name in str(found["problems"]["shop"])
    assert millstream("journal", "verify", "shop", "--home", str(home.path)).exit_code == 1


def test_rebase_says_what_it_would_do_and_does_it_only_when_confirmed(home: Home) -> None:
    store = home.open_state()
    store.put_stream("shop", {"name": "shop", "source": {"name": "shop"}, "commit": "all"})
    store.save_cursor(Cursor("shop", "log", "j1", 1, 4, 1208))
    store.save_cursor(Cursor("shop", "spare", "j1", 1, 90, 1108))
    store.put_stream("beside", {"name": "beside", "source": {"name": "shop"}, "commit": "all"})
    store.save_cursor(Cursor("beside", "log", "j1", 1, 3, 1150))
    # A baseline brought it further than its cursor; the next one, of the other target, never came.
    store.open_epoch(EpochRecord("beside", "log", 1, "j1", 3, 1180, "baseline", datetime.now(UTC)))
    store.open_epoch(EpochRecord("shop", "spare", 2, "j1", 90, 1190, "baseline", datetime.now(UTC)))
    store.put_stream("elsewhere", {"name": "elsewhere", "source": {"name": "other"}, "commit": "all"})
    store.save_cursor(Cursor("elsewhere", "log", "j2", 1, 900, 1))
    store.close()
    asked = millstream("journal", "rebase", "shop", "--home", str(home.path))
    assert asked.exit_code == 0
    assert "first seq: 91\n" in asked.stdout
    assert "{" not in asked.stdout, "targets stand on lines of their own"
    assert "  shop/spare is at position " in asked.stdout
    assert asked.stdout.endswith("Nothing was done. Say it again with --confirm.\n")
    assert (home.journal_path("shop") / "journal.json").exists()
    done = millstream("journal", "rebase", "shop", "--confirm", "--json", "--home", str(home.path))
    assert done.exit_code == 0
    plan = json.loads(done.stdout)
    assert (plan["first_seq"], plan["incarnation"], plan["start_position"]) == (91, 2, 1108)
    assert plan["cursors"] == {"beside/log": 1180, "shop/log": 1208, "shop/spare": 1108}
    assert not home.journal_path("shop").exists()


def test_rebase_is_refused_while_a_process_runs(home: Home) -> None:
    with home.lock():
        result = millstream("journal", "rebase", "shop", "--confirm", "--home", str(home.path))
    assert result.exit_code == 1
    assert f"is in use by process {os.getpid()}" in result.stderr
