"""`apply`, `list`, `pause`, `resume` and `delete` on a home that no process runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from millstream import Engine
from millstream.cli.app import app
from millstream.model import Json

FILE = """\
name: {name}
source:
  name: main
  kind: postgres
  uri: postgresql://app@localhost:1/shop{password}
  tables: [{table}]
mode: cdc
targets:
  - {{name: log, kind: files, path: ./{name}/log}}
  - {{name: copy, kind: files, path: ./{name}/copy}}
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


def file(home: Path, name: str = "shop", table: str = "public.orders", password: str = "") -> Path:
    path = home.parent / f"{name}.yaml"
    path.write_text(FILE.format(name=name, table=table, password=password))
    return path


def millstream(home: Path, *arguments: object) -> Result:
    return CliRunner().invoke(app, [*map(str, arguments), "--home", str(home)])


def answer(home: Path, *arguments: object) -> Json:
    done = millstream(home, *arguments, "--json")
    assert done.exit_code == 0, done.output
    found: Json = json.loads(done.stdout)
    return found


def test_a_file_is_applied_once_and_again(home: Path) -> None:
    assert answer(home, "apply", file(home)) == {"streams": {"shop": "created"}, "run_by": None}
    assert answer(home, "apply", file(home)) == {"streams": {"shop": "unchanged"}, "run_by": None}
    done = millstream(home, "apply", file(home, table="public.items"), file(home, "bank"))
    assert (done.exit_code, done.stdout) == (
        0,
        "shop: replaced\nbank: created\nNo process runs this home: start one with `millstream run`.\n",
    )
    assert [(one["name"], one["state"], one["tables"]) for one in answer(home, "list")] == [
        ("bank", "created", ["public.orders"]),
        ("shop", "created", ["public.items"]),
    ]
    text = millstream(home, "list").stdout.splitlines()
    assert text[2].split(maxsplit=4) == ["shop", "created", "main", "public.items", "log (files), copy (files)"]


def test_a_password_in_a_file_is_not_written_down(home: Path) -> None:
    done = millstream(home, "apply", file(home, password="?password=hunter2"))
    assert done.exit_code == 2
    assert "hunter2" not in done.output
    assert "auth_ref: env:NAME" in done.stderr
    assert answer(home, "list") == []


def test_a_target_or_all_of_a_stream_is_paused_and_resumed(home: Path) -> None:
    answer(home, "apply", file(home))
    for _ in range(2):
        assert answer(home, "pause", "shop", "--target", "log") == {
            "name": "shop",
            "state": "created",
            "targets": {"log": "paused"},
        }
    assert answer(home, "pause", "shop")["targets"] == {"log": "paused", "copy": "paused"}
    assert answer(home, "resume", "shop", "--target", "copy")["targets"] == {"copy": "created"}
    assert answer(home, "status", "shop")["streams"][0]["targets"][0]["state"] == "paused"
    done = millstream(home, "resume", "shop")
    assert (done.exit_code, done.stdout) == (0, "shop/log: created\nshop/copy: created\n")


def test_a_deletion_that_cannot_reach_its_source_is_remembered(home: Path) -> None:
    answer(home, "apply", file(home))
    done = millstream(home, "delete", "shop")
    assert done.exit_code == 1
    assert "the slot of source main cannot be dropped" in done.stderr
    assert "millstream delete shop --keep-slot" in done.stderr
    assert answer(home, "list")[0]["deleting"] is True
    assert "its deletion was interrupted" in millstream(home, "status").stdout
    for command in ("pause", "resume"):
        assert "is being deleted" in millstream(home, command, "shop").stderr
    assert "is being deleted" in millstream(home, "apply", file(home)).stderr
    assert answer(home, "delete", "shop", "--keep-slot") == {
        "stream": "shop",
        "source": "kept",
        "targets": {"log": "released", "copy": "released"},
    }
    assert answer(home, "list") == []


def test_what_is_not_there_is_an_error_that_names_the_nearest(home: Path) -> None:
    answer(home, "apply", file(home))
    for command in ("pause", "resume", "delete", "status"):
        done = millstream(home, command, "shoop")
        assert done.exit_code == 2
        assert "has no stream shoop: did you mean shop?" in done.stderr
    assert "has no target logs: did you mean log?" in millstream(home, "pause", "shop", "--target", "logs").stderr
    assert Engine(home).list_streams()[0].name == "shop"


def test_a_home_that_is_not_there_is_not_made_to_say_so(home: Path) -> None:
    for command in (("pause",), ("resume",), ("delete",), ("reload",), ("replay", "--from-seq", "1"), ("verify",)):
        done = millstream(home, *command, "shop")
        assert (done.exit_code, "has no stream shop: no stream has run there yet" in done.stderr) == (2, True), command
    assert "has no stream shop" in millstream(home, "journal", "rebase", "shop").stderr
    assert millstream(home, "journal", "verify").stdout == "There is no journal yet.\n"
    assert not home.exists()


def test_a_file_is_no_home(home: Path) -> None:
    home.write_text("")
    for command in ("status", "list", "run"):
        done = millstream(home, command)
        assert (done.exit_code, f"error: the home {home} is no directory\n" in done.stderr) == (2, True), command
