"""The sources: databases whose log is captured.

`open_source` is the only way in for the engine. A source's module is imported when it is asked
for, so that its driver need not be installed for the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from millstream.errors import ConfigError, DependencyError, SourceHalted

if TYPE_CHECKING:
    import pyarrow as pa

    from millstream.keyrange import KeyRange
    from millstream.model import Relation, SourceSpec
    from millstream.observe import Event
    from millstream.sources.base import Chunk, CopyLimits, Finding, KeyRows, Snapshot, SnapshotPlan, Source, Wanted
    from millstream.sources.postgres.shadowed import Shadowed

KINDS = ("postgres", "scripted")
"""Every kind of source there is."""


def open_source(spec: SourceSpec, work: Path | None = None, tell: Callable[[Event], None] | None = None) -> Source:
    """The source that a stream file describes. Connects to nothing yet.

    `work` is a directory for its temporary files, which nobody else uses. `tell` hears what a person
    should know while the source is prepared (what it waits for, for instance), and may raise to give up.

    Raises ConfigError for an unknown kind or wrong options, DependencyError when its driver is missing.
    """
    _check_kind(spec)
    if spec.kind == "scripted":
        from millstream.sources.scripted.source import ScriptedSource

        return ScriptedSource(spec)
    try:
        from millstream.sources.postgres.source import PostgresSource
    except ImportError as missing:
        raise _without_driver(missing) from missing
    return PostgresSource(spec, work, tell)


def take_snapshot(
    spec: SourceSpec, on_wait: Callable[[str], None], *, captured: bool = True, wanted: Wanted | None = None
) -> Snapshot:
    """A snapshot of the source's tables, ready to be read. It makes nothing on the source that outlives it.

    `captured`: changes will follow, so that the source must be captured already, for the same tables. `wanted`: only
    for these of its tables. `on_wait` hears what is waited for, and may raise to give up. Raises as `open_source`
    does, and SourceError.
    """
    _check_kind(spec)
    if spec.kind == "scripted":
        raise _nothing_to_copy()
    try:
        from millstream.sources.postgres.snapshot import HeldSnapshot
    except ImportError as missing:
        raise _without_driver(missing) from missing
    return HeldSnapshot(spec, on_wait, captured=captured, wanted=wanted)


def preflight_copy(spec: SourceSpec) -> list[Finding]:
    """Is the source fit for a snapshot that no changes follow? Changes nothing. Raises as `open_source` does."""
    _check_kind(spec)
    if spec.kind == "scripted":
        raise _nothing_to_copy()
    try:
        from millstream.sources.postgres.options import PostgresOptions
        from millstream.sources.postgres.preflight import preflight
    except ImportError as missing:
        raise _without_driver(missing) from missing
    return preflight(spec, PostgresOptions.of(spec), captured=False)


def can_copy(spec: SourceSpec) -> None:
    """Raise ConfigError for a source that has no tables which a snapshot could take."""
    if spec.kind == "scripted":
        raise _nothing_to_copy()


def key_range(spec: SourceSpec, table: str, where: str) -> KeyRange:
    """What a condition on a table's key means, as the source itself understands it.

    Raises ConfigError for what cannot be answered alike at source and target, as `open_source` does, and SourceError.
    """
    can_copy(spec)
    try:
        from millstream.sources.postgres import within
    except ImportError as missing:
        raise _without_driver(missing) from missing
    return within.key_range(spec, table, where)


def copy_limits(spec: SourceSpec) -> CopyLimits:
    """What copies of its tables may take of a source. Raises as `open_source` does."""
    from millstream.sources.base import CopyLimits

    _check_kind(spec)
    if spec.kind == "scripted":
        return CopyLimits()
    try:
        from millstream.sources.postgres.options import PostgresOptions
    except ImportError as missing:
        raise _without_driver(missing) from missing
    options = PostgresOptions.of(spec)
    return CopyLimits(options.max_connections, options.max_rate, options.snapshot_at_once)


def table_bytes(spec: SourceSpec) -> int:
    """About how large the source's tables are together. Raises as `open_source` does, and SourceError."""
    _check_kind(spec)
    if spec.kind == "scripted":
        return 0
    try:
        from millstream.sources.postgres import chunks
    except ImportError as missing:
        raise _without_driver(missing) from missing
    return chunks.table_bytes(spec)


def captured_tables(spec: SourceSpec) -> list[str]:
    """The tables (`schema.table`) that a source's patterns name now. Raises as `open_source` does, and SourceError."""
    can_copy(spec)
    try:
        from millstream.sources.postgres import chunks
    except ImportError as missing:
        raise _without_driver(missing) from missing
    return chunks.table_names(spec)


def read_chunk(spec: SourceSpec, plan: SnapshotPlan, chunk: Chunk) -> Iterator[pa.LargeBinaryArray]:
    """The rows of a chunk, for the decoder of its relation. Runs on executors, without Spark."""
    _check_kind(spec)
    try:
        from millstream.sources.postgres import chunks
    except ImportError as missing:
        raise _without_driver(missing) from missing
    return chunks.read_chunk(spec, plan, chunk)


def read_keys(
    spec: SourceSpec, relation: Relation, names: Sequence[str], keys: Sequence[Sequence[str]], txids: Sequence[int]
) -> KeyRows:
    """The rows with these keys as they are now, for the relation's decoder: at a moment when all these transactions,
    which are in the source's log, are seen by others. Raises as `read_chunk`, and SourceError."""
    _check_kind(spec)
    if spec.kind == "scripted":
        raise SourceHalted("a scripted source has no tables to read")
    try:
        from millstream.sources.postgres import keys as single
    except ImportError as missing:
        raise _without_driver(missing) from missing
    return single.read_keys(spec, relation, names, keys, txids)


def shadowed_tables(spec: SourceSpec, streams: Mapping[str, Sequence[str]]) -> list[Shadowed]:
    """Tables whose changes come under another name, so that a stream which names them gets none of them.

    `streams` are those that share the source, with their patterns. Raises as `open_source` does, and SourceError.
    """
    _check_kind(spec)
    if spec.kind == "scripted" or len(streams) < 2:
        return []
    try:
        from millstream.sources.postgres.shadowed import shadowed
    except ImportError as missing:
        raise _without_driver(missing) from missing
    return shadowed(spec, streams)


def remove_source(spec: SourceSpec) -> None:
    """Drop what capture has made on the source. Its journal then has no future: only for one that is given up.

    Raises as `open_source` does, and SourceError when the source does not let go.
    """
    _check_kind(spec)
    if spec.kind == "scripted":
        from millstream.sources.scripted.source import remove as remove_slot

        remove_slot(spec)
        return
    try:
        from millstream.sources.postgres.removal import remove
    except ImportError as missing:
        raise _without_driver(missing) from missing
    remove(spec)


def _check_kind(spec: SourceSpec) -> None:
    if spec.kind not in KINDS:
        raise ConfigError(f"source {spec.name}: unknown kind {spec.kind!r}", hint=f"one of: {', '.join(KINDS)}")


def _nothing_to_copy() -> ConfigError:
    return ConfigError("a scripted source has no tables to copy", hint="give the stream mode: cdc")


def _without_driver(missing: ImportError) -> Exception:
    """What to say of an import that failed; the failure itself if it was not for a driver."""
    if missing.name is None or not missing.name.startswith("psycopg"):
        return missing
    return DependencyError(
        "a Postgres source needs psycopg, which is not installed", hint="pip install 'millstream[postgres]'"
    )
