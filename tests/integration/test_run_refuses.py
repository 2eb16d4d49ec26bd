"""What is wrong is told at once, clearly, with what to do; nothing is lost by it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from pyspark import SparkContext
from typer.testing import CliRunner

from millstream.cli.app import app
from tests.fixtures.postgres import Database

pytestmark = pytest.mark.postgres

STREAM = """\
name: shop
source:
  kind: postgres
  uri: {uri}
  tables: [{tables}]
mode: {mode}
targets:
  - {{name: log, kind: files, path: log, format: parquet}}
"""


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the commands are run; what they say is wrapped by no terminal."""
    monkeypatch.setenv("COLUMNS", "1000")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def stream_file(directory: Path, uri: str, *, tables: str = "public.orders", mode: str = "cdc") -> str:
    (directory / "shop.yaml").write_text(STREAM.format(uri=uri, tables=tables, mode=mode))
    return "shop.yaml"


def refusal(directory: Path, file: str, *, once: bool = True) -> str:
    """What `run` says when it refuses: one clear message, no traceback, nothing delivered."""
    done = CliRunner().invoke(app, ["run", file, *(["--once"] if once else [])])
    assert done.exit_code in (1, 2), done.stderr
    assert isinstance(done.exception, SystemExit)
    assert not (directory / "log").exists()
    assert SparkContext._active_spark_context is None, "it is told before Spark starts"
    return done.stderr


def test_a_wrong_address(directory: Path) -> None:
    """In a process of its own, as a user has it."""
    file = stream_file(directory, "postgresql://app@127.0.0.1:1/shop")
    command = [sys.executable, "-m", "millstream", "run", file, "--once"]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    (error,) = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert "127.0.0.1" in error
    assert "trying again" not in error, "a run with an end does not try again"


def test_a_wrong_database(directory: Path, database: Database) -> None:
    said = refusal(directory, stream_file(directory, database.server.uri("nowhere")))
    assert "nowhere" in said


def test_a_password_that_cannot_be_resolved(directory: Path, database: Database) -> None:
    file = stream_file(directory, database.uri)
    path = directory / file
    path.write_text(path.read_text().replace("  tables:", "  auth_ref: env:NO_SUCH_VARIABLE\n  tables:"))
    assert "NO_SUCH_VARIABLE" in refusal(directory, file)


def test_a_missing_table(directory: Path, database: Database) -> None:
    said = refusal(directory, stream_file(directory, database.uri))
    assert "public.orders" in said


def test_a_mode_that_there_is_not(directory: Path, database: Database) -> None:
    said = refusal(directory, stream_file(directory, database.uri, mode="sometimes"))
    assert "sometimes" in said
    assert "cdc" in said
    assert "shop.yaml:6" in said


def test_an_unknown_key_names_the_nearest(directory: Path, database: Database) -> None:
    file = stream_file(directory, database.uri)
    path = directory / file
    path.write_text(path.read_text().replace("mode:", "moed:"))
    said = refusal(directory, file, once=False)
    assert "shop.yaml:6" in said
    assert "mode" in said


def test_a_journal_directory_that_cannot_be_written(directory: Path, database: Database) -> None:
    journals = directory / ".millstream" / "journals"
    journals.mkdir(parents=True, mode=0o700)
    if os.geteuid() == 0:
        # Root may write anywhere, except where a file stands in the way of a directory.
        (journals / "shop").write_text("in the way")
    else:
        journals.chmod(0o500)
    database.sql("CREATE TABLE orders (id int PRIMARY KEY)")
    assert str(journals / "shop") in refusal(directory, stream_file(directory, database.uri))
