"""`millstream snapshot`: the states of targets, kept aside and brought back."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from millstream.cli.columns import Column, print_columns
from millstream.cli.homes import engine_of
from millstream.cli.output import Home, Json, console, in_words, print_json, seconds, size
from millstream.observe import counted

if TYPE_CHECKING:
    from millstream.snapshots.manifest import TargetSnapshot

snapshot = typer.Typer(
    help="Keep the state of a target's tables, and bring it back.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

Name = Annotated[str, typer.Argument(metavar="NAME", help="The stream.", show_default=False)]
Id = Annotated[str, typer.Argument(metavar="ID", help="The snapshot, as `list` names it.")]
Target = Annotated[
    str | None, typer.Option("--target", metavar="TARGET", help="Only this target of the stream.", show_default="all")
]
OneTarget = Annotated[
    str | None,
    typer.Option(
        "--target", metavar="TARGET", help="The target, where several can have snapshots.", show_default="the one"
    ),
]
Where = Annotated[
    str | None,
    typer.Option(
        "--path",
        metavar="PATH",
        help="Where the snapshots are, a directory or URL.",
        show_default="what the stream says",
    ),
]


@snapshot.command()
def create(
    name: Name,
    target: Target = None,
    path: Where = None,
    format: Annotated[
        str | None,
        typer.Option(
            metavar="FORMAT", help="How rows are written: arrow or jsonl.", show_default="what the stream says"
        ),
    ] = None,
    home: Home = None,
    json: Json = False,
) -> None:
    """Take a snapshot of each target, or of one. The stream goes on."""
    if format not in (None, "arrow", "jsonl"):
        raise typer.BadParameter("a format is arrow or jsonl")
    found = engine_of(home).create_snapshot(name, target, path=_absolute(path), format=format)
    if json:
        print_json([one.to_json() for one in found])
        return
    for one in found:
        what = f"{counted(one.rows, 'row')}, {size(one.size)}, at seq {one.seq:,} ({one.position_text})"
        console().print(f"{name}/{one.target}: {one.id}: {what}, in {seconds(one.seconds)}")


@snapshot.command(name="list")
def list_snapshots(
    name: Name, target: Target = None, path: Where = None, home: Home = None, json: Json = False
) -> None:
    """List the snapshots there are, oldest first. One that was not finished is none."""
    found = engine_of(home).list_snapshots(name, target, path=_absolute(path))
    if json:
        print_json([one.to_json() for one in found])
        return
    if not found:
        console().print("No snapshot is here.")
        return
    _print(found)


@snapshot.command()
def inspect(
    name: Name,
    id: Id = "latest",
    target: OneTarget = None,
    path: Where = None,
    check: Annotated[bool, typer.Option("--check", help="Read all files and compare their checksums.")] = False,
    home: Home = None,
    json: Json = False,
) -> None:
    """Show what is in a snapshot, and whether it can be restored."""
    found, why = engine_of(home).inspect_snapshot(name, id, target, path=_absolute(path), check=check)
    told = {**found.to_json(), "checked": check, "usable": why is None, "why_not": why}
    if json:
        print_json(told)
        return
    for key, value in told.items():
        if key not in ("tables", "why_not"):
            console().print(f"{key.replace('_', ' ')}: {in_words(value)}")
    if why is not None:
        console().print(f"cannot be restored: {why}", style="yellow")
    for table in told["tables"]:
        columns = ", ".join(f"{column} {kind}" for column, kind in table["columns"].items())
        console().print(f"  {table['name']}: {counted(table['rows'], 'row')}, {size(table['bytes'])}: {columns}")


@snapshot.command()
def restore(
    name: Name,
    id: Id = "latest",
    target: OneTarget = None,
    path: Where = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace what the target has; else it must be empty.")
    ] = False,
    home: Home = None,
    json: Json = False,
) -> None:
    """Bring a target back to a snapshot. Its delivery goes on from there: no gap, no double."""
    record = engine_of(home).restore_snapshot(name, id, target, path=_absolute(path), overwrite=overwrite)
    if json:
        print_json(record)
        return
    what = f"{name}: snapshot {record['id']} at seq {record['seq']:,} ({record['position']})"
    if record["state"] == "waiting":
        console().print(f"{what}: the target's delivery restores it now; see `millstream status {name}`")
    else:
        console().print(f"{what}: restored; the stream goes on from there when it runs")


@snapshot.command()
def delete(
    name: Name,
    id: Annotated[str, typer.Argument(metavar="ID", help="The snapshot, as `list` names it.", show_default=False)],
    target: OneTarget = None,
    path: Where = None,
    home: Home = None,
    json: Json = False,
) -> None:
    """Remove a snapshot."""
    gone = engine_of(home).delete_snapshot(name, id, target, path=_absolute(path))
    print_json(gone.to_json()) if json else console().print(f"{name}/{gone.target}: {gone.id} is deleted.")


@snapshot.command()
def prune(
    name: Name,
    target: Target = None,
    keep: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="How many of each target stay.", show_default="what the stream says"),
    ] = None,
    path: Where = None,
    home: Home = None,
    json: Json = False,
) -> None:
    """Remove the oldest snapshots, so that only the newest stay."""
    gone = engine_of(home).prune_snapshots(name, target, keep=keep, path=_absolute(path))
    if json:
        print_json([one.to_json() for one in gone])
        return
    for one in gone:
        console().print(f"{name}/{one.target}: {one.id} is deleted.")
    if not gone:
        console().print("There are no more than that.")


def _absolute(path: str | None) -> str | None:
    """The process that does it may have another working directory."""
    return path if path is None or "://" in path else str(Path(path).expanduser().absolute())


_SNAPSHOTS = (
    Column("id"),
    Column("target"),
    Column("taken (UTC)", spare=3),
    Column("seq", right=True),
    Column("position", spare=1),
    Column("tables", right=True, spare=2),
    Column("rows", right=True),
    Column("size", right=True),
    Column("format", spare=4),
)


def _print(found: list[TargetSnapshot]) -> None:
    rows = []
    for one in found:
        what = (one.id, one.target, f"{one.created_at:%Y-%m-%d %H:%M:%S}", f"{one.seq:,}", one.position_text)
        rows.append([*what, str(len(one.tables)), f"{one.rows:,}", size(one.size), one.format.value])
    print_columns(_SNAPSHOTS, rows)
