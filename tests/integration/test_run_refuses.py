"""What is wrong is told at once, clearly, with what to do; nothing is lost by it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

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


def millstream(directory: Path, *arguments: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    """Run the command as a user does; what it says is wrapped by no terminal."""
    return subprocess.run(
        [sys.executable, "-m", "millstream", *arguments],
        cwd=directory,
        env={**os.environ, "COLUMNS": "1000"},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def stream_file(directory: Path, uri: str, *, tables: str = "public.orders", mode: str = "cdc") -> str:
    (directory / "shop.yaml").write_text(STREAM.format(uri=uri, tables=tables, mode=mode))
    return "shop.yaml"


def refusal(directory: Path, file: str) -> str:
    """What `run --once` says when it refuses: one clear message, no traceback, nothing delivered."""
    done = millstream(directory, "run", file, "--once")
    assert done.returncode in (1, 2), done.stderr
    assert "Traceback" not in done.stderr
    assert not (directory / "log").exists()
    return done.stderr


def test_a_wrong_address(tmp_path: Path, database: Database) -> None:
    said = refusal(tmp_path, stream_file(tmp_path, "postgresql://app@127.0.0.1:1/shop"))
    (error,) = [line for line in said.splitlines() if line.startswith("error:")]
    assert "127.0.0.1" in error
    assert "trying again" not in error, "a run with an end does not try again"


def test_a_wrong_database(tmp_path: Path, database: Database) -> None:
    said = refusal(tmp_path, stream_file(tmp_path, database.server.uri("nowhere")))
    assert "nowhere" in said


def test_a_password_that_cannot_be_resolved(tmp_path: Path, database: Database) -> None:
    file = stream_file(tmp_path, database.uri)
    path = tmp_path / file
    path.write_text(path.read_text().replace("  tables:", "  auth_ref: env:NO_SUCH_VARIABLE\n  tables:"))
    assert "NO_SUCH_VARIABLE" in refusal(tmp_path, file)


def test_a_missing_table(tmp_path: Path, database: Database) -> None:
    said = refusal(tmp_path, stream_file(tmp_path, database.uri))
    assert "public.orders" in said


def test_modes_that_are_not_built_are_refused(tmp_path: Path, database: Database) -> None:
    done = millstream(tmp_path, "run", stream_file(tmp_path, database.uri, mode="snapshot"), "--once")
    assert done.returncode in (1, 2)
    assert "snapshot" in done.stderr
    assert "cdc" in done.stderr
    assert "shop.yaml:6" in done.stderr


def test_an_unknown_key_names_the_nearest(tmp_path: Path, database: Database) -> None:
    file = stream_file(tmp_path, database.uri)
    path = tmp_path / file
    path.write_text(path.read_text().replace("mode:", "moed:"))
    done = millstream(tmp_path, "run", file)
    assert done.returncode in (1, 2)
    assert "shop.yaml:6" in done.stderr
    assert "mode" in done.stderr


def test_a_journal_directory_that_cannot_be_written(tmp_path: Path, database: Database) -> None:
    journals = tmp_path / ".millstream" / "journals"
    journals.mkdir(parents=True, mode=0o700)
    if os.geteuid() == 0:
        # Root may write anywhere, except where a file stands in the way of a directory.
        (journals / "shop").write_text("in the way")
    else:
        journals.chmod(0o500)
    database.sql("CREATE TABLE orders (id int PRIMARY KEY)")
    assert str(journals / "shop") in refusal(tmp_path, stream_file(tmp_path, database.uri))
