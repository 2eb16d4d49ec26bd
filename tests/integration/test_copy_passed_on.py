"""A baseline from Postgres to Postgres: rows are passed on as they are copied, where columns have the same types."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest

from millstream.embedded import EmbeddedPostgres
from millstream.errors import RowRefused
from millstream.sources import take_snapshot
from millstream.spark.baseline import BaselinePlan, read_chunks
from millstream.targets.lanes import sessions
from millstream.targets.postgres import PostgresDatabase, PostgresTarget
from millstream.targets.postgres_options import PostgresTargetOptions
from tests.fixtures.capture import source_spec
from tests.fixtures.lanes import CONTEXT, assert_equal
from tests.fixtures.postgres import Database, fresh_database

pytestmark = pytest.mark.postgres

SEQ = 7_000_000_000

PASSED = """
    CREATE TABLE passed (id bigint PRIMARY KEY, small smallint, n numeric(20, 4), whole numeric, r real,
        d double precision, t text, v varchar(9), c char(5), b boolean, raw bytea, day date,
        at timestamp, instant timestamptz, clock time,
        zoned timetz, span interval, u uuid, doc jsonb, j json, net inet, bits varbit, list int[], words text[],
        p point);
    INSERT INTO passed (id) VALUES (-1);
    INSERT INTO passed VALUES
        (1, -3, 1.5, 'NaN', 'infinity', '-0', E'tab\\t, line\\n, \\\\N', 'é', 'ab', true, '\\x00ff', 'infinity',
         '-infinity', '4713-01-01 00:00:00+00 BC', '24:00:00', '12:00:00+01:30', '1 mon -2 days 3.000001 s',
         'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11', '{"a": [1, null]}', '{"a" : 1}', '::1/64', B'101',
         '[2:3]={1,NULL}', '{"a,b","\\"",NULL}', '(1,2)'),
        (2, 0, -12345678901234.5678, 1e-20, 1.1, 5e-324, '', '', '', false, '', '294276-12-31',
         '2020-01-01 00:00:00.000001',
         'now', '00:00', '00:00-15:59', '-178000000 years', NULL, '1', '2', '10.0.0.1', B'', '{}', '{}', '(NaN,-0)');
    INSERT INTO passed (id, t) SELECT g, repeat(md5(g::text), g % 100) FROM generate_series(3, 3000) g;
"""
OTHERS = """
    CREATE TYPE mood AS ENUM ('glad', 'sad');
    CREATE TABLE feelings (id int PRIMARY KEY, m mood);
    INSERT INTO feelings VALUES (1, 'sad'), (2, NULL);
    CREATE TABLE prices (id int PRIMARY KEY, m money);
    INSERT INTO prices VALUES (1, 12.34);
    CREATE TABLE wider (id int PRIMARY KEY, n int);
    INSERT INTO wider VALUES (1, 5);
"""


@pytest.fixture
def copy(postgres: EmbeddedPostgres) -> Iterator[Database]:
    with fresh_database(postgres) as made:
        yield made
        sessions.close_idle(made.uri, None)


@pytest.fixture
def passed_on(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The tables whose rows went as they came."""
    given, names = PostgresDatabase.pass_on, list[str]()

    def watched(self: PostgresDatabase, table: str, *more: Any, soft: bool) -> None:
        given(self, table, *more, soft=soft)
        names.append(table)

    monkeypatch.setattr(PostgresDatabase, "pass_on", watched)
    return names


def deliver(database: Database, copy: Database, *, key: str | None = None, **options: Any) -> int:
    """Copy all tables; returns how many rows were told. `key`: as if that identified their rows."""
    target = PostgresTarget(PostgresTargetOptions(uri=copy.uri, **options))
    target.open(CONTEXT)
    source = source_spec(database)
    with closing(take_snapshot(source, lambda _: None, captured=False)) as snapshot:
        chunks = snapshot.plan.chunks
        if key is not None:
            chunks = tuple(replace(one, relation=replace(one.relation, key=(key,))) for one in chunks)
        numbers = {relation: at for at, relation in enumerate(dict.fromkeys(chunk.relation for chunk in chunks), 1)}
        plan = BaselinePlan(source, replace(snapshot.plan, chunks=chunks), "aaaa", SEQ, SEQ, numbers, target.stager())
        receipts = [row for part in read_chunks(plan, range(len(chunks)), 1) for row in part.to_pylist()]
    assert target.stager().database is PostgresDatabase
    return sum(row["rows"] for row in receipts)


@pytest.mark.parametrize("deletes", ["hard", "soft"])
def test_every_value_is_the_same_whichever_way_it_goes(
    database: Database, copy: Database, passed_on: list[str], deletes: str
) -> None:
    database.sql(PASSED + OTHERS)
    copy.sql("CREATE TABLE wider (id int PRIMARY KEY, n bigint)")
    assert deliver(database, copy, deletes=deletes) == 3001 + 4
    assert passed_on == ['"public"."passed"'], (
        "an enum has other numbers there, money another meaning, a bigint another size"
    )
    for table in ("passed", "feelings", "prices"):
        assert_equal(database, copy, table)
    assert copy.sql("SELECT n FROM wider") == [(5,)]
    keys = "SELECT conrelid::regclass::text, pg_get_constraintdef(oid) FROM pg_constraint WHERE contype = 'p'"
    assert sorted(copy.sql(f"{keys} AND connamespace = 'public'::regnamespace")) == [
        (table, "PRIMARY KEY (id)") for table in ("feelings", "passed", "prices", "wider")
    ]
    assert copy.sql("SELECT DISTINCT _ms_seq FROM passed") == [(SEQ,)]
    if deletes == "soft":
        assert copy.sql("SELECT DISTINCT _ms_deleted FROM passed") == [(False,)]


def test_parents_come_before_their_children_whichever_way_each_goes(
    database: Database, copy: Database, passed_on: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "_prepare", lambda _: False)  # as a role that may not leave foreign keys alone
    database.sql(
        "CREATE TYPE kind AS ENUM ('a'); CREATE TABLE z_parent (id int PRIMARY KEY, k kind);"
        "CREATE TABLE a_child (id int PRIMARY KEY, parent int REFERENCES z_parent);"
        "INSERT INTO z_parent VALUES (1, 'a'); INSERT INTO a_child VALUES (2, 1)"
    )
    copy.sql(
        "CREATE TABLE z_parent (id int PRIMARY KEY, k text);"
        "CREATE TABLE a_child (id int PRIMARY KEY, parent int REFERENCES z_parent)"
    )
    assert deliver(database, copy) == 2
    assert copy.sql("SELECT parent FROM a_child") == [(1,)]
    assert passed_on == ['"public"."a_child"']


def test_what_the_table_does_not_allow_is_a_row_to_blame_and_nothing_is_written(
    database: Database, copy: Database, passed_on: list[str]
) -> None:
    database.sql(
        "CREATE TABLE item (id int PRIMARY KEY, n int); INSERT INTO item SELECT g, g FROM generate_series(1, 9) g"
    )
    copy.sql("CREATE TABLE item (id int PRIMARY KEY, n int CHECK (n < 9))")
    with pytest.raises(RowRefused, match=r"constraint item_n_check of public\.item does not allow a row"):
        deliver(database, copy)
    assert (copy.sql("SELECT * FROM item"), passed_on) == ([], [])
    copy.sql("ALTER TABLE item DROP CONSTRAINT item_n_check")
    assert deliver(database, copy) == 9
    assert passed_on == ['"public"."item"']


def test_two_rows_with_one_key_are_refused_though_the_key_comes_after_the_rows(
    database: Database, copy: Database, passed_on: list[str]
) -> None:
    database.sql("CREATE TABLE item (id int PRIMARY KEY, n int); INSERT INTO item VALUES (1, 1), (2, 2), (3, 2)")
    with pytest.raises(RowRefused, match=r"constraint item_pkey of public\.item does not allow a row"):
        deliver(database, copy, key="n")
    assert copy.sql("SELECT to_regclass('item')") == [(None,)]
    assert deliver(database, copy) == 3
