"""`millstream doctor`: what was found on this machine, with the fix beside each miss."""

from __future__ import annotations

import json as json_module
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from millstream.doctor import Found

STYLE = {"ok": "green", "warning": "yellow", "missing": "red"}


def doctor(
    json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Say what is here of what Millstream needs. Ends with 1 if something required is missing."""
    from millstream.doctor import examine, is_fit
    from millstream.engine.home import Home

    findings = examine(Home.locate().path)
    fit = is_fit(findings)
    if json:
        typer.echo(json_module.dumps({"fit": fit, "findings": [found.to_json() for found in findings]}, indent=2))
    else:
        _show(findings)
    raise typer.Exit(0 if fit else 1)


def _show(findings: list[Found]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(show_edge=False, pad_edge=False)
    for heading in ("", "state", "found", "what to do"):
        table.add_column(heading, overflow="fold")
    for found in findings:
        state = Text(found.state.value, style=STYLE[found.state.value])
        # Text, because paths and commands may hold what rich would take for markup: millstream[postgres].
        table.add_row(found.check, state, Text(found.found), Text(found.fix or ""))
    Console().print(table)
