"""`millstream demo`: the whole way of the data on this machine, with a proof at the end."""

from __future__ import annotations

import json as json_module
import secrets
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from millstream.demo.play import Outcome


def demo(
    seconds: Annotated[float, typer.Option(metavar="SECONDS", help="How long the shop trades.")] = 20.0,
    seed: Annotated[int | None, typer.Option(metavar="N", help="Seed of the load; a random one is printed.")] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Leave journal, files, tables and log for a look.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the outcome as JSON.")] = False,
) -> None:
    """Mirror a live shop into three targets, and compare every row."""
    from rich.console import Console

    from millstream.demo.play import Play

    console = Console(stderr=json)
    seed = secrets.randbelow(1 << 31) if seed is None else seed
    directory = Path(tempfile.mkdtemp(prefix="millstream-demo-"))
    console.print(f"[bold]Millstream demo[/] · seed {seed}", highlight=False)
    outcome = None
    try:
        outcome = Play(directory, console, seconds, seed).perform()
    finally:
        if outcome is not None and outcome.equal and not keep:
            shutil.rmtree(directory, ignore_errors=True)
        else:
            console.print(f"Left for a look: {directory}", highlight=False, soft_wrap=True)
    if json:
        typer.echo(json_module.dumps(as_json(outcome, seed), indent=2))
    else:
        summarise(console, outcome)
    raise typer.Exit(0 if outcome.equal else 1)


def summarise(console: Console, outcome: Outcome) -> None:
    """What was compared, and one line that says it."""
    from millstream.cli.verify import show

    show(console, outcome.report)
    console.print(
        f"{outcome.transactions:,} transactions, {outcome.changes:,} changes on top of full tables, 1 pause, "
        f"1 kill -9 of {outcome.killed} processes, {outcome.seconds:.0f} s in all.",
        highlight=False,
        soft_wrap=True,
    )
    verdict = "[bold green]EQUAL[/]: every row" if outcome.equal else "[bold red]NOT EQUAL[/]: see the rows"
    console.print(f"{verdict} of every table, at every target.", highlight=False)


def as_json(outcome: Outcome, seed: int) -> dict[str, object]:
    """The outcome for machines."""
    return {
        "equal": outcome.equal,
        "seed": seed,
        "seconds": round(outcome.seconds, 1),
        "transactions": outcome.transactions,
        "changes": outcome.changes,
        "killed_processes": outcome.killed,
        "targets": outcome.report.to_json()["targets"],
    }
