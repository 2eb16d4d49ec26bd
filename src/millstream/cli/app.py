"""The commands, and the one place where an error becomes what a user sees.

Nothing heavy is imported here: each command imports what it needs when it runs, so that
`millstream --help` answers at once.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from millstream.cli.bench import bench
from millstream.cli.check import check
from millstream.cli.ddl import ddl
from millstream.cli.demo import demo
from millstream.cli.dlq import dlq
from millstream.cli.doctor import doctor
from millstream.cli.examples import add_examples
from millstream.cli.journal import journal
from millstream.cli.output import report_error
from millstream.cli.reload import reload
from millstream.cli.replay import replay
from millstream.cli.run import run
from millstream.cli.schema import schema
from millstream.cli.snapshot import snapshot
from millstream.cli.status import status
from millstream.cli.streams import apply, delete, list_streams, pause, resume
from millstream.cli.verify import verify
from millstream.errors import ConfigError, MillstreamError


class _Commands(TyperGroup):
    """Every error Millstream raises on purpose ends here: a line, a hint, an exit code, no traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except MillstreamError as error:
            if ctx.params.get("debug"):
                raise
            report_error(error)
            raise typer.Exit(2 if isinstance(error, ConfigError) else 1) from None


app = typer.Typer(
    cls=_Commands,
    help="Replicate databases: every committed change, in order, nothing lost.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def version() -> None:
    """Print the version."""
    from millstream import __version__

    typer.echo(f"millstream {__version__}")


def _version(asked: bool) -> None:
    if asked:
        version()
        raise typer.Exit


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Replicate databases: every committed change, in order, nothing lost."""


app.command()(demo)
app.command()(run)
app.command()(check)
app.command()(apply)
app.command(name="list")(list_streams)
app.command()(status)
app.command()(pause)
app.command()(resume)
app.command()(replay)
app.command()(reload)
app.command()(delete)
app.add_typer(snapshot, name="snapshot")
app.add_typer(dlq, name="dlq")
app.add_typer(ddl, name="ddl")
app.command()(verify)
app.add_typer(journal, name="journal")
app.add_typer(schema, name="schema")
app.command()(doctor)
app.command()(bench)
app.command()(version)
add_examples(app)
