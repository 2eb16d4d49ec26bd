"""Tables of one Postgres mirrored into another, with Postgres itself as the judge."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from millstream.embedded import EmbeddedPostgres
from millstream.errors import MissingBase, TargetRefused, TargetUnavailable
from millstream.targets.base import Part
from millstream.targets.lanes import sessions
from millstream.targets.postgres import PostgresTarget
from millstream.targets.postgres_options import PostgresTargetOptions
from millstream.targets.rejects import Guard, Outstanding, RowsRejected
from tests.fixtures.capture import drive
from tests.fixtures.lanes import (
    CONTEXT,
    assert_equal,
    batch_after,
    captured,
    deliver,
    mirror,
    mirror_rest,
    opened,
)
from tests.fixtures.postgres import Database, fresh_database
from tests.fixtures.type_oracle import available, texts
from tests.fixtures.typed_values import KINDS, SETUP

pytestmark = pytest.mark.postgres

TABLES = """
    CREATE TABLE item (id int PRIMARY KEY, name text, body text);
    ALTER TABLE item ALTER body SET STORAGE EXTERNAL;
    CREATE TABLE whole (id int PRIMARY KEY DEFERRABLE, name text, body text); ALTER TABLE whole REPLICA IDENTITY FULL;
    ALTER TABLE whole ALTER body SET STORAGE EXTERNAL;
    CREATE TABLE pair (a int, b text, name text, body text, PRIMARY KEY (a, b));
    CREATE TABLE by_index (id int, code text NOT NULL, name text);
    CREATE UNIQUE INDEX by_index_code ON by_index (code);
    ALTER TABLE by_index REPLICA IDENTITY USING INDEX by_index_code;
    CREATE TABLE keyless (name text, body text);
"""
NAMES = ("item", "whole", "pair", "by_index", "keyless")


@pytest.fixture
def copy(postgres: EmbeddedPostgres) -> Iterator[Database]:
    """The database that is written to."""
    with fresh_database(postgres) as made:
        yield made
        sessions.close_idle(made.uri, None)


class Trader:
    """Random statements on the tables above."""

    def __init__(self, database: Database, seed: int) -> None:
        self._database = database
        self._dice = random.Random(seed)

    def trade(self, transactions: int) -> None:
        for number in range(transactions):
            statements = [self._statement() for _ in range(self._dice.randrange(1, 5))]
            if number % 7 == 3:
                statements = [*statements, "SAVEPOINT s", self._statement(), "ROLLBACK TO s", self._statement()]
            end = "ROLLBACK" if number % 11 == 5 else "COMMIT"
            self._database.sql("; ".join(["BEGIN", *statements, end]))

    def _statement(self) -> str:
        table = self._dice.choice(("item", "item", "whole"))
        row, other, body = self._dice.randrange(30), self._dice.randrange(30), self._body()
        name = f"'{self._dice.random()}'"
        return self._dice.choice(
            [
                f"INSERT INTO {table} VALUES ({row}, {name}, {body}) ON CONFLICT DO NOTHING"
                if table == "item"
                else f"INSERT INTO whole SELECT {row}, {name}, {body} WHERE {row} NOT IN (SELECT id FROM whole)",
                f"UPDATE {table} SET name = {name} WHERE id % 3 = {row % 3}",
                f"UPDATE {table} SET body = {body} WHERE id = {row}",
                f"UPDATE {table} SET id = id + 1000, name = {name} WHERE id = {row}",
                f"UPDATE {table} SET id = id - 1000 WHERE id >= 1000 AND id - 1000 NOT IN (SELECT id FROM {table})",
                self._swap(table, row, other),
                f"SET CONSTRAINTS ALL DEFERRED; INSERT INTO whole SELECT id, {name}, body FROM whole WHERE id = {row}; "
                f"DELETE FROM whole WHERE id = {row} AND name <> {name}; SET CONSTRAINTS ALL IMMEDIATE",
                f"DELETE FROM {table} WHERE id = {row}",
                f"INSERT INTO pair VALUES ({row % 4}, '{other % 5}', {name}, {body}) ON CONFLICT (a, b) DO UPDATE "
                f"SET name = {name}, b = 'moved ' || {self._dice.random()}",
                f"DELETE FROM pair WHERE a = {row % 4} AND b <> '{other}'",
                f"INSERT INTO by_index VALUES ({row}, '{other}', {name}) ON CONFLICT (code) DO UPDATE SET id = {row}",
                f"UPDATE by_index SET code = 'x' || id || code WHERE id = {row}",
                f"INSERT INTO keyless VALUES ({name}, {body}), ('twice', NULL), ('twice', NULL)",
                self._dice.choice(
                    [f"TRUNCATE {table}", "TRUNCATE keyless, pair", f"DELETE FROM {table} WHERE id = {row}"]
                ),
            ]
        )

    def _swap(self, table: str, row: int, other: int) -> str:
        if table == "whole":
            return f"UPDATE whole SET id = CASE id WHEN {row} THEN {other} ELSE {row} END WHERE id IN ({row}, {other})"
        return (
            f"UPDATE item SET id = -1 WHERE id = {row} AND EXISTS (SELECT 1 FROM item WHERE id = {other}); "
            f"UPDATE item SET id = {row} WHERE id = {other} AND EXISTS (SELECT 1 FROM item WHERE id = -1); "
            f"UPDATE item SET id = {other} WHERE id = -1"
        )

    def _body(self) -> str:
        return self._dice.choice(["NULL", "'short'", f"repeat(md5('{self._dice.random()}'), 200)"])


HISTORIES = int(os.environ.get("MILLSTREAM_HISTORIES", "2"))
"""How many random histories are tried; `make histories` tries more."""


@pytest.mark.parametrize("seed", range(HISTORIES))
def test_a_mirror_equals_its_source_after_any_history(
    database: Database, copy: Database, tmp_path: Path, seed: int
) -> None:
    database.sql(TABLES)
    with drive(database, tmp_path) as capture:
        trader = Trader(database, seed)
        trader.trade(60)
        database.sql(
            "ALTER TABLE item ADD COLUMN later numeric(10,2); UPDATE item SET later = id / 3.0 WHERE id % 2 = 0"
        )
        trader.trade(20)
        database.sql(
            "BEGIN; INSERT INTO pair VALUES (9, 'x', 'n', NULL); ALTER TABLE pair ADD COLUMN size int[]; "
            "UPDATE pair SET size = '{1,NULL,3}' WHERE a = 9; COMMIT"
        )
        mirror(capture, opened(copy), seed)
    for table in NAMES:
        assert_equal(database, copy, table)


def test_every_type_arrives_as_it_was(database: Database, copy: Database, tmp_path: Path) -> None:
    kinds = [kind for kind in available(database, KINDS) if not kind.needs]
    kinds += [kind.array() for kind in kinds if not kind.name.endswith("[]") and kind.name not in ("refcursor",)]
    half = len(kinds) // 2
    database.sql(f"{SETUP}; CREATE TABLE keyed (); CREATE TABLE whole ()")
    copy.sql(SETUP)
    for number, some in enumerate((kinds[:half], kinds[half:])):
        columns = ", ".join(f"c{at} {kind.declared}" for at, kind in enumerate(some))
        database.sql(f"CREATE TABLE many_{number} (id int PRIMARY KEY, {columns})")
    with drive(database, tmp_path) as capture:
        for number, some in enumerate((kinds[:half], kinds[half:])):
            rows = zip(*[texts(kind, 20) for kind in some], strict=True)
            marks = ", ".join(f"%s::{kind.declared}" for kind in some)
            with database.connect() as connection, connection.cursor() as cursor:
                cursor.executemany(
                    f"INSERT INTO many_{number} VALUES (%s, {marks})", [(at, *row) for at, row in enumerate(rows)]
                )
        mirror(capture, opened(copy))
    for number in range(2):
        assert_equal(database, copy, f"many_{number}")
    types = "SELECT attname, format_type(atttypid, atttypmod) FROM pg_attribute WHERE attrelid = 'many_0'::regclass"
    kept = set(copy.sql(f"{types} AND attnum > 0")) & set(database.sql(f"{types} AND attnum > 0"))
    assert len(kept) > half * 0.8, "most types are the source's own"


def test_times_that_were_asked_for_as_numbers_are_times_again(
    database: Database, copy: Database, tmp_path: Path
) -> None:
    database.sql("CREATE TABLE clock (id int PRIMARY KEY, t time, z timetz, i interval, many interval[])")
    choices = {"time": "time", "timetz": "struct", "interval": "struct"}
    with drive(database, tmp_path, options={"types": choices}) as capture:
        database.sql(
            "INSERT INTO clock VALUES "
            "(1, '24:00', '24:00+15:59:59', '-1 mon 3 days -00:00:00.000001', '{1 day,NULL}'), "
            "(2, '12:30:00.000001', '00:00:00.5-03:30', 'infinity', '{}'), (3, NULL, NULL, NULL, NULL)"
        )
        mirror(capture, opened(copy))
    assert_equal(database, copy, "clock")


def test_a_value_that_nobody_has_stops_the_target(database: Database, copy: Database, tmp_path: Path) -> None:
    database.sql(TABLES)
    database.sql("INSERT INTO item VALUES (1, 'old', repeat(md5('x'), 200))")
    with drive(database, tmp_path) as capture:
        database.sql("UPDATE item SET name = 'new'")
        with pytest.raises(MissingBase, match=r"public\.item: a value of 1 changed row was not sent"):
            mirror(capture, opened(copy))
    assert copy.sql("SELECT to_regclass('item')") == [(None,)]


FAMILY = """
    CREATE TABLE parent (id int PRIMARY KEY, name text);
    CREATE TABLE child (id int PRIMARY KEY, of int NOT NULL REFERENCES parent, name text);
"""


def as_plain_user(database: Database) -> str:
    """A role without any special right, who owns the database's schema."""
    role = f"plain_{database.name}"
    database.sql(f"CREATE ROLE {role} LOGIN; GRANT ALL ON DATABASE {database.name} TO {role}")
    database.sql(f"GRANT ALL ON SCHEMA public TO {role}")
    return database.uri.replace("//", f"//{role}@", 1) if "@" not in database.uri else swapped(database.uri, role)


def swapped(uri: str, role: str) -> str:
    scheme, _, rest = uri.partition("//")
    return f"{scheme}//{role}@{rest.partition('@')[2]}"


def test_foreign_keys_hold_for_a_role_without_rights(database: Database, copy: Database, tmp_path: Path) -> None:
    database.sql(FAMILY)
    uri = as_plain_user(copy)
    role = f"plain_{copy.name}"
    copy.sql(f"{FAMILY} ALTER TABLE parent OWNER TO {role}; ALTER TABLE child OWNER TO {role}")
    target = PostgresTarget(PostgresTargetOptions(uri=uri))
    target.open(CONTEXT)
    with drive(database, tmp_path) as capture:
        database.sql(
            "BEGIN; INSERT INTO parent SELECT n, 'p' FROM generate_series(1, 9) n; "
            "INSERT INTO child SELECT n, n, 'c' FROM generate_series(1, 9) n; COMMIT"
        )
        database.sql("BEGIN; DELETE FROM child WHERE id < 4; DELETE FROM parent WHERE id < 4; COMMIT")
        database.sql(
            "BEGIN; INSERT INTO parent VALUES (20, 'p'); UPDATE child SET of = 20 WHERE id = 5; "
            "DELETE FROM parent WHERE id = 5; COMMIT"
        )
        mirror(capture, target)
    for table in ("parent", "child"):
        assert_equal(database, copy, table)
    target.close()
    copy.sql(f"DROP OWNED BY {role} CASCADE; DROP ROLE {role}")


def test_a_refused_parent_takes_its_children_along_and_nobody_else(
    database: Database, copy: Database, tmp_path: Path
) -> None:
    database.sql(FAMILY)
    uri, role = as_plain_user(copy), f"plain_{copy.name}"
    copy.sql(f"{FAMILY} ALTER TABLE parent OWNER TO {role}; ALTER TABLE child OWNER TO {role}")
    copy.sql("ALTER TABLE parent ADD CHECK (name <> 'bad')")
    target = PostgresTarget(PostgresTargetOptions(uri=uri))
    target.open(CONTEXT)
    with drive(database, tmp_path) as capture:
        database.sql(
            "BEGIN; INSERT INTO parent SELECT n, CASE n WHEN 5 THEN 'bad' ELSE 'p' END FROM generate_series(1, 9) n; "
            "INSERT INTO child SELECT n, n, 'c' FROM generate_series(1, 9) n; DELETE FROM child WHERE id = 2; COMMIT"
        )
        capture.catch_up()
        batch = batch_after(capture, captured(capture), 0)
        with pytest.raises(RowsRejected) as found:
            deliver(target, replace(batch, isolate=True))
        assert [(one.table, one.kind, one.key) for one in found.value.rejects] == [
            ("public.parent", "constraint", "5"),
            ("public.child", "constraint", "5"),
        ]
        assert copy.sql("SELECT to_regclass('_millstream.cursors') IS NOT NULL") == [(True,)]
        assert copy.sql("SELECT count(*) FROM parent") == [(0,)], "nothing is written before the letters are"
        guard = Guard(Outstanding(True, left_out=frozenset(one.event_id for one in found.value.rejects)))
        batch = batch_after(capture, captured(capture), 0)
        passed = [
            Part(p.relation, p.relation_id, guard.passed(p.relation, p.relation_id, p.batches)) for p in batch.parts
        ]
        deliver(target, replace(batch, parts=passed))
    assert copy.sql("SELECT array_agg(id ORDER BY id) FROM parent") == [([1, 2, 3, 4, 6, 7, 8, 9],)]
    assert copy.sql("SELECT array_agg(id ORDER BY id) FROM child") == [([1, 3, 4, 6, 7, 8, 9],)]
    target.close()
    copy.sql(f"DROP OWNED BY {role} CASCADE; DROP ROLE {role}")


def test_foreign_keys_in_a_circle_are_refused_clearly(database: Database, copy: Database, tmp_path: Path) -> None:
    circle = FAMILY + "ALTER TABLE parent ADD COLUMN best int; "
    database.sql(circle)
    uri = as_plain_user(copy)
    role = f"plain_{copy.name}"
    copy.sql(
        circle + f"ALTER TABLE parent ADD FOREIGN KEY (best) REFERENCES child; "
        f"ALTER TABLE parent OWNER TO {role}; ALTER TABLE child OWNER TO {role}"
    )
    target = PostgresTarget(PostgresTargetOptions(uri=uri))
    target.open(CONTEXT)
    with drive(database, tmp_path) as capture:
        database.sql("BEGIN; INSERT INTO parent VALUES (1, 'p', 1); INSERT INTO child VALUES (1, 1, 'c'); COMMIT")
        with pytest.raises(TargetRefused, match=r"public\.child, public\.parent go round in a circle"):
            mirror(capture, target)
    target.close()
    copy.sql(f"DROP OWNED BY {role} CASCADE; DROP ROLE {role}")


def test_our_commits_can_be_told_by_their_origin(database: Database, copy: Database, tmp_path: Path) -> None:
    database.sql(TABLES)
    slot = f"loop_{copy.name}"
    target = opened(copy)
    copy.sql("CREATE PUBLICATION everything FOR TABLES IN SCHEMA public")
    copy.sql(f"SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput')")
    with drive(database, tmp_path) as capture:
        database.sql("INSERT INTO item VALUES (1, 'replicated', NULL)")
        mirror(capture, target)
    copy.sql("UPDATE item SET name = 'local'")

    def inserts(origin: str) -> list[bytes]:
        found = copy.sql(
            f"SELECT data FROM pg_logical_slot_peek_binary_changes('{slot}', NULL, NULL, 'proto_version', '4', "
            f"'publication_names', 'everything', 'origin', '{origin}')"
        )
        return [bytes(data)[:1] for (data,) in found if bytes(data)[:1] in (b"I", b"U")]

    assert inserts("any") == [b"I", b"U"]
    assert inserts("none") == [b"U"]


def test_a_lost_connection_is_replaced(database: Database, copy: Database, tmp_path: Path) -> None:
    database.sql(TABLES)
    target = opened(copy)
    with drive(database, tmp_path) as capture:
        database.sql("INSERT INTO item VALUES (1, 'a', NULL)")
        capture.catch_up()
        copy.sql(
            f"SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE datname = '{copy.name}' "
            "AND pid <> pg_backend_pid()"
        )
        mirror(capture, target)
    assert_equal(database, copy, "item")


def test_a_session_that_nobody_uses_does_not_stay(copy: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "IDLE", "1500ms")
    target = opened(copy)
    count = (
        "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'millstream' AND datname = current_database()"
    )
    assert copy.sql(count) == [(1,)]
    copy.await_true(f"SELECT ({count}) = 0")
    target.open(CONTEXT)
    assert target.cursor() is None


def test_a_server_that_cannot_be_reached_is_tried_again(copy: Database) -> None:
    with pytest.raises(TargetUnavailable, match="cannot connect"):
        PostgresTarget(PostgresTargetOptions(uri="postgresql://app@127.0.0.1:1/shop")).open(CONTEXT)
    with pytest.raises(TargetRefused, match="does not exist"):
        PostgresTarget(PostgresTargetOptions(uri=copy.server.uri("nowhere"))).open(CONTEXT)


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ("CREATE TABLE item (id int PRIMARY KEY, name int)", r"public\.item\.name is text at the source, and integer"),
        ("CREATE TABLE item (id int, name text)", "has no unique index on its key"),
        ("CREATE TABLE item (id int PRIMARY KEY, mine int NOT NULL)", r"NOT NULL of public\.item\.mine does not allow"),
        ("CREATE TABLE item (id int PRIMARY KEY, name text CHECK (name = ''))", "constraint item_name_check"),
    ],
)
def test_a_table_that_does_not_fit_is_refused_without_a_value(
    database: Database, copy: Database, tmp_path: Path, table: str, said: str
) -> None:
    database.sql(TABLES)
    copy.sql(table)
    with drive(database, tmp_path) as capture:
        database.sql("INSERT INTO item VALUES (1, 'a secret', NULL)")
        with pytest.raises(TargetRefused, match=said) as caught:
            mirror(capture, opened(copy))
    assert "secret" not in str(caught.value)
    assert copy.sql("SELECT count(*) FROM item") == [(0,)]


def test_a_changelog_has_the_types_of_the_source(database: Database, copy: Database, tmp_path: Path) -> None:
    database.sql(TABLES)
    with drive(database, tmp_path) as capture:
        database.sql("INSERT INTO item VALUES (1, 'a', 'b'); UPDATE item SET id = 2; DELETE FROM item")
        mirror(capture, opened(copy, write="changelog"))
    found = copy.sql(
        "SELECT id, name, _ms_op, _ms_before ->> 'id', _ms_deleted, _ms_tx_index FROM item ORDER BY _ms_seq"
    )
    assert found == [(1, "a", "c", None, False, 0), (2, "a", "u", "1", False, 1), (2, None, "d", "2", True, 2)]


def test_a_table_dropped_or_rebuilt_under_us_stops_the_target(
    database: Database, copy: Database, tmp_path: Path
) -> None:
    database.sql(TABLES)
    target = opened(copy)
    with drive(database, tmp_path) as capture:
        database.sql("INSERT INTO item VALUES (1, 'a', NULL)")
        mirror(capture, target)
        copy.sql("DROP TABLE item")
        database.sql("INSERT INTO item VALUES (2, 'b', NULL)")
        with pytest.raises(TargetUnavailable, match="the table has changed and is looked at again"):
            mirror_rest(capture, target)
        with pytest.raises(TargetRefused, match=r"the table public\.item at .* was dropped"):
            mirror_rest(capture, target)


def test_another_key_at_the_source_is_followed_and_none_stops_the_target(
    database: Database, copy: Database, tmp_path: Path
) -> None:
    database.sql(TABLES)
    target = opened(copy)
    with drive(database, tmp_path) as capture:
        database.sql("INSERT INTO item VALUES (1, 'a', NULL)")
        mirror(capture, target)
        database.sql("ALTER TABLE item DROP CONSTRAINT item_pkey; ALTER TABLE item ADD PRIMARY KEY (id, name)")
        database.sql("INSERT INTO item VALUES (1, 'b', NULL)")
        mirror_rest(capture, target)
        assert_equal(database, copy, "item")
        database.sql("ALTER TABLE item DROP CONSTRAINT item_pkey; ALTER TABLE item REPLICA IDENTITY FULL")
        database.sql("INSERT INTO item VALUES (1, 'b', NULL)")
        with pytest.raises(TargetRefused, match=r"the key of public\.item was \(id, name\) and is \(\)"):
            mirror_rest(capture, target)


def test_the_source_itself_is_no_target(database: Database, tmp_path: Path) -> None:
    database.sql(TABLES)
    with drive(database, tmp_path, options={"publication": "millstream_shop"}) as capture:
        database.sql("INSERT INTO item VALUES (1, 'a', NULL)")
        with pytest.raises(TargetRefused, match=r"public\.item at .* is captured there"):
            mirror(capture, opened(database))
    assert database.sql("SELECT * FROM item") == [(1, "a", None)]
    sessions.close_idle(database.uri, None)


def test_columns_that_make_their_own_values_take_the_source_s(
    database: Database, copy: Database, tmp_path: Path
) -> None:
    made = "CREATE TABLE item (id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY, name text)"
    for one in (database, copy):
        one.sql(made)
    with drive(database, tmp_path) as capture:
        database.sql("INSERT INTO item (name) VALUES ('a'), ('b'), ('c'); UPDATE item SET name = 'd' WHERE id = 2")
        mirror(capture, opened(copy))
    assert_equal(database, copy, "item")
