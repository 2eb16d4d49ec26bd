"""The page about types is what the table of types says."""

from __future__ import annotations

from pathlib import Path

from millstream.sources.postgres.typedoc import page
from millstream.sources.postgres.types import EXTENSIONS, TYPES

PAGE = Path(__file__).parents[2] / "docs" / "types" / "postgres.md"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "run: make docs"


def test_each_type_has_a_line() -> None:
    lines = [line for line in page().splitlines() if line.startswith("| ") and line.count("|") == 7]
    assert len([line for line in lines if not line.startswith("| type ")]) == len(TYPES) + len(EXTENSIONS)
