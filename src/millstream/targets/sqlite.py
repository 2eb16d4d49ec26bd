"""Target `sqlite`: mirrors or changelogs in a SQLite file, a table each, exactly once.

A table is called as at the source, schema included: `"public.orders"`. Values:

    boolean, integers          INTEGER
    float, double              REAL; NaN is the text NaN, since SQLite has none
    decimal, date, timestamp   TEXT, exact: SQLite's own numbers are doubles
    array                      TEXT, JSON
    binary                     BLOB
    anything else              TEXT

What has no home in its type at the other targets (infinity, a year before 1) is its exact text here.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import NoneType
from typing import Any, Self

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types
from pydantic import Field

from millstream.changelog import BEFORE, COMMON, METADATA, exposed, schema
from millstream.errors import RowRefused, TargetError, TargetRefused, TargetUnavailable
from millstream.latest import special_texts, whole
from millstream.model import Json, Relation
from millstream.targets.base import KeptTable
from millstream.targets.forms import json_form
from millstream.targets.lanes.database import OWN, ColumnDef, Database, LaneOptions, Values, matches, quoted
from millstream.targets.lanes.keeping import plain
from millstream.targets.lanes.lane import LaneTarget
from millstream.targets.lanes.sqlite_rows import OTHER, arrow_schema, from_arrow, to_arrow
from millstream.targets.retyping import HeldType
from millstream.wire.json_columns import json_text
from millstream.wire.text import decimal_text

BUSY_SECONDS = 5.0
"""How long a statement waits for another writer before the batch is tried again later."""

READ_ROWS = 16_384
"""So many rows are read at a time."""

_PERMANENT = {
    "SQLITE_PERM": "check the file's owner and rights",
    "SQLITE_READONLY": "check the file's owner and rights, and those of its directory",
    "SQLITE_CANTOPEN": "the directory must exist and be writable",
    "SQLITE_NOTADB": "the file is not a SQLite database: give another path",
    "SQLITE_CORRUPT": "restore the file from a copy, or start a new target",
    "SQLITE_TOOBIG": "a value is larger than SQLite can hold",
    "SQLITE_CONSTRAINT": "a constraint of the table does not allow what the source has: drop it",
    "SQLITE_MISMATCH": "a column of the table has a type that does not fit: create the table anew",
    "SQLITE_ERROR": "the table was changed by somebody else",
}
_OF_A_ROW = {"SQLITE_TOOBIG": "value", "SQLITE_MISMATCH": "value", "SQLITE_CONSTRAINT": "constraint"}
"""Of these, what a row is to blame for."""


class SqliteOptions(LaneOptions):
    """Options of a target of kind `sqlite`."""

    path: Path = Field(description="The SQLite file. It is created if it is missing.")


class SqliteTarget(LaneTarget):
    """The driver side. See `targets.base.Target` for the contract."""

    def __init__(self, options: SqliteOptions) -> None:
        super().__init__(SqliteDatabase, options)


class SqliteDatabase(Database):
    """One file, opened for one transaction."""

    kind = "sqlite"
    boolean = "INTEGER"

    def __init__(self, options: LaneOptions) -> None:
        super().__init__(options)
        assert isinstance(options, SqliteOptions)  # noqa: S101 - for the type checker
        self._path = options.path.absolute()
        self.where = str(self._path)
        self._connection: sqlite3.Connection | None = None

    def __enter__(self) -> Self:
        with self._errors():
            self._connection = sqlite3.connect(self._path, timeout=BUSY_SECONDS, isolation_level=None)
            # Readers are not held up by a batch, nor hold it up; a commit is on disk when it returns.
            for setting in ("journal_mode = WAL", "synchronous = FULL", "temp_store = MEMORY"):
                self._connection.execute(f"PRAGMA {setting}")
        return self

    def __exit__(self, *error: object) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    @contextmanager
    def transaction(self) -> Iterator[None]:
        self.run("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self.known.clear()
            self._open().rollback()
            raise
        self.run("COMMIT")

    def run(self, statement: str, parameters: Sequence[Any] = ()) -> int:
        with self._errors():
            return self._open().execute(statement, parameters).rowcount

    def rows(self, statement: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        with self._errors():
            return self._open().execute(statement, parameters).fetchall()

    def own(self, name: str) -> str:
        return quoted(f"_millstream_{name}")

    def is_there(self) -> bool:
        return self._path.exists()

    def has_own(self) -> bool:
        return bool(self.rows("SELECT 1 FROM sqlite_master WHERE name = '_millstream_cursors'"))

    def create_own(self) -> None:
        for name, columns in OWN.items():
            self.run(f"CREATE TABLE IF NOT EXISTS {self.own(name)} {columns}")

    def table(self, relation: Relation) -> str:
        # A dot in a name must not make it another table's.
        schema, name = (part.replace("%", "%25").replace(".", "%2E") for part in (relation.schema, relation.name))
        return quoted(f"{schema}.{name}")

    def columns(self, relation: Relation) -> dict[str, str] | None:
        found = self.rows(f"PRAGMA table_info({self.table(relation)})")
        return {name: kind for _, name, kind, *_ in found} or None

    def types(self, relation: Relation) -> list[str]:
        return [_type(field.type) for field in schema(relation) if field.name not in METADATA]

    def metadata_types(self) -> dict[str, str]:
        return {**{field.name: _type(field.type) for field in COMMON}, BEFORE: "TEXT"}

    def fits(self, wanted: str, there: str) -> bool:
        return wanted.upper() == there.upper()

    def must_convert(self, wanted: str, there: str, was: HeldType, now: HeldType) -> bool:
        # Decimals are text, with all digits of their scale.
        return not self.fits(wanted, there) or (was.scale is not None and now.scale not in (None, was.scale))

    def convert_column(self, table: str, column: ColumnDef, there: str, was: HeldType, now: HeldType) -> None:
        value = _converted(quoted(column.name), was, now)
        if self.fits(column.type, there):
            self.run(f"UPDATE {table} SET {quoted(column.name)} = {value}")
        else:
            self._make_anew(table, {column.name.lower(): (column.type, value)}, None)

    def change_key(self, table: str, old: Sequence[str], new: Sequence[str]) -> None:
        self._make_anew(table, {}, new)

    def _make_anew(self, table: str, changed: Mapping[str, tuple[str, str]], key: Sequence[str] | None) -> None:
        """SQLite can change neither a column's type nor a key: make the table once more, with its rows, indexes and
        triggers. `changed` has types and values of columns by their names in small letters; no `key`: it stays."""
        found = self.rows(f"PRAGMA table_info({table})")
        had = [name for _, name, _, _, _, place in sorted(found, key=lambda column: column[5]) if place]
        now = list(had if key is None else key)
        lines, values = [], []
        for _, name, kind, not_null, default, _ in found:
            kind, value = changed.get(name.lower(), (kind, quoted(name)))
            never_null = name in now or (not_null and name not in had)
            lines.append(
                f"{quoted(name)} {kind}{' NOT NULL' if never_null else ''}"
                f"{f' DEFAULT {default}' if default is not None else ''}"
            )
            values.append(value)
        if now:
            lines.append(f"PRIMARY KEY ({', '.join(map(quoted, now))})")
        name = table[1:-1].replace('""', '"')
        beside = self.rows(
            "SELECT sql FROM sqlite_master WHERE tbl_name = ? AND type IN ('index', 'trigger') AND sql IS NOT NULL",
            (name,),
        )
        self.run(f"CREATE TABLE _ms_anew ({', '.join(lines)})")
        self.run(f"INSERT INTO _ms_anew SELECT {', '.join(values)} FROM {table}")
        self.run(f"DROP TABLE {table}")
        # Views of the table are not to be looked at while it is away.
        self.run("PRAGMA legacy_alter_table = ON")
        self.run(f"ALTER TABLE _ms_anew RENAME TO {table}")
        self.run("PRAGMA legacy_alter_table = OFF")
        for (statement,) in beside:
            self.run(statement)

    def insert(self, table: str, values: Sequence[Values]) -> None:
        names = ", ".join(quoted(each.column.name) for each in values)
        marks = ", ".join("?" * len(values))
        columns = [_python(each) for each in values]
        with self._errors():
            self._open().executemany(f"INSERT INTO {table} ({names}) VALUES ({marks})", zip(*columns, strict=True))

    def stage(self, name: str, values: Sequence[Values]) -> str:
        table = f"temp.{quoted(name)}"
        columns = ", ".join(f"{quoted(each.column.name)} {each.column.type}" for each in values)
        self.run(f"DROP TABLE IF EXISTS {table}")
        self.run(f"CREATE TABLE {table} ({columns})")
        self.insert(table, values)
        return table

    def delete(self, table: str, key: Sequence[str], stage: str) -> None:
        # The staged keys are looked up in the table's index, and not the table's rows among them.
        self.run(
            f"DELETE FROM {table} WHERE rowid IN (SELECT t.rowid FROM {stage} AS s CROSS JOIN {table} AS t "
            f"WHERE {matches(key)} AND t._ms_seq < s.v)"
        )

    def held(self, relation: Relation, part: Json, living: str, order: str | None = None) -> Iterator[pa.Table]:
        there = self.columns(relation) or {}
        names = [column.name for column in exposed(relation).columns]
        wanted = ", ".join(quoted(name) if name in there else "NULL" for name in names)
        with self._errors():
            sorted_by = f" ORDER BY {order}" if order else ""
            found = self._open().execute(f"SELECT {wanted} FROM {self.table(relation)} WHERE {living}{sorted_by}")
            while rows := found.fetchmany(READ_ROWS):
                yield json_form([_said(column) for column in zip(*rows, strict=True)], names)

    @classmethod
    def form(cls, relation: Relation, rows: pa.Table) -> pa.Table:
        """JSON texts of what SQLite stores: of one value a number, of another a text, whatever the column's type."""
        special = special_texts(rows)
        names = [column.name for column in exposed(relation).columns]
        values = [Values(ColumnDef(name, ""), whole(rows[name]), special.get(name)) for name in names]
        return json_form([_said(_python(each)) for each in values], names)

    def own_keys(self, keys: pa.Table) -> pa.Table:
        return pa.table({name: _unsaid(keys[name].to_pylist()) for name in keys.column_names})

    keeps_state = True

    @contextmanager
    def reading(self) -> Iterator[None]:
        # Its first statement fixes what is seen. With a write-ahead log no batch waits for it.
        self.run("BEGIN")
        try:
            yield
        finally:
            self._open().rollback()

    def has_table(self, place: str) -> bool:
        return bool(self.rows("SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ?", (plain(place),)))

    def kept_table(self, place: str) -> KeptTable:
        made = self.rows(
            "SELECT type, sql FROM sqlite_master WHERE tbl_name = ? AND sql IS NOT NULL ORDER BY rowid", (plain(place),)
        )
        make = tuple(sql for kind, sql in made if kind == "table")
        if not make:
            raise self._dropped(plain(place))
        finish = tuple(sql for kind, sql in made if kind != "table")
        kept = arrow_schema({name: kind for _, name, kind, *_ in self.rows(f"PRAGMA table_info({place})")})
        return KeptTable(plain(place), place, kept, self._kept_rows(place, kept), make, finish)

    def _kept_rows(self, place: str, kept: pa.Schema) -> Iterator[pa.RecordBatch]:
        names = ", ".join(quoted(name) for name in kept.names if name != OTHER)
        with self._errors():
            found = self._open().execute(f"SELECT {names} FROM {place}")
            while rows := found.fetchmany(READ_ROWS):
                yield to_arrow(rows, kept)

    def put_rows(self, place: str, batch: pa.RecordBatch) -> None:
        names = [name for name in batch.schema.names if name != OTHER]
        into = f"{place} ({', '.join(map(quoted, names))}) VALUES ({', '.join('?' * len(names))})"
        with self._errors():
            self._open().executemany(f"INSERT INTO {into}", zip(*from_arrow(batch), strict=True))

    def _open(self) -> sqlite3.Connection:
        if self._connection is None:
            raise TargetUnavailable(f"{self.where} is not open")
        return self._connection

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """SQLite's errors as ours. Its codes say enough, and none of its words may be a user's value."""
        try:
            yield
        except sqlite3.Error as failed:
            code = getattr(failed, "sqlite_errorname", None) or type(failed).__name__
            raise self._error(code) from failed

    def _error(self, code: str) -> TargetError:
        plain = "_".join(code.split("_")[:2])
        if plain in _OF_A_ROW:
            return RowRefused(f"cannot write {self.where}: {code}", hint=_PERMANENT[plain], kind=_OF_A_ROW[plain])
        if plain in _PERMANENT:
            return TargetRefused(f"cannot write {self.where}: {code}", hint=_PERMANENT[plain])
        return TargetUnavailable(f"cannot write {self.where}: {code}")


def _type(arrow: pa.DataType) -> str:
    if types.is_integer(arrow) or types.is_boolean(arrow):
        return "INTEGER"
    if types.is_floating(arrow):
        return "REAL"
    return "BLOB" if types.is_binary(arrow) else "TEXT"


def _converted(value: str, was: HeldType, now: HeldType) -> str:
    """What a stored value becomes when the source's column has another type, which keeps its values."""
    if was.is_integer:
        return f"CAST({value} AS TEXT)" + (f" || '.{'0' * now.scale}'" if now.scale else "")
    if was.scale is None or not now.scale:
        return value
    more = ("" if was.scale else ".") + "0" * (now.scale - was.scale)
    # NaN and Infinity have no digits.
    return f"CASE WHEN {value} GLOB '*[0-9]' THEN {value} || '{more}' ELSE {value} END"


def _python(values: Values) -> Sequence[Any]:
    """The values as SQLite takes them."""
    array = values.array
    if types.is_decimal(array.type):
        array = decimal_text(array)
    elif types.is_list(array.type) or types.is_struct(array.type):
        array = pc.if_else(array.is_valid(), json_text(array), None)
    elif types.is_floating(array.type) and pc.any(pc.is_nan(array)).as_py():
        return [value if value == value else "NaN" for value in array.to_pylist()]
    elif types.is_timestamp(array.type) or types.is_date(array.type) or types.is_time(array.type):
        array = array.cast(pa.string())
    taken: Sequence[Any] = (array if values.special is None else pc.coalesce(values.special, array)).to_pylist()
    return taken


def _said(values: Sequence[Any]) -> pa.StringArray:
    """Stored values as JSON texts; bytes as SQLite writes them, x'00ff'."""
    kinds = set(map(type, values))
    if kinds <= {str, NoneType}:
        return json_text(pa.array(values, pa.string()))
    if kinds <= {int, NoneType}:
        return json_text(pa.array(values, pa.int64()))
    if kinds <= {bool, NoneType}:
        return json_text(pa.array(values, pa.bool_()).cast(pa.int64()))
    return pa.array([_json(value) for value in values], pa.string())


def _json(value: Any) -> str:
    if isinstance(value, bytes):
        return f"x'{value.hex()}'"
    # SQLite has no -0.0, and what others write as one is 0.0 when it is read.
    return json.dumps(value + 0.0 if isinstance(value, float) else value, ensure_ascii=False)


def _unsaid(texts: Sequence[str]) -> pa.Array:
    values = [bytes.fromhex(text[2:-1]) if text.startswith("x'") else json.loads(text) for text in texts]
    try:
        return pa.array(values)
    except pa.ArrowInvalid:
        raise TargetRefused(
            "a row that the source does not have has a key of another type than the others",
            hint="remove it by hand, and verify again",
        ) from None
