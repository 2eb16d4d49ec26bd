"""`millstream run`: run the streams of some files until told to stop."""

from __future__ import annotations

import sys
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from millstream.cli.output import Home, console, report_warning

if TYPE_CHECKING:
    from millstream.engine.home import Home as HomeDirectory
    from millstream.observe import Observers


def run(
    files: Annotated[
        list[Path] | None,
        typer.Argument(metavar="FILE", help="Stream files. None: all streams of the home.", show_default=False),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Deliver what is committed now, then exit.")] = False,
    home: Home = None,
    master: Annotated[
        str | None, typer.Option(metavar="MASTER", help="Spark master. Default: local, by the number of cores.")
    ] = None,
    conf: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="A setting of Spark's; may be repeated.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Say only what is wrong.")] = False,
    json_logs: Annotated[bool, typer.Option("--json-logs", help="Log one JSON object a line.")] = False,
) -> None:
    """Run streams until SIGTERM or Ctrl-C.

    The batch at hand is finished and saved then, and the exit code is 0.

    Without a file, all streams of the home; other commands may add more at any time.
    """
    from millstream.config import load_streams
    from millstream.engine.home import Home as HomeDirectory

    # Before Spark is imported: a wrong file is told at once.
    streams = load_streams(files or [], on_warning=report_warning)
    from millstream.engine import runner
    from millstream.spark.session import user_settings

    settings = user_settings(conf or [])
    directory = HomeDirectory.locate(home)
    if not streams:
        _refuse_nothing(directory)
    with ExitStack() as stack:
        observers = _observers(stack, directory, quiet=quiet, json_logs=json_logs)
        code = runner.run(streams, home=directory, once=once, master=master, observers=observers, conf=settings)
    if code and not json_logs:
        err = console(stderr=True)
        err.print("error: it ends because a stream has failed", style="red")
        held = _held_changes(directory, once=once)
        for line in held:
            err.print(line)
        err.print(f"hint: {_AFTER_DECISION if held else _AFTER_FAILURE}")
    raise typer.Exit(code)


_AFTER_FAILURE = "see `millstream status`; when the cause is gone, run it again"
_AFTER_DECISION = "approve what may be delivered, and run it again; everything before it is delivered"


def _held_changes(home: HomeDirectory, *, once: bool) -> list[str]:
    """The schema changes at which streams of the home ended, and what lets them pass. `once`: nobody has waited."""
    from millstream.engine.engine import Engine
    from millstream.engine.status import home_status
    from millstream.errors import MillstreamError
    from millstream.registry.kinds import Policy

    engine, found = Engine(home), []
    for stream in home_status(home).streams:
        with suppress(MillstreamError):
            for one in engine.ddl_events(stream.name):
                what = "; ".join(change.in_words() for change in one.version.changes)
                if one.state == "rejected" or (one.state == "pending" and (once or one.policy is Policy.HALT)):
                    waits = "waits for approval" if one.policy is Policy.GATE else "is not to be applied"
                    said = "was rejected" if one.state == "rejected" else waits
                    decide = f"`millstream ddl approve {stream.name} {one.id}`"
                    found.append(f"{stream.name}: {one.version.table} ({what}) {said}: {decide}")
    return found


def _refuse_nothing(home: HomeDirectory) -> None:
    from millstream.engine.status import home_status
    from millstream.errors import ConfigError

    if not home_status(home).streams:
        raise ConfigError(
            f"no stream file is named, and the home {home.path} has no streams",
            hint="name one (millstream run FILE), or put a stream there first: millstream apply FILE",
        )


def _observers(stack: ExitStack, home: HomeDirectory, *, quiet: bool, json_logs: bool) -> Observers:
    """The log, and beside it a live display on a terminal or a summary line elsewhere."""
    from millstream.cli.log import JsonLog, Log
    from millstream.cli.progress import LiveDisplay, Progress, Summary
    from millstream.observe import Level, Observers

    level = Level.WARNING if quiet else Level.INFO
    if json_logs:
        return Observers([JsonLog(sys.stderr, level)])
    if quiet:
        return Observers([Log(sys.stderr, level)])
    progress = Progress(home)
    if sys.stderr.isatty():
        display = stack.enter_context(LiveDisplay(progress))
        return Observers([progress, Log(display, level)])
    log = Log(sys.stderr, level)
    stack.enter_context(Summary(progress, log))
    return Observers([progress, log])
