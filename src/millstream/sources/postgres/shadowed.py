"""Partitions that a stream names while another stream of the source names the table above them.

The log carries changes of a partition under the name of the topmost table that is published. So the stream that
names the partition alone would get none of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from millstream.model import SourceSpec
from millstream.sources.postgres.catalog import select
from millstream.sources.postgres.connection import connect
from millstream.sources.postgres.options import PostgresOptions


@dataclass(frozen=True)
class Shadowed:
    """A table that a stream names in vain, and the one under whose name its changes come."""

    stream: str
    table: str
    root: str

    @property
    def message(self) -> str:
        return (
            f"stream {self.stream}: {self.table} is a partition of {self.root}, which another stream of this source "
            f"names: its changes come as those of {self.root}"
        )

    @property
    def fix(self) -> str:
        return f"name {self.root} in stream {self.stream} too; a filter can leave the other partitions' rows out"


def shadowed(spec: SourceSpec, streams: Mapping[str, Sequence[str]]) -> list[Shadowed]:
    """Those of streams that share the source, by their names and patterns. Changes nothing. Raises SourceError."""
    with connect(spec, PostgresOptions.of(spec)) as conn:
        together = dict.fromkeys(pattern for patterns in streams.values() for pattern in patterns)
        published = {table.relation.oid: table.relation.table for table in select(conn, list(together)).tables}
        return [
            Shadowed(name, table.relation.table, published[above])
            for name, patterns in streams.items()
            for table in select(conn, patterns).tables
            for above in table.ancestors
            if table.relation.oid not in published and above in published
        ]
