"""Preflight of the server itself: version, settings, slots and senders, role. Reads only."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from millstream.config.units import format_duration, format_size
from millstream.model import SourceSpec
from millstream.observe import counted
from millstream.sources.base import Finding, Severity
from millstream.sources.postgres.blockers import prepared_transactions
from millstream.sources.postgres.connection import Connection, translated
from millstream.sources.postgres.options import PostgresOptions
from millstream.sources.postgres.patterns import quote
from millstream.sources.postgres.slot import slot_info, slot_problem

PREPARED_SECONDS = 60
"""Who commits in two phases does so within moments: what is older was left behind."""
_NAMED = 5

MINIMUM_MINORS = {14: 19, 15: 14, 16: 10, 17: 6, 18: 0}
"""Older minors have faults in logical decoding that lose or mix up changes."""

_SETTINGS = (
    "wal_level",
    "max_replication_slots",
    "max_wal_senders",
    "synchronous_standby_names",
    "max_slot_wal_keep_size",
    "idle_replication_slot_timeout",
    "wal_sender_timeout",
    "server_encoding",
    "synchronized_standby_slots",
)


@dataclass(frozen=True)
class Server:
    """What preflight needs to know of a server and of our role there. Settings are in their base units."""

    version: int
    settings: Mapping[str, str]
    standby: bool
    role: str
    superuser: bool
    replication: bool
    bypasses_row_security: bool
    database: str
    creates: bool
    """Whether the role may create publications in the database."""
    slots: int

    @classmethod
    def read(cls, conn: Connection) -> Server:
        with translated("looking at the server"):
            settings = conn.execute(
                "SELECT name, setting FROM pg_settings WHERE name = ANY (%s)", (list(_SETTINGS),)
            ).fetchall()
            row = conn.execute(
                "SELECT pg_is_in_recovery(), rolname::text, rolsuper, rolreplication OR EXISTS (SELECT FROM pg_roles g "
                "WHERE g.rolname IN ('rds_replication', 'cloudsqlsuperuser') AND pg_has_role(g.oid, 'USAGE')), "
                "rolsuper OR rolbypassrls, current_database()::text, "
                "has_database_privilege(current_database(), 'CREATE'), "
                "(SELECT count(*) FROM pg_replication_slots) FROM pg_roles WHERE rolname = current_user"
            ).fetchone()
        assert row is not None  # noqa: S101 - the role exists: it is ours
        return cls(conn.info.server_version, dict(settings), *row)

    def number(self, name: str) -> int:
        return int(self.settings[name])


def server_findings(conn: Connection, server: Server, spec: SourceSpec, options: PostgresOptions) -> Iterator[Finding]:
    """Everything about the server that capture depends on, in the order one would mend it."""
    yield _version(server)
    if server.standby:
        yield Finding(
            "standby",
            Severity.ERROR,
            "the server is a standby, which cannot be captured",
            "name the primary in the uri, or all servers with ?target_session_attrs=read-write",
        )
    yield _wal_level(server)
    yield _slots(conn, server, options)
    yield _role(server)
    yield _synchronous(server.settings["synchronous_standby_names"], f"millstream {options.slot}")
    yield from _limits(server, spec)
    yield from _needs(server, options)
    yield from _failover(server, options)
    yield from _left_behind(conn)


def _version(server: Server) -> Finding:
    major, minor = divmod(server.version, 10000)
    least = MINIMUM_MINORS.get(major)
    if least is None and major < min(MINIMUM_MINORS):
        return Finding(
            "version", Severity.ERROR, f"the server is Postgres {major}", "upgrade to Postgres 14.19 or newer"
        )
    if least is None:
        return Finding("version", Severity.WARNING, f"Millstream has not been tried on Postgres {major} yet")
    if minor < least:
        return Finding(
            "version",
            Severity.ERROR,
            f"Postgres {major}.{minor} has faults in logical decoding that lose changes",
            f"upgrade the server to {major}.{least} or newer",
        )
    return Finding("version", Severity.OK, f"Postgres {major}.{minor}")


def _wal_level(server: Server) -> Finding:
    level = server.settings["wal_level"]
    if level == "logical":
        return Finding("wal_level", Severity.OK, "wal_level is logical")
    return Finding(
        "wal_level",
        Severity.ERROR,
        f"wal_level is {level}, logical is needed",
        "ALTER SYSTEM SET wal_level = 'logical'; then restart the server",
    )


def _slots(conn: Connection, server: Server, options: PostgresOptions) -> Finding:
    info = slot_info(conn, options.slot)
    limit = server.number("max_replication_slots")
    if info is None:
        if server.slots < limit:
            return Finding("slots", Severity.OK, f"{limit - server.slots} of {limit} replication slots are free")
        return Finding(
            "slots",
            Severity.ERROR,
            f"all {limit} replication slots are in use",
            f"drop one that nobody needs, or ALTER SYSTEM SET max_replication_slots = {limit + 10}; then restart",
        )
    problem = slot_problem(info, server.database)
    if problem is not None:
        return Finding("slots", Severity.ERROR, problem, f"SELECT pg_drop_replication_slot('{options.slot}')")
    if info.active_pid is not None:
        return Finding(
            "slots",
            Severity.WARNING,
            f"slot {options.slot} is being read by server process {info.active_pid}",
            "if that is not the process that runs this home, stop it before you start this one",
        )
    return Finding("slots", Severity.OK, f"slot {options.slot} exists and is sound")


def _role(server: Server) -> Finding:
    if server.superuser or server.replication:
        return Finding("role", Severity.OK, f"role {server.role} may replicate")
    return Finding(
        "role",
        Severity.ERROR,
        f"role {server.role} may not replicate",
        f"ALTER ROLE {quote(server.role)} REPLICATION",
    )


def _synchronous(names: str, application_name: str) -> Finding:
    if not is_synchronous(names, application_name):
        return Finding("synchronous_standby_names", Severity.OK, "commits do not wait for us")
    return Finding(
        "synchronous_standby_names",
        Severity.ERROR,
        f"synchronous_standby_names ({names}) matches us: every commit of the application would wait for Millstream",
        "ALTER SYSTEM SET synchronous_standby_names = '<the standbys by name, without *>'; SELECT pg_reload_conf()",
    )


def is_synchronous(names: str, application_name: str) -> bool:
    """Whether a setting of synchronous_standby_names means this application name. Case does not count."""
    listed = re.search(r"\((.*)\)", names, re.DOTALL)
    quoted = re.findall(r'"((?:[^"]|"")*)"|([^\s,()"]+)', listed[1] if listed else names)
    meant = {(first.replace('""', '"') or second).lower() for first, second in quoted}
    return "*" in meant or application_name.lower() in meant


def _limits(server: Server, spec: SourceSpec) -> Iterator[Finding]:
    keep = server.number("max_slot_wal_keep_size") << 20
    if keep >= 0 and keep < 2 * spec.max_source_wal:
        yield Finding(
            "max_slot_wal_keep_size",
            Severity.WARNING,
            f"the server drops log that the slot needs beyond {format_size(keep)}, and max_source_wal is "
            f"{format_size(spec.max_source_wal)}",
            f"set max_source_wal to {format_size(keep // 2)} or less, or ALTER SYSTEM SET max_slot_wal_keep_size = "
            f"'{2 * spec.max_source_wal >> 20}MB'; SELECT pg_reload_conf()",
        )
    idle = int(server.settings.get("idle_replication_slot_timeout", "0"))
    if idle > 0:
        yield Finding(
            "idle_replication_slot_timeout",
            Severity.WARNING,
            f"the server invalidates a slot that nobody has read for {format_duration(idle * 1000)}: a longer stop "
            "of Millstream loses changes",
            "ALTER SYSTEM SET idle_replication_slot_timeout = 0; SELECT pg_reload_conf()",
        )
    timeout = server.number("wal_sender_timeout")
    if timeout < 10_000:
        said = "never notices a dead connection" if timeout == 0 else f"gives us up after {format_duration(timeout)}"
        yield Finding(
            "wal_sender_timeout",
            Severity.WARNING,
            f"the server {said}",
            "ALTER SYSTEM SET wal_sender_timeout = '60s'; SELECT pg_reload_conf()",
        )
    if server.settings["server_encoding"] == "SQL_ASCII":
        yield Finding(
            "server_encoding",
            Severity.WARNING,
            "the database has no encoding (SQL_ASCII): text that is not UTF-8 cannot be decoded",
            "copy the database into one with ENCODING 'UTF8'",
        )


def _needs(server: Server, options: PostgresOptions) -> Iterator[Finding]:
    for wanted, least, name in (
        (options.push and bool(options.columns or options.rows), 15, "`columns` and `rows`"),
        (options.origin == "none", 16, "`origin: none`"),
        (options.failover, 17, "`failover`"),
        (options.protocol == 3, 15, "`protocol: 3`"),
        (options.protocol == 4, 16, "`protocol: 4`"),
    ):
        if wanted and server.version < least * 10000:
            yield Finding("options", Severity.ERROR, f"{name} needs Postgres {least}", f"remove {name} from the source")


def _failover(server: Server, options: PostgresOptions) -> Iterator[Finding]:
    """A standby that lacks what the journal has is no successor: the stream would halt there."""
    if options.failover and not server.settings.get("synchronized_standby_slots", "-"):
        yield Finding(
            "failover",
            Severity.WARNING,
            "changes come to us before a standby has them: one that is promoted without the last of them halts the "
            "stream",
            "ALTER SYSTEM SET synchronized_standby_slots = '<the physical slots of the standbys>'; "
            "SELECT pg_reload_conf()",
        )


def _left_behind(conn: Connection) -> Iterator[Finding]:
    old = [one for one in prepared_transactions(conn) if one.seconds >= PREPARED_SECONDS]
    if old:
        yield Finding(
            "prepared_transactions",
            Severity.WARNING,
            f"{counted(len(old), 'transaction')} prepared and left behind, the oldest {old[0].seconds} s ago: a new "
            "slot and every snapshot wait for that, and the server keeps its log",
            "; ".join(one.remedy for one in old[:_NAMED]),
        )
