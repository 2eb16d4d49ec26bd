"""Which kinds of sources and targets there are, and where their own options are declared.

Options are named as text and imported when a stream file uses them, so that reading a file needs
neither Spark nor the drivers of databases that are not in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from pydantic import BaseModel

from millstream.model import BatchLimits, TargetSpec

MAX_EVENTS = 500_000


@dataclass(frozen=True)
class SourceKind:
    """A kind of source that this version has."""

    options: str
    patterns: str
    """The function that reads table patterns; it raises ConfigError for what is none."""
    schemes: tuple[str, ...]


@dataclass(frozen=True)
class Choices:
    """Values of an option: those this version has, and those that are known and will come."""

    now: tuple[str, ...]
    later: tuple[str, ...]


@dataclass(frozen=True)
class TargetKind:
    """A kind of target that this version has, with the limits its batches have by default."""

    options: str
    limits: BatchLimits
    choices: Mapping[str, Choices]
    schemes: tuple[str, ...] = ()
    """Of its `uri`, where it has one."""


SOURCES = {
    "postgres": SourceKind(
        options="millstream.sources.postgres.options:PostgresOptions",
        patterns="millstream.sources.postgres.patterns:parse_patterns",
        schemes=("postgresql", "postgres"),
    ),
}
SOURCES_LATER = ("mysql", "mariadb", "sqlite", "kafka", "nats", "kinesis", "archive", "fanout", "base", "mongodb")

LAKE_LIMITS = BatchLimits(max_ms=10_000, max_bytes=64 << 20, max_events=MAX_EVENTS)
DATABASE_LIMITS = BatchLimits(max_ms=200, max_bytes=64 << 20, max_events=MAX_EVENTS)

TARGETS = {
    "files": TargetKind(
        "millstream.targets.files:FilesOptions",
        BatchLimits(max_ms=5_000, max_bytes=16 << 20, max_events=MAX_EVENTS),
        choices={"format": Choices(now=("parquet",), later=("json", "jsonl", "avro", "arrow", "protobuf"))},
    ),
    "delta": TargetKind("millstream.targets.delta:DeltaOptions", LAKE_LIMITS, choices={}),
    "duckdb": TargetKind("millstream.targets.duckdb:DuckdbOptions", DATABASE_LIMITS, choices={}),
    "postgres": TargetKind(
        "millstream.targets.postgres_options:PostgresTargetOptions",
        DATABASE_LIMITS,
        choices={},
        schemes=("postgresql", "postgres"),
    ),
    "sqlite": TargetKind("millstream.targets.sqlite:SqliteOptions", DATABASE_LIMITS, choices={}),
}
MIRRORS = ("delta", "duckdb", "postgres", "sqlite")
"""Kinds that keep tables equal to the source's, unless they are told `write: changelog`."""


KEPT = ("duckdb", "sqlite")
"""Kinds whose state can be kept in snapshots, and brought back."""


def is_mirror(target: TargetSpec) -> bool:
    """Whether a target finds rows by their keys: it keeps tables equal to the source's, now or at every moment."""
    return target.kind in MIRRORS and target.options.get("write", "mirror") != "changelog"


def keeps_history(target: TargetSpec) -> bool:
    """Whether a target keeps every version of each row beside the one of now."""
    return target.options.get("write") == "scd2"


TARGETS_LATER = (
    *("iceberg", "mysql", "mariadb", "clickhouse", "kafka", "nats", "redis"),
    *("http", "queue", "memory", "fanout", "turbopuffer", "grpc", "base"),
)


def options_model(place: str) -> type[BaseModel]:
    """The pydantic model at `module:Class`."""
    model: type[BaseModel] = _named(place)
    return model


def check_pattern(kind: SourceKind, pattern: str) -> None:
    """Raise ConfigError if `pattern` is no pattern of tables to this kind of source."""
    _named(kind.patterns)([pattern])


def _named(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)
