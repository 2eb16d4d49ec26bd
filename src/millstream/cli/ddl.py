"""`millstream ddl`: schema changes on their way to targets, and what to do about those that wait."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from millstream.cli.columns import Column, print_columns
from millstream.cli.homes import engine_of
from millstream.cli.output import Home, Json, console, in_words, print_json

if TYPE_CHECKING:
    from millstream.registry.ddl import DdlEvent

ddl = typer.Typer(
    help="See to schema changes on their way: list, approve, reject.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

Stream = Annotated[str, typer.Argument(metavar="NAME", help="Name of the stream.", show_default=False)]
Id = Annotated[str, typer.Argument(metavar="ID", help="The change, by its id in `ddl list`.", show_default=False)]


@ddl.command(name="list")
def list_events(
    name: Stream,
    pending: Annotated[bool, typer.Option("--pending", help="Only those that wait for a decision.")] = False,
    home: Home = None,
    json: Json = False,
) -> None:
    """List the schema changes of a stream's tables, oldest first."""
    found = [one for one in engine_of(home).ddl_events(name) if not pending or one.state == "pending"]
    if json:
        print_json([one.to_json() for one in found])
    elif found:
        _print(found)
    else:
        console().print("No schema change is here.")


@ddl.command()
def show(name: Stream, id: Id, home: Home = None, json: Json = False) -> None:
    """Show one schema change. What is different, what was decided, which targets have it."""
    event = engine_of(home).ddl_event(name, id)
    found = event.to_json()
    if json:
        print_json(found)
        return
    out = console()
    for key in ("stream", "id", "table", "version", "state", "policy", "fingerprint"):
        out.print(f"{key}: {in_words(found[key])}")
    out.print(f"decided at: {f'{event.decided.at:{_TIME}} UTC' if event.decided else '-'}")
    place, at = found["checkpoint"], f"{event.version.checkpoint.wall:{_TIME}} UTC"
    if found["since"] is None:
        out.print(f"delivered before it: up to seq {place['seq']}")
        out.print(f"committed at {place['position']}, {at}")
    else:
        out.print(f"found in the catalog {at}, at seq {place['seq']}")
        out.print(f"committed between {found['since']} and {place['position']}")
    for change in event.version.changes:
        out.print(f"  {change.in_words()}")
    for target, receipt in found["receipts"].items():
        out.print(f"  target {target}: {receipt}")
    if event.state in ("pending", "rejected"):
        out.print(f"it passes with: millstream ddl approve {name} {id}")


@ddl.command()
def approve(name: Stream, id: Id, home: Home = None, json: Json = False) -> None:
    """Let a schema change pass. Delivery that waits for it goes on at once, one that has failed is tried again."""
    _decide(home, name, id, approved=True, json=json)


@ddl.command()
def reject(name: Stream, id: Id, home: Home = None, json: Json = False) -> None:
    """Do not let a schema change pass. Delivery fails there, with everything before it delivered."""
    _decide(home, name, id, approved=False, json=json)


def _decide(home: str | None, name: str, id: str, *, approved: bool, json: bool) -> None:
    found = engine_of(home).decide_ddl(name, id, approved=approved)
    print_json(found.to_json()) if json else console().print(f"{id}: {found.state}")


_TIME = "%Y-%m-%d %H:%M:%S"

_LISTED = (
    Column("id", right=True),
    Column("table"),
    Column("version", right=True, spare=1),
    Column("state"),
    Column("policy", spare=2),
    Column("at (UTC)", spare=3),
    Column("targets", spare=4),
    Column("what changed"),
)


def _print(found: list[DdlEvent]) -> None:
    rows = []
    for one in found:
        targets = ", ".join(f"{target} {receipt}" for target, receipt in one.receipts.items())
        at, words = f"{one.version.checkpoint.wall:{_TIME}}", [c.in_words() for c in one.version.changes]
        version = str(one.version.version or "-")
        where = (str(one.id), one.version.table, version, one.state, one.policy.value, at)
        rows.append([*where, targets, "; ".join(words)])
    print_columns(_LISTED, rows)
