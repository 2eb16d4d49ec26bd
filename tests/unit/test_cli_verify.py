"""What `millstream verify` and `millstream status` say of comparisons."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from millstream.cli.app import app
from millstream.cli.verify import show
from millstream.engine import verifying
from millstream.engine.verify_report import TableVerdict, TargetVerdict, VerifyReport

AT = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
EQUAL = TargetVerdict("lake", "delta", 9, "0/9", (TableVerdict("public.t", 1200, 1200),), AT, 2.0)
WRONG = TargetVerdict(
    "copy",
    "postgres",
    9,
    "0/9",
    (TableVerdict("public.t", 1200, 1201, 1, 20, 2, ('{"id":1}', '{"id":2}')), TableVerdict("public.u", 0, 0)),
    AT,
    2.0,
)
REPAIRED = TargetVerdict(
    "copy", "postgres", 9, "0/9", (TableVerdict("public.t", 5, 4, 1, 0, 0, ('{"id":1}',), True),), AT, 1.0
)


def shown(report: VerifyReport) -> list[str]:
    out = StringIO()
    show(Console(file=out, width=200, markup=False, highlight=False), report)
    return [" ".join(line.split()) for line in out.getvalue().splitlines()]


def test_a_table_says_what_was_compared_and_which_keys_differ() -> None:
    report = VerifyReport("shop", (EQUAL, WRONG), {"log": "the journal did not come"})
    assert shown(report) == [
        "target table source rows target rows missing changed extra",
        "lake (delta) public.t 1,200 1,200 0 0 0 equal",
        "copy (postgres) public.t 1,200 1,201 1 20 2 DIFFERENT",
        "public.u 0 0 0 0 0 equal",
        "lake is equal to the source: 1,200 rows at 0/9, 2.0 s, 600 rows/s",
        "copy, public.t, keys of rows that differ:",
        '{"id":1}',
        '{"id":2}',
        "and 21 more",
        "copy is DIFFERENT from the source: 1,200 rows at 0/9, 2.0 s, 600 rows/s",
        "log was not compared: the journal did not come",
    ]


def test_a_narrow_terminal_gets_fewer_counts_and_no_name_that_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")  # a dumb one has 80 columns, whatever it is told
    out = StringIO()
    show(
        Console(file=out, width=62, force_terminal=True, color_system=None, soft_wrap=True), VerifyReport("s", (WRONG,))
    )
    assert out.getvalue().splitlines()[:4] == [
        "target           table     missing  changed  extra",
        "copy (postgres)  public.t        1       20      2  DIFFERENT",
        "                 public.u        0        0      0  equal",
        "(no room for source rows, target rows: see --json, or a wider terminal)",
    ]


def test_a_table_without_a_key_comes_with_what_to_do_about_it() -> None:
    keyless = TableVerdict("public.no key", 3, 3, 1, 0, 1, keyed=False)
    report = VerifyReport("shop", (TargetVerdict("copy", "postgres", 9, "0/9", (keyless,), AT, 1.0),))
    assert shown(report)[2] == (
        "copy, public.no key: it has no key by which rows could be shown or repaired; "
        "copy it anew: millstream reload shop --target copy --table 'public.no key'"
    )
    assert VerifyReport.from_json(report.to_json()) == report


def test_a_table_that_is_not_captured_yet_is_named() -> None:
    report = VerifyReport("shop", (replace(EQUAL, uncaptured=("public.new",)),))
    assert shown(report)[2:] == [
        "public.new is not captured yet, and was not compared",
        "lake is equal to the source: 1,200 rows at 0/9, 2.0 s, 600 rows/s",
    ]
    assert VerifyReport.from_json(report.to_json()) == report


def test_without_any_answer_there_is_no_table() -> None:
    assert shown(VerifyReport("shop", (), {"log": "no"})) == ["log was not compared: no"]


def test_a_repair_is_told() -> None:
    lines = shown(VerifyReport("shop", (REPAIRED,)))
    assert lines[1] == "copy (postgres) public.t 5 4 1 0 0 repaired"
    assert lines[-1] == "copy is equal to the source after a repair of 1 row: 5 rows at 0/9, 1.0 s, 5 rows/s"


@pytest.mark.parametrize(
    ("report", "code"),
    [
        (VerifyReport("shop", (EQUAL,)), 0),
        (VerifyReport("shop", (REPAIRED,)), 0),
        (VerifyReport("shop", (EQUAL, WRONG)), 1),
        (VerifyReport("shop", (EQUAL,), {"log": "no answer"}), 1),
    ],
)
def test_the_exit_code_says_whether_all_is_equal(
    report: VerifyReport, code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(verifying, "verify", lambda *_, **__: report)
    assert CliRunner().invoke(app, ["verify", "shop", "--home", str(tmp_path)]).exit_code == code
    assert VerifyReport.from_json(report.to_json()) == report


def test_an_unknown_stream_is_an_error(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["verify", "shop", "--home", str(tmp_path / "home")])
    assert done.exit_code == 2
    assert "has no stream shop" in done.stderr
