"""What `scripts/test` does about tests that failed, on a made-up suite of a few tests."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"

PASSES = "def test_passes():\n    pass\n"
FAILS = "def test_fails():\n    raise AssertionError('as ever')\n"
FAILS_ONCE = """
from pathlib import Path

def test_fails_once():
    been_here = Path(__file__).with_suffix(".been")
    first = not been_here.exists()
    been_here.touch()
    assert not first
"""
SKIPPED_LATER = FAILS_ONCE + "    import pytest\n    pytest.skip('later')\n"
DIES = "import os\n\ndef test_dies():\n    os._exit(7)\n"
WITH_SPARK = "import pytest\n\n@pytest.mark.spark\n" + PASSES


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    """A project of its own where each of the four processes has a test that passes."""
    (tmp_path / "pytest.ini").write_text("[pytest]\ntestpaths = tests\nmarkers = spark: needs a Spark session\n")
    for name in ("integration/test_a.py", "integration/test_d.py", "unit/test_unit.py", "chaos/test_spark.py"):
        write(tmp_path, name, WITH_SPARK if "spark" in name else PASSES)
    (tmp_path / "scripts").mkdir()
    for name in ("test", "second_look.py"):
        shutil.copy(SCRIPTS / name, tmp_path / "scripts" / name)
    return tmp_path


def write(suite: Path, name: str, text: str) -> None:
    path = suite / "tests" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def run(suite: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""}
    command = [suite / "scripts" / "test", sys.executable]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)


@pytest.fixture(scope="module")
def second_look() -> dict[str, Any]:
    return runpy.run_path(str(SCRIPTS / "second_look.py"))


def test_a_suite_that_passes_gets_no_second_look(suite: Path) -> None:
    ended = run(suite)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "second look" not in ended.stdout


def test_a_test_that_passes_alone_is_called_flaky_and_fails_nobody(suite: Path) -> None:
    write(suite, "integration/test_b.py", FAILS_ONCE)
    write(suite, "chaos/test_c.py", FAILS_ONCE.replace("def", "import pytest\n\n@pytest.mark.spark\ndef"))
    ended = run(suite)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert [line for line in ended.stdout.splitlines() if line.startswith("FLAKY")] == [
        "FLAKY: tests/chaos/test_c.py::test_fails_once: failed beside the others, passed alone",
        "FLAKY: tests/integration/test_b.py::test_fails_once: failed beside the others, passed alone",
    ]
    assert "assert not first" in ended.stdout, "why it failed is shown all the same"


def test_a_test_that_fails_again_fails_all(suite: Path) -> None:
    write(suite, "integration/test_b.py", FAILS_ONCE)
    write(suite, "integration/test_y.py", FAILS)
    write(suite, "integration/test_x.py", SKIPPED_LATER)
    ended = run(suite)
    assert ended.returncode == 1
    assert "FLAKY: tests/integration/test_b.py::test_fails_once" in ended.stdout
    again = [line for line in ended.stdout.splitlines() if line.startswith("FAILED AGAIN")]
    assert again == [
        "FAILED AGAIN: tests/integration/test_x.py::test_fails_once",
        "FAILED AGAIN: tests/integration/test_y.py::test_fails",
    ]


def test_a_process_that_died_fails_all_without_a_second_look(suite: Path) -> None:
    write(suite, "integration/test_b.py", FAILS_ONCE)
    write(suite, "integration/test_c.py", DIES)
    ended = run(suite)
    assert ended.returncode == 7
    assert "second look" not in ended.stdout


@pytest.mark.parametrize(
    ("failed", "said"),
    [
        (["tests/integration/test_a.py"], "tests/integration/test_a.py could not be collected"),
        ([f"tests/chaos/test_a.py::test_a[{n}]" for n in range(6)], "6 tests failed, more than the 5"),
        ([], "no test is known to have failed"),
    ],
)
def test_no_second_look_if_it_could_hide_a_fault(
    second_look: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], failed: list[str], said: str
) -> None:
    lastfailed = tmp_path / "v" / "cache" / "lastfailed"
    lastfailed.parent.mkdir(parents=True)
    lastfailed.write_text(json.dumps(dict.fromkeys(failed, True)))
    assert second_look["main"]([tmp_path, tmp_path / "of a process where none failed"]) == 1
    assert f"no second look at what failed: {said}" in capsys.readouterr().out
