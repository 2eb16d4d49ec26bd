"""A database as a lane uses it. One class per kind; the statements they share are in `mirror` and `lane`.

SQL here is what SQLite, DuckDB and Postgres have in common. Parameters are written `?`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import pyarrow as pa
from pydantic import BaseModel, ConfigDict, Field

from millstream.changelog import exposed
from millstream.errors import NotSupported, TargetError, TargetRefused
from millstream.model import Json, Relation
from millstream.targets.base import KeptTable, Part, TargetContext
from millstream.targets.constants import Constant
from millstream.targets.retyping import HeldType

SelfDatabase = TypeVar("SelfDatabase", bound="Database")

Write = Literal["mirror", "changelog"]
Deletes = Literal["hard", "soft"]
Dropped = Literal["keep", "drop"]


class LaneOptions(BaseModel):
    """The options that every database has."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    write: Write = Field(
        "mirror",
        description="`mirror`: a table equal to the source's; `changelog`: every change, in order.",
    )
    deletes: Deletes = Field(
        "hard",
        description="In a mirror: `hard` removes the row, `soft` keeps it with `_ms_deleted` true.",
    )
    dropped: Dropped = Field(
        "keep",
        description="In a mirror: a column that the source has no more stays with what it had (`keep`), or goes "
        "(`drop`).",
    )


@dataclass(frozen=True)
class ColumnDef:
    """A column as the database is to have it."""

    name: str
    type: str
    tight: bool = False
    """Whether some values that the source sends do not fit into it: they are refused with their rows."""


@dataclass(frozen=True)
class Values:
    """A column's values on their way into the database.

    `special` has the exact text of values that their Arrow type cannot hold, NULL where it can.
    """

    column: ColumnDef
    array: pa.Array
    special: pa.StringArray | None = None
    of: str = ""
    """The source's name of the column, for messages."""

    def part(self, begin: int, count: int) -> Values:
        """The values of so many rows, at most."""
        special = None if self.special is None else self.special.slice(begin, count)
        return replace(self, array=self.array.slice(begin, count), special=special)


class Database(ABC):
    """A connection with at most one transaction. Every error that leaves it is one of ours, without a row's value."""

    kind: str
    boolean: str
    """The type of a true or false."""
    where: str
    """What to call it in messages."""
    special_type: str | None = None
    """Where values without a home in their column need a column of their own, `_ms_special`: its type."""
    case_matters = False
    """Whether it can tell apart names that differ in case alone."""
    many_readers = True
    """Whether several processes can read it at once."""

    adds_keys = False
    """Whether a table can get its key when its rows are there: that is faster than to keep it while they come."""

    def __init__(self, options: LaneOptions) -> None:
        self.options = options
        self.loads = False
        """Whether tables that the transaction makes get all their rows in it, and then their keys (`add_keys`)."""
        self._keyless: dict[str, Sequence[str]] = {}
        self.asking = False
        """Whether only little is asked of it, by the driver: nobody waits long for that."""
        self.takes_back = False
        """Whether the next transaction has a `piece` or more."""
        self.known: dict[Any, Any] = {}
        """What was found out about tables in this connection; forgotten when a transaction is rolled back."""

    @abstractmethod
    def __enter__(self: SelfDatabase) -> SelfDatabase:
        """Connect, or take a connection that is still open."""

    @abstractmethod
    def __exit__(self, *error: object) -> None:
        """Let go of it; what was not committed is gone."""

    @abstractmethod
    def transaction(self) -> AbstractContextManager[None]:
        """A transaction that writes: committed at its end, durably, or rolled back by an error."""

    @contextmanager
    def piece(self) -> Iterator[None]:
        """A part of the transaction: when it raises, it was never there, and the transaction goes on."""
        self.run("SAVEPOINT piece")
        try:
            yield
        except TargetError:
            self.run("ROLLBACK TO SAVEPOINT piece")
            raise
        self.run("RELEASE SAVEPOINT piece")

    @abstractmethod
    def run(self, statement: str, parameters: Sequence[Any] = ()) -> int:
        """Run a statement; returns how many rows it concerned."""

    @abstractmethod
    def rows(self, statement: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """The rows of a query."""

    @abstractmethod
    def own(self, name: str) -> str:
        """The name, quoted, of a table of our own (`cursors`, `tables`)."""

    @abstractmethod
    def create_own(self) -> None:
        """Create our own tables where they are missing: `OWN` below."""

    @abstractmethod
    def table(self, relation: Relation) -> str:
        """The name, quoted, of the table for a relation."""

    @abstractmethod
    def columns(self, relation: Relation) -> dict[str, str] | None:
        """Names and types of the table's columns as they are now; None when there is no such table."""

    def check_adoption(self, relation: Relation) -> None:  # noqa: B027 - most have no reason against it
        """Raise TargetRefused if a table that was there before must not be written to."""

    def create(self, relation: Relation, columns: Sequence[ColumnDef], key: Sequence[str]) -> None:
        """Create the table for a relation. `key` is empty for one whose rows have no identity."""
        lines = [f"{quoted(c.name)} {c.type}{' NOT NULL' if c.name in (*key, '_ms_seq') else ''}" for c in columns]
        if key and self.loads and self.adds_keys:
            self._keyless[self.table(relation)] = key
        elif key:
            lines.append(_primary_key(key))
        self.run(f"CREATE TABLE {self.table(relation)} ({', '.join(lines)})")

    def add_keys(self) -> None:
        """Give the tables their keys that were made without. Raises RowRefused where two rows have the same one."""
        waiting, self._keyless = self._keyless, {}
        for table, key in waiting.items():
            self.run(f"ALTER TABLE {table} ADD {_primary_key(key)}")

    def add_column(self, table: str, column: ColumnDef, constant: Constant | None, default: str = "") -> None:
        """Add a column, which every row there has as NULL, or as `constant`, or as `default` (SQL) for good."""
        self.run(f"ALTER TABLE {table} ADD COLUMN {quoted(column.name)} {column.type}{default}")
        if constant is not None:
            special = None if constant.special is None else pa.array([constant.special])
            stage = self.stage("constant", [Values(ColumnDef("c0", column.type), constant.value, special)])
            self.run(f"UPDATE {table} SET {quoted(column.name)} = (SELECT c0 FROM {stage})")

    def rename_column(self, table: str, old: str, new: str) -> None:
        """Give a column another name; its values stay."""
        self.run(f"ALTER TABLE {table} RENAME COLUMN {quoted(old)} TO {quoted(new)}")

    def drop_column(self, table: str, name: str) -> None:
        """Remove a column and its values."""
        self.run(f"ALTER TABLE {table} DROP COLUMN {quoted(name)}")

    def must_convert(self, wanted: str, there: str, was: HeldType, now: HeldType) -> bool:
        """Whether a column has to be changed, since the source's has another type, which keeps its values."""
        return not self.fits(wanted, there)

    def convert_column(self, table: str, column: ColumnDef, there: str, was: HeldType, now: HeldType) -> None:
        """Give a column another type, and its values the form that the source gave them."""
        self.run(f"ALTER TABLE {table} ALTER COLUMN {quoted(column.name)} TYPE {column.type}")

    @abstractmethod
    def change_key(self, table: str, old: Sequence[str], new: Sequence[str]) -> None:
        """Let rows be told by other columns, which are there, none of them NULL, and no two rows alike."""

    def ordered(self, tables: list[list[Part]]) -> list[list[Part]]:
        """The tables of a batch in the order in which they can be written."""
        return tables

    def takes_copied(self, table: str, names: Sequence[str], relation: Relation) -> bool:
        """Whether rows that a Postgres source copies can be appended to these columns as they are."""
        return False

    def pass_on(
        self, table: str, names: Sequence[str], copied: Iterator[pa.LargeBinaryArray], seq: int, *, soft: bool
    ) -> None:
        """Append such rows, with their version."""
        raise NotSupported(f"{self.kind} takes no rows of a copy as they are")

    def remove(self, removal: Callable[[], None]) -> None:
        """Remove rows now, or where that must wait for rows of other tables, when the batch is `settle`d."""
        removal()

    def settle(self) -> None:  # noqa: B027 - nothing waits unless a database says so
        """Everything is written: do what had to wait for that."""

    def is_there(self) -> bool:
        """Whether there is anything to connect to; asked before `__enter__`."""
        return True

    @abstractmethod
    def has_own(self) -> bool:
        """Whether our own tables were made."""

    def unmark(self, stream: str, target: str) -> None:  # noqa: B027 - the same
        """The stream is gone: remove what its commits were marked with."""

    def mark(self, context: TargetContext) -> None:  # noqa: B027 - most have nothing to mark it with
        """Let the transaction's commit be known as ours."""

    @abstractmethod
    def types(self, relation: Relation) -> list[str]:
        """For each column of the relation the type that a new table gets."""

    @abstractmethod
    def metadata_types(self) -> dict[str, str]:
        """The type of each of our own columns (`changelog.METADATA`) in a changelog."""

    @abstractmethod
    def fits(self, wanted: str, there: str) -> bool:
        """Whether every value of one type can be written to a column of another."""

    def narrower(self, wanted: str, there: str) -> bool:
        """Whether a column of another type takes some of the values exactly, and refuses the others (RowRefused)."""
        return False

    @abstractmethod
    def insert(self, table: str, values: Sequence[Values]) -> None:
        """Append rows to a table. `table` is quoted."""

    @abstractmethod
    def stage(self, name: str, values: Sequence[Values]) -> str:
        """Put rows where statements of this transaction can use them, in a table that others do not see.

        What was staged under the name before is gone. Returns the table's name, quoted.
        """

    def given(self, name: str, values: Sequence[Values]) -> str:
        """The same for rows that one statement uses, the very next one, which is given to `do`."""
        return self.stage(name, values)

    def do(self, statement: str) -> None:
        """Run a statement, at once or later: in its order, and before anything is asked or committed."""
        self.run(statement)

    def inserting(self, columns: str) -> str:
        """What stands between an INSERT's table and its rows."""
        return f"({columns})"

    def kept_special(self, number: int, kept: Mapping[str, int]) -> str:
        """`_ms_special` of a row that keeps values of the target's (`kept`, with their numbers): with their texts."""
        return f"s.c{number}"

    def make_way(self, table: str, key: Sequence[str], stage: str) -> None:
        """Let the rows whose key is staged (c0, c1 ..) be written anew, whatever versions they have."""
        self.run(f"UPDATE {table} AS t SET _ms_seq = {UNKNOWN} FROM {stage} AS s WHERE {matches(key)}")

    def delete(self, table: str, key: Sequence[str], stage: str) -> None:
        """Remove the rows whose key is staged (c0, c1 ..) with a newer version (v)."""
        self.do(f"DELETE FROM {table} AS t USING {stage} AS s WHERE {matches(key)} AND t._ms_seq < s.v")

    def upsert(
        self, table: str, columns: Sequence[str], key: Sequence[str], stage: str, *, soft: bool, only: str
    ) -> None:
        """Write the staged rows (`only` says which) unless the table has a newer version of them."""
        values = {quoted(name): f"c{number}" for number, name in enumerate(columns)}
        values["_ms_seq"] = "v"
        if soft:
            values["_ms_deleted"] = "false"
        updates = ", ".join(f"{name} = excluded.{name}" for name in values if name not in map(quoted, key))
        self.do(
            f"INSERT INTO {table} AS t {self.inserting(', '.join(values))} "
            f"SELECT {', '.join(values.values())} FROM {stage} AS s "
            f"WHERE {only} ON CONFLICT ({', '.join(map(quoted, key))}) DO UPDATE SET {updates} "
            "WHERE t._ms_seq < excluded._ms_seq"
        )

    # What it holds, for `verify`

    def parts(self, relation: Relation) -> list[Json]:
        """The parts in which tasks read the table, which is there."""
        return [{}]

    @abstractmethod
    def held(self, relation: Relation, part: Json, living: str, order: str | None = None) -> Iterator[pa.Table]:
        """The rows of a part of which `living` is true, in this database's form; in an order, if one is asked for."""

    @classmethod
    def form(cls, relation: Relation, rows: pa.Table) -> pa.Table:
        """Rows of the source in that form: what `held` gives once they are written."""
        return rows.select([*(column.name for column in exposed(relation).columns), "_ms_special"])

    def own_keys(self, keys: pa.Table) -> pa.Table:
        """Keys in that form as values that can be written."""
        return keys

    # Its state, kept aside and brought back: where `keeps_state` says so

    keeps_state = False
    """Whether that can be done."""

    def reading(self) -> AbstractContextManager[None]:
        """A transaction that sees one state of all tables, and changes nothing."""
        raise self._cannot_keep()

    def has_table(self, place: str) -> bool:
        """Whether there is a table of that name, which is quoted."""
        raise self._cannot_keep()

    def kept_table(self, place: str) -> KeptTable:
        """A table with all its rows, within `reading`. Raises TargetRefused if it is not there."""
        raise self._cannot_keep()

    def put_rows(self, place: str, batch: pa.RecordBatch) -> None:
        """Write rows that `kept_table` gave to a table that was made like that one."""
        raise self._cannot_keep()

    def _cannot_keep(self) -> NotSupported:
        return NotSupported(f"the state of a target of kind {self.kind} cannot be kept aside")

    def _dropped(self, place: str) -> TargetRefused:
        return TargetRefused(
            f"the table {place} at {self.where} was dropped", hint="restore the target, or start a new one"
        )


UNKNOWN = -1
"""The version of a row that was there before us, or is not to be trusted: older than any change."""

OWN = {
    "cursors": "(stream text NOT NULL, target text NOT NULL, epoch bigint NOT NULL, run text NOT NULL, "
    "journal_id text, seq bigint, position bigint, PRIMARY KEY (stream, target))",
    "tables": "(name text PRIMARY KEY, stream text NOT NULL, target text NOT NULL, write text NOT NULL, "
    "key text NOT NULL)",
    "columns": "(name text PRIMARY KEY, stream text NOT NULL, target text NOT NULL, numbers text NOT NULL)",
    "tombstones": "(stream text NOT NULL, target text NOT NULL, name text NOT NULL, key text NOT NULL, "
    "seq bigint NOT NULL, PRIMARY KEY (stream, target, name, key))",
}
"""Our own tables, by name. A cursor without seq has never been delivered to. Tombstones are there during a replay."""


def quoted(name: str) -> str:
    """An identifier."""
    return '"' + name.replace('"', '""') + '"'


def _primary_key(key: Sequence[str]) -> str:
    return f"PRIMARY KEY ({', '.join(map(quoted, key))})"


def matches(key: Sequence[str], *, staged: str = "c", numbers: Sequence[int] | None = None) -> str:
    """The condition that a row of the table (t) has the key that is staged (s)."""
    columns = zip(key, numbers if numbers is not None else range(len(key)), strict=True)
    return " AND ".join(f"t.{quoted(name)} = s.{staged}{number}" for name, number in columns)
