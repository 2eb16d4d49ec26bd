"""Target `duckdb`: mirrors or changelogs in a DuckDB file, with types of their own for all columns, exactly once.

DuckDB lets one process at a time open a file for writing, and nobody read it meanwhile. So the file
is opened for each batch and closed after it; while somebody else has it, the batch is tried again.

A value without a home in its type (NaN in a decimal, an array of two dimensions) is NULL in its
column, and its exact text stands in `_ms_special`, a map by column.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import pyarrow as pa
from pyarrow import types
from pydantic import Field

from millstream.changelog import BEFORE, COMMON, METADATA, schema
from millstream.errors import DependencyError, RowRefused, TargetError, TargetRefused, TargetUnavailable
from millstream.model import Json, Relation
from millstream.targets.base import KeptTable
from millstream.targets.constants import Constant
from millstream.targets.forms import form_schema
from millstream.targets.lanes.database import OWN, ColumnDef, Database, LaneOptions, Values, matches, quoted
from millstream.targets.lanes.keeping import plain, same_table
from millstream.targets.lanes.lane import LaneTarget
from millstream.targets.retyping import HeldType

if TYPE_CHECKING:
    import duckdb

Done = TypeVar("Done")

MEMORY = "1GB"
"""What DuckDB may use in a task; beyond that it works on disk."""

READ_ROWS = 16_384
"""So many rows are read at a time."""

_TYPES = {
    "bool": "BOOLEAN",
    "int16": "SMALLINT",
    "int32": "INTEGER",
    "int64": "BIGINT",
    "float": "FLOAT",
    "double": "DOUBLE",
    "string": "VARCHAR",
    "binary": "BLOB",
    "date32[day]": "DATE",
    "time64[us]": "TIME",
    "timestamp[us]": "TIMESTAMP",
    "timestamp[us, tz=UTC]": "TIMESTAMP WITH TIME ZONE",
}

_WHOLE = ("TINYINT", "SMALLINT", "INTEGER", "BIGINT")
"""Each holds what those before it do."""
_DECIMAL = re.compile(r"DECIMAL\((\d+),(\d+)\)")

_GIVEN = "_ms_given"
_OF_A_ROW = {
    "ConstraintException": "constraint",
    "ConversionException": "value",
    "OutOfRangeException": "value",
    "InvalidInputException": "value",
}
_PASSING = (
    *("IOException", "TransactionException", "OutOfMemoryException", "InterruptException"),
    # Another thread of this process is just letting go of the file.
    "ResourceInUseException",
)
_REFUSED = {
    "Permission denied": "check the file's owner and rights, and those of its directory",
    "not a valid DuckDB database file": "the file is not a DuckDB database: give another path",
    "No such file or directory": "the directory must exist",
    "Is a directory": "give the path of a file",
}


class DuckdbOptions(LaneOptions):
    """Options of a target of kind `duckdb`."""

    path: Path = Field(description="The DuckDB file. It is created if it is missing.")


class DuckdbTarget(LaneTarget):
    """The driver side. See `targets.base.Target` for the contract."""

    def __init__(self, options: DuckdbOptions) -> None:
        _driver()
        super().__init__(DuckdbDatabase, options)


def _driver() -> Any:
    try:
        import duckdb
    except ImportError:
        raise DependencyError("the target duckdb needs its package", hint="pip install 'millstream[duckdb]'") from None
    return duckdb


class DuckdbDatabase(Database):
    """One file, opened for one transaction."""

    kind = "duckdb"
    boolean = "BOOLEAN"
    special_type = "MAP(VARCHAR, VARCHAR)"
    many_readers = False

    def __init__(self, options: LaneOptions) -> None:
        super().__init__(options)
        assert isinstance(options, DuckdbOptions)  # noqa: S101 - for the type checker
        self._path = options.path.absolute()
        self.where = str(self._path)
        self._connection: duckdb.DuckDBPyConnection | None = None
        self._done: list[Callable[[], object]] | None = None
        """What the transaction has written so far, where pieces of it are taken back."""
        self._there: dict[tuple[str, str], dict[str, str]] | None = None
        """The columns of all tables; None while nobody has asked, or when something has changed them."""

    def __enter__(self) -> Self:
        self._there = None
        with self._errors():
            self._connection = _driver().connect(str(self._path), config={"memory_limit": MEMORY})
            self._connection.execute("SET TimeZone = 'UTC'")
        return self

    def __exit__(self, *error: object) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    @contextmanager
    def transaction(self) -> Iterator[None]:
        self._execute("BEGIN")
        self._done = [] if self.takes_back else None
        try:
            yield
        except BaseException:
            # Closing rolls back; a statement that failed has ended the transaction already.
            self.known.clear()
            self.__exit__()
            raise
        self._execute("COMMIT")

    @contextmanager
    def piece(self) -> Iterator[None]:
        """DuckDB has no savepoints: a transaction in which something failed is begun and done anew, up to there."""
        assert self._done is not None  # noqa: S101 - said before the transaction began
        before = len(self._done)
        try:
            yield
        except TargetError:
            done = self._done[:before]
            self.__exit__()
            self.__enter__()
            self._execute("BEGIN")
            for action in done:
                action()
            self._done = done
            raise

    def run(self, statement: str, parameters: Sequence[Any] = ()) -> int:
        return self._do(lambda: self._execute(statement, parameters))

    def _execute(self, statement: str, parameters: Sequence[Any] = ()) -> int:
        if statement.startswith(("ALTER", "CREATE TABLE", "DROP")):
            self._there = None
        with self._errors():
            return self._open().execute(statement, list(parameters)).rowcount

    def _do(self, action: Callable[[], Done]) -> Done:
        """Do it; and if need be, again."""
        result = action()
        if self._done is not None:
            self._done.append(action)
        return result

    def rows(self, statement: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        with self._errors():
            return self._open().execute(statement, list(parameters)).fetchall()

    def own(self, name: str) -> str:
        return f"_millstream.{quoted(name)}"

    def is_there(self) -> bool:
        return self._path.exists()

    def has_own(self) -> bool:
        return bool(self.rows("SELECT 1 FROM duckdb_tables() WHERE schema_name = '_millstream'"))

    def create_own(self) -> None:
        self.run("CREATE SCHEMA IF NOT EXISTS _millstream")
        for name, columns in OWN.items():
            self.run(f"CREATE TABLE IF NOT EXISTS {self.own(name)} {columns}")

    def table(self, relation: Relation) -> str:
        return f"{quoted(relation.schema)}.{quoted(relation.name)}"

    def columns(self, relation: Relation) -> dict[str, str] | None:
        # All at once: DuckDB looks through the columns of all tables for those of one. Nobody else changes them now.
        if self._there is None:
            self._there = {}
            found = self.rows(
                "SELECT schema_name, table_name, column_name, data_type FROM duckdb_columns() "
                "WHERE database_name = current_database() ORDER BY column_index"
            )
            for schema_name, table, name, kind in found:
                self._there.setdefault((schema_name.lower(), table.lower()), {})[name] = kind
        there = self._there.get((relation.schema.lower(), relation.name.lower()))
        return dict(there) if there else None

    def types(self, relation: Relation) -> list[str]:
        return [_type(field.type) for field in schema(relation) if field.name not in METADATA]

    def metadata_types(self) -> dict[str, str]:
        plain = {field.name: _TYPES.get(str(field.type), "VARCHAR") for field in COMMON}
        return {**plain, BEFORE: "VARCHAR"}

    def fits(self, wanted: str, there: str) -> bool:
        one, other = (text.upper().replace('"', "") for text in (wanted, there))
        both_whole = one in _WHOLE and other in _WHOLE
        return one == other or (both_whole and _WHOLE.index(one) < _WHOLE.index(other))

    def narrower(self, wanted: str, there: str) -> bool:
        if wanted in _WHOLE and there in _WHOLE:
            return _WHOLE.index(there) < _WHOLE.index(wanted)
        decimals = _DECIMAL.fullmatch(wanted), _DECIMAL.fullmatch(there)
        if decimals[0] is None or decimals[1] is None:
            return False
        (wide, scale), (narrow, other) = (tuple(map(int, found.groups())) for found in decimals if found)
        # With fewer places it would round, and refuse nothing.
        return scale == other and narrow < wide

    def create(self, relation: Relation, columns: Sequence[ColumnDef], key: Sequence[str]) -> None:
        # No primary key: MERGE needs none, and DuckDB's index would see deleted keys until the commit.
        self.run(f"CREATE SCHEMA IF NOT EXISTS {quoted(relation.schema)}")
        super().create(relation, columns, ())

    def insert(self, table: str, values: Sequence[Values]) -> None:
        names = ", ".join(quoted(each.column.name) for each in values)
        self._do(lambda: self._run_given(values, f"INSERT INTO {table} ({names}) SELECT * FROM {_GIVEN}"))

    def stage(self, name: str, values: Sequence[Values]) -> str:
        made = f"CREATE OR REPLACE TEMPORARY TABLE {quoted(name)} AS SELECT * FROM {_GIVEN}"
        self._do(lambda: self._run_given(values, made))
        return f"temp.{quoted(name)}"

    def upsert(
        self, table: str, columns: Sequence[str], key: Sequence[str], stage: str, *, soft: bool, only: str
    ) -> None:
        values = {quoted(name): f"s.c{number}" for number, name in enumerate(columns)}
        on = " AND ".join(f"t.{quoted(name)} = {values[quoted(name)]}" for name in key)
        values["_ms_seq"] = "s.v"
        if soft:
            values["_ms_deleted"] = "false"
        updates = ", ".join(f"{name} = {value}" for name, value in values.items())
        self.run(
            f"MERGE INTO {table} AS t USING (SELECT * FROM {stage} AS s WHERE {only}) AS s ON {on} "
            f"WHEN MATCHED AND t._ms_seq < s.v THEN UPDATE SET {updates} "
            f"WHEN NOT MATCHED THEN INSERT ({', '.join(values)}) VALUES ({', '.join(values.values())})"
        )

    def kept_special(self, number: int, kept: Mapping[str, int]) -> str:
        texts = {name.replace("'", "''"): at for name, at in kept.items()}
        flags = " OR ".join(f"(s.k{at} AND e.key = '{name}')" for name, at in texts.items())
        theirs = f"map_from_entries(list_filter(map_entries(coalesce(t._ms_special, MAP {{}})), lambda e: {flags}))"
        return f"map_concat({theirs}, coalesce(s.c{number}, MAP {{}}))"

    def add_column(self, table: str, column: ColumnDef, constant: Constant | None, default: str = "") -> None:
        super().add_column(table, column, constant, default)
        if constant is not None and constant.special is not None:
            texts = "map_concat(coalesce(_ms_special, MAP {}), map_from_entries([(?, ?)]))"
            self.run(f"UPDATE {table} SET _ms_special = {texts}", (column.name, constant.special))

    def rename_column(self, table: str, old: str, new: str) -> None:
        super().rename_column(table, old, new)
        named = "(CASE WHEN e.key = ? THEN ? ELSE e.key END, e.value)"
        texts = f"map_from_entries(list_transform(map_entries(_ms_special), lambda e: {named}))"
        where = "list_contains(map_keys(_ms_special), ?)"
        self.run(f"UPDATE {table} SET _ms_special = {texts} WHERE {where}", (old, new, old))

    def convert_column(self, table: str, column: ColumnDef, there: str, was: HeldType, now: HeldType) -> None:
        super().convert_column(table, column, there, was, now)
        if self.options.write == "mirror" and column.type == "VARCHAR":
            # What had no home in a number has one in a text.
            text, name = f"coalesce(_ms_special[?], {quoted(column.name)})", (column.name,)
            self.run(f"UPDATE {table} SET {quoted(column.name)} = {text} WHERE _ms_special IS NOT NULL", name)
            self._forget_special(table, column.name)

    def change_key(self, table: str, old: Sequence[str], new: Sequence[str]) -> None:
        for name in old:
            self.run(f"ALTER TABLE {table} ALTER COLUMN {quoted(name)} DROP NOT NULL")
        for name in new:
            self.run(f"ALTER TABLE {table} ALTER COLUMN {quoted(name)} SET NOT NULL")

    def drop_column(self, table: str, name: str) -> None:
        super().drop_column(table, name)
        self._forget_special(table, name)

    def _forget_special(self, table: str, name: str) -> None:
        texts = "map_from_entries(list_filter(map_entries(_ms_special), lambda e: e.key <> ?))"
        where = "list_contains(map_keys(_ms_special), ?)"
        self.run(f"UPDATE {table} SET _ms_special = {texts} WHERE {where}", (name, name))

    def make_way(self, table: str, key: Sequence[str], stage: str) -> None:
        # Without an index a key may be there twice, and one row of it comes back.
        self.run(f"DELETE FROM {table} AS t USING {stage} AS s WHERE {matches(key)}")

    def held(self, relation: Relation, part: Json, living: str, order: str | None = None) -> Iterator[pa.Table]:
        there = self.columns(relation) or {}
        wanted = form_schema(relation)
        names = [quoted(name) if name in there else f"NULL AS {quoted(name)}" for name in wanted.names]
        if self.options.write == "changelog":
            # There it is JSON.
            names[-1] = f"{names[-1]}::JSON::MAP(VARCHAR, VARCHAR) AS _ms_special"
        sorted_by = f" ORDER BY {order}" if order else ""
        with self._errors():
            found = self._open().sql(f"SELECT {', '.join(names)} FROM {self.table(relation)} WHERE {living}{sorted_by}")
            for batch in found.to_arrow_reader(READ_ROWS) or ():
                yield pa.Table.from_batches([batch]).cast(wanted)

    keeps_state = True

    @contextmanager
    def reading(self) -> Iterator[None]:
        self._execute("BEGIN")
        try:
            yield
        finally:
            # Closing rolls back, also where a statement that failed has ended the transaction.
            self.__exit__()

    def has_table(self, place: str) -> bool:
        return self._made(place) is not None

    def _made(self, place: str) -> tuple[str, str, str] | None:
        """Schema, name, and the statement that makes a table."""
        found = self.rows(
            "SELECT schema_name, table_name, sql FROM duckdb_tables() WHERE database_name = current_database()"
        )
        return next(((a, b, sql) for a, b, sql in found if same_table(place, a, b)), None)

    def kept_table(self, place: str) -> KeptTable:
        made = self._made(place)
        if made is None:
            raise self._dropped(plain(place))
        schema_name, name, sql = made
        indexes = self.rows(
            "SELECT sql FROM duckdb_indexes() WHERE database_name = current_database() AND schema_name = ? "
            "AND table_name = ? AND sql IS NOT NULL",
            (schema_name, name),
        )
        with self._errors():
            rows = self._open().sql(f"SELECT * FROM {place}").to_arrow_reader(READ_ROWS)
        make = (f"CREATE SCHEMA IF NOT EXISTS {quoted(schema_name)}", sql)
        finish = tuple(row[0] for row in indexes)
        return KeptTable(plain(place), place, rows.schema, self._kept_rows(rows), make, finish)

    def _kept_rows(self, rows: pa.RecordBatchReader) -> Iterator[pa.RecordBatch]:
        with self._errors():
            yield from rows

    def put_rows(self, place: str, batch: pa.RecordBatch) -> None:
        with self._errors():
            self._open().register(_GIVEN, pa.Table.from_batches([batch]))
        self._execute(f"INSERT INTO {place} SELECT * FROM {_GIVEN}")
        self._open().unregister(_GIVEN)

    def _run_given(self, values: Sequence[Values], statement: str) -> None:
        """Run a statement that reads Arrow's columns as a table."""
        table = pa.table([each.array for each in values], names=[each.column.name for each in values])
        with self._errors():
            self._open().register(_GIVEN, table)
        self._execute(statement)
        # Not after an error: it has ended the transaction, and with it the connection's use.
        self._open().unregister(_GIVEN)

    def _open(self) -> duckdb.DuckDBPyConnection:
        if self._connection is None:
            raise TargetUnavailable(f"{self.where} is not open")
        return self._connection

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """DuckDB's errors as ours. Its words may hold a user's value, so only their kind is told."""
        try:
            yield
        except _driver().Error as failed:
            raise self._error(type(failed).__name__, str(failed)) from None

    def _error(self, name: str, words: str) -> TargetError:
        message = f"cannot write {self.where}: {name}"
        for sign, hint in _REFUSED.items():
            if name == "IOException" and sign in words:
                return TargetRefused(message, hint=hint)
        if name in _OF_A_ROW:
            hint = "change the table there so that it takes the row, or the row at the source"
            return RowRefused(message, hint=hint, kind=_OF_A_ROW[name])
        if name == "IOException" and "lock" in words:
            return TargetUnavailable(f"{self.where} is open in another process", hint="close it there")
        return TargetUnavailable(message) if name in _PASSING else TargetRefused(message)


def _type(arrow: pa.DataType) -> str:
    if types.is_decimal(arrow):
        return f"DECIMAL({arrow.precision},{arrow.scale})"
    if types.is_list(arrow):
        return f"{_type(arrow.value_type)}[]"
    if types.is_struct(arrow):
        return f"STRUCT({', '.join(f'{quoted(inner.name)} {_type(inner.type)}' for inner in arrow)})"
    return _TYPES[str(arrow)]
