"""What every page shows is there: links lead somewhere, commands are understood, stream files load."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any, get_args

import pytest
import typer
import yaml

from millstream.cli.app import app
from millstream.config import load_streams
from millstream.transforms.shape import Verb

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md"))]
COMMAND: Any = typer.main.get_command(app)
A_STREAM: dict[str, Any] = {
    "name": "shop",
    "source": {"kind": "postgres", "uri": "postgresql://app@localhost:5432/shop", "tables": ["public.*"]},
    "mode": "snapshot_then_cdc",
    "targets": [{"name": "copy", "kind": "sqlite", "path": "./copy.db"}],
}
"""What a page's part of a stream file is a part of."""


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def prose(page: Path) -> str:
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """What a link can name of a page: its headings, as those who show Markdown spell them."""
    titles = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def commands() -> list[tuple[str, str]]:
    """Page and command line of each `millstream ...` that stands in a block of its own."""
    found = []
    for page in PAGES:
        text = "\n".join(block.replace("\\\n", " ") for block in blocks(page, "(?:sh)?"))
        for line in re.findall(r"^(?:\$ )?(?:[A-Z_]+=\S+ )*(millstream .+)$", text, re.MULTILINE):
            found.append((name(page), line))
    return found


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if not link.startswith("https://"):
            path, _, anchor = link.partition("#")
            other = page.parent / path if path else page
            assert other.exists(), f"{name(page)} links to {link}"
            assert not anchor or anchor in anchors(other), f"{name(page)} links to {link}"


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent != ROOT], ids=name)
def test_each_page_is_found_from_the_readme_or_a_page_of_it(page: Path) -> None:
    others = [other for other in PAGES if other != page]
    assert any(re.search(rf"\]\([^)]*\b{re.escape(page.name)}", prose(other)) for other in others)


@pytest.mark.parametrize(("page", "line"), commands())
def test_each_command_that_a_page_shows_is_understood(page: str, line: str) -> None:
    words = shlex.split(re.split(r"  +|\s#", line)[0])
    command, called = COMMAND, words.pop(0)
    while hasattr(command, "commands"):
        called = words.pop(0)
        command = command.commands[called]
    command.make_context(called, words)  # raises for what it does not know


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "yaml")], ids=name)
def test_each_stream_file_that_a_page_shows_loads_whole_or_as_a_part(page: Path, tmp_path: Path) -> None:
    for number, text in enumerate(blocks(page, "yaml")):
        shown = yaml.safe_load(text)
        whole = shown if "streams" in shown else {**A_STREAM, **shown}
        path = tmp_path / f"{number}.yaml"
        path.write_text(yaml.safe_dump(whole))
        assert load_streams([path], environment={}), text


def test_each_transform_that_the_page_on_filters_shows_loads(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "filters.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (`\{.+?\}`) \|", text, re.MULTILINE)
    assert {verb for verb, _ in rows} == set(get_args(Verb)) - {"add_sql"}
    for number, shown in enumerate(example for _, cell in rows for example in re.findall(r"`([^`]+)`", cell)):
        path = tmp_path / f"{number}.yaml"
        path.write_text(f"{yaml.safe_dump(A_STREAM)}transforms:\n  - {shown}\n")
        (stream,) = load_streams([path], environment={})
        assert len(stream.shape.transforms) >= 1, shown
