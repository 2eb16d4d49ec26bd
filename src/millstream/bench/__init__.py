"""Measurements that check what they measure: each compares its result with another way of doing the same.

A result is an object: `name`, `value` in `unit`, `baseline` and its `baseline_value`, `ratio` (above 1: ours is
better), `must` and whether it was `reached`, `rows`, `equal` (whether the content was right, each time), `runs`
with the raw times, and what else the bench has to say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from millstream.bench.frame import Settings
from millstream.errors import DependencyError
from millstream.model import Json

DECODE_MUST = 8.0


@dataclass(frozen=True)
class Bench:
    """One measurement. `options` are those of `Settings` that mean something to it, `targets` the kinds it knows."""

    run: Callable[[Settings], Json]
    what: str
    options: frozenset[str] = frozenset()
    targets: tuple[str, ...] = ()


def _decode(settings: Settings) -> Json:
    from millstream.bench import decode, decode_types

    found = decode.run(rows=settings.rows or decode.ROWS)
    types = decode_types.run()
    return {
        "must": DECODE_MUST,
        "reached": found["ratio"] >= DECODE_MUST,
        **found,
        "equal": found["equal"] and types["equal"],
        "types": types,
        "notes": decode_types.notes(types),
    }


def _of(module: str, function: str = "run") -> Callable[[Settings], Json]:
    """The bench of a module, imported when it runs: it brings a driver, and perhaps Spark."""

    def run(settings: Settings) -> Json:
        try:
            found: Json = getattr(import_module(f"millstream.bench.{module}"), function)(settings)
        except ImportError as missing:
            if missing.name is None or not missing.name.startswith("psycopg"):
                raise
            hint = "pip install 'millstream[postgres,embedded]'"
            raise DependencyError("the bench needs psycopg, which is not installed", hint=hint) from missing
        return found

    return run


BENCHES: Mapping[str, Bench] = {
    "decode": Bench(_decode, "row messages to typed columns, on one core", frozenset({"rows"})),
    "capture": Bench(_of("capture"), "slot to journal", frozenset({"rows", "repeat", "bulk", "open_transaction"})),
    "lookup": Bench(_of("lookup"), "places in the index of a journal of 100 GB, cold and warm"),
    "drain": Bench(
        _of("drain"),
        "slot to Parquet, or into mirrors, through Spark",
        frozenset({"rows", "repeat", "debezium", "target", "keys"}),
        ("files", "delta", "postgres"),
    ),
    "fanout": Bench(_of("drain", "run_fanout"), "the same to three targets", frozenset({"rows", "repeat"})),
    "latency": Bench(
        _of("latency"),
        "commit to where it can be read",
        frozenset({"seconds", "repeat", "target"}),
        ("files", "postgres"),
    ),
    "snapshot": Bench(
        _of("snapshot"),
        "all rows of a table, to Parquet or to another Postgres",
        frozenset({"rows", "repeat", "target"}),
        ("files", "postgres"),
    ),
    "tables": Bench(
        _of("tables"),
        "a hundred tables, ten changes a second each",
        frozenset({"seconds", "target"}),
        ("delta", "postgres"),
    ),
    "isolation": Bench(_of("isolation"), "beside a target that hangs, and a slow one", frozenset({"seconds"})),
    "quiet": Bench(_of("quiet"), "a stream to which nothing happens", frozenset({"seconds"})),
}

ALL: tuple[tuple[str, Mapping[str, Any]], ...] = (
    ("decode", {}),
    ("lookup", {}),
    ("capture", {}),
    ("capture", {"bulk": True}),
    ("capture", {"bulk": True, "open_transaction": True}),
    ("drain", {}),
    ("fanout", {}),
    ("latency", {}),
    ("drain", {"target": "delta"}),
    ("drain", {"target": "postgres"}),
    ("drain", {"target": "postgres", "keys": 1_000_000}),
    ("latency", {"target": "postgres"}),
    ("snapshot", {}),
    ("snapshot", {"target": "postgres"}),
    ("tables", {"target": "delta"}),
    ("tables", {"target": "postgres"}),
    ("isolation", {}),
    ("quiet", {}),
)
"""What `millstream bench` runs, in this order, each with options of its own."""
