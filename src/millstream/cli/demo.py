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
    seconds: Annotated[float, typer.Option(help="How long the shop trades.")] = 20.0,
    seed: Annotated[int | None, typer.Option(help="Seed of the load; a random one is printed.")] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Leave journal, files and log for a look.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the outcome as JSON.")] = False,
) -> None:
    """Replicate a live shop from an embedded Postgres, crash in the middle, prove that all is equal."""
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
    """The proof as a table, and one line that says it."""
    from rich.table import Table

    table = Table(title="Source and folded changelog", title_justify="left")
    table.add_column("table", no_wrap=True)
    for name in ("changes", "source", "folded", "missing", "extra"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("equal", no_wrap=True)
    for proof in outcome.tables:
        numbers = (proof.changes, proof.source_rows, proof.folded_rows, proof.missing, proof.extra)
        table.add_row(proof.table, *(f"{n:,}" for n in numbers), "[green]yes[/]" if proof.equal else "[red]NO[/]")
    console.print(table)
    log = outcome.log
    console.print(
        f"{outcome.transactions:,} transactions, {log.changes:,} changes (seq {log.first_seq:,} to {log.last_seq:,}), "
        f"{log.changes - log.distinct_seqs} duplicates, {log.broken_transactions} transactions split, "
        f"1 kill -9 of {outcome.killed} processes, {outcome.seconds:.0f} s in all.",
        highlight=False,
        soft_wrap=True,
    )
    verdict = "[bold green]EQUAL[/]: every row" if outcome.equal else "[bold red]NOT EQUAL[/]: see the rows"
    console.print(f"{verdict} of every table, compared by Postgres itself.", highlight=False)


def as_json(outcome: Outcome, seed: int) -> dict[str, object]:
    """The outcome for machines."""
    from dataclasses import asdict

    return {
        "equal": outcome.equal,
        "seed": seed,
        "seconds": round(outcome.seconds, 1),
        "transactions": outcome.transactions,
        "killed_processes": outcome.killed,
        "log": {**asdict(outcome.log), "exact": outcome.log.exact},
        "tables": [{**asdict(table), "equal": table.equal} for table in outcome.tables],
    }
