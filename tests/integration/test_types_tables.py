"""Tables that are unlike others: keys with odd values, 1,600 columns, names that need care."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from millstream import changelog
from millstream.sources.postgres.catalog import relations
from tests.fixtures.postgres import Database
from tests.fixtures.tuples import journal_rows
from tests.fixtures.type_oracle import changes, session

pytestmark = pytest.mark.postgres

OPS = {b"I": "c", b"U": "u", b"D": "d"}


def changelog_of(database: Database, pattern: str, setup: str, *statements: str) -> pa.RecordBatch:
    """What the changelog of one table says after these statements, each a transaction of its own."""
    database.sql(f"{setup}; CREATE PUBLICATION trial FOR ALL TABLES")
    slot = f"trial_{database.name}"
    database.sql(f"SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput')")
    for statement in statements:
        database.sql(statement)
    with session(database) as connection:
        (relation,) = relations(connection, [pattern])
        messages = [(OPS[raw[:1]], raw) for raw in changes(connection, slot) if raw[:1] in OPS]
    batch = changelog.assemble(journal_rows(messages), relation, 1, "0123456789ab")
    batch.validate(full=True)
    return batch


KEY = ("12.30", "infinity", "2024-02-29 01:02:03.5+00", "{{1},{2}}")
NEW = ("NaN", "0044-03-15 BC", "-infinity", "{1,NULL}")


def test_a_key_is_never_null_whatever_its_value(any_database: Database) -> None:
    literals = [", ".join(f"'{text}'" for text in key) for key in (KEY, NEW)]
    batch = changelog_of(
        any_database,
        "public.t",
        "CREATE TABLE t (n numeric(12,2), d date, z timestamptz, a int[], v date, PRIMARY KEY (n, d, z, a))",
        f"INSERT INTO t VALUES ({literals[0]}, 'infinity')",
        f"UPDATE t SET (n, d, z, a, v) = ROW({literals[1]}, '2024-01-01')",
        "DELETE FROM t",
    )
    names = ("n", "d", "z", "a")
    rows = batch.to_pylist()
    assert [tuple(row[name] for name in names) for row in rows] == [KEY, NEW, NEW]
    old = [row["_ms_before"] and tuple(row["_ms_before"][name] for name in names) for row in rows]
    assert old == [None, KEY, NEW]
    assert [row["_ms_special"] for row in rows] == [[("v", "infinity")], [], []]


def test_a_table_may_have_1600_columns(any_database: Database, tmp_path: Path) -> None:
    kinds = ("smallint", "boolean", "real", '"char"')
    columns = [(f"c{number}", kinds[number % 4]) for number in range(1599)]
    values = [str(number) if number % 4 == 0 else "f" if number % 4 == 1 else "1" for number in range(1599)]
    batch = changelog_of(
        any_database,
        "public.t",
        f"CREATE TABLE t (id smallint PRIMARY KEY, {', '.join(' '.join(column) for column in columns)});"
        "ALTER TABLE t REPLICA IDENTITY FULL",
        f"INSERT INTO t VALUES (1, {', '.join(repr(value) for value in values)})",
        "INSERT INTO t (id, c1598) VALUES (2, '3.5')",
        "UPDATE t SET id = 3, c0 = 7 WHERE id = 1",
    )
    path = tmp_path / "wide.parquet"
    pq.write_table(pa.Table.from_batches([batch]), path)
    first, second, third = pq.read_table(path).to_pylist()
    expected: list[Any] = [(int(v), False, 1.0, "1")[number % 4] for number, v in enumerate(map(_number, values))]
    assert [first[name] for name, _ in columns] == expected
    assert (second["id"], second["c1598"], second["c1597"]) == (2, 3.5, None)
    assert [third["_ms_before"][name] for name, _ in columns] == expected
    assert (third["id"], third["c0"], third["_ms_before"]["id"]) == (3, 7, 1)


def _number(text: str) -> int:
    return int(text) if text.isdigit() else 0


NAMES = (
    "id",
    "_ms_op",
    "_MS_Seq",
    "_ms_before",
    "_ms_before.x",
    "_ms__op",
    "a b",
    'q"q',
    "naïve 🌊",
    "SELECT",
    "a.b",
    "é" * 31,
)


TABLE = '"Ünï x"."T""1.*"'


def test_names_that_need_care_arrive(any_database: Database, tmp_path: Path) -> None:
    columns = ", ".join('"' + name.replace('"', '""') + '" date' for name in NAMES)
    days = ", ".join(f"'2024-01-{day:02d}'" for day in range(1, 12))
    batch = changelog_of(
        any_database,
        TABLE,
        f'CREATE SCHEMA "Ünï x"; CREATE TABLE {TABLE} ({columns}); ALTER TABLE {TABLE} REPLICA IDENTITY FULL',
        f"INSERT INTO {TABLE} VALUES (NULL, {days})",
        f"""UPDATE {TABLE} SET "_ms_op" = 'infinity', "a.b" = 'infinity'""",
        f'UPDATE {TABLE} SET "_ms_op" = NULL',
    )
    shown = ["id", "_ms___op", "_MS__Seq", "_ms__before", "_ms__before.x", "_ms__op", *NAMES[6:]]
    assert batch.schema.names[: len(NAMES)] == shown
    path = tmp_path / "named.parquet"
    pq.write_table(pa.Table.from_batches([batch]), path)
    first, second, third = pq.read_table(path).to_pylist()
    assert [first[name] and first[name].day for name in shown] == [None, *range(1, 12)]
    assert [first["_ms_op"], second["_ms_op"]] == ["c", "u"]
    assert dict(second["_ms_special"]) == {"_ms___op": "infinity", "a.b": "infinity"}
    assert dict(third["_ms_special"]) == {
        "_ms_before._ms___op": "infinity",
        "_ms_before.a.b": "infinity",
        "a.b": "infinity",
    }
