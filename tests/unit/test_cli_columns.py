"""Results in columns: all of them in a file, those that fit on a terminal, and no value is ever cut."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.text import Text

from millstream.cli import columns as module
from millstream.cli.columns import Column, print_columns
from millstream.cli.dlq import _value
from millstream.cli.output import in_words

COLUMNS = (
    Column("id"),
    Column("position", spare=1),
    Column("rows", right=True),
    Column("format", spare=2),
    Column("reason"),
)
ROWS: list[list[str | Text]] = [
    ["20261116T160605371Z", "00000000/01B92D00", "1,173", Text("arrow", "green"), "the table has no such column"],
    ["20261116T160607401Z", "00000000/01B92D00", "7", "jsonl", "-"],
]


def printed(monkeypatch: pytest.MonkeyPatch, width: int, *, terminal: bool = True, indent: int = 0) -> list[str]:
    monkeypatch.setenv("TERM", "xterm")  # one that is dumb has 80 columns
    file = io.StringIO()
    wide = Console(file=file, width=width, force_terminal=terminal, color_system=None, soft_wrap=True)
    monkeypatch.setattr(module, "console", lambda: wide)
    print_columns(COLUMNS, ROWS, indent=indent)
    return file.getvalue().splitlines()


def test_a_wide_terminal_gets_all_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    assert printed(monkeypatch, 120) == [
        "id                   position            rows  format  reason",
        "20261116T160605371Z  00000000/01B92D00  1,173  arrow   the table has no such column",
        "20261116T160607401Z  00000000/01B92D00      7  jsonl   -",
    ]


def test_a_narrow_one_gets_fewer_columns_and_words_on_more_lines_but_no_cut_value(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert printed(monkeypatch, 74, indent=2) == [
        "  id                   position            rows  reason",
        "  20261116T160605371Z  00000000/01B92D00  1,173  the table has no such",
        "                                                 column",
        "  20261116T160607401Z  00000000/01B92D00      7  -",
        "  (no room for format: see --json, or a wider terminal)",
    ]


def test_what_must_be_shown_is_shown_on_the_narrowest_one(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = printed(monkeypatch, 20)
    assert lines[0].split() == ["id", "rows", "reason"]
    assert "20261116T160605371Z  1,173  the table has no such column" in lines


def test_a_file_gets_all_columns_whatever_its_width(monkeypatch: pytest.MonkeyPatch) -> None:
    assert printed(monkeypatch, 20, terminal=False) == printed(monkeypatch, 120)


def test_values_are_said_in_words_and_not_as_python_writes_them() -> None:
    assert [in_words(value) for value in (None, True, False, 0, "x")] == ["-", "yes", "no", "0", "x"]
    values = (None, True, 1, "it's", ["a", None], {"ß": 2})
    assert [_value(value) for value in values] == ["NULL", "true", "1", "it's", '["a", null]', '{"ß": 2}']
