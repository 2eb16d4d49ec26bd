"""The targets there are, by kind."""

from __future__ import annotations

from millstream.errors import ConfigError, DependencyError
from millstream.model import TargetSpec
from millstream.targets.base import Target


def open_target(spec: TargetSpec) -> Target:
    """The target that a stream file describes. Raises ConfigError; connects to nothing yet."""
    if spec.kind == "files":
        from millstream.targets.files import FilesOptions, FilesTarget

        return FilesTarget(FilesOptions.model_validate(dict(spec.options)))
    if spec.kind == "delta":
        from millstream.targets.delta import DeltaOptions, DeltaTarget

        return DeltaTarget(DeltaOptions.model_validate(dict(spec.options)))
    if spec.kind == "duckdb":
        from millstream.targets.duckdb import DuckdbOptions, DuckdbTarget

        return DuckdbTarget(DuckdbOptions.model_validate(dict(spec.options)))
    if spec.kind == "postgres":
        try:
            from millstream.targets.postgres import PostgresTarget
        except ImportError as missing:
            if missing.name is None or not missing.name.startswith("psycopg"):
                raise
            raise DependencyError(
                "the target postgres needs psycopg, which is not installed", hint="pip install 'millstream[postgres]'"
            ) from None
        from millstream.targets.postgres_options import PostgresTargetOptions

        return PostgresTarget(PostgresTargetOptions.model_validate(dict(spec.options)))
    if spec.kind == "sqlite":
        from millstream.targets.sqlite import SqliteOptions, SqliteTarget

        return SqliteTarget(SqliteOptions.model_validate(dict(spec.options)))
    raise ConfigError(f"target {spec.name}: there is no target of kind {spec.kind}")
