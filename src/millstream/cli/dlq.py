"""`millstream dlq`: changes that targets could not take."""

from __future__ import annotations

from json import dumps
from typing import TYPE_CHECKING, Annotated, Any

import typer

from millstream.cli.columns import Column, print_columns
from millstream.cli.homes import engine_of
from millstream.cli.output import Home, Json, console, in_words, print_json
from millstream.errors import ConfigError
from millstream.observe import counted

if TYPE_CHECKING:
    from millstream.engine.engine import Engine
    from millstream.state.base import Letter

dlq = typer.Typer(
    help="See to changes that targets could not take: dead letters.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

Ids = Annotated[list[int] | None, typer.Argument(metavar="ID", help="Letters, by their number.")]
Stream = Annotated[str | None, typer.Option("--stream", metavar="NAME", help="All letters of this stream.")]
Target = Annotated[str | None, typer.Option("--target", metavar="TARGET", help="Only those of this target.")]
Table = Annotated[str | None, typer.Option("--table", metavar="SCHEMA.TABLE", help="Only those of this table.")]


@dlq.command(name="list")
def list_letters(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Only this stream.", show_default=False)] = None,
    target: Target = None,
    table: Table = None,
    home: Home = None,
    json: Json = False,
) -> None:
    """List the dead letters, oldest first, without values of their rows."""
    letters = engine_of(home).dead_letters(name, target, table)
    if json:
        print_json([_listed(letter) for letter in letters])
        return
    if not letters:
        console().print("No dead letter is here.")
        return
    _print(letters)


@dlq.command()
def show(
    id: Annotated[int, typer.Argument(metavar="ID", help="The letter, by its number.", show_default=False)],
    home: Home = None,
    json: Json = False,
) -> None:
    """Show one letter with the values of its row."""
    letter = engine_of(home).dead_letter(id)
    found = {**_listed(letter), "change": _change(letter)}
    if json:
        print_json(found)
        return
    for key, value in found.items():
        if key != "change":
            console().print(f"{key.replace('_', ' ')}: {in_words(value)}")
    for part in ("values", "before"):
        for column, value in (found["change"][part] or {}).items():
            unsent = column in found["change"]["unchanged"] and part == "values"
            text = "(unchanged, not sent)" if unsent else _value(found["change"]["special"].get(column, value))
            console().print(f"  {'old ' if part == 'before' else ''}{column} = {text}")


@dlq.command()
def retry(
    ids: Ids = None,
    stream: Stream = None,
    target: Target = None,
    table: Table = None,
    home: Home = None,
    json: Json = False,
) -> None:
    """Deliver letters once more. One whose row was written by a later change does nothing, and is removed."""
    engine = engine_of(home)
    done = engine.retry_letters(_numbers(engine, ids, stream, target, table))
    if json:
        print_json([one.to_json() for one in done])
    else:
        for one in done:
            console().print(f"{one.id}: {one.outcome}: {one.detail}")
        if not done:
            console().print("No dead letter is here.")
    if any(one.outcome == "rejected" for one in done):
        raise typer.Exit(1)


@dlq.command()
def purge(
    ids: Ids = None,
    stream: Stream = None,
    target: Target = None,
    table: Table = None,
    home: Home = None,
    json: Json = False,
) -> None:
    """Give letters up. The changes are lost to their target, whose rows stay as they are."""
    engine = engine_of(home)
    removed = engine.purge_letters(_numbers(engine, ids, stream, target, table))
    print_json({"purged": removed}) if json else console().print(f"{counted(removed, 'dead letter')} given up.")


def _numbers(
    engine: Engine, ids: list[int] | None, stream: str | None, target: str | None, table: str | None
) -> list[int]:
    """The letters that are meant: those that were named, or all of a stream."""
    if ids and (stream or target or table):
        raise ConfigError("name letters, or what they are of, not both")
    if not ids and stream is None:
        raise ConfigError("which letters?", hint="give their numbers, or --stream NAME for all of a stream")
    return list(ids) if ids else [letter.id for letter in engine.dead_letters(stream, target, table)]


def _value(value: object) -> str:
    """A value of a row: texts as they are, others as in JSON, not as Python writes them."""
    if value is None:
        return "NULL"
    return value if isinstance(value, str) else dumps(value, ensure_ascii=False)


def _listed(letter: Letter) -> dict[str, Any]:
    return {
        "id": letter.id,
        "stream": letter.stream,
        "target": letter.target,
        "table": letter.table,
        "op": letter.op,
        "seq": letter.seq,
        "event_id": letter.event_id,
        "kind": letter.kind,
        "state": letter.state.value,
        "superseded_by": letter.superseded_by,
        "tries": letter.tries,
        "at": letter.at.isoformat(),
        "reason": letter.reason,
    }


def _change(letter: Letter) -> dict[str, Any]:
    from millstream.cli.journal_cat import one_change
    from millstream.model import Relation
    from millstream.targets.rejects import unpacked

    (row,) = unpacked(letter.payload).to_pylist()
    return one_change(Relation.from_json(letter.relation), row)


_LETTERS = (
    Column("id", right=True),
    Column("stream", spare=1),
    Column("target"),
    Column("table"),
    Column("op"),
    Column("seq", right=True, spare=2),
    Column("kind", spare=4),
    Column("state", spare=3),
    Column("at (UTC)", spare=5),
    Column("reason"),
)


def _print(letters: list[Letter]) -> None:
    rows = []
    for one in letters:
        state = one.state.value if one.superseded_by is None else f"{one.state.value} by {one.superseded_by:,}"
        where = (one.stream, one.target, one.table, one.op, f"{one.seq:,}", one.kind, state)
        rows.append([str(one.id), *where, f"{one.at:%Y-%m-%d %H:%M:%S}", one.reason])
    print_columns(_LETTERS, rows)
