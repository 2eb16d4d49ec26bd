"""`millstream journal prune`: let a journal forget what is over its limits."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from millstream.cli.output import Home, Json, console, print_json, size
from millstream.errors import ConfigError
from millstream.observe import counted

if TYPE_CHECKING:
    from millstream.model import Json as Result


def prune(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the source.", show_default=False)],
    older_than: Annotated[
        str | None, typer.Option("--older-than", metavar="AGE", help="Changes older than this go: 7d, 12h.")
    ] = None,
    max_bytes: Annotated[
        str | None,
        typer.Option(
            "--max-bytes", metavar="SIZE", help="The oldest changes go until no more than this is left: 50GiB."
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Also what a target still needs, which then needs a reload.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    home: Home = None,
    json: Json = False,
) -> None:
    """Remove the oldest changes of a journal, by age or size.

    Never what a target still needs, unless it is forced.
    """
    from millstream.cli.journal import find_journal
    from millstream.config.units import parse_duration_ms, parse_size
    from millstream.engine.home import Home as HomeDirectory
    from millstream.engine.prune import prune as prune_journal
    from millstream.model import Retention

    age = _given("--older-than", older_than, parse_duration_ms)
    most = _given("--max-bytes", max_bytes, parse_size)
    rule = None if age is None and most is None else Retention(age, most)
    find_journal(home, name)
    result = prune_journal(HomeDirectory.locate(home), name, rule, force=force, dry_run=dry_run)
    print_json(result) if json else _print(name, result)


def _print(name: str, result: Result) -> None:
    """What went, or would; what is kept for whom; and who cannot go on."""
    out, held = console(), result["held"]
    if result["segments"]:
        verb = "removed" if result["done"] else "would remove"
        amount = f"{counted(result['rows'], 'change')}, {counted(result['segments'], 'segment')}"
        out.print(f"{name}: {verb} {amount}, {size(result['bytes'])}; up to seq {result['last_seq']:,}")
    else:
        why = "" if held["segments"] else " (whole segments go, never the one that is written to)"
        out.print(f"{name}: nothing to remove{why}")
    if held["segments"]:
        who = ", ".join(f"{one['stream']}/{one['target']} (at seq {one['seq']:,})" for one in held["by"])
        out.print(f"  {counted(held['rows'], 'change')} over the limit, but still needed by {who}", style="yellow")
    for one in result["halted"]:
        out.print(f"  {one['stream']}/{one['target']} is at seq {one['seq']:,}: it cannot go on", style="red")
        out.print(f"  copy its tables anew: millstream reload {one['stream']} --target {one['target']}")


def _given(option: str, text: str | None, parse: Callable[[object], int]) -> int | None:
    try:
        return None if text is None else parse(text)
    except ValueError as wrong:
        raise ConfigError(f"{option}: {wrong}") from None
