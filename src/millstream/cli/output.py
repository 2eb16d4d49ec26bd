"""How the command speaks: results on standard output, everything else on standard error."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from millstream.errors import MillstreamError
from millstream.observe import counted

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.console import Console

    from millstream.config.problems import Problem

WIDTH_OF_PIPES = 200

Home = Annotated[
    str | None,
    typer.Option("--home", metavar="DIR", help="Where state lives. Default: $MILLSTREAM_HOME, else ./.millstream."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def console(*, stderr: bool = False) -> Console:
    """A console that prints text as it is: no markup from data, no colours outside a terminal."""
    from rich.console import Console

    plain = Console(stderr=stderr, highlight=False, markup=False, emoji=False, soft_wrap=True)
    if not plain.is_terminal:
        # Files and pipes have no width that tables would have to be squeezed into.
        plain.width = WIDTH_OF_PIPES
    return plain


def print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))


def report_error(error: MillstreamError) -> None:
    """What is wrong in red, what to do on a line of its own."""
    err = console(stderr=True)
    err.print(f"error: {error.message}", style="red")
    if error.hint:
        err.print(f"hint: {error.hint}")


def report_warning(problem: Problem) -> None:
    console(stderr=True).print(f"warning: {problem}", style="yellow")


def in_words(value: object) -> str:
    """One value of a result for people: yes or no, and - for what there is none of."""
    if value is None or isinstance(value, bool):
        return {None: "-", True: "yes", False: "no"}[value]
    return str(value)


def size(count: int | None) -> str:
    """A size for people: 1.5 MiB."""
    if count is None:
        return "-"
    amount, units = float(count), ["B", "KiB", "MiB", "GiB"]
    while amount >= 1024 and len(units) > 1:
        amount /= 1024
        units.pop(0)
    return f"{amount:.0f} B" if units[0] == "B" else f"{amount:.1f} {units[0]}"


def seconds(count: float | None) -> str:
    """A duration for people: 0.4 s, 3 min, 2 h."""
    if count is None:
        return "-"
    if count < 120:
        return f"{count:.1f} s"
    return f"{count / 60:.0f} min" if count < 7200 else f"{count / 3600:.0f} h"


def how_far(copy: Mapping[str, Any]) -> str:
    """How far rows of tables are that are copied: 3 of 12 chunks, 80,000 rows/s, about 35.0 s left."""
    # Before a plan is made there is none of either yet, and of a table that is empty there is no chunk.
    parts = [f"{copy['done']} of {counted(copy['chunks'], 'chunk')}" if copy.get("chunks") else "begins"]
    if copy.get("tables"):
        parts.insert(0, f"{copy['tables_done']} of {counted(copy['tables'], 'table')}")
    if copy.get("rows_per_second") is not None:
        parts.append(f"{copy['rows_per_second']:,} rows/s")
    if copy.get("seconds_left") is not None:
        parts.append(f"about {seconds(copy['seconds_left'])} left")
    return ", ".join(parts)
