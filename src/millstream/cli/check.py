"""`millstream check`: is a stream file right, and is its database fit for it?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from millstream.cli.output import Home, Json, console, print_json, report_warning

if TYPE_CHECKING:
    from millstream.config.problems import Problem
    from millstream.model import Relation, SourceSpec, StreamSpec
    from millstream.sources.base import Finding, Source


def check(
    files: Annotated[list[Path], typer.Argument(metavar="FILE", help="Stream files.", show_default=False)],
    connect: Annotated[
        bool, typer.Option("--connect", help="Look at source and targets too; changes nothing.")
    ] = False,
    home: Home = None,
    json: Json = False,
) -> None:
    """Check stream files: every problem at once, with its line. Exit 2 when there is one."""
    from millstream.config import StreamFileError, load_streams
    from millstream.sources.base import Severity

    warnings: list[Problem] = []
    try:
        streams = load_streams(files, on_warning=warnings.append)
    except StreamFileError as error:
        if json:
            print_json({"ok": False, "problems": [problem.to_json() for problem in error.problems]})
            raise typer.Exit(2) from None
        raise
    looked_at = _sources(streams, home) if connect else {}
    findings = {name: _preflight(source, streams) + _targets(name, streams) for name, source in looked_at.items()}
    ok = not any(one.severity is Severity.ERROR for found in findings.values() for one in found)
    if json:
        _print_json(streams, warnings, findings, ok)
    else:
        _print(streams, warnings, findings)
    raise typer.Exit(0 if ok else 1)


def _sources(streams: list[StreamSpec], home: str | None) -> dict[str, SourceSpec]:
    """By name each source with the tables of all streams on it: of these files, and of others in the home."""
    from dataclasses import replace

    from millstream.engine.engine import Engine
    from millstream.engine.home import Home as HomeDirectory

    names = {stream.name for stream in streams}
    others = [stream for stream in Engine(HomeDirectory.locate(home)).list_streams() if stream.name not in names]
    found: dict[str, SourceSpec] = {}
    for stream in streams:
        sharing = [one.source for one in (*streams, *others) if one.source.name == stream.source.name]
        tables = dict.fromkeys(table for source in sharing for table in source.tables)
        found[stream.source.name] = replace(stream.source, tables=tuple(tables))
    return found


def _preflight(source: SourceSpec, streams: list[StreamSpec]) -> list[Finding]:
    """`source` has the tables of all streams on it, the given ones and others."""
    from millstream.config.kinds import is_mirror, keeps_history
    from millstream.model import Mode
    from millstream.sources import open_source, preflight_copy
    from millstream.sources.base import Severity

    mine = [stream for stream in streams if stream.source.name == source.name]
    copied = all(stream.mode is Mode.SNAPSHOT for stream in mine)
    opened = open_source(source)
    try:
        found = preflight_copy(source) if copied else opened.preflight()
        if any(one.severity is Severity.ERROR for one in found):
            return found
        if not copied:
            found += _shadowed(source, mine)
        for stream in mine:
            mirrors = [target.name for target in stream.targets if is_mirror(target)]
            if mirrors and not copied:
                found += _without_key(opened.relations(stream.source.tables), mirrors)
            if not stream.shape and any(map(keeps_history, stream.targets)):
                tables = opened.relations(stream.source.tables)
                found += [one for relation in tables for one in _names(stream, relation)]
        return found + _shapes(opened, [stream for stream in mine if stream.shape])
    finally:
        opened.close()


def _targets(source: str, streams: list[StreamSpec]) -> list[Finding]:
    """What keeps the targets of a source's streams from being written to."""
    from millstream.targets.preflight import target_findings

    mine = [(stream.name, target) for stream in streams if stream.source.name == source for target in stream.targets]
    return [finding for name, target in mine for finding in target_findings(name, target)]


def _names(stream: StreamSpec, relation: Relation) -> list[Finding]:
    from millstream.transforms.check import history_findings

    return history_findings(stream, relation)


def _shapes(source: Source, streams: list[StreamSpec]) -> list[Finding]:
    """What filters and transforms do not find in the tables. Spark is started only if something is in SQL or Python."""
    if not streams:
        return []
    from millstream.spark.analysis import analyst
    from millstream.transforms.check import shape_findings

    with analyst() as spark:
        found = [shape_findings(stream, source.relations(stream.source.tables), spark) for stream in streams]
    return [finding for some in found for finding in some]


def _shadowed(source: SourceSpec, streams: list[StreamSpec]) -> list[Finding]:
    """Partitions of which a stream would get nothing, since another one names the table above them."""
    from millstream.sources import shadowed_tables
    from millstream.sources.base import Finding, Severity

    found = shadowed_tables(source, {stream.name: stream.source.tables for stream in streams})
    return [Finding("partitions", Severity.ERROR, one.message, one.fix, one.table) for one in found]


def _without_key(relations: list[Relation], mirrors: list[str]) -> list[Finding]:
    """What mirrors cannot take of tables whose rows only the whole of them tells apart."""
    from millstream.sources.base import Finding, Severity

    return [
        Finding(
            "key",
            Severity.WARNING,
            f"it has no primary key: an update or delete of it stops {', '.join(mirrors)}",
            f'ALTER TABLE "{relation.schema}"."{relation.name}" ADD PRIMARY KEY (...), or `write: changelog`',
            relation.table,
        )
        for relation in relations
        if relation.identity == "f" and not relation.primary_key
    ]


def _print_json(
    streams: list[StreamSpec], warnings: list[Problem], findings: dict[str, list[Finding]], ok: bool
) -> None:
    from millstream.config.definition import definition

    print_json(
        {
            "ok": ok,
            "streams": [definition(stream) for stream in streams],
            "warnings": [warning.to_json() for warning in warnings],
            "findings": {name: [one.to_json() for one in found] for name, found in findings.items()},
        }
    )


def _print(streams: list[StreamSpec], warnings: list[Problem], findings: dict[str, list[Finding]]) -> None:
    out = console()
    for warning in warnings:
        report_warning(warning)
    for stream in streams:
        targets = ", ".join(f"{target.name} ({target.kind})" for target in stream.targets)
        tables = ", ".join(stream.source.tables)
        out.print(f"{stream.name}: {stream.source.kind} {tables} -> {targets}: the file is right")
    for name, found in findings.items():
        _print_findings(name, found)


def _print_findings(source: str, found: list[Finding]) -> None:
    from rich.table import Table
    from rich.text import Text

    from millstream.sources.base import Severity

    styles = {Severity.OK: "green", Severity.WARNING: "yellow", Severity.ERROR: "red"}
    order = list(styles)
    table = Table(title=f"Source {source}", title_justify="left")
    for name in ("", "check", "finding"):
        table.add_column(name)
    for one in sorted(found, key=lambda one: -order.index(one.severity)):
        where = f"{one.check}\n{one.table}" if one.table else one.check
        table.add_row(Text(one.severity.value, styles[one.severity]), Text(where), Text(one.message))
    out = console()
    out.print(table)
    for one in found:
        if one.fix and one.severity is not Severity.OK:
            # Outside the table, so that it can be copied as it is.
            # Of several targets the message says which one it is of.
            whose = one.table or (one.message.partition(":")[0] if one.check == "target" else None)
            out.print(f"{one.check}{f' ({whose})' if whose else ''}: {one.fix}")
