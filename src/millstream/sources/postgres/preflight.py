"""Is this database fit for capture? Every finding comes with the SQL, or the sentence, that mends it.

    preflight(spec, options) -> list[Finding]
    preflight(spec, options, captured=False), for a snapshot that no changes follow: it needs no publication

Nothing is changed on the source, and nothing that can be reported is raised.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from millstream.errors import MillstreamError
from millstream.model import SourceSpec
from millstream.sources.base import Finding, Severity
from millstream.sources.postgres.catalog import Selection, Table, select
from millstream.sources.postgres.checks import identify
from millstream.sources.postgres.connection import (
    POOLER_HINT,
    TEXT_INSTEAD,
    Connection,
    connect,
    connect_replication,
    where,
)
from millstream.sources.postgres.membership import check_drift, read_publications
from millstream.sources.postgres.options import PostgresOptions
from millstream.sources.postgres.patterns import quote
from millstream.sources.postgres.publication import (
    drift_hint,
    identity_findings,
    plan_statements,
    try_publications,
    wanted_members,
)
from millstream.sources.postgres.server import Server, server_findings
from millstream.sources.postgres.wire import refusals


def preflight(spec: SourceSpec, options: PostgresOptions, *, captured: bool = True) -> list[Finding]:
    """Look at everything capture, or a mere copy of the tables, depends on.

    Errors keep it from starting; warnings may hurt later.
    """
    try:
        conn = connect(spec, options)
    except MillstreamError as error:
        return [_of_error("connection", error)]
    findings = [Finding("connection", Severity.OK, f"connected to {where(spec)}")]
    with conn:
        try:
            findings += _all_findings(conn, spec, options) if captured else _copy_findings(conn, spec, options)
        except MillstreamError as error:
            findings.append(_of_error("preflight", error))
    return findings


def _all_findings(conn: Connection, spec: SourceSpec, options: PostgresOptions) -> Iterator[Finding]:
    server = Server.read(conn)
    yield from server_findings(conn, server, spec, options)
    if server.superuser or server.replication:
        yield _replication(spec, options, server)
    selection = select(conn, spec.tables)
    yield from selection.findings
    yield _chosen(selection)
    for table in selection.tables:
        yield from _table_findings(table, server)
    if options.ddl_trigger and not server.superuser:
        yield Finding(
            "ddl_trigger",
            Severity.WARNING,
            "only a superuser, or who your provider allows it, can create the event trigger that ddl_trigger asks for",
            "ALTER ROLE ... SUPERUSER, or leave ddl_trigger out",
        )
    if options.wire == "binary":
        yield from _wire_findings(server, selection)
    yield from identity_findings(selection.tables)
    if selection.tables:
        yield from _publications(conn, server, selection, options, spec.tables)


def _copy_findings(conn: Connection, spec: SourceSpec, options: PostgresOptions) -> Iterator[Finding]:
    """What a snapshot needs: a temporary slot, and the right to read the tables."""
    server = Server.read(conn)
    yield from server_findings(conn, server, spec, options)
    if server.superuser or server.replication:
        yield _replication(spec, options, server)
    selection = select(conn, spec.tables)
    yield from selection.findings
    yield _chosen(selection)
    for table in selection.tables:
        for finding in _table_findings(table, server):
            # Changes can be captured without the right to read a table; nothing else can copy it.
            needed = finding.check == "rights" or (finding.check == "row_security" and finding.fix is not None)
            yield replace(finding, severity=Severity.ERROR) if needed else finding


def _replication(spec: SourceSpec, options: PostgresOptions, server: Server) -> Finding:
    """Open a walsender as capture will: rights, pg_hba.conf, poolers and free senders show at once."""
    try:
        connection = connect_replication(spec, options)
    except MillstreamError as error:
        if "max_wal_senders" in error.message or "max_connections" in error.message:
            more = int(server.settings["max_wal_senders"]) + 10
            fix = f"ALTER SYSTEM SET max_wal_senders = {more}; then restart the server"
            return Finding("replication", Severity.ERROR, error.message, fix)
        return _of_error("replication", error)
    try:
        identify(connection)
    except MillstreamError as error:
        return _of_error("replication", error)
    finally:
        connection.finish()
    return Finding("replication", Severity.OK, "a replication connection can be opened")


def _chosen(selection: Selection) -> Finding:
    if not selection.tables:
        return Finding("tables", Severity.ERROR, "the patterns in `tables` name no table that can be captured")
    names = [table.relation.table for table in selection.tables]
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return Finding("tables", Severity.OK, f"{len(names)} to capture: {shown}")


def _table_findings(table: Table, server: Server) -> Iterator[Finding]:
    name = table.relation.table
    quoted = quote(table.relation.schema, table.relation.name)
    if not table.selectable:
        yield Finding(
            "rights",
            Severity.WARNING,
            f"role {server.role} may not read {name}, which copying and repairing rows needs",
            f"GRANT SELECT ON {quoted} TO {quote(server.role)}",
            name,
        )
    if table.row_security:
        yield Finding(
            "row_security",
            Severity.WARNING,
            f"{name} has row level security, which does not apply to the log: every row is captured",
            None
            if server.bypasses_row_security
            else f"ALTER ROLE {quote(server.role)} BYPASSRLS (to copy rows as well)",
            name,
        )
    if table.unpublished:
        yield Finding(
            "generated",
            Severity.WARNING,
            f"generated columns of {name} are not in the log: {', '.join(table.unpublished)}",
            "compute them at the target" + ("" if server.version >= 180000 else ", or upgrade to Postgres 18"),
            name,
        )
    if table.uncaptured_partitions:
        yield Finding(
            "partitions",
            Severity.WARNING,
            f"changes of foreign or unlogged partitions of {name} are not in the log: "
            f"{', '.join(table.uncaptured_partitions)}",
            "make them plain, logged tables: ALTER TABLE ... SET LOGGED",
            name,
        )


def _wire_findings(server: Server, selection: Selection) -> Iterator[Finding]:
    for table in selection.tables:
        for reason in refusals(table.relation, server.version):
            yield Finding(
                "wire", Severity.ERROR, f"wire: binary is not possible: {reason}", TEXT_INSTEAD, table.relation.table
            )


def _publications(
    conn: Connection, server: Server, selection: Selection, options: PostgresOptions, patterns: Sequence[str]
) -> Iterator[Finding]:
    try:
        before = read_publications(conn, options.publications)
        statements = plan_statements(before, wanted_members(selection, options), options, server.version)
    except MillstreamError as error:
        yield _of_error("publication", error)
        return
    left = {name: publication.left for name, publication in before.items() if publication.left is not None}
    for said in check_drift(conn, left):
        yield Finding(
            "publication", Severity.WARNING, f"{said}: a stream that has a journal will halt", drift_hint(options)
        )
    lacking = list(_lacking_rights(server, selection, statements)) if statements else []
    yield from lacking
    for name, publication in before.items():
        mine = [statement for target, statement in statements if target == name]
        if mine and publication.ours:
            yield Finding(
                "publication", Severity.OK, f"publication {name} will be brought up to date: {'; '.join(mine)}"
            )
    if lacking or not statements or (any(f.severity is Severity.ERROR for f in selection.findings)):
        return
    if set(before) or options.columns or options.rows:
        # Only the server can say what an expression means, and who may alter what: ask it, and undo.
        try:
            try_publications(conn, patterns, options)
        except MillstreamError as error:
            yield _of_error("publication", error)
            return
    yield Finding("publication", Severity.OK, "the publications can be made as the stream needs them")


def _lacking_rights(server: Server, selection: Selection, statements: Sequence[tuple[str, str]]) -> Iterator[Finding]:
    create = any(statement.startswith("CREATE") for _, statement in statements)
    strange = [table.relation for table in selection.tables if not table.owned]
    if create and not server.creates:
        yield Finding(
            "rights",
            Severity.ERROR,
            f"role {server.role} may not create publications in database {server.database}",
            f"GRANT CREATE ON DATABASE {quote(server.database)} TO {quote(server.role)}",
        )
    for relation in strange:
        yield Finding(
            "rights",
            Severity.ERROR,
            f"role {server.role} does not own {relation.table}, so it cannot publish it",
            f"GRANT <owner of {quote(relation.schema, relation.name)}> TO {quote(server.role)}",
            relation.table,
        )
    if strange or (create and not server.creates):
        # Once, and not with each table: there may be hundreds.
        yield Finding(
            "publication",
            Severity.ERROR,
            f"role {server.role} cannot make the publications as the stream needs them",
            "give it the rights above, or as a superuser: " + "; ".join(statement for _, statement in statements),
        )


def _of_error(check: str, error: MillstreamError) -> Finding:
    return Finding("pooler" if error.hint == POOLER_HINT else check, Severity.ERROR, error.message, error.hint)
