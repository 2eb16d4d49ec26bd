"""Target `postgres`: mirrors or changelogs in another Postgres, with the source's own types, exactly once.

Rows go by COPY into temporary tables of the session, and from there with one statement per table
into the mirror; a few rows go with the statement, and such statements together (`lanes.queue`). Our
own tables are in the schema `_millstream`.

A session that may do so runs with `session_replication_role = replica`, as replication of Postgres
itself does: foreign keys and triggers are the source's affair. One that may not writes parents
first and deletes last. Where the role may, commits carry a replication origin, by which a capture of
this database can tell them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from graphlib import CycleError, TopologicalSorter
from typing import Any, Self

import psycopg
import pyarrow as pa

from millstream.changelog import METADATA, exposed
from millstream.errors import TargetError, TargetRefused
from millstream.model import Column, Json, Relation
from millstream.targets.base import Part, TargetContext
from millstream.targets.constants import Constant
from millstream.targets.lanes import sessions
from millstream.targets.lanes.copy_binary import (
    copy_pieces,
    copy_statement,
    page_ranges,
    read_copy,
    takes_as_they_are,
)
from millstream.targets.lanes.copy_text import copy_text
from millstream.targets.lanes.database import OWN, ColumnDef, Database, LaneOptions, Values, quoted
from millstream.targets.lanes.given import can_be_given
from millstream.targets.lanes.lane import LaneTarget
from millstream.targets.lanes.queue import Queue
from millstream.targets.lanes.runs import ahead
from millstream.targets.lanes.sessions import Session, errors
from millstream.targets.postgres_options import PostgresTargetOptions

_METADATA = (
    "text",
    "bigint",
    "text",
    "integer",
    "timestamptz",
    "bigint",
    "text",
    "boolean",
    "integer",
    "jsonb",
    "jsonb",
    "jsonb",
)

_FIRST_OF_USERS = 16_384
_NOT_HERE = {
    *(2205, 2206, 24, 2202, 2203, 2204, 3734, 3769, 4089, 4096, 4191),
    *(2210, 2211, 1008, 2207, 2208, 2209, 3735, 3770, 4090, 4097, 4192),
    *(194, 3361, 3402, 5017, 4600, 4601, 3642, 3644, 1033, 1034),
}
"""Types whose values mean objects of the source's own server, or that take no input: text here."""

_WIDER = {
    "smallint": {"integer", "bigint", "numeric"},
    "integer": {"bigint", "numeric"},
    "bigint": {"numeric"},
    "real": {"double precision"},
}
_ANYTHING = {"text", "character varying"}
_WHOLE = ("smallint", "integer", "bigint")
_MARK = re.compile(r'"(?:[^"]|"")*"|\?')


_NO_ORIGIN = (
    psycopg.errors.InsufficientPrivilege,
    psycopg.errors.ConfigurationLimitExceeded,
    psycopg.errors.ObjectNotInPrerequisiteState,
    psycopg.errors.UndefinedFunction,
)
"""The role may not, or the server keeps no origins: commits go without."""


def _origin(stream: str, target: str) -> str:
    return f"millstream_{stream}_{target}"


class PostgresTarget(LaneTarget):
    """The driver side. See `targets.base.Target` for the contract."""

    def __init__(self, options: PostgresTargetOptions) -> None:
        super().__init__(PostgresDatabase, options)
        self._uri, self._auth_ref = options.uri, options.auth_ref

    def close(self) -> None:
        super().close()
        sessions.close_idle(self._uri, self._auth_ref)


class PostgresDatabase(Database):
    """A session of the target, taken for one transaction."""

    kind = "postgres"
    boolean = "boolean"
    case_matters = True
    adds_keys = True

    def __init__(self, options: LaneOptions) -> None:
        super().__init__(options)
        assert isinstance(options, PostgresTargetOptions)  # noqa: S101 - for the type checker
        self._uri, self._auth_ref = options.uri, options.auth_ref
        self._taken: Session | None = None
        self._filled: set[str] = set()
        self._queue = Queue()
        self._removals: list[Callable[[], None]] | None = None

    def __enter__(self) -> Self:
        self._taken = sessions.take(self._uri, self._auth_ref)
        self._taken.connection.patience = sessions.ASKING_SECONDS if self.asking else sessions.WRITING_SECONDS
        self.where = self._taken.where
        self.known = self._taken.known
        return self

    def __exit__(self, *error: object) -> None:
        session, self._taken = self._taken, None
        if session is None:
            return
        if error[0] is None and not session.connection.closed:
            sessions.give_back(self._uri, self._auth_ref, session)
        else:
            # What it knows, and what it staged, may have been rolled back.
            session.connection.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        self._filled, self._queue = set(), Queue()
        self.run("BEGIN")
        try:
            yield
        except BaseException:
            self._session.connection.close()
            raise
        self.run("COMMIT")
        if self._session.marked:
            self.run("SELECT pg_replication_origin_session_reset()")
            self._session.marked = False

    @contextmanager
    def piece(self) -> Iterator[None]:
        """What the session remembers of temporary tables and of removals that wait goes back too."""
        session, removals = self._session, None if self._removals is None else len(self._removals)
        staged, filled = dict(session.staged), set(self._filled)
        try:
            with super().piece():
                yield
        except TargetError:
            session.staged, self._filled = staged, filled
            if self._removals is not None:
                del self._removals[removals:]
            raise

    def run(self, statement: str, parameters: Sequence[Any] = ()) -> int:
        return self._execute(statement, parameters).rowcount

    def rows(self, statement: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        return self._execute(statement, parameters).fetchall()

    def given(self, name: str, values: Sequence[Values]) -> str:
        # Where pieces are taken back, errors must come with their statements.
        if self.takes_back or not can_be_given(values):
            return self.stage(name, values)
        return self._queue.give(name, values)

    def do(self, statement: str) -> None:
        if not self._queue.takes(statement):
            self.run(statement)
        elif self._queue.is_full:
            self._catch_up()

    def _catch_up(self) -> None:
        """Do what waits."""
        waiting, self._queue = self._queue, Queue()
        if waiting:
            waiting.run(self._session, self._second_look)

    def _second_look(self, name: str, values: Sequence[Values]) -> None:
        """Raise RowRefused that names the column, if the values alone are refused: COPY tells it, JSON does not."""
        with PostgresDatabase(self.options) as again, again.transaction():
            again.stage(name, values)

    def own(self, name: str) -> str:
        return f"_millstream.{quoted(name)}"

    def has_own(self) -> bool:
        return self.rows("SELECT to_regclass('_millstream.cursors') IS NOT NULL") == [(True,)]

    def create_own(self) -> None:
        self._make_schema("_millstream")
        for name, columns in OWN.items():
            if self.rows("SELECT to_regclass(?) IS NULL", (self.own(name),)) == [(True,)]:
                self.run(f"CREATE TABLE IF NOT EXISTS {self.own(name)} {columns}")

    def table(self, relation: Relation) -> str:
        return f"{quoted(relation.schema)}.{quoted(relation.name)}"

    def columns(self, relation: Relation) -> dict[str, str] | None:
        found = self.rows(
            "SELECT attname, format_type(atttypid, atttypmod) FROM pg_attribute WHERE attrelid = to_regclass(?) "
            "AND attnum > 0 AND NOT attisdropped ORDER BY attnum",
            (self.table(relation),),
        )
        return dict(found) or None

    def types(self, relation: Relation) -> list[str]:
        return [self._type(column) for column in relation.columns]

    def metadata_types(self) -> dict[str, str]:
        return dict(zip(METADATA, _METADATA, strict=True))

    def fits(self, wanted: str, there: str) -> bool:
        full = {"timestamptz": "timestamp with time zone"}.get(wanted, wanted)
        bare = re.sub(r"\(.*\)", "", full)
        return there == full or there in _ANYTHING or there in _WIDER.get(full, set()) or (there == bare == "numeric")

    def narrower(self, wanted: str, there: str) -> bool:
        if there in ("smallint", "integer"):
            return there in _WHOLE[: _WHOLE.index(wanted)] if wanted in _WHOLE else False
        text = wanted.partition("(")[0] in _ANYTHING
        return text and re.fullmatch(r"character varying\(\d+\)", there) is not None

    def check_adoption(self, relation: Relation) -> None:
        """A table that a stream captures here may be the source itself."""
        captured = self.rows(
            "SELECT pubname FROM pg_publication_tables WHERE schemaname = ? AND tablename = ? "
            "AND pubname LIKE 'millstream%'",
            (relation.schema, relation.name),
        )
        if captured:
            raise TargetRefused(
                f"the table {relation.table} at {self.where} is captured there (publication {captured[0][0]})",
                hint="a stream must not write to its own source: give the target another database",
            )

    def create(self, relation: Relation, columns: Sequence[ColumnDef], key: Sequence[str]) -> None:
        self._make_schema(relation.schema)
        super().create(relation, columns, key)

    def add_keys(self) -> None:
        self._session.connection.patience = sessions.INDEXING_SECONDS
        super().add_keys()
        self._session.connection.patience = sessions.WRITING_SECONDS

    def add_column(self, table: str, column: ColumnDef, constant: Constant | None, default: str = "") -> None:
        if constant is None:
            super().add_column(table, column, None, default)
            return
        # As the source did it: the server notes the value, and no row is written.
        text = constant.text.replace("'", "''")
        super().add_column(table, column, None, f" DEFAULT '{text}'")
        self.run(f"ALTER TABLE {table} ALTER COLUMN {quoted(column.name)} DROP DEFAULT")

    def change_key(self, table: str, old: Sequence[str], new: Sequence[str]) -> None:
        found = self.rows(
            "SELECT conname FROM pg_constraint WHERE conrelid = to_regclass(?) AND contype = 'p'", (table,)
        )
        for (name,) in found:
            self.run(f"ALTER TABLE {table} DROP CONSTRAINT {quoted(name)}")
        for name in old:
            if name not in new:
                self.run(f"ALTER TABLE {table} ALTER COLUMN {quoted(name)} DROP NOT NULL")
        self.run(f"ALTER TABLE {table} ADD PRIMARY KEY ({', '.join(map(quoted, new))})")

    def insert(self, table: str, values: Sequence[Values]) -> None:
        self._catch_up()
        names = ", ".join(quoted(each.column.name) for each in values)
        session = self._session
        with (
            errors(session.where, values, stale=session.used_before),
            session.connection.cursor() as cursor,
            cursor.copy(f"COPY {table} ({names}) FROM STDIN".encode()) as copy,
        ):
            # The server takes in one piece while the next one is made.
            for piece in copy_text(values):
                copy.write(memoryview(piece))

    def takes_copied(self, table: str, names: Sequence[str], relation: Relation) -> bool:
        types = "SELECT attname, atttypid::int8 FROM pg_attribute WHERE attrelid = to_regclass(?) AND attnum > 0"
        return takes_as_they_are(relation, names, dict(self.rows(types, (table,))))

    def pass_on(
        self, table: str, names: Sequence[str], copied: Iterator[pa.LargeBinaryArray], seq: int, *, soft: bool
    ) -> None:
        self._catch_up()
        listed = ", ".join(quoted(name) for name in ("_ms_seq", *(["_ms_deleted"] if soft else []), *names))
        session = self._session
        with (
            errors(session.where, stale=session.used_before),
            session.connection.cursor() as cursor,
            cursor.copy(f"COPY {table} ({listed}) FROM STDIN (FORMAT binary)".encode()) as copy,
            closing(ahead(copy_pieces(copied, len(names), seq, soft=soft))) as coming,
        ):
            for piece in coming:
                copy.write(memoryview(piece))

    def stage(self, name: str, values: Sequence[Values]) -> str:
        table = f"pg_temp.{quoted(name)}"
        columns = tuple(each.column for each in values)
        staged = self._session.staged
        if staged.get(name) != columns:
            lines = ", ".join(f"{quoted(column.name)} {column.type}" for column in columns)
            if name in staged:
                self.run(f"DROP TABLE {table}")
            self.run(f"CREATE TEMPORARY TABLE {quoted(name)} ({lines}) ON COMMIT DELETE ROWS")
            staged[name] = columns
        elif name in self._filled:
            self.run(f"TRUNCATE {table}")
        self._filled.add(name)
        self.insert(table, values)
        return table

    def inserting(self, columns: str) -> str:
        # A column that makes its own values (GENERATED ALWAYS AS IDENTITY) takes the source's.
        return f"({columns}) OVERRIDING SYSTEM VALUE"

    # What it holds

    def parts(self, relation: Relation) -> list[Json]:
        ((pages,),) = self.rows(
            "SELECT pg_relation_size(?::regclass) / current_setting('block_size')::int8", (self.table(relation),)
        )
        return page_ranges(int(pages))

    def held(self, relation: Relation, part: Json, living: str, order: str | None = None) -> Iterator[pa.Table]:
        there = self.columns(relation) or {}
        values = [self._as_sent(column, there.get(column.name)) for column in exposed(relation).columns]
        statement = copy_statement(relation, values, self.table(relation), part, living, order)
        with errors(self._session.where):
            yield from read_copy(self._session.connection, statement, exposed(relation))

    def _as_sent(self, column: Column, there: str | None) -> str:
        """The column's values with the type that the source's have, if they can be had."""
        if there is None:
            return "NULL"
        wanted, name = self._type(column), quoted(column.name)
        return name if there == wanted else f"{name}::{wanted}"

    # Foreign keys

    def ordered(self, tables: list[list[Part]]) -> list[list[Part]]:
        """Parents first, where the session must care."""
        self._removals = None
        if self._session.replica:
            return tables
        numbers = {(parts[0].relation.schema, parts[0].relation.name): at for at, parts in enumerate(tables)}
        parents = self._parents(numbers)
        if not parents:
            return tables
        self._removals = []
        self.run("SET CONSTRAINTS ALL DEFERRED")
        try:
            order = list(TopologicalSorter(parents).static_order())
        except CycleError as cycle:
            names = ", ".join(sorted({tables[at][0].relation.table for at in cycle.args[1]}))
            raise TargetRefused(
                f"{self.where}: the foreign keys of {names} go round in a circle, and are checked at once",
                hint="make one of them DEFERRABLE, or allow the role to SET session_replication_role",
            ) from None
        return [tables[at] for at in order]

    def _parents(self, numbers: dict[tuple[str, str], int]) -> dict[int, set[int]]:
        """By table those of the batch that it refers to; empty when no table of the batch has such a key at all."""
        found = self.rows(
            "SELECT cn.nspname, c.relname, pn.nspname, p.relname, k.condeferrable FROM pg_constraint k "
            "JOIN pg_class c ON c.oid = k.conrelid JOIN pg_namespace cn ON cn.oid = c.relnamespace "
            "JOIN pg_class p ON p.oid = k.confrelid JOIN pg_namespace pn ON pn.oid = p.relnamespace "
            "WHERE k.contype = 'f'"
        )
        parents: dict[int, set[int]] = {at: set() for at in numbers.values()}
        concerned = False
        for schema, name, parent_schema, parent, deferrable in found:
            child, above = numbers.get((schema, name)), numbers.get((parent_schema, parent))
            concerned = concerned or child is not None or above is not None
            if child is not None and above is not None and child != above and not deferrable:
                parents[child].add(above)
        return parents if concerned else {}

    def remove(self, removal: Callable[[], None]) -> None:
        if self._removals is None:
            removal()
        else:
            self._removals.append(removal)

    def settle(self) -> None:
        for removal in reversed(self._removals or []):
            removal()
        self._catch_up()

    # Loops

    def mark(self, context: TargetContext) -> None:
        """Let the commit carry an origin of this stream and target, where the role and the server allow it."""
        session, name = self._session, _origin(context.stream, context.target)
        if name not in session.origins:
            session.origins[name] = self._try_origin(name)
        elif session.origins[name]:
            self.rows("SELECT pg_replication_origin_session_setup(?)", (name,))
        session.marked = session.origins[name]

    def unmark(self, stream: str, target: str) -> None:
        name, session = _origin(stream, target), self._session
        session.origins.pop(name, None)
        try:
            with errors(self.where, passing=_NO_ORIGIN), session.connection.transaction():
                session.connection.execute(
                    "SELECT pg_replication_origin_drop(roname) FROM pg_replication_origin WHERE roname = $1", (name,)
                )
        except _NO_ORIGIN:
            return

    def _try_origin(self, name: str) -> bool:
        connection = self._session.connection
        try:
            with errors(self.where, passing=_NO_ORIGIN), connection.transaction():
                ((known,),) = connection.execute("SELECT pg_replication_origin_oid($1)", (name,)).fetchall()
                if known is None:
                    connection.execute("SELECT pg_replication_origin_create($1)", (name,))
                connection.execute("SELECT pg_replication_origin_session_setup($1)", (name,))
        except _NO_ORIGIN:
            return False
        return True

    # Types

    def _type(self, column: Column) -> str:
        oid, modifier = column.type_oid, column.type_mod
        if oid in _NOT_HERE:
            return "text[]" if column.element_type_oid else "text"
        if oid >= _FIRST_OF_USERS:
            named = self._named_type(column.type_name)
            if named is not None:
                return named
            if column.base_type_oid is None or column.base_type_oid >= _FIRST_OF_USERS:
                return "text[]" if column.element_type_oid else "text"
            oid, modifier = column.base_type_oid, -1 if column.base_type_mod is None else column.base_type_mod
        ((name,),) = self.rows("SELECT format_type(?::oid, ?::integer)", (oid, modifier))
        return str(name) if name and name != "???" else "text"

    def _named_type(self, name: str | None) -> str | None:
        """A type that somebody made here too, under the same name."""
        if name is None:
            return None
        ((found,),) = self.rows("SELECT to_regtype(?) IS NOT NULL", (name,))
        return name if found else None

    def _make_schema(self, name: str) -> None:
        if self.rows("SELECT to_regnamespace(?) IS NULL", (quoted(name),)) == [(True,)]:
            self.run(f"CREATE SCHEMA IF NOT EXISTS {quoted(name)}")

    # Statements

    @property
    def _session(self) -> Session:
        if self._taken is None:
            raise TargetRefused("the Postgres target is not open")
        return self._taken

    def _execute(self, statement: str, parameters: Sequence[Any]) -> psycopg.Cursor[tuple[Any, ...]]:
        self._catch_up()
        session = self._session
        if parameters:
            numbers = iter(range(1, len(parameters) + 1))
            statement = _MARK.sub(lambda m: f"${next(numbers)}" if m[0] == "?" else m[0], statement)
        with errors(session.where, stale=session.used_before):
            return session.connection.execute(statement.encode(), tuple(parameters) or None)
