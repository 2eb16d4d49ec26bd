"""The two publications of a source: made, kept in step with the patterns, and watched.

The main one publishes everything of the tables whose rows the log can identify. Tables without a
usable identity go to the second, which publishes inserts and truncates only: in the main one the
server would refuse the application's UPDATE and DELETE. Both always exist, so that the names given
to the server never change.

    sync_publications(conn, patterns, options, first_start=...) -> PublicationPlan
    watch_publications(conn, options, plan.publications)        -> list of reasons to halt
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from psycopg import sql

from millstream.errors import ConfigError, PreflightError, SourceHalted, SourceUnavailable
from millstream.failpoint import failpoint
from millstream.sources.base import Finding, Severity
from millstream.sources.postgres.catalog import PUBLISHES_GENERATED, Selection, Table, select, tables_by_oid
from millstream.sources.postgres.connection import Connection, translated
from millstream.sources.postgres.identity import filter_dangers
from millstream.sources.postgres.membership import (
    INSERT_OPERATIONS,
    MAIN_OPERATIONS,
    MARK,
    Member,
    Publication,
    check_drift,
    drift,
    gone_tables,
    read_publications,
)
from millstream.sources.postgres.options import PostgresOptions
from millstream.sources.postgres.patterns import quote


@dataclass(frozen=True)
class Wanted:
    """A table that a publication shall have, with its column list and row filter."""

    table: Table
    columns: tuple[str, ...] | None
    rows: str | None

    @property
    def clause(self) -> str:
        """As it stands after ADD TABLE. ONLY: children by inheritance are tables of their own."""
        relation = self.table.relation
        columns = f" ({', '.join(quote(name) for name in self.columns)})" if self.columns else ""
        rows = f" WHERE ({self.rows})" if self.rows else ""
        return f"ONLY {quote(relation.schema, relation.name)}{columns}{rows}"


@dataclass(frozen=True)
class PublicationPlan:
    """The publications after a sync, by name, and what the sync did to get there."""

    publications: Mapping[str, Publication]
    statements: tuple[str, ...]
    created: bool
    """True when a publication did not exist before: no slot may be older than that."""
    findings: tuple[Finding, ...]
    """Tables that are captured in part only, or left out, with the fix."""


def sync_publications(
    conn: Connection, patterns: Sequence[str], options: PostgresOptions, *, first_start: bool
) -> PublicationPlan:
    """Make both publications hold exactly what the patterns mean now; one transaction, idempotent.

    `first_start` says that no journal exists for this source. Otherwise publications that are gone,
    or that are not as they were left, halt the source (SourceHalted): changes may be missing from
    the log. So does a table that has lost its identity, after it was moved for the application's sake
    (see `watch_publications`). PreflightError when a table cannot be captured, ConfigError for filters
    of unknown tables. Commits only what leaves the application's writes alone; SourceUnavailable when
    a table changed under our eyes.
    """
    if not first_start:
        found = read_publications(conn, options.publications)
        left = {one.name: one.left for one in found.values() if one.left}
        # A table that lost its identity while nobody watched is no less a loss than one that does so later.
        reasons = _watch(conn, options, left, found, patterns) if options.publication in left else []
        if reasons:
            raise drift_error(reasons, options)
    plan = _sync(conn, patterns, options, first_start=first_start, dry_run=False)
    if plan.statements:
        failpoint("capture.publication_created")
    return plan


def try_publications(conn: Connection, patterns: Sequence[str], options: PostgresOptions) -> PublicationPlan:
    """What `sync_publications` would do at a first start, with the server's own verdict, undone again."""
    return _sync(conn, patterns, options, first_start=True, dry_run=True)


def _sync(
    conn: Connection, patterns: Sequence[str], options: PostgresOptions, *, first_start: bool, dry_run: bool
) -> PublicationPlan:
    with translated("preparing the publications"), conn.transaction(force_rollback=dry_run):
        selection = select(conn, patterns)
        _refuse_errors(selection)
        before = read_publications(conn, options.publications)
        if not first_start:
            _refuse_drift(conn, before, options, patterns)
        wanted = wanted_members(selection, options)
        statements = plan_statements(before, wanted, options, conn.info.server_version)
        _refuse_foreign(before, statements)
        for _, statement in statements:
            conn.execute(statement.encode())
        after = read_publications(conn, options.publications) if statements else before
        if statements:
            # The tables are locked against DDL now: what holds here holds at commit.
            _refuse_danger(after[options.publication], select(conn, patterns).tables)
        if _leave_records(conn, after, options, created=set(after) - set(before)):
            after = read_publications(conn, options.publications)
    return PublicationPlan(
        publications=after,
        statements=tuple(statement for _, statement in statements),
        created=set(before) != set(after),
        findings=(*selection.findings, *identity_findings(selection.tables)),
    )


def watch_publications(
    conn: Connection, options: PostgresOptions, expected: Mapping[str, Publication], patterns: Sequence[str] = ()
) -> list[str]:
    """Look whether the publications, and the names of their tables, are still as they were left; once a minute.

    A table that lost its identity makes the application's updates fail: it is moved to the
    insert-only publication at once, and reported. Any reason returned must halt the source, and
    every later start of it, until a person has accepted what is missing (`drift_hint`).
    """
    return _watch(conn, options, expected, read_publications(conn, list(expected)), patterns)


def _watch(
    conn: Connection,
    options: PostgresOptions,
    expected: Mapping[str, Publication],
    actual: Mapping[str, Publication],
    patterns: Sequence[str],
) -> list[str]:
    """As `watch_publications`, with the publications as they were just read."""
    reasons = check_drift(conn, expected, actual) or renamed_away(conn, expected, actual, patterns)
    if reasons:
        return reasons
    members = {member.table: member for member in expected[options.publication].members}
    with translated("watching the publications"), conn.transaction():
        endangered = [
            (table, danger)
            for table in tables_by_oid(conn, list(members))
            if (danger := danger_of(table, members[table.relation.oid])) is not None
        ]
        if endangered and patterns:
            # One that nobody wants any more is no loss: the next sync takes it out.
            meant = {table.relation.oid for table in select(conn, patterns).tables}
            endangered = [(table, danger) for table, danger in endangered if table.relation.oid in meant]
        if not endangered:
            return []
        rescued = _move_to_inserts(conn, options, [table for table, _ in endangered])
    what = "and was moved to the insert-only publication" if rescued else "while it is in the publication"
    return [
        f"table {table.relation.table} can no longer publish updates ({danger}), {what}; to capture its updates "
        f"and deletes again: {table.identity_fix or 'restore its identity'}"
        for table, danger in endangered
    ]


def wanted_members(selection: Selection, options: PostgresOptions) -> dict[str, list[Wanted]]:
    """Which table belongs to which publication, with what the options push to the server."""
    names = {table.relation.table for table in selection.tables}
    unknown = sorted(name for name in {*options.columns, *options.rows} if name not in names)
    if unknown:
        raise ConfigError(
            f"columns or rows are given for tables that are not captured: {', '.join(unknown)}",
            hint="write them as schema.table, and name the table in `tables`",
        )
    chosen: dict[str, list[Wanted]] = {name: [] for name in options.publications}
    for table in selection.tables:
        name = table.relation.table
        columns = tuple(options.columns[name]) if name in options.columns else None
        place = options.publication if table.unusable is None else options.insert_publication
        chosen[place].append(Wanted(table, columns, options.rows.get(name)))
    return chosen


def plan_statements(
    before: Mapping[str, Publication],
    wanted: Mapping[str, Sequence[Wanted]],
    options: PostgresOptions,
    server_version: int,
) -> list[tuple[str, str]]:
    """(publication, SQL) that turn what is there into what is wanted. Computed before anything is altered."""
    statements: list[tuple[str, str]] = []
    for name, members in wanted.items():
        operations = MAIN_OPERATIONS if name == options.publication else INSERT_OPERATIONS
        settings = f"publish = '{', '.join(operations)}', publish_via_partition_root = true"
        if server_version >= PUBLISHES_GENERATED:
            settings += ", publish_generated_columns = stored"
        there = before.get(name)
        if there is None:
            tables = f" FOR TABLE {', '.join(member.clause for member in members)}" if members else ""
            statements.append((name, f"CREATE PUBLICATION {quote(name)}{tables} WITH ({settings})"))
        else:
            statements += [(name, text) for text in _alterations(there, members, operations, settings, server_version)]
    # Out before in: a table that moves is never in both.
    return sorted(statements, key=lambda pair: " DROP TABLE " not in pair[1])


def _alterations(
    there: Publication, members: Sequence[Wanted], operations: tuple[str, ...], settings: str, server_version: int
) -> list[str]:
    alter = f"ALTER PUBLICATION {quote(there.name)}"
    generated = "s" if server_version >= PUBLISHES_GENERATED else ""
    by_oid = {member.table: member for member in there.members}
    kept = {w.table.relation.oid for w in members if _is_same(w, by_oid.get(w.table.relation.oid), there)}
    out = [quote(m.schema, m.name) for m in there.members if m.table not in kept]
    added = [member.clause for member in members if member.table.relation.oid not in kept]
    statements = []
    if (there.operations, there.via_root, there.generated) != (operations, True, generated):
        statements.append(f"{alter} SET ({settings})")
    if out:
        statements.append(f"{alter} DROP TABLE {', '.join(f'ONLY {name}' for name in out)}")
    if added:
        statements.append(f"{alter} ADD TABLE {', '.join(added)}")
    return statements


def _is_same(wanted: Wanted, there: Member | None, publication: Publication) -> bool:
    if there is None:
        return False
    columns = None if wanted.columns is None else set(wanted.columns)
    # The server writes a filter its own way, so our users' text is compared with the text of then.
    asked = publication.asked_rows.get(there.title) if publication.ours else there.filter
    return (None if there.columns is None else set(there.columns)) == columns and asked == wanted.rows


def danger_of(table: Table, member: Member) -> str | None:
    """Why this member of the main publication makes the application's writes fail; None if it does not."""
    if table.unusable is not None:
        return table.unusable
    identity = [column.name for column in table.relation.columns if column.key]
    dangers = filter_dangers(table.relation.identity, identity, member.columns, member.filter_columns)
    return "; ".join(dangers) or None


def identity_findings(tables: Sequence[Table]) -> list[Finding]:
    """A warning for each table that can be captured in part only."""
    return [
        Finding(
            "identity",
            Severity.WARNING,
            f"only inserts and truncates of {table.relation.table} are captured: {table.unusable}",
            table.identity_fix,
            table.relation.table,
        )
        for table in tables
        if table.unusable is not None
    ]


def drift_error(reasons: Sequence[str], options: PostgresOptions) -> SourceHalted:
    """The halt for a publication that is not as it was left."""
    return SourceHalted(f"changes may be missing from the log: {'; '.join(reasons)}", hint=drift_hint(options))


def drift_hint(options: PostgresOptions) -> str:
    """How a person accepts that changes are missing: by leaving the bare mark, without a record."""
    accept = "; ".join(f"COMMENT ON PUBLICATION {quote(name)} IS '{MARK}'" for name in options.publications)
    return f"a reload of the tables concerned brings what is missing (millstream reload); to go on, run: {accept}"


def _refuse_errors(selection: Selection) -> None:
    errors = [finding for finding in selection.findings if finding.severity is Severity.ERROR]
    if errors:
        raise PreflightError("; ".join(finding.message for finding in errors), hint=errors[0].fix)
    if not selection.tables:
        raise PreflightError("the patterns in `tables` name no table that can be captured")


def renamed_away(
    conn: Connection,
    expected: Mapping[str, Publication],
    actual: Mapping[str, Publication],
    patterns: Sequence[str],
) -> list[str]:
    """Tables that have another name now, so that the patterns mean others, or fewer. One sentence each.

    A publication goes with the table and not with its name: what is called so now may never have been in the log.
    """
    names = {m.table: m.title for name in expected if name in actual for m in actual[name].members}
    before = {m.table: m.title for publication in expected.values() for m in publication.members}
    moved = {oid: was for oid, was in before.items() if names.get(oid, was) != was}
    if not moved or not patterns:
        return []
    meant = {table.relation.table: table.relation.oid for table in select(conn, patterns).tables}
    reasons = []
    for oid, was in moved.items():
        said = f"table {was} is called {names[oid]} now"
        if meant.get(was, oid) not in names:
            reasons.append(f"{said}, and another one is called {was}, whose changes were not captured")
        elif names[oid] not in meant:
            reasons.append(f"{said}, which `tables` does not name")
    return reasons


def _refuse_drift(
    conn: Connection, before: Mapping[str, Publication], options: PostgresOptions, patterns: Sequence[str]
) -> None:
    missing = [name for name in options.publications if name not in before]
    if missing:
        raise SourceHalted(
            f"publication {', '.join(missing)} does not exist any more, so changes are missing from the log",
            hint="re-base the stream (millstream journal rebase) and reload its tables",
        )
    left = [publication.left for publication in before.values() if publication.left is not None]
    gone = gone_tables(conn, [member for publication in left for member in publication.members])
    reasons = [said for publication in left for said in drift(publication, before[publication.name], gone)]
    reasons = reasons or renamed_away(conn, {one.name: one for one in left}, before, patterns)
    if reasons:
        raise drift_error(reasons, options)


def _refuse_foreign(before: Mapping[str, Publication], statements: Sequence[tuple[str, str]]) -> None:
    """Never alter a publication that somebody else made or owns, or that takes more than tables."""
    for name, publication in before.items():
        if publication.all_tables or publication.schemas:
            raise PreflightError(
                f"publication {name} is for all tables, or for all tables of a schema",
                hint=f"drop it and let Millstream make its own: DROP PUBLICATION {quote(name)}",
            )
        mine = [statement for target, statement in statements if target == name]
        if mine and not (publication.ours and publication.owned):
            raise PreflightError(
                f"publication {name} was not made by this role for Millstream, and is not what the stream needs",
                hint=f"as its owner: {'; '.join(mine)}",
            )


def _refuse_danger(publication: Publication, tables: Sequence[Table]) -> None:
    members = {member.table: member for member in publication.members}
    for table in tables:
        member = members.get(table.relation.oid)
        danger = danger_of(table, member) if member else None
        if danger is None:
            continue
        if table.unusable is not None:
            raise SourceUnavailable(f"table {table.relation.table} changed while it was being published: {danger}")
        raise PreflightError(
            f"publishing {table.relation.table} would make the application's UPDATE and DELETE fail: {danger}",
            hint="change `columns` or `rows` of the source, or the table's replica identity",
        )


def _leave_records(
    conn: Connection, publications: Mapping[str, Publication], options: PostgresOptions, created: Collection[str] = ()
) -> bool:
    """Write down on each publication of ours how it was left, where that is not there already. Whether any was not."""
    written = False
    for name, publication in publications.items():
        if not (publication.owned and (publication.ours or name in created)):
            continue
        asked = {m.title: options.rows[m.title] for m in publication.members if m.title in options.rows}
        if publication.left is not None and not drift(publication.left, publication):
            continue
        conn.execute(
            sql.SQL("COMMENT ON PUBLICATION {} IS {}").format(
                sql.Identifier(name), sql.Literal(publication.comment(asked))
            )
        )
        written = True
    return written


def _move_to_inserts(conn: Connection, options: PostgresOptions, tables: Sequence[Table]) -> bool:
    """Take tables out of the main publication, for the application's sake. False when it is not ours."""
    publications = read_publications(conn, options.publications)
    if not all(publication.ours and publication.owned for publication in publications.values()):
        return False
    names = ", ".join(f"ONLY {quote(table.relation.schema, table.relation.name)}" for table in tables)
    conn.execute(f"ALTER PUBLICATION {quote(options.publication)} DROP TABLE {names}".encode())
    conn.execute(f"ALTER PUBLICATION {quote(options.insert_publication)} ADD TABLE {names}".encode())
    # The records stay as they were: updates and deletes are missing from here on, and that is for a person to accept.
    return True
