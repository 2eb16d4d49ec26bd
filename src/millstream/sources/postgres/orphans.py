"""Slots that look like ours and are nobody's: each keeps the server's log for ever."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from millstream.model import SourceSpec
from millstream.sources.postgres.connection import connect, translated
from millstream.sources.postgres.options import PREFIX, PostgresOptions


@dataclass(frozen=True)
class OrphanSlot:
    """A slot with our prefix that nobody reads and none of the sources given owns."""

    name: str
    database: str
    retained_bytes: int


def orphan_slots(spec: SourceSpec, sources: Collection[SourceSpec]) -> list[OrphanSlot]:
    """Those on the server of `spec`, of whatever database. Raises SourceUnavailable."""
    owned = [PostgresOptions.of(source).slot for source in sources]
    with connect(spec, PostgresOptions.of(spec)) as conn, translated("looking for slots"):
        rows = conn.execute(
            "SELECT slot_name, database, coalesce(pg_wal_lsn_diff(pg_current_wal_lsn(), restart_lsn), 0)::int8 "
            "FROM pg_replication_slots WHERE NOT active AND NOT temporary AND starts_with(slot_name, %s) "
            "AND slot_name <> ALL(%s) ORDER BY 1",
            (PREFIX, owned),
        ).fetchall()
    return [OrphanSlot(name, database, size) for name, database, size in rows]
