"""`millstream schema`: the versions of the tables that journals know."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from millstream.cli.columns import Column, print_columns
from millstream.cli.journal import Source, find_journal, journals_of, reader_of
from millstream.cli.output import Home, Json, console, print_json
from millstream.cli.places import at_place
from millstream.errors import ConfigError, UnknownName
from millstream.names import instead

if TYPE_CHECKING:
    from millstream.registry.versions import Registry, Version

schema = typer.Typer(
    help="Look at the versions of tables, and what changed.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

Table = Annotated[str, typer.Argument(metavar="TABLE", help="The table, schema.table.", show_default=False)]


@schema.command(name="list")
def list_schemas(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Only this source; else all.")] = None,
    table: Annotated[str | None, typer.Option("--table", metavar="SCHEMA.TABLE", help="Only this table.")] = None,
    tenant: Annotated[
        str | None, typer.Option("--tenant", metavar="TENANT", help="Only sources of this tenant.")
    ] = None,
    home: Home = None,
    json: Json = False,
) -> None:
    """List all versions of all tables in the order in which they came."""
    paths = journals_of(home) if name is None else [find_journal(home, name)]
    known = [one for path in paths for one in _registry(home, path.name).all()]
    if table is not None and table not in (tables := sorted({one.table for one in known})):
        where = f"the journal of {name}" if name is not None else "the home"
        raise UnknownName(f"{where} has no changes of {table}: {instead(table, tables, none='it has none yet')}")
    found = [one for one in known if table in (None, one.table) and tenant in (None, one.tenant)]
    if json:
        print_json([one.to_json() for one in found])
    elif found:
        _print_versions(found)
    else:
        console().print("No schema is registered: no change has been captured.")


@schema.command()
def show(
    name: Source,
    table: Annotated[str | None, typer.Argument(metavar="TABLE", help="The table, schema.table.")] = None,
    version: Annotated[int | None, typer.Option("--version", metavar="N", help="This version of it.")] = None,
    at: Annotated[
        str | None, typer.Option("--at", metavar="PLACE", help="The one in force at a seq, a position or a time.")
    ] = None,
    id: Annotated[
        int | None, typer.Option("--id", metavar="N", help="By the number that changes have in `_ms_schema`.")
    ] = None,
    home: Home = None,
    json: Json = False,
) -> None:
    """Show one version of a table. The latest, or the one that is asked for."""
    registry = _registry(home, name)
    if sum(one is not None for one in (version, at, id)) > 1 or (id is None) == (table is None):
        raise ConfigError("which schema?", hint="name a table with at most one of --version and --at, or give --id")
    if id is not None:
        found = registry.by_id(id)
    elif version is not None:
        found = registry.version(str(table), version)
    elif at is not None:
        found = _at(registry, str(table), at)
    else:
        found = registry.versions(str(table))[-1]
    print_json(found.to_json()) if json else _print_one(found)


@schema.command()
def diff(
    name: Source,
    table: Table,
    start: Annotated[
        int | None, typer.Option("--from", metavar="N", help="A version. Default: the one before --to.")
    ] = None,
    end: Annotated[int | None, typer.Option("--to", metavar="N", help="A version. Default: the latest.")] = None,
    home: Home = None,
    json: Json = False,
) -> None:
    """Say what is different between two versions of a table.

    Also whether readers of one can read rows of the other.
    """
    from millstream.registry.structure import compatibility, differences

    registry = _registry(home, name)
    after = registry.versions(table)[-1] if end is None else registry.version(table, end)
    if start is None and after.version == 1:
        raise UnknownName(f"{table} has no version before {after.version}", hint="name another with --from")
    before = registry.version(table, after.version - 1 if start is None else start)
    changes = differences(before.relation, after.relation)
    fits = compatibility(before.relation, after.relation)
    if json:
        found = {"table": table, "from": before.version, "to": after.version, "compatibility": fits.value}
        print_json({**found, "changes": [one.to_json() for one in changes]})
        return
    out = console()
    out.print(f"{table}: version {before.version} to {after.version}, compatibility {fits.value}")
    for one in changes:
        out.print(f"  {one.in_words()}")
    if not changes:
        out.print("  nothing is different")


def _registry(home: str | None, name: str) -> Registry:
    from millstream.registry.versions import Registry

    return Registry(reader_of(find_journal(home, name)))


def _at(registry: Registry, table: str, place: str) -> Version:
    """The version at a place, which may have been pruned from the journal."""
    return at_place(
        place,
        lambda seq: registry.at_seq(table, seq),
        lambda position: registry.at_position(table, position),
        lambda time: registry.at_time(table, time),
    )


_VERSIONS = (
    Column("tenant", spare=5),
    Column("source", spare=2),
    Column("table"),
    Column("version", right=True),
    Column("id", right=True, spare=3),
    Column("seq", right=True),
    Column("since (UTC)", spare=1),
    Column("fingerprint", spare=4),
    Column("what changed"),
)
_COLUMNS = tuple(Column(name) for name in ("column", "type", "null", "default", "generated"))


def _print_versions(found: list[Version]) -> None:
    rows = []
    for one in found:
        since = f"{one.checkpoint.wall:%Y-%m-%d %H:%M:%S}"
        numbers = (str(one.version), str(one.id), f"{one.seq:,}", since, one.fingerprint[:12])
        rows.append([one.tenant, one.source, one.table, *numbers, "; ".join(c.in_words() for c in one.changes)])
    print_columns(_VERSIONS, rows)


def _print_one(one: Version) -> None:
    from millstream.registry.structure import type_text

    out, found = console(), one.to_json()
    for key in ("tenant", "source", "table", "version", "id", "fingerprint", "seq"):
        out.print(f"{key}: {found[key]}")
    place = found["checkpoint"]
    out.print(f"checkpoint: seq {place['seq']}, position {place['position']}, {place['at']}")
    out.print(f"key: {', '.join(one.relation.key) or 'none'}")
    for change in one.changes:
        out.print(f"changed: {change.in_words()}")
    words = {None: "?", True: "yes", False: "no"}
    rows = [
        [each.name, type_text(each), words[each.nullable], each.default or "", words[each.generated]]
        for each in one.relation.columns
    ]
    print_columns(_COLUMNS, rows)
