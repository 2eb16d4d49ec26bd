"""The sources: databases whose log is captured.

`open_source` is the only way in for the engine. A source's module is imported when it is asked
for, so that its driver need not be installed for the others.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from millstream.errors import ConfigError, DependencyError

if TYPE_CHECKING:
    from millstream.model import SourceSpec
    from millstream.observe import Event
    from millstream.sources.base import Source

KINDS = ("postgres",)
"""Every kind of source there is."""


def open_source(spec: SourceSpec, work: Path | None = None, tell: Callable[[Event], None] | None = None) -> Source:
    """The source that a stream file describes. Connects to nothing yet.

    `work` is a directory for its temporary files, which nobody else uses. `tell` hears what a person
    should know while the source is prepared (what it waits for, for instance), and may raise to give up.

    Raises ConfigError for an unknown kind or wrong options, DependencyError when its driver is missing.
    """
    if spec.kind not in KINDS:
        raise ConfigError(f"source {spec.name}: unknown kind {spec.kind!r}", hint=f"one of: {', '.join(KINDS)}")
    try:
        from millstream.sources.postgres.source import PostgresSource
    except ImportError as missing:
        if missing.name is None or not missing.name.startswith("psycopg"):
            raise
        raise DependencyError(
            "a Postgres source needs psycopg, which is not installed", hint="pip install 'millstream[postgres]'"
        ) from missing
    return PostgresSource(spec, work, tell)
