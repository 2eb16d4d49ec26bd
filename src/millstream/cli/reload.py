"""`millstream reload`: tables are copied anew while changes go on coming."""

from __future__ import annotations

from typing import Annotated

import typer

from millstream.cli.homes import engine_of
from millstream.cli.output import Home, Json, console, print_json


def reload(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The stream.", show_default=False)],
    table: Annotated[
        list[str] | None,
        typer.Option(metavar="SCHEMA.TABLE", help="Only this table; may be repeated.", show_default="all"),
    ] = None,
    where: Annotated[
        str | None,
        typer.Option(
            metavar="CONDITION",
            help="Only this range of the key of the one table, as 'id >= 100 AND id < 200'; at mirrors.",
            show_default="all of it",
        ),
    ] = None,
    target: Annotated[
        str | None, typer.Option(metavar="TARGET", help="Only this target of the stream.", show_default="all")
    ] = None,
    home: Home = None,
    json: Json = False,
) -> None:
    """Copy tables anew while changes keep flowing. Returns when it is written down."""
    engine = engine_of(home)
    if where is not None and len(table or ()) != 1:
        raise typer.BadParameter("--where is a condition on the key of one table: give one --table with it")
    engine.reload(name, target, tables=table or (), where=where)
    runs = engine.home.owner() is not None
    targets = [one for one in engine.get_status(name).targets if target in (None, one.name)]
    if json:
        print_json({"name": name, "running": runs, "targets": {one.name: one.reload for one in targets}})
        return
    for one in targets:
        state = one.reload["state"] if one.reload else "no reload"
        what = (", ".join(table or ()) or "every table") + ("" if where is None else f" where {where}")
        console().print(f"{name}/{one.name}: reload of {what}: {state}", markup=False)
    if not runs:
        console().print("No process runs here: it is done when the stream runs (millstream run).")
