"""What can be said of filters and transforms once the tables are known: before a stream runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from millstream.changelog import exposed
from millstream.config.kinds import is_mirror, keeps_history
from millstream.errors import ConfigError, MillstreamError
from millstream.model import Relation, StreamSpec
from millstream.observe import counted
from millstream.secrets import resolve
from millstream.sources.base import Finding, Severity
from millstream.sources.patterns import matcher
from millstream.sources.postgres.inline import always_sent
from millstream.transforms.block import Block
from millstream.transforms.compiled import Compiled, compiled_by
from millstream.transforms.lacking import needed_anyway
from millstream.transforms.shape import Shaping
from millstream.transforms.sql import Analyst
from millstream.versions import ADDED


def shape_findings(stream: StreamSpec, relations: Sequence[Relation], analyst: Analyst) -> list[Finding]:
    """What is wrong, or may hurt, with a stream's filters and transforms on these tables.

    `analyst` is asked where something is in SQL or Python.
    """
    if not stream.shape:
        return []
    found = [*_unmeant(stream, relations), *_unsalted(stream)]
    shaping = Shaping(stream.name, stream.shape, any(map(is_mirror, stream.targets)))
    for relation in relations:
        try:
            bound = compiled_by(analyst, shaping, relation)
        except ConfigError as wrong:
            found.append(Finding("transforms", Severity.ERROR, wrong.message, wrong.hint, relation.table))
            continue
        if bound is not None:
            found += _unsent(stream, relation, bound)
        found += history_findings(stream, relation if bound is None else bound.relation)
    if not any(one.severity is Severity.ERROR for one in found):
        message = f"the filters and transforms of stream {stream.name} fit its {counted(len(relations), 'table')}"
        found.append(Finding("transforms", Severity.OK, message))
    return found


def history_findings(stream: StreamSpec, relation: Relation) -> list[Finding]:
    """Columns, as targets get them, that are called like those which a history has beside them."""
    targets = [target.name for target in stream.targets if keeps_history(target)]
    taken = [column.name for column in exposed(relation).columns if column.name.lower() in ADDED]
    if not (targets and taken):
        return []
    message = f"{relation.table} has a column {taken[0]}, which {', '.join(targets)} (write: scd2) has itself"
    fix = "rename it in the stream (transforms: rename), or write: changelog"
    return [Finding("scd2", Severity.ERROR, message, fix, relation.table)]


def _unmeant(stream: StreamSpec, relations: Sequence[Relation]) -> Iterator[Finding]:
    """Filters and transforms that no table gets: most likely their pattern is misspelt."""
    shape = stream.shape
    patterns = [one.tables for one in shape.filters] + [one.tables for one in shape.fields]
    for tables in (*patterns, *(one.tables for one in shape.transforms)):
        if not any(map(matcher(tables), relations)):
            message = f"stream {stream.name}: no table of it is meant by {', '.join(tables)}"
            yield Finding("transforms", Severity.ERROR, message, "correct the pattern in the stream file")


def _unsalted(stream: StreamSpec) -> Iterator[Finding]:
    """Salts that cannot be read here, where the stream is to run."""
    steps = [step for step in stream.shape.transforms if step.verb == "hash"]
    for reference in dict.fromkeys(str(reference) for step in steps for _, reference in step.arguments):
        try:
            resolve(reference)
        except MillstreamError as wrong:
            message = f"stream {stream.name}: the salt of a hash cannot be read: {wrong.message}"
            yield Finding("transforms", Severity.ERROR, message, wrong.hint)


def _unsent(stream: StreamSpec, relation: Relation, bound: Compiled) -> Iterator[Finding]:
    """Filters or transforms need values that an update does not send when they are large and did not change."""
    if relation.identity == "f" or relation.source_kind != "postgres":
        return
    large = [column.name for column in relation.columns if not always_sent(column) and column.name not in relation.key]
    again = "its row is read at the source again, or kept aside"
    found: dict[str, tuple[list[str], str]] = {}
    needed = [name for name in large if name in bound.rule.needs]
    if needed:
        found["filter"] = needed, f"which the filters of stream {stream.name} need: {again}"
    elif bound.rule.filters and large and any(map(is_mirror, stream.targets)):
        found["filter"] = large, f"and by it a row may enter the filters of stream {stream.name}: {again}"
    halfway = [name for name in large if needed_anyway(bound, Block(1, {}, {}, {name: np.ones(1, bool)})) is not None]
    if halfway:
        what = f"which the transforms of stream {stream.name} need together with others: {again}"
        found["transforms"] = halfway, what
    for part, (names, what) in found.items():
        yield Finding(
            part,
            Severity.WARNING,
            f"an update that leaves a value of more than 2 kB as it was does not send it ({', '.join(names)}), {what}",
            f'ALTER TABLE "{relation.schema}"."{relation.name}" REPLICA IDENTITY FULL, if there are such values',
            relation.table,
        )
