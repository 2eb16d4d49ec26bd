"""`run`, `check`, `version`, and how every command ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import millstream.engine
import millstream.sources
from millstream import __version__
from millstream.cli.app import app
from millstream.engine.home import Home
from millstream.errors import MillstreamError, SourceUnavailable
from millstream.model import StreamSpec
from millstream.observe import Event, Level, Observers
from millstream.sources.base import Finding, Severity

FILE = """\
name: shop
source:
  kind: postgres
  uri: postgresql://app:hunter2@localhost/shop
  tables: [public.orders]
mode: cdc
targets:
  - {name: log, kind: files, path: ./log}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "shop.yaml"
    path.write_text(FILE)
    return path


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def process(*arguments: object, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "millstream", *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, cwd=cwd, env={**os.environ, **environment}, check=False
    )


class Run:
    """Stands in for the runner: remembers what it was asked, says what it was told."""

    def __init__(self) -> None:
        self.asked: dict[str, Any] = {}
        self.events: list[Event] = []
        self.ends: int | MillstreamError = 0

    def run(
        self,
        streams: Sequence[StreamSpec],
        *,
        home: Home,
        once: bool,
        master: str | None,
        observers: Observers,
        conf: Mapping[str, str],
    ) -> int:
        names = [stream.name for stream in streams]
        self.asked = {"streams": names, "home": home.path, "once": once, "master": master, "conf": conf}
        for event in self.events:
            observers.on_event(event)
        if isinstance(self.ends, MillstreamError):
            raise self.ends
        return self.ends


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Run:
    stand_in = Run()
    module = ModuleType("millstream.engine.runner")
    module.run = stand_in.run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "millstream.engine.runner", module)
    monkeypatch.setattr(millstream.engine, "runner", module, raising=False)
    return stand_in


def test_run_hands_files_and_options_to_the_runner(runner: Run, file: Path, tmp_path: Path) -> None:
    result = invoke("run", file, "--once", "--home", tmp_path / "h", "--master", "local[2]", "--conf", "spark.a=b=c")
    assert result.exit_code == 0
    conf = {"spark.a": "b=c"}
    expected = {"streams": ["shop"], "home": tmp_path / "h", "once": True, "master": "local[2]", "conf": conf}
    assert runner.asked == expected
    assert "shop.yaml:4:8: source.uri: a password stands in the URI" in result.stderr
    assert "hunter2" not in result.output


def test_run_ends_with_the_runners_exit_code(runner: Run, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLSTREAM_HOME", "/somewhere")
    runner.ends = 1
    assert invoke("run", file).exit_code == 1
    assert runner.asked == {"streams": ["shop"], "home": Path("/somewhere"), "once": False, "master": None, "conf": {}}


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("executor.memory=2g", "--conf executor.memory: not a setting of Spark's"),
        ("spark.executor.memory", "--conf spark.executor.memory: not a setting of Spark's"),
        ("spark.speculation=true", "--conf spark.speculation cannot be changed"),
    ],
)
def test_a_setting_that_cannot_be_is_refused(runner: Run, file: Path, setting: str, said: str) -> None:
    result = invoke("run", file, "--conf", setting)
    assert result.exit_code == 2
    assert said in result.stderr
    assert runner.asked == {}


def test_an_error_is_a_line_and_a_hint_without_a_traceback(runner: Run, file: Path) -> None:
    runner.ends = SourceUnavailable("cannot reach localhost:5432", hint="is the server up?")
    result = invoke("run", file, "--quiet")
    assert result.exit_code == 1
    assert result.stderr.endswith("error: cannot reach localhost:5432\nhint: is the server up?\n")
    assert "Traceback" not in result.stderr
    debugged = invoke("--debug", "run", file, "--quiet")
    assert debugged.exception is runner.ends


EVENTS = [
    Event("capture.started", "capture started", fields={"source": "main"}),
    Event("delivery.batch", "5 rows", Level.DEBUG, "shop", "log", {"rows": 5, "tables": {"public.orders": 5}}),
    Event("delivery.retry", "no room; trying again", Level.WARNING, "shop", "log", {"hint": "make room"}),
]


def test_the_log_has_changes_of_state_and_no_batches(runner: Run, file: Path) -> None:
    runner.events = EVENTS
    lines = invoke("run", file).stderr.splitlines()[1:]
    assert [line[13:] for line in lines] == [
        "INFO    main  capture started",
        "WARNING shop/log  no room; trying again (make room)",
    ]


def test_a_quiet_log_has_only_what_is_wrong(runner: Run, file: Path) -> None:
    runner.events = EVENTS
    lines = invoke("run", file, "--quiet").stderr.splitlines()[1:]
    assert [line[13:] for line in lines] == ["WARNING shop/log  no room; trying again (make room)"]


def test_a_json_log_is_one_object_a_line(runner: Run, file: Path) -> None:
    runner.events = EVENTS
    lines = [json.loads(line) for line in invoke("run", file, "--json-logs").stderr.splitlines()[1:]]
    assert [(line["level"], line["kind"], line["target"], line["fields"]) for line in lines] == [
        ("INFO", "capture.started", None, {"source": "main"}),
        ("WARNING", "delivery.retry", "log", {"hint": "make room"}),
    ]


def test_check_says_that_a_file_is_right(file: Path) -> None:
    result = invoke("check", file)
    assert result.exit_code == 0
    assert result.stdout == "shop: postgres public.orders -> log (files): the file is right\n"
    as_json = json.loads(invoke("check", file, "--json").stdout)
    assert (as_json["ok"], [stream["name"] for stream in as_json["streams"]]) == (True, ["shop"])
    assert as_json["warnings"][0]["message"] == "a password stands in the URI"
    assert as_json["streams"][0]["source"]["uri"] == "postgresql://app:***@localhost/shop"


def test_check_lists_every_problem_and_exits_2(file: Path) -> None:
    file.write_text(FILE.replace("mode: cdc", "mode: snap").replace("tables", "tabels"))
    result = invoke("check", file)
    assert result.exit_code == 2
    assert result.stderr == "\n".join(
        [
            "error: 3 problems in the stream file",
            f"  {file}:3:3: source.tables: is missing; write `tables: [public.orders]`, or `tables: [public.*]`",
            f"  {file}:5:3: source.tabels: unknown key; did you mean `tables`?",
            f"  {file}:6:7: mode: `snap` is not known; did you mean `snapshot`? available: cdc, snapshot, "
            "snapshot_then_cdc",
            "",
        ]
    )
    as_json = invoke("check", file, "--json")
    problems = json.loads(as_json.stdout)["problems"]
    assert (as_json.exit_code, [problem["line"] for problem in problems]) == (2, [3, 5, 6])


class FakeSource:
    """A source that has been looked at already."""

    findings = (
        Finding("wal_level", Severity.OK, "wal_level is logical"),
        Finding("identity", Severity.WARNING, "no replica identity", "ALTER TABLE a REPLICA IDENTITY FULL", "public.a"),
        Finding("slots", Severity.ERROR, "no free slot", "ALTER SYSTEM SET max_replication_slots = 20"),
    )

    def __init__(self, spec: object) -> None: ...

    def preflight(self) -> list[Finding]:
        return list(self.findings)

    def close(self) -> None: ...


def test_check_connect_shows_findings_with_their_fix(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(millstream.sources, "open_source", FakeSource)
    result = invoke("check", "--connect", file)
    assert result.exit_code == 1
    assert "no free slot" in result.stdout
    assert "slots: ALTER SYSTEM SET max_replication_slots = 20\n" in result.stdout
    assert "identity (public.a): ALTER TABLE a REPLICA IDENTITY FULL\n" in result.stdout
    as_json = invoke("check", "--connect", "--json", file)
    found = json.loads(as_json.stdout)
    assert (as_json.exit_code, found["ok"]) == (1, False)
    *of_source, of_target = found["findings"]["shop"]
    assert of_source == [finding.to_json() for finding in FakeSource.findings]
    assert (of_target["check"], of_target["severity"]) == ("target", "ok")
    monkeypatch.setattr(FakeSource, "findings", FakeSource.findings[:2])
    assert invoke("check", "--connect", file).exit_code == 0


def test_version_is_the_packages() -> None:
    assert invoke("version").stdout == f"millstream {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run"], "no stream file is named, and the home"),
        (["run", "missing.yaml"], "missing.yaml: cannot be read: No such file or directory"),
        (["run", "x.yaml", "--ones"], "No such option: --ones"),
        (["runn"], "No such command 'runn'"),
    ],
)
def test_wrong_use_exits_2_without_a_traceback(arguments: list[str], said: str, tmp_path: Path) -> None:
    ended = process(*arguments, cwd=tmp_path)
    assert ended.returncode == 2
    assert said in ended.stderr
    assert "Traceback" not in ended.stderr
    assert "\x1b" not in ended.stderr + ended.stdout
    assert list(tmp_path.iterdir()) == []


def test_as_a_process_fine_is_0_failed_is_1(file: Path, tmp_path: Path) -> None:
    assert process("check", file).returncode == 0
    home = Home(tmp_path / "h").create()
    home.state_path.write_text("no database")
    ended = process("status", "--home", home.path)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.startswith(f"error: cannot open: state store {home.state_path}: ")
    debugged = process("--debug", "status", "--home", home.path)
    assert debugged.returncode == 1
    assert "Traceback" in debugged.stderr


def test_help_answers_without_loading_anything_heavy() -> None:
    heavy = ("pyspark", "pyarrow", "numpy", "pandas", "pydantic", "psycopg", "yaml", "rich.console")
    code = f"import sys, millstream.cli.app; print([name for name in {heavy} if name in sys.modules])"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout == "[]\n"
    helped = process("--help")
    assert helped.returncode == 0
    for command in ("demo", "run", "check", "status", "journal", "doctor", "bench", "version"):
        assert f"\n  {command} " in helped.stdout
    assert process("-h").stdout == helped.stdout


def test_the_version_is_told_by_the_option_too() -> None:
    told = process("--version")
    assert (told.returncode, told.stdout) == (0, process("version").stdout)
