"""`millstream verify`: are the targets equal to the source, and which rows are not."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from millstream.cli.columns import Column, print_columns
from millstream.cli.output import Home, Json, console, print_json
from millstream.observe import counted

if TYPE_CHECKING:
    from rich.console import Console

    from millstream.engine.verify_report import TargetVerdict, VerifyReport


def verify(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The stream.", show_default=False)],
    target: Annotated[str | None, typer.Option(metavar="TARGET", help="Only this target of the stream.")] = None,
    table: Annotated[
        list[str] | None, typer.Option(metavar="SCHEMA.TABLE", help="Only this table; may be repeated.")
    ] = None,
    repair: Annotated[bool, typer.Option("--repair", help="Write the rows that differ once more.")] = False,
    home: Home = None,
    master: Annotated[
        str | None, typer.Option(metavar="MASTER", help="Spark master, if no process runs the home. Default: local.")
    ] = None,
    json: Json = False,
) -> None:
    """Compare a stream's targets with its source, row by row.

    Both are compared at one exact position, also while others write.

    Exit code 0: equal, or equal after a repair; 1: different.
    """
    from millstream.engine.home import Home as HomeDirectory
    from millstream.engine.verifying import verify as compare
    from millstream.observe import Observers

    with _progress(shown=not json) as hear:
        report = compare(
            HomeDirectory.locate(home),
            name,
            target=target,
            tables=tuple(table or ()),
            repair=repair,
            observers=Observers(),
            master=master,
            on_progress=hear,
        )
    if json:
        print_json(report.to_json())
    else:
        show(console(), report)
    raise typer.Exit(0 if report.equal else 1)


@contextmanager
def _progress(*, shown: bool) -> Iterator[Callable[[str], None]]:
    """A line that says how far it is: one that changes on a terminal, one for each step elsewhere."""
    if not shown:
        yield lambda text: None
        return
    err = console(stderr=True)
    if sys.stderr.isatty():
        with err.status("comparing") as line:
            yield lambda text: line.update(text or "comparing")
        return
    said = ""

    def say(text: str) -> None:
        nonlocal said
        step = ": ".join(text.split(": ")[:2])
        if step and step != said:
            said = step
            err.print(step)

    yield say


COMPARED = (
    *(Column("target"), Column("table")),
    *(Column("source rows", right=True, spare=2), Column("target rows", right=True, spare=1)),
    *(Column("missing", right=True), Column("changed", right=True), Column("extra", right=True)),
    Column(""),
)


def show(out: Console, report: VerifyReport) -> None:
    """A table of what was compared, the keys that differ, and one line that says it."""
    from rich.text import Text

    rows: list[list[str | Text]] = []
    for target in report.targets:
        for number, one in enumerate(target.tables):
            counts = (one.source_rows, one.target_rows, one.missing, one.changed, one.extra)
            verdict = Text("repaired", "yellow") if one.repaired else Text("equal", "green")
            verdict = verdict if one.equal else Text("DIFFERENT", "red")
            first = f"{target.target} ({target.kind})" if not number else ""
            rows.append([first, one.table, *(f"{count:,}" for count in counts), verdict])
    if report.targets:
        print_columns(COMPARED, rows, out=out)
    for target in report.targets:
        _show_keys(out, target)
        _show_keyless(out, report.stream, target)
        for name in target.uncaptured:
            out.print(f"{name} is not captured yet, and was not compared", style="yellow")
        out.print(_verdict(target), style="green" if target.equal else "red")
    for name, why in report.failures.items():
        out.print(f"{name} was not compared: {why}", style="red")


def _show_keys(out: Console, target: TargetVerdict) -> None:
    for one in target.tables:
        if one.keys:
            more = one.differences - len(one.keys)
            out.print(f"{target.target}, {one.table}, keys of rows that differ:")
            for key in one.keys:
                out.print(f"  {key}")
            if more > 0:
                out.print(f"  and {more:,} more")


def _show_keyless(out: Console, stream: str, target: TargetVerdict) -> None:
    """What there is to do about tables whose rows cannot be repaired one by one."""
    for one in target.tables:
        if not one.keyed and not one.equal:
            out.print(
                f"{target.target}, {one.table}: it has no key by which rows could be shown or repaired; "
                f"copy it anew: millstream reload {stream} --target {target.target} --table {shlex.quote(one.table)}"
            )


def _verdict(target: TargetVerdict) -> str:
    rate = target.rows / target.seconds if target.seconds else 0
    done = f"{counted(target.rows, 'row')} at {target.position}, {target.seconds:.1f} s, {rate:,.0f} rows/s"
    if not target.equal:
        return f"{target.target} is DIFFERENT from the source: {done}"
    repaired = sum(one.differences for one in target.tables)
    after = f" after a repair of {counted(repaired, 'row')}" if repaired else ""
    return f"{target.target} is equal to the source{after}: {done}"
