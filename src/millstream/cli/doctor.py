"""`millstream doctor`: what was found on this machine, with the fix beside each miss."""

from __future__ import annotations

import json as json_module
from typing import TYPE_CHECKING, Annotated

import typer

from millstream.cli.output import Home, console

if TYPE_CHECKING:
    from millstream.doctor import Found

STYLE = {"ok": "green", "warning": "yellow", "missing": "red"}


def doctor(
    home: Home = None,
    json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Say what is here of what Millstream needs. Ends with 1 if something required is missing."""
    from millstream.doctor import examine, is_fit
    from millstream.engine.home import Home as HomeDirectory

    findings = examine(HomeDirectory.locate(home).path)
    fit = is_fit(findings)
    if json:
        typer.echo(json_module.dumps({"fit": fit, "findings": [found.to_json() for found in findings]}, indent=2))
    else:
        _show(findings)
    raise typer.Exit(0 if fit else 1)


def _show(findings: list[Found]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(show_edge=False, pad_edge=False)
    for heading in ("", "state", "found"):
        table.add_column(heading, overflow="fold")
    for found in findings:
        table.add_row(found.check, Text(found.state.value, style=STYLE[found.state.value]), Text(found.found))
    out = console()
    out.print(table)
    for found in findings:
        if found.fix:
            # Outside the table, so that it can be copied as it is.
            out.print(f"{found.check}: {found.fix}")
