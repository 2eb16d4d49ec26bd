"""`millstream run`: run the streams of some files until told to stop."""

from __future__ import annotations

import sys
from contextlib import ExitStack
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
        err.print("hint: see `millstream status`; when the cause is gone, run it again")
    raise typer.Exit(code)


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
