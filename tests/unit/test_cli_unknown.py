"""One rule for all commands: a name or a number that is not there is wrong use. Exit code 2, and nothing was done."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from millstream.cli.app import app
from millstream.config import load_streams
from millstream.config.definition import definition
from millstream.engine.home import Home
from millstream.model import Cursor
from tests.fixtures.journals import Journal, shop_table

FILE = """\
name: shop
source: {name: main, kind: postgres, uri: "postgresql://app@localhost:1/shop", tables: [public.orders]}
mode: cdc
snapshots: {path: ./kept}
targets:
  - {name: log, kind: files, path: ./log}
  - {name: copy, kind: sqlite, path: ./copy.db}
"""

STREAM, TARGET, TABLE = "no stream shup: did you mean shop?", "no target lag", "public.order"
JOURNAL, LETTER, CHANGE = "no journal mein: did you mean main?", "no dead letter 7", "no schema change 7"
SNAPSHOT = "no snapshot 20200101T000000000Z"

CASES = {
    "status": {"name": ("shup", STREAM)},
    "pause": {"name": ("shup", STREAM), "target": ("shop --target lag", TARGET)},
    "resume": {"name": ("shup", STREAM), "target": ("shop --target lag", TARGET)},
    "delete": {"name": ("shup", STREAM)},
    "replay": {
        "name": ("shup --from-seq 1", STREAM),
        "target": ("shop --from-seq 1 --target lag", TARGET),
        "table": ("shop --from-seq 1 --target log --table public.order", TABLE),
    },
    "reload": {
        "name": ("shup", STREAM),
        "target": ("shop --target lag", TARGET),
        "table": ("shop --table public.order", TABLE),
    },
    "verify": {
        "name": ("shup", STREAM),
        "target": ("shop --target lag", TARGET),
        "table": ("shop --table public.order", TABLE),
    },
    "dlq list": {
        "name": ("shup", STREAM),
        "target": ("--target lag", TARGET),
        "table": ("shop --table public.order", TABLE),
    },
    "dlq show": {"id": ("7", LETTER)},
    **{
        f"dlq {verb}": {
            "ids": ("7", LETTER),
            "stream": ("--stream shup", STREAM),
            "target": ("--stream shop --target lag", TARGET),
            "table": ("--stream shop --table public.order", TABLE),
        }
        for verb in ("retry", "purge")
    },
    "ddl list": {"name": ("shup", STREAM)},
    **{f"ddl {verb}": {"name": ("shup 7", STREAM), "id": ("shop 7", CHANGE)} for verb in ("show", "approve", "reject")},
    "snapshot create": {"name": ("shup", STREAM), "target": ("shop --target lag", TARGET)},
    "snapshot list": {"name": ("shup", STREAM), "target": ("shop --target lag", TARGET)},
    "snapshot prune": {"name": ("shup --keep 1", STREAM), "target": ("shop --keep 1 --target lag", TARGET)},
    **{
        f"snapshot {verb}": {
            "name": ("shup 20200101T000000000Z", STREAM),
            "id": ("shop 20200101T000000000Z", SNAPSHOT),
            "target": ("shop 20200101T000000000Z --target lag", TARGET),
        }
        for verb in ("inspect", "restore", "delete")
    },
    "journal ls": {"name": ("mein", JOURNAL)},
    "journal cat": {"name": ("mein", JOURNAL), "table": ("main --table public.order", TABLE)},
    "journal verify": {"name": ("mein", JOURNAL)},
    "journal prune": {"name": ("mein", JOURNAL)},
    "journal rebase": {"name": ("shup", STREAM)},
    "schema list": {"name": ("mein", JOURNAL), "table": ("main --table public.order", TABLE)},
    "schema show": {
        "name": ("mein public.orders", JOURNAL),
        "table": ("main public.order", TABLE),
        "version": ("main public.orders --version 9", "no version 9"),
        "id": ("main --id 9", "has the schema 9"),
    },
    "schema diff": {
        "name": ("mein public.orders", JOURNAL),
        "table": ("main public.order", TABLE),
        "start": ("main public.orders --from 9", "no version"),
        "end": ("main public.orders --to 9", "no version 9"),
    },
}
"""By command and what it is told by name: how it is called wrongly, and what it says."""

NAMING = {"name", "stream", "target", "table", "id", "ids"}
FIXED = {"bench"}
"""Chooses from what is built in, not from what a home has."""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the stream `shop` and the journal of its source, of which both targets have everything."""
    base = tmp_path_factory.mktemp("unknown")
    home = Home(base / "home").create()
    (base / "shop.yaml").write_text(FILE)
    journal = Journal.create(home.journal_path("main"))
    journal.register(shop_table("orders", 7001))
    journal.transaction([("public.orders", 1, "x")])
    journal.writer.close()
    store = home.open_state()
    store.put_stream("shop", definition(load_streams([base / "shop.yaml"])[0]))
    for target in ("log", "copy"):
        store.save_cursor(Cursor("shop", target, journal.writer.header.journal_id, 1, 1, journal.position))
    store.close()
    return home.path


@pytest.mark.parametrize("command", CASES)
def test_what_is_not_there_is_wrong_use(home: Path, command: str) -> None:
    for words, said in CASES[command].values():
        done = CliRunner().invoke(app, [*command.split(), *words.split(), "--home", str(home)])
        assert (done.exit_code, done.stdout) == (2, ""), (words, done.output)
        assert done.stderr.startswith("error: "), words
        assert said in done.stderr, words


def test_every_command_that_is_told_a_name_is_among_them() -> None:
    named = {}

    def visit(command: Any, path: tuple[str, ...]) -> None:
        for name, one in getattr(command, "commands", {}).items():
            visit(one, (*path, name))
        told = NAMING & {one.name for one in command.params}
        if told:
            named[" ".join(path)] = told

    visit(typer.main.get_command(app), ())
    assert named.keys() - FIXED == CASES.keys()
    assert {command: told - CASES[command].keys() for command, told in named.items() if command in CASES} == {
        command: set() for command in CASES
    }
