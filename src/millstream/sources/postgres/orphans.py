"""What looks like ours on a server and is nobody's: slots keep its log for ever, triggers write into it for nobody."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from millstream.model import SourceSpec
from millstream.sources.postgres.connection import connect, translated
from millstream.sources.postgres.options import PREFIX, PostgresOptions
from millstream.sources.postgres.patterns import quote
from millstream.sources.postgres.trigger_sql import SCHEMA, TRIGGERS

# Ours are told by their functions, which are in our schema.
_MADE = """
    SELECT p.proname, pg_get_function_identity_arguments(p.oid), e.evtname
    FROM pg_proc p LEFT JOIN pg_event_trigger e ON e.evtfoid = p.oid
    WHERE p.pronamespace = to_regnamespace(%s) ORDER BY 1, 3"""
_SLOTS = "SELECT slot_name, active FROM pg_replication_slots WHERE NOT temporary"
_IN_SCHEMA = """
    SELECT count(*) FROM pg_depend
    WHERE refclassid = 'pg_namespace'::regclass AND refobjid = to_regnamespace(%s)::oid"""


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


@dataclass(frozen=True)
class OrphanTriggers:
    """What `ddl_trigger` has made for a slot that is gone, or that nobody reads and none of the sources given owns."""

    slot: str
    database: str
    triggers: tuple[str, ...]
    functions: tuple[str, ...]
    """As statements write them."""
    slot_exists: bool
    alone: bool
    """Whether nothing else is in our schema."""

    @property
    def removal(self) -> str:
        """The statements that take all of it away, for a superuser in this database."""
        statements = [f"DROP EVENT TRIGGER {', '.join(map(quote, self.triggers))}"] if self.triggers else []
        statements.append(f"DROP FUNCTION {', '.join(self.functions)}")
        return "; ".join([*statements, f"DROP SCHEMA {quote(SCHEMA)}"] if self.alone else statements)


def orphan_triggers(spec: SourceSpec, sources: Collection[SourceSpec]) -> list[OrphanTriggers]:
    """Those in the database of `spec`. Raises SourceUnavailable."""
    owned = {PostgresOptions.of(source).slot for source in sources}
    functions: dict[str, set[str]] = {}
    triggers: dict[str, list[str]] = {}
    with connect(spec, PostgresOptions.of(spec)) as conn, translated("looking for DDL triggers"):
        slots: dict[str, bool] = dict(conn.execute(_SLOTS).fetchall())
        made = conn.execute(_MADE.encode(), (SCHEMA,)).fetchall()
        ((there,),) = conn.execute(_IN_SCHEMA.encode(), (SCHEMA,)).fetchall()
        database = conn.info.dbname
    for name, arguments, trigger in made:
        slot, _, kind = name.rpartition("_")
        if kind in (*TRIGGERS, "tell"):
            functions.setdefault(slot, set()).add(f"{quote(SCHEMA, name)}({arguments})")
            triggers.setdefault(slot, []).extend([trigger] if trigger is not None else [])
    # Of a slot that is there, somebody may take care: who reads it, or who has it in his stream file.
    return [
        OrphanTriggers(slot, database, tuple(triggers[slot]), tuple(sorted(ours)), slot in slots, len(ours) == there)
        for slot, ours in functions.items()
        if slot not in slots or not (slots[slot] or slot in owned)
    ]
