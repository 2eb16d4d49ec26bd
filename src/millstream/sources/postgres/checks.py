"""May capture go on from here? Asked on every connect, before START_REPLICATION.

The server never refuses a wrong position: an older one is moved forward (changes are skipped) and
one beyond the end of its log drops commits, both in silence. So each way in which server and journal
can have come apart is looked for here, and is a halt with its reason and its remedy.

    identify(replication)                                  -> System
    build_identity(conn, replication, options, publications, consistent_point) -> SourceIdentity
    check_before_start(conn, replication, identity, journal_end, options, expected=...) -> SourceIdentity
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from psycopg.pq.abc import PGconn

from millstream.errors import SourceHalted, SourceUnavailable
from millstream.sources.base import SourceIdentity
from millstream.sources.postgres.connection import Connection, command, session_settings, translated
from millstream.sources.postgres.lsn import format_lsn, parse_lsn
from millstream.sources.postgres.membership import Publication, check_drift, read_publications
from millstream.sources.postgres.options import PostgresOptions, newest_protocol
from millstream.sources.postgres.publication import drift_error
from millstream.sources.postgres.slot import slot_info, slot_problem

KIND = "postgres"
_REBASE = (
    "if this is meant to be the source from now on, re-base the stream "
    "(millstream journal rebase STREAM --confirm) and reload its tables"
)


@dataclass(frozen=True)
class System:
    """What IDENTIFY_SYSTEM says. `xlogpos` is the end of the log that is safe on the server's disk."""

    identifier: str
    timeline: int
    xlogpos: int
    database: str


def identify(replication: PGconn) -> System:
    ((identifier, timeline, xlogpos, database),) = command(replication, "IDENTIFY_SYSTEM")
    return System(identifier or "", int(timeline or 0), parse_lsn(xlogpos or ""), database or "")


def build_identity(
    conn: Connection,
    replication: PGconn,
    options: PostgresOptions,
    publications: Mapping[str, Publication],
    consistent_point: int,
) -> SourceIdentity:
    """What a new journal of this source is bound to. Goes into its header."""
    system = identify(replication)
    history = None
    with contextlib.suppress(SourceHalted):  # its file can be gone; then timelines are compared by their numbers
        history = _history(replication, system.timeline)
    return SourceIdentity(
        KIND,
        {
            "system_identifier": system.identifier,
            "timeline": system.timeline,
            "timeline_history": history,
            "database": system.database,
            "database_oid": _database_oid(conn),
            "slot": options.slot,
            "consistent_point": consistent_point,
            "publications": {name: publications[name].oid for name in options.publications},
            "plugin_options": options.plugin_options(replication.server_version),
            "session_settings": session_settings(replication),
            "server_version": replication.server_version,
        },
        start=consistent_point,
    )


def check_before_start(
    conn: Connection,
    replication: PGconn,
    identity: SourceIdentity,
    journal_end: int,
    options: PostgresOptions,
    *,
    expected: Mapping[str, Publication] | None = None,
) -> SourceIdentity:
    """Return if START_REPLICATION at `journal_end` is exact; otherwise raise SourceHalted.

    `identity` is the journal's. What is returned is what it must be bound to before it gets a row from this server:
    one that was promoted is on a timeline of its own, and the next one must have left that. `expected` are the
    publications as `sync_publications` left them; without it, the record on the publications themselves counts.
    SourceUnavailable for a server that is still a standby: it may be about to be promoted.
    """
    facts = identity.facts
    _check_names(facts, options)
    _check_server(conn, replication)
    _check_protocol(replication, options)
    system = identify(replication)
    _check_system(facts, system, _database_oid(conn))
    history = _check_timeline(facts, system, journal_end, replication)
    _check_settings(facts, replication)
    _check_slot(conn, options, journal_end)
    _check_publications(conn, facts, options, expected)
    if system.timeline == facts["timeline"]:
        return identity
    return replace(identity, facts={**facts, "timeline": system.timeline, "timeline_history": history})


History = list[list[int]]
"""The timelines that a server came by, in order, each with the position where it left it. JSON."""


def parse_history(text: str) -> History:
    """What a timeline history file says."""
    lines = (line.split("#")[0].split() for line in text.splitlines())
    return [[int(fields[0]), parse_lsn(fields[1])] for fields in lines if len(fields) >= 2 and fields[0].isdigit()]


def _history(replication: PGconn, timeline: int) -> History:
    if timeline == 1:
        return []
    ((_, text),) = command(replication, f"TIMELINE_HISTORY {timeline}")
    return parse_history(text or "")


def _check_names(facts: Mapping[str, Any], options: PostgresOptions) -> None:
    if facts["slot"] != options.slot or set(facts["publications"]) != set(options.publications):
        raise SourceHalted(
            f"the journal was made from slot {facts['slot']} and publications {', '.join(facts['publications'])}, the "
            f"source now names slot {options.slot} and publications {', '.join(options.publications)}",
            hint="put the old names back, or re-base the stream (millstream journal rebase STREAM --confirm)",
        )


def _check_server(conn: Connection, replication: PGconn) -> None:
    started = "SELECT pg_postmaster_start_time()::text, pg_is_in_recovery()::text"
    with translated("checking the source"):
        row = conn.execute(started.encode()).fetchone()
    if [row] != command(replication, started):
        raise SourceUnavailable(
            "the two connections to the source reached different servers, or it was restarted in between",
            hint="with several hosts in the uri, add ?target_session_attrs=read-write",
        )
    if row is not None and row[1] == "true":
        raise SourceUnavailable(
            "the server is a standby, which cannot be captured",
            hint="name the primary in the uri, or all servers with ?target_session_attrs=read-write",
        )


def _check_protocol(replication: PGconn, options: PostgresOptions) -> None:
    newest = newest_protocol(replication.server_version)
    if options.protocol > newest:
        raise SourceHalted(
            f"Postgres {replication.server_version // 10000} has no version {options.protocol} of pgoutput's protocol",
            hint=f"set protocol of the source to {newest} or less",
        )


def _check_system(facts: Mapping[str, Any], system: System, database_oid: int) -> None:
    if system.identifier != facts["system_identifier"]:
        raise SourceHalted(
            f"this is another database cluster: its system identifier is {system.identifier}, the journal's source "
            f"had {facts['system_identifier']}",
            hint=f"correct the uri; {_REBASE}",
        )
    if database_oid != facts["database_oid"]:
        raise SourceHalted(
            f"database {system.database} is not the one the journal was made from (OID {database_oid}, "
            f"was {facts['database_oid']}): it was dropped and created again, or the uri names another",
            hint=f"correct the uri; {_REBASE}",
        )


def _check_timeline(facts: Mapping[str, Any], system: System, journal_end: int, replication: PGconn) -> History | None:
    """Returns the server's history; None where it was not asked for."""
    before, known, history = facts["timeline"], facts.get("timeline_history"), None
    if system.timeline != before or known is not None:
        history = _history(replication, system.timeline)
    # Each standby that is promoted counts on by one: two of them are on different timelines of the same number.
    if known is not None and (history or [])[: len(known)] != known:
        raise SourceHalted(
            f"the server came to timeline {system.timeline} in another way than the one that the journal was "
            f"captured from came to timeline {before}",
            hint=_REBASE,
        )
    if system.timeline != before:
        left = next((position for timeline, position in history or [] if timeline == before), None)
        if left is None:
            raise SourceHalted(
                f"the server is on timeline {system.timeline}, which does not descend from the journal's "
                f"timeline {before}",
                hint=_REBASE,
            )
        if left < journal_end:
            raise SourceHalted(
                f"the server left timeline {before} at {format_lsn(left)}, before the journal's end "
                f"{format_lsn(journal_end)}: the journal has transactions that this server lost",
                hint=_REBASE,
            )
    if system.xlogpos < journal_end:
        raise SourceHalted(
            f"the server's log ends at {format_lsn(system.xlogpos)}, before the journal's end "
            f"{format_lsn(journal_end)}: it was restored from a backup or lost its last transactions",
            hint=_REBASE,
        )
    return history


def _check_settings(facts: Mapping[str, Any], replication: PGconn) -> None:
    now = session_settings(replication)
    changed = [name for name, value in facts["session_settings"].items() if now.get(name) != value]
    if changed:
        raise SourceHalted(
            f"values would be written in another way than in the journal so far: {', '.join(changed)}", hint=_REBASE
        )


def _check_slot(conn: Connection, options: PostgresOptions, journal_end: int) -> None:
    info = slot_info(conn, options.slot)
    if info is None:
        raise SourceHalted(f"slot {options.slot} does not exist any more, so changes may be lost", hint=_REBASE)
    problem = slot_problem(info, conn.info.dbname)
    if problem is not None:
        drop = f"SELECT pg_drop_replication_slot('{options.slot}')"
        raise SourceHalted(problem, hint=f"drop it ({drop}), re-base the stream and reload its tables")
    if info.confirmed_flush is not None and info.confirmed_flush > journal_end:
        raise SourceHalted(
            f"slot {options.slot} stands at {format_lsn(info.confirmed_flush)}, beyond the journal's end "
            f"{format_lsn(journal_end)}: somebody else moved it, or the journal is an older copy",
            hint=f"put the newer journal back; or, since what lies between is lost: {_REBASE}",
        )


def _check_publications(
    conn: Connection,
    facts: Mapping[str, Any],
    options: PostgresOptions,
    expected: Mapping[str, Publication] | None,
) -> None:
    actual = read_publications(conn, options.publications)
    reasons = []
    for name, oid in facts["publications"].items():
        if name not in actual:
            reasons.append(f"publication {name} does not exist any more")
        elif actual[name].oid != oid:
            reasons.append(f"publication {name} was dropped and created again")
    if reasons:
        raise SourceHalted(f"changes are missing from the log: {'; '.join(reasons)}", hint=_REBASE)
    left = {name: state.left for name, state in actual.items() if state.left is not None}
    reasons = check_drift(conn, expected if expected is not None else left, actual)
    if reasons:
        raise drift_error(reasons, options)


def _database_oid(conn: Connection) -> int:
    with translated("reading the database's OID"):
        row = conn.execute("SELECT oid::int8 FROM pg_database WHERE datname = current_database()").fetchone()
    assert row is not None  # noqa: S101 - we are connected to it
    return int(row[0])
