"""`millstream replay`: targets get once more what they have had."""

from __future__ import annotations

import json as jsonlib
from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer

from millstream.cli.homes import engine_of
from millstream.cli.output import Home, Json, console, print_json

if TYPE_CHECKING:
    from millstream.engine.replay import Place
    from millstream.engine.stream_status import TargetStatus
    from millstream.model import Checkpoint


def replay(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The stream.", show_default=False)],
    from_position: Annotated[
        str | None, typer.Option(metavar="POSITION", help="What was committed from this position of the source on.")
    ] = None,
    from_seq: Annotated[
        int | None, typer.Option(metavar="SEQ", help="The change with this seq, and all after it.")
    ] = None,
    from_time: Annotated[
        str | None, typer.Option(metavar="TIME", help="What was committed from this time on; without a zone, local.")
    ] = None,
    from_checkpoint: Annotated[
        str | None, typer.Option(metavar="JSON", help="What came after a `last_checkpoint` of `status --json`.")
    ] = None,
    target: Annotated[
        str | None, typer.Option(metavar="TARGET", help="Only this target of the stream.", show_default="all")
    ] = None,
    table: Annotated[
        list[str] | None,
        typer.Option(metavar="SCHEMA.TABLE", help="Only this table; may be repeated.", show_default="all"),
    ] = None,
    until: Annotated[
        str | None,
        typer.Option(metavar="PLACE", help="End with this seq, or before this position or time. Not at mirrors."),
    ] = None,
    home: Home = None,
    json: Json = False,
) -> None:
    """Deliver once more what targets have had, out of the journal. Returns when it is written down."""
    start = _start(from_position, from_seq, from_time, from_checkpoint)
    engine = engine_of(home)
    engine.replay(name, start, target, tables=table or (), until=None if until is None else _end(until))
    runs = engine.home.owner() is not None
    targets = [one for one in engine.get_status(name).targets if target in (None, one.name)]
    if json:
        print_json({"name": name, "running": runs, "targets": {one.name: one.replay for one in targets}})
        return
    for one in targets:
        console().print(f"{name}/{one.name}: {_said(one)}")
    if not runs:
        console().print("No process runs here: it is done when the stream runs (millstream run).")


def _start(position: str | None, seq: int | None, time: str | None, checkpoint: str | None) -> Place:
    given = [one for one in (position, seq, time, checkpoint) if one is not None]
    if len(given) != 1:
        raise typer.BadParameter("give one of --from-position, --from-seq, --from-time and --from-checkpoint")
    if checkpoint is not None:
        return _checkpoint(checkpoint)
    if time is not None:
        return _time(time)
    place = seq if seq is not None else position
    assert place is not None  # noqa: S101 - one of the four is
    return place


def _checkpoint(text: str) -> Checkpoint:
    from millstream.model import Checkpoint

    try:
        return Checkpoint.from_json(jsonlib.loads(text))
    except (ValueError, KeyError, TypeError):
        wanted = '{"seq": 12, "position": 23456, "wall": "2026-01-31T12:00:00+00:00"}'
        raise typer.BadParameter(f"a checkpoint looks like {wanted}; `millstream status --json` has them") from None


def _end(text: str) -> datetime | int | str:
    if text.isdigit():
        return int(text)
    return text if "/" in text else _time(text)


def _time(text: str) -> datetime:
    try:
        return datetime.fromisoformat(text).astimezone()
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no time; write 2026-01-31T12:00:00+00:00") from None


def _said(target: TargetStatus) -> str:
    record = target.replay
    if record is None:
        return "no replay"
    what = f"replay of seq {record['from_seq'] + 1} to {record['until_seq']}: {record['state']}"
    return f"{what}, {record['progress']:.0%}" if record["state"] == "running" else what
