"""`millstream apply | list | pause | resume | delete`: the streams of a home, whether or not a process runs them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from millstream.cli.columns import Column, print_columns
from millstream.cli.homes import engine_of
from millstream.cli.output import Home, Json, console, print_json, report_warning

if TYPE_CHECKING:
    from millstream.engine.engine import Engine

Name = Annotated[str, typer.Argument(metavar="NAME", help="The stream.", show_default=False)]
Target = Annotated[str | None, typer.Option(metavar="TARGET", help="Only this target of the stream.")]


def apply(
    files: Annotated[list[Path], typer.Argument(metavar="FILE", help="Stream files.", show_default=False)],
    home: Home = None,
    json: Json = False,
) -> None:
    """Create or replace the streams of some files. A process that runs the home runs them at once."""
    from millstream.config import load_streams
    from millstream.config.definition import definition

    streams = load_streams(files, on_warning=report_warning)
    engine = engine_of(home)
    before = {stream.name: definition(stream) for stream in engine.list_streams()}
    engine.upsert_streams(streams)
    done = {}
    for stream in streams:
        same = before.get(stream.name) == definition(stream)
        done[stream.name] = "unchanged" if same else "replaced" if stream.name in before else "created"
    runner = engine.home.owner()
    if json:
        print_json({"streams": done, "run_by": runner.pid if runner else None})
        return
    for name, what in done.items():
        console().print(f"{name}: {what}")
    if runner is None:
        console().print("No process runs this home: start one with `millstream run`.")


_LISTED = (Column("name"), Column("state"), Column("source", spare=1), Column("tables", spare=2), Column("targets"))


def list_streams(home: Home = None, json: Json = False) -> None:
    """List the streams of a home."""
    from millstream.engine.home import Home as HomeDirectory
    from millstream.engine.status import home_status

    streams = home_status(HomeDirectory.locate(home)).streams
    if json:
        print_json(
            [
                {
                    "name": stream.name,
                    "state": stream.state.value,
                    "deleting": stream.deleting,
                    "source": stream.source.name,
                    "tables": list(stream.tables),
                    "targets": {target.name: target.kind for target in stream.targets},
                }
                for stream in streams
            ]
        )
        return
    if not streams:
        console().print("No stream is here.")
        return
    rows = []
    for stream in streams:
        state = "being deleted" if stream.deleting else stream.state.value
        targets = ", ".join(f"{target.name} ({target.kind})" for target in stream.targets)
        rows.append([stream.name, state, stream.source.name, ", ".join(stream.tables), targets])
    print_columns(_LISTED, rows)


def pause(name: Name, target: Target = None, home: Home = None, json: Json = False) -> None:
    """Deliver no more of a stream, or to one target, until `resume`. Nothing is lost."""
    engine = engine_of(home)
    engine.pause(name, target)
    _print_state(engine, name, target, json=json)


def resume(name: Name, target: Target = None, home: Home = None, json: Json = False) -> None:
    """Go on with what was paused, and try again what has failed."""
    engine = engine_of(home)
    engine.resume(name, target)
    _print_state(engine, name, target, json=json)


def delete(
    name: Name,
    keep_slot: Annotated[
        bool, typer.Option("--keep-slot", help="Leave what captures the source: slot, publications, journal.")
    ] = False,
    keep_target: Annotated[
        bool, typer.Option("--keep-target", help="Do not tell the targets: a stream of this name may go on there.")
    ] = False,
    home: Home = None,
    json: Json = False,
) -> None:
    """Remove a stream; what was delivered stays.

    With it go its checkpoints and state, and unless another stream of the home is on the same source, the slot, the
    publications and the journal.
    """
    done = engine_of(home).delete_stream(name, keep_slot=keep_slot, keep_target=keep_target)
    if json:
        print_json(done)
        return
    out = console()
    out.print(f"{name}: deleted; slot, publications and journal of its source: {done['source']}")
    for target, what in done["targets"].items():
        out.print(f"  target {target}: {what}")
    if done["source"] == "kept":
        out.print(
            "  The source keeps its log for the slot until a stream on it runs, or somebody drops it.", style="yellow"
        )


def _print_state(engine: Engine, name: str, target: str | None, *, json: bool) -> None:
    status = engine.get_status(name)
    states = {one.name: one.state.value for one in status.targets if target in (None, one.name)}
    if json:
        print_json({"name": name, "state": status.state.value, "targets": states})
        return
    for one, state in states.items():
        console().print(f"{name}/{one}: {state}")
