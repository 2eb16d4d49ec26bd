"""`millstream status`: how the streams of a home are, whether or not a process runs them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from millstream.cli.columns import Column, print_columns
from millstream.cli.output import Home, Json, console, how_far, print_json, seconds, size
from millstream.observe import counted

if TYPE_CHECKING:
    from rich.text import Text

    from millstream.engine.stream_status import HomeStatus, StreamStatus, TargetStatus

SHOWN_TABLES = 20
"""At most so many tables of a stream are listed."""

_STYLES = {
    "running": "green",
    "complete": "green",
    "catching_up": "cyan",
    "failed": "red",
    "needs_reload": "red",
    "halted": "red",
    "gated": "yellow",
    "stopped": "yellow",
    "paused": "yellow",
}


def status(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Only this stream.", show_default=False)] = None,
    home: Home = None,
    json: Json = False,
) -> None:
    """Show how far each target is, and what is wrong."""
    from millstream.engine.home import Home as HomeDirectory
    from millstream.engine.status import home_status

    found = home_status(HomeDirectory.locate(home), name)
    if json:
        print_json(found.to_json())
        return
    _print(found)


def _print(found: HomeStatus) -> None:
    out = console()
    out.print(f"{found.home}: {f'run by {found.owner}' if found.owner else 'no process runs here'}")
    if not found.streams:
        out.print("No stream is here.")
    for stream in found.streams:
        _print_stream(stream)


def _print_stream(stream: StreamStatus) -> None:
    from rich.text import Text

    out, source = console(), stream.source
    out.print()
    out.print(Text.assemble(stream.name, "  ", (stream.state.value, _STYLES.get(stream.state.value, ""))))
    if stream.deleting:
        out.print(f"  its deletion was interrupted; go on with: millstream delete {stream.name}", style="red")
    if stream.silent:
        out.print(f"  nothing was heard of it since {stream.reported_at:%Y-%m-%d %H:%M:%S} UTC", style="red")
    if stream.mode == "snapshot":
        out.print(f"  source {source.name} ({source.kind}): only copied, nothing of it is captured")
    else:
        _print_source(stream)
    print_columns(_TARGETS, [_target_row(target) for target in stream.targets], indent=2)
    _print_tables(stream)
    _print_beginnings(stream)
    _print_replays(stream)
    _print_reloads(stream)
    _print_comparisons(stream)
    _print_troubles(stream)


_TARGETS = (
    Column("target"),
    Column("state"),
    Column("seq", right=True),
    Column("position", spare=1),
    Column("behind", right=True),
    Column("oldest", right=True),
    Column("events", right=True),
    Column("epoch", right=True, spare=2),
)


def _target_row(target: TargetStatus) -> list[str | Text]:
    from rich.text import Text

    return [
        f"{target.name} ({target.kind})",
        Text(target.state.value, _STYLES.get(target.state.value, "")),
        _number(target.seq),
        target.position or "-",
        _number(target.lag_events),
        seconds(target.lag_seconds),
        _number(target.events_replicated),
        _number(target.epoch),
    ]


_TABLES = (
    Column("table (all targets)"),
    Column("seq", right=True),
    Column("position", spare=1),
    Column("behind", right=True),
    Column("bytes behind", right=True, spare=2),
    Column("oldest", right=True),
    Column("events", right=True),
    Column("bytes", right=True, spare=3),
)


def _print_tables(stream: StreamStatus) -> None:
    """Each table at the target that is furthest behind with it; those with the most to come first."""
    tables = sorted(stream.tables_replicated, key=lambda one: (-(one.lag_events or 0), one.name))
    if not tables:
        return
    rows = [
        [
            one.name,
            _number(one.seq),
            one.position or "-",
            _number(one.lag_events),
            size(one.lag_bytes),
            seconds(one.lag_seconds),
            _number(one.events_replicated),
            size(one.bytes_replicated),
        ]
        for one in tables[:SHOWN_TABLES]
    ]
    print_columns(_TABLES, rows, indent=2)
    if len(tables) > SHOWN_TABLES:
        console().print(f"  and {counted(len(tables) - SHOWN_TABLES, 'table')} more; --json has all of them, by target")


def _print_source(stream: StreamStatus) -> None:
    out, source = console(), stream.source
    end = f"seq {source.end_seq:,} at {source.end_position}" if source.end_seq is not None else "empty"
    if source.oldest_commit_at is not None:
        end += f", {size(source.journal_bytes)} since {source.oldest_commit_at:%Y-%m-%d %H:%M:%S} UTC"
    out.print(
        f"  source {source.name} ({source.kind}): capture {source.state}"
        f"{f', pid {source.pid}' if source.pid else ''}; journal {end}; "
        f"retained on the source {size(source.retained_bytes)}"
    )
    if source.mode is not None:
        out.print(f"  reading the log: {source.mode}, {size(source.behind_bytes)} behind")
    if source.bulk_refused:
        out.print(f"  source {source.name}: not read in bulk: {source.bulk_refused}", style="yellow")


def _print_beginnings(stream: StreamStatus) -> None:
    """How deliveries began, and what is kept of their targets."""
    for target in stream.targets:
        if target.startup is not None:
            begun = f"began {_time(target.startup['at'])}: {target.startup['path']}: {target.startup['reason']}"
            console().print(f"  target {target.name}: {begun}")
        restore, last = target.restore, target.snapshot
        if restore is not None and restore["state"] == "failed":
            text = f"not restored from snapshot {restore['id']}: {restore['error']}"
            console().print(f"  target {target.name}: {text}", style="red")
        elif restore is not None and restore["state"] == "waiting":
            console().print(f"  target {target.name}: to be restored from snapshot {restore['id']}")
        if last is not None and last["error"]:
            console().print(f"  target {target.name}: no snapshot was taken: {last['error']}", style="yellow")
        elif last is not None:
            console().print(f"  target {target.name}: snapshot {last['id']} at seq {last['seq']:,}")


def _print_replays(stream: StreamStatus) -> None:
    """What is delivered once more, and what became of that last."""
    for target in stream.targets:
        record = target.replay
        if record is None:
            continue
        what = f"  target {target.name}: replay of seq {record['from_seq'] + 1:,} to {record['until_seq']:,}"
        if record["state"] == "failed":
            console().print(f"{what} ended: {record['error']}", style="red")
        elif record["state"] == "done":
            console().print(f"{what}: done")
        else:
            console().print(f"{what}: {record['state']}, {record['progress']:.0%}")


def _print_reloads(stream: StreamStatus) -> None:
    """Which tables are copied anew, and what became of the last ones."""
    for target in stream.targets:
        if target.baseline is not None and target.baseline.get("tables") is None:
            rows = f"about {counted(target.baseline['rows'], 'row')}"
            console().print(f"  target {target.name}: first rows: {how_far(target.baseline)}, {rows}")
        if target.reload is None:
            continue
        if not target.reload["tables"]:
            console().print(f"  target {target.name}: reload: {target.reload['state']}")
        for name, one in target.reload["tables"].items():
            part = f" where {one['where']}" if "where" in one else ""
            kind = "first rows" if target.reload.get("baseline") else "reload"
            what = escape(f"  target {target.name}: {kind} of {name}{part}: {one['state']}")
            if one["state"] == "failed":
                console().print(f"{what}: {one['error']}", style="red")
            elif one["state"] == "running":
                console().print(f"{what}, {how_far(one)}, {counted(one['rows'], 'row')}")
            else:
                console().print(f"{what}, {counted(one['rows'], 'row')}" if one["state"] == "done" else what)


def _print_comparisons(stream: StreamStatus) -> None:
    """What is being compared with the source, and what came of it last."""
    for target in stream.targets:
        if target.verifying:
            console().print(f"  target {target.name} is compared with the source: {target.verifying}")
        last = target.verified
        if last is None:
            continue
        at = _time(last["compared_at"])
        if last["equal"] is None:
            console().print(f"  target {target.name}: not compared at {at}: {last['error']}", style="yellow")
        elif last["equal"]:
            only = f" (only {', '.join(last['only'])})" if last.get("only") else ""
            console().print(f"  target {target.name}{only}: equal to the source at {at}, {last['position']}")
        else:
            text = f"differs from the source since {at}; see it with: millstream verify {stream.name}"
            console().print(f"  target {target.name}: {text}", style="red")


def _print_troubles(stream: StreamStatus) -> None:
    """What went wrong, and what to do about it."""
    out, source = console(), stream.source
    if stream.errors_last_hour:
        errors = counted(stream.errors_last_hour, "error")
        out.print(f"  {errors} in the last hour; the last: {stream.last_error}", style="yellow")
    for target in stream.targets:
        if target.retrying:
            out.print(f"  target {target.name}: trying again: {target.retrying}", style="yellow")
        if target.dead_letters:
            what = f"{counted(target.dead_letters, 'change')} could not be taken: millstream dlq list {stream.name}"
            out.print(f"  target {target.name}: {what}", style="yellow")
    failures = [(f"source {source.name}", source.error, source.hint)]
    failures += [(f"target {target.name}", target.error, target.hint) for target in stream.targets]
    for who, error, hint in failures:
        if error:
            out.print(f"  {who}: {error}", style="red")
            if hint:
                out.print(f"  hint: {hint}")


def _time(iso: str) -> str:
    """Of the text of a time in UTC: 2026-01-31 12:00:00 UTC."""
    return f"{iso[:19].replace('T', ' ')} UTC"


def _number(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"
