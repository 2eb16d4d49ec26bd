"""`millstream bench`: measure parts of Millstream on this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from millstream.cli.output import Json, console, print_json


def bench(
    name: Annotated[str | None, typer.Argument(help="Which one; without a name they are listed.")] = None,
    json: Json = False,
) -> None:
    """Run a benchmark."""
    from millstream.bench import BENCHES

    if name is None:
        print_json(sorted(BENCHES)) if json else typer.echo("\n".join(sorted(BENCHES)))
        return
    if name not in BENCHES:
        raise typer.BadParameter(f"no benchmark is called {name}; there are {', '.join(sorted(BENCHES))}")
    result = BENCHES[name]()
    if json:
        print_json(result)
        return
    out = console()
    for key, value in result.items():
        out.print(f"{key}: {value}")
