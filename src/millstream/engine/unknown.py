"""Streams, targets and tables that are named and not there: each is refused in the same words, and as UnknownName."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from millstream.engine.home import Home
from millstream.errors import UnknownName, UnknownStream
from millstream.model import StreamSpec
from millstream.names import instead
from millstream.sources.postgres.patterns import parse_patterns


def unknown_stream(name: str, known: Iterable[str], home: Home) -> UnknownStream:
    """The error for a stream that the home does not have, with the one that may have been meant."""
    there = instead(name, known, none="no stream has run there yet")
    return UnknownStream(f"the home {home.path} has no stream {name}: {there}", hint="check the name and --home")


def unknown_target(what: str, name: str, known: Iterable[str]) -> UnknownStream:
    """The same for a target; `what` does not have it."""
    return UnknownStream(f"{what} has no target {name}: {instead(name, known)}")


def refuse_unknown_tables(stream: StreamSpec, names: Sequence[str]) -> None:
    """Raise UnknownName for a table that no pattern of the stream means. What the source has is not asked."""
    patterns = stream.source.tables
    for name in names:
        if not is_for(patterns, name):
            hint = f"write schema.table; its tables are {', '.join(patterns)}"
            raise UnknownName(f"stream {stream.name} has no table {name}", hint=hint)


def is_for(patterns: Sequence[str], name: str) -> bool:
    """Whether one of the patterns means the table of this name."""
    schema, _, table = name.partition(".")
    return any(pattern.matches(schema, table) for pattern in parse_patterns(patterns))
