"""What the doctor says, on machines that are well and on machines that are not."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import socket
from collections import namedtuple
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from millstream import doctor
from millstream.cli.doctor import doctor as command
from millstream.doctor import Found, State
from millstream.embedded import binaries
from millstream.errors import DependencyError
from millstream.spark import java as java_module
from millstream.spark.java import Java

Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def app() -> typer.Typer:
    made = typer.Typer()
    made.command()(command)
    return made


def pretend_version(monkeypatch: pytest.MonkeyPatch, **versions: str | None) -> None:
    real = importlib.metadata.version

    def version(name: str) -> str:
        found = versions.get(name, real)
        if found is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return found if isinstance(found, str) else real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)


def test_this_machine_is_fit(tmp_path: Path) -> None:
    findings = doctor.examine(tmp_path)
    assert [found.check for found in findings] == [
        "python", "pyspark", "java", "SPARK_HOME", "hostname", "arrow", "home", "disk",
        "postgres", "delta", "duckdb", "embedded",
    ]  # fmt: skip
    assert doctor.is_fit(findings)
    assert all((found.fix is None) == (found.state is State.OK) for found in findings)


@pytest.mark.parametrize("version", [None, "3.5.1", "4.1.9", "4.4.0"])
def test_a_missing_or_foreign_pyspark(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    pretend_version(monkeypatch, pyspark=version)
    found = doctor.check_pyspark()
    assert (found.state, found.fix) == (State.MISSING, "pip install 'pyspark>=4.2,<4.4'")
    assert found.found == (f"{version}, which is not supported" if version else "not installed")


@pytest.mark.parametrize("version", ["4.2.0", "4.3.2", "4.3.0.dev1"])
def test_a_supported_pyspark(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    pretend_version(monkeypatch, pyspark=version)
    assert doctor.check_pyspark() == Found("pyspark", State.OK, version)


def test_no_java(monkeypatch: pytest.MonkeyPatch) -> None:
    def find_java() -> Java:
        raise DependencyError("no Java that can run Spark", hint="install one")

    monkeypatch.setattr(java_module, "find_java", find_java)
    assert doctor.check_java() == Found("java", State.MISSING, "no Java that can run Spark", "install one")


@pytest.mark.parametrize(
    ("version", "state"),
    [("17.0.9", State.WARNING), ("17", State.WARNING), ("17.0.11", State.OK), ("21.0.1", State.OK)],
)
def test_an_early_java_17_is_a_warning(monkeypatch: pytest.MonkeyPatch, version: str, state: State) -> None:
    monkeypatch.setattr(java_module, "find_java", lambda: Java(Path("/j"), version, "PATH"))
    assert doctor.check_java().state is state


def test_a_foreign_spark_home_is_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SPARK_HOME", str(tmp_path))
    assert doctor.check_spark_home() == Found("SPARK_HOME", State.WARNING, f"{tmp_path}, ignored", "unset SPARK_HOME")


def test_a_hostname_that_does_not_resolve_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    monkeypatch.setattr(socket, "gethostname", lambda: "lost")
    assert doctor.check_hostname() == Found(
        "hostname", State.WARNING, "lost does not resolve", "add '127.0.1.1 lost' to /etc/hosts"
    )


def test_a_missing_arrow(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_version(monkeypatch, pyarrow=None, numpy=None)
    assert doctor.check_arrow() == Found(
        "arrow", State.MISSING, "not installed: pyarrow, numpy", "pip install pyarrow numpy"
    )


def test_a_home_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    found = doctor.check_home(tmp_path / "not" / "there")
    assert (found.state, found.found) == (State.MISSING, f"{tmp_path}/not/there: {tmp_path} is not writable")


def test_a_home_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert doctor.check_home(tmp_path / "file" / "home").state is State.MISSING


def test_little_disk_is_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(8 << 30, 7 << 30, 1 << 30))
    found = doctor.check_disk(tmp_path)
    assert (found.state, found.found) == (State.WARNING, "1.0 GiB free at home")


def test_missing_extras_name_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_version(monkeypatch, psycopg=None)
    monkeypatch.setattr(binaries, "PACKAGE", "no_such_package_here")
    assert doctor.check_psycopg() == Found(
        "postgres", State.WARNING, "psycopg is not installed", "pip install 'millstream[postgres]'"
    )
    pretend_version(monkeypatch, duckdb=None)
    assert doctor.check_package("duckdb", "duckdb") == Found(
        "duckdb",
        State.WARNING,
        "duckdb is not installed",
        "pip install 'millstream[duckdb]', if a target is of this kind",
    )
    assert doctor.check_embedded() == Found(
        "embedded", State.WARNING, "the embedded Postgres is not installed", "pip install 'millstream[embedded]'"
    )


def test_the_command_shows_the_fix_and_ends_with_1(monkeypatch: pytest.MonkeyPatch, app: typer.Typer) -> None:
    finding = Found("postgres", State.MISSING, "not [here]", "pip install 'millstream[postgres]'")
    monkeypatch.setattr(doctor, "examine", lambda home: [finding])
    shown = CliRunner().invoke(app, [], env={"COLUMNS": "120"})
    assert shown.exit_code == 1
    assert "not [here]" in shown.output
    assert "pip install 'millstream[postgres]'" in shown.output
    as_json = CliRunner().invoke(app, ["--json"])
    assert as_json.exit_code == 1
    assert json.loads(as_json.output) == {"fit": False, "findings": [finding.to_json()]}


def test_a_fix_stands_whole_on_a_line_of_its_own_however_narrow_the_terminal(
    monkeypatch: pytest.MonkeyPatch, app: typer.Typer
) -> None:
    sql = "SELECT pg_drop_replication_slot('millstream_a_long_name_that_is_wider_than_a_column')"
    monkeypatch.setattr(doctor, "examine", lambda home: [Found("slots", State.WARNING, f"at {home}", sql)])
    shown = CliRunner().invoke(app, ["--home", "/somewhere"], env={"COLUMNS": "40"})
    assert f"\nslots: {sql}\n" in shown.output
    assert "at /somewhere" in shown.output


def test_warnings_alone_end_with_0(monkeypatch: pytest.MonkeyPatch, app: typer.Typer) -> None:
    monkeypatch.setattr(doctor, "examine", lambda home: [Found("disk", State.WARNING, "little", "free some")])
    assert CliRunner().invoke(app, []).exit_code == 0
