"""`millstream reload`: tables are copied anew while changes go on coming."""

from __future__ import annotations

from typing import Annotated

import typer

from millstream.cli.output import Home, Json, console, print_json


def reload(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The stream.", show_default=False)],
    table: Annotated[
        list[str] | None, typer.Option(help="Only this table, schema.table; may be repeated.", show_default="all")
    ] = None,
    target: Annotated[str | None, typer.Option(help="Only this target of the stream.", show_default="all")] = None,
    home: Home = None,
    json: Json = False,
) -> None:
    """Copy tables anew while the others, and their own changes, keep flowing. Returns when it is written down."""
    from millstream.engine.engine import Engine
    from millstream.engine.home import Home as HomeDirectory

    engine = Engine(HomeDirectory.locate(home))
    engine.reload(name, target, tables=table or ())
    runs = engine.home.owner() is not None
    targets = [one for one in engine.get_status(name).targets if target in (None, one.name)]
    if json:
        print_json({"name": name, "running": runs, "targets": {one.name: one.reload for one in targets}})
        return
    for one in targets:
        state = one.reload["state"] if one.reload else "no reload"
        console().print(f"{name}/{one.name}: reload of {', '.join(table or ()) or 'every table'}: {state}")
    if not runs:
        console().print("No process runs here: it is done when the stream runs (millstream run).")
