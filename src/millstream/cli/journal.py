"""`millstream journal`: look into the journals of a home."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from millstream.cli.journal_prune import prune
from millstream.cli.output import Home, Json, console, in_words, print_json
from millstream.observe import counted

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.progress import Progress

    from millstream.journal import JournalReader

journal = typer.Typer(
    help="Look into the journals of a home.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

Source = Annotated[str, typer.Argument(metavar="NAME", help="Name of the source.", show_default=False)]


@journal.command()
def ls(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="List the segments of this journal.")] = None,
    home: Home = None,
    json: Json = False,
) -> None:
    """List the journals, or the segments of one."""
    from millstream.cli import journal_list

    if name is None:
        journals = [journal_list.summary(path) for path in journals_of(home)]
        print_json(journals) if json else journal_list.print_journals(journals)
        return
    segments = journal_list.segments(find_journal(home, name))
    print_json(segments) if json else journal_list.print_segments(segments)


@journal.command()
def cat(
    name: Source,
    table: Annotated[
        list[str] | None, typer.Option("--table", metavar="SCHEMA.TABLE", help="Only this table; may be repeated.")
    ] = None,
    start: Annotated[
        str | None, typer.Option("--from", metavar="PLACE", help="Seq, position or time to begin at.")
    ] = None,
    end: Annotated[
        str | None, typer.Option("--to", metavar="PLACE", help="Seq to end with, or position or time to end before.")
    ] = None,
    limit: Annotated[int | None, typer.Option("--limit", min=1, metavar="N", help="At most so many changes.")] = None,
    home: Home = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")] = False,
) -> None:
    """Print changes in their order, with their values."""
    from millstream.cli.journal_cat import changes, in_words

    reader = reader_of(find_journal(home, name))
    shown = changes(reader, tables=frozenset(table or ()), start=start, end=end, limit=limit)
    for change in shown:
        typer.echo(json_module.dumps(change, ensure_ascii=False, default=str) if json else in_words(change))


@journal.command()
def verify(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Only this journal; else all.")] = None,
    home: Home = None,
    json: Json = False,
) -> None:
    """Read every byte and compare it with what was written. Exit 1 when something is wrong."""
    from millstream.journal import verify as verify_journal

    paths = journals_of(home) if name is None else [find_journal(home, name)]
    found: dict[str, list[str]] = {}
    with _progress_bar() as bar:
        for path in paths:
            found[path.name] = [str(problem) for problem in verify_journal(path, _shown_by(bar, path.name))]
    if json:
        print_json({"ok": not any(found.values()), "problems": found})
    else:
        out = console()
        if not found:
            out.print("There is no journal yet.")
        for source, problems in found.items():
            out.print(f"{source}: {'whole' if not problems else counted(len(problems), 'problem')}")
            for problem in problems:
                out.print(f"  {problem}", style="red")
    raise typer.Exit(1 if any(found.values()) else 0)


@journal.command()
def rebase(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the stream.", show_default=False)],
    confirm: Annotated[bool, typer.Option("--confirm", help="Do it; else only say what would be done.")] = False,
    home: Home = None,
    json: Json = False,
) -> None:
    """Go on after a journal was lost. The new one begins above every seq that was ever delivered."""
    from millstream.engine.home import Home as HomeDirectory
    from millstream.engine.rebase import rebase as rebase_stream

    plan = rebase_stream(HomeDirectory.locate(home), name, confirm)
    if json:
        print_json(plan)
        return
    out = console()
    for key, value in plan.items():
        if key != "cursors":
            out.print(f"{key.replace('_', ' ')}: {in_words(value)}")
    for who, position in plan["cursors"].items():
        out.print(f"  {who} is at position {position}")
    if not confirm:
        out.print("Nothing was done. Say it again with --confirm.")


journal.command()(prune)


def journals_of(home: str | None) -> list[Path]:
    """The directories of all journals, in order of their names."""
    from millstream.engine.home import Home as HomeDirectory

    directory = HomeDirectory.locate(home).journals_path
    return sorted(path.parent for path in directory.glob("*/journal.json")) if directory.is_dir() else []


def find_journal(home: str | None, name: str) -> Path:
    """The directory of a journal. Raises UnknownName."""
    from millstream.errors import UnknownName
    from millstream.names import instead

    paths = {path.name: path for path in journals_of(home)}
    if name not in paths:
        there = instead(name, paths, none="there is none yet")
        hint = _meant(home, name) or "check the name and --home"
        raise UnknownName(f"the home has no journal {name}: {there}", hint=hint)
    return paths[name]


def _meant(home: str | None, name: str) -> str | None:
    """Which journal to ask for, where `name` is a stream's: journals have the names of sources."""
    from millstream.engine.engine import Engine
    from millstream.engine.home import Home as HomeDirectory

    streams = {one.name: one.source.name for one in Engine(HomeDirectory.locate(home)).list_streams()}
    return f"journals are called as sources are: that of stream {name} is {streams[name]}" if name in streams else None


def reader_of(path: Path) -> JournalReader:
    from millstream.journal import JournalReader

    return JournalReader([str(path)])


def _shown_by(bar: Progress, name: str) -> Callable[[int, int], None]:
    task = bar.add_task(name, total=None)
    return lambda done, all: bar.update(task, completed=done, total=all)


def _progress_bar() -> Progress:
    """A bar per journal with rate and time to go, on a terminal; nothing elsewhere."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    err = console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=err, disable=not err.is_terminal, transient=True)
