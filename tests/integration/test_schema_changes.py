"""ALTER TABLE on a real Postgres: every mirror has what the source has, also in rows that no change has touched."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from millstream.embedded import EmbeddedPostgres
from millstream.registry.structure import differences
from millstream.targets.lanes import sessions
from tests.fixtures.capture import drive
from tests.fixtures.mirrors import Mirrors
from tests.fixtures.postgres import Database, fresh_database


@pytest.fixture
def copy(postgres: EmbeddedPostgres) -> Iterator[Database]:
    with fresh_database(postgres) as made:
        yield made
        sessions.close_idle(made.uri, None)


def test_mirrors_follow_a_table_that_is_altered(database: Database, copy: Database, tmp_path: Path) -> None:
    database.sql("CREATE TABLE item (id int PRIMARY KEY, name text)")
    database.sql(
        "CREATE TABLE part (id int PRIMARY KEY, name text) PARTITION BY RANGE (id); "
        "CREATE TABLE part_1 PARTITION OF part FOR VALUES FROM (0) TO (100)"
    )
    mirrors = Mirrors(tmp_path, copy)
    with drive(database, tmp_path / "spool") as capture:
        for table in ("item", "part"):
            database.sql(f"INSERT INTO {table} SELECT i, 'n' || i FROM generate_series(1, 20) i")
        mirrors.deliver(capture)
        for statement, change in (
            ("ADD COLUMN x int DEFAULT 7", "INSERT INTO {} VALUES (21, 'new', 1), (22, 'null', NULL)"),
            ("ALTER COLUMN x SET DEFAULT 8", "INSERT INTO {} VALUES (23, 'later')"),
            ("ADD COLUMN word text NOT NULL DEFAULT 'it''s'", "UPDATE {} SET x = 9 WHERE id < 4"),
            ("RENAME COLUMN name TO label", "UPDATE {} SET label = 'l' WHERE id = 5"),
            ("DROP COLUMN x", "DELETE FROM {} WHERE id = 6"),
            ("ADD COLUMN x int", "UPDATE {} SET x = 1 WHERE id = 8"),
        ):
            for table in ("item", "part"):
                database.sql(f"ALTER TABLE {table} {statement}")
                database.sql(change.format(table))
            mirrors.deliver(capture)
            for table in ("item", "part"):
                mirrors.assert_equal(database, table)
        # Several at once, of which only the last shows in the log, and names that change places.
        database.sql("ALTER TABLE item ADD COLUMN a int DEFAULT 1, ADD COLUMN b int DEFAULT 2")
        database.sql("ALTER TABLE item RENAME COLUMN x TO y; ALTER TABLE item RENAME COLUMN label TO x")
        database.sql("BEGIN; INSERT INTO item (id, x, word) VALUES (30, 'x', 'w'); COMMIT")
        mirrors.deliver(capture)
        mirrors.assert_equal(database, "item")
        described = [one for one in capture.relations if one.table == "public.item"]
        kinds = [{change.kind.value for change in differences(*pair)} for pair in pairwise(described)]
        assert kinds == [
            {"add_column"},
            {"default"},
            {"add_column"},
            {"rename_column"},
            {"drop_column"},
            {"add_column"},
            {"add_column", "rename_column"},
        ]


CONSTANTS = {
    "bool": "true",
    "int2": "-7",
    "int8": "9007199254740993",
    "real": "0.1",
    "float8": "'Infinity'",
    "numeric": "'NaN'",
    "numeric(12,3)": "1.500",
    "text": "'it''s \"quoted\", {braced} and ü'",
    "varchar(9)": "''",
    "char(4)": "'ab'",
    "bytea": r"'\x00ff5c'",
    "date": "'infinity'",
    "timestamp": "'2026-01-31 12:34:56.789012'",
    "timestamptz": "'2026-01-31 12:34:56.789012+02'",
    "time": "'24:00:00'",
    "interval": "'1 mon -2 days 03:04:05'",
    "uuid": "'6f1c6a3e-5f0e-4c6e-8a55-0d1d2a3b4c5d'",
    "jsonb": """'{"a": [1, null, "x"]}'""",
    "int4[]": "'{1,NULL,3}'",
    "text[]": """'{"a b",NULL,"c,\\"d\\""}'""",
    "bit(3)": "'101'",
    "money": "'12.34'",
    "mood": "'glad'",
    "small": "5",
}
"""By type a default that is a constant, which Postgres keeps beside the column and not in its rows."""


def test_rows_that_are_older_than_a_column_have_constants_of_every_type(
    database: Database, copy: Database, tmp_path: Path
) -> None:
    database.sql("CREATE TYPE mood AS ENUM ('sad', 'glad'); CREATE DOMAIN small AS int")
    database.sql("CREATE TABLE item (id int PRIMARY KEY, name text)")
    names = [f"c{number}" for number in range(len(CONSTANTS))]
    mirrors = Mirrors(tmp_path, copy)
    with drive(database, tmp_path / "spool") as capture:
        database.sql("INSERT INTO item VALUES (1, 'untouched')")
        mirrors.deliver(capture)
        ((file,),) = database.sql("SELECT relfilenode FROM pg_class WHERE relname = 'item'")
        for name, (kind, value) in zip(names, CONSTANTS.items(), strict=True):
            database.sql(f"ALTER TABLE item ADD COLUMN {name} {kind} DEFAULT {value}")
        assert database.sql("SELECT relfilenode FROM pg_class WHERE relname = 'item'") == [(file,)], "no row is written"
        # The log brings the same values for a row that is written with them.
        database.sql("INSERT INTO item VALUES (2, 'written')")
        mirrors.deliver(capture)
    for kind, rows in mirrors.rows("item", ["id", *names]).items():
        (_, *older), (_, *written) = sorted(rows, key=lambda row: row[0])
        assert dict(zip(CONSTANTS, older, strict=True)) == dict(zip(CONSTANTS, written, strict=True)), kind
        assert None not in written, kind
