"""The page on the command and the command itself say the same commands and options."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import typer

from millstream.cli.app import app
from millstream.cli.examples import EXAMPLES

COMMAND: Any = typer.main.get_command(app)
PAGE = Path(__file__).parents[2] / "docs" / "cli.md"


def documented() -> dict[str, set[str]]:
    """Command and its options, by the page's sections."""
    found = {}
    for part in re.split(r"^## millstream ", PAGE.read_text(), flags=re.MULTILINE)[1:]:
        title, _, body = part.partition("\n")
        command = re.sub(r" ?\[?[A-Z]{2,}\S*", "", title).strip()
        found[command] = set(re.findall(r"^\| `(--[\w-]+)`", body, re.MULTILINE))
    return found


def built() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}

    def visit(command: Any, path: tuple[str, ...]) -> None:
        commands = getattr(command, "commands", None)
        if commands is None:
            options = [option for one in command.params for option in one.opts if option.startswith("--")]
            found[" ".join(path)] = set(options) - {"--help"}
            return
        for name, one in commands.items():
            visit(one, (*path, name))

    visit(COMMAND, ())
    return found


def test_each_command_and_option_is_documented_and_each_documented_one_exists() -> None:
    assert documented() == built()


def test_each_option_says_what_it_is_for() -> None:
    def visit(command: Any) -> None:
        for one in command.params:
            assert getattr(one, "help", None), (command.name, one.name)
        for inner in getattr(command, "commands", {}).values():
            assert inner.help, inner.name
            visit(inner)

    visit(COMMAND)


def test_each_command_has_an_example_in_its_help_and_each_example_is_understood() -> None:
    assert EXAMPLES.keys() == built().keys()
    for name, examples in EXAMPLES.items():
        command = COMMAND
        for word in name.split():
            command = command.commands[word]
        for example in examples:
            assert f"\n  {example}" in command.epilog
            words = shlex.split(example)
            assert words[: 1 + len(name.split())] == ["millstream", *name.split()]
            command.make_context(name, words[1 + len(name.split()) :])  # raises for what it does not know


def test_no_line_of_a_list_of_commands_is_cut_at_80_columns() -> None:
    def visit(command: Any, path: str) -> None:
        if hasattr(command, "commands"):
            shown = command.get_help(typer.Context(command, info_name=path, terminal_width=80, max_content_width=80))
            assert not re.findall(r"^ .*\.\.\.$", shown, re.MULTILINE), path
            for name, inner in command.commands.items():
                visit(inner, f"{path} {name}")

    visit(COMMAND, "millstream")


def test_each_argument_and_option_is_called_what_it_is() -> None:
    def visit(command: Any, path: str) -> None:
        usage = command.get_usage(typer.Context(command, info_name=path))
        assert not re.search(r"\[\[|\.\.\.\]|\.\.\.\}", usage), usage
        for one in command.params:
            if one.param_type_name == "option" and not one.is_flag:
                assert one.metavar, (path, one.name)
        for name, inner in getattr(command, "commands", {}).items():
            visit(inner, f"{path} {name}")

    visit(COMMAND, "millstream")
