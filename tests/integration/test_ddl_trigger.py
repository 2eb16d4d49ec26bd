"""The event triggers that tell each ALTER in the log: they come, they go, and nobody is held up by them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from millstream.errors import PreflightError
from millstream.observe import Event
from millstream.sources.postgres.options import PostgresOptions
from millstream.sources.postgres.preflight import preflight
from millstream.sources.postgres.removal import remove
from millstream.sources.postgres.source import PostgresSource
from tests.fixtures.capture import drive, source_spec
from tests.fixtures.postgres import Database

pytestmark = pytest.mark.postgres

TRIGGER = {"ddl_trigger": True}
MADE = (
    "SELECT (SELECT count(*) FROM pg_event_trigger), (SELECT count(*) FROM pg_proc WHERE proname LIKE '{}%'), "
    "(SELECT count(*) FROM pg_namespace WHERE nspname = '_millstream')"
)


def made_on(database: Database) -> tuple[int, ...]:
    """Triggers, functions and schemas of ours."""
    ((*found,),) = database.sql(MADE.format(database.name))
    return tuple(found)


@pytest.fixture
def role(database: Database) -> Iterator[str]:
    """Somebody who may replicate, and owns the tables, but is no superuser."""
    name = f"owner_{database.name}"
    database.sql(f"CREATE ROLE {name} LOGIN REPLICATION; GRANT ALL ON DATABASE {database.name} TO {name}")
    database.sql(f"GRANT ALL ON SCHEMA public TO {name}")
    yield name
    database.sql(f"DROP OWNED BY {name} CASCADE; DROP ROLE {name}")


def test_it_tells_what_the_catalog_knew_when_a_table_was_altered(any_database: Database, tmp_path: Path) -> None:
    database = any_database
    database.sql("CREATE TABLE t (id int PRIMARY KEY, a text); CREATE TABLE other (id int PRIMARY KEY)")
    database.sql(
        "CREATE TABLE p (id int PRIMARY KEY, a text) PARTITION BY RANGE (id); "
        "CREATE TABLE p_1 PARTITION OF p FOR VALUES FROM (0) TO (100)"
    )
    with drive(database, tmp_path, "public.t", "public.p", options=TRIGGER) as capture:
        for table in ("t", "p"):
            database.sql(f"INSERT INTO {table} VALUES (1, 'a')")
            database.sql(f"ALTER TABLE {table} ADD COLUMN n int NOT NULL DEFAULT 7")
            database.sql(f"INSERT INTO {table} VALUES (2, 'b', 8)")
            database.sql(f"ALTER TABLE {table} RENAME COLUMN a TO n2; ALTER TABLE {table} RENAME COLUMN n TO a")
            database.sql(f"INSERT INTO {table} VALUES (3, 'c', 9); ALTER TABLE {table} DROP COLUMN n2")
        rows = [row for row in capture.catch_up() if row["relation"]]
        described = [capture.relations[row["relation"] - 1] for row in rows]
        assert all(one.enriched for one in described)
        said = [[(c.attnum, c.name, c.missing, c.nullable) for c in one.columns] for one in described]
        first, second = (1, "id", None, False), (2, "a", None, True)
        expected = [
            [first, second],
            [first, second, (3, "n", "7", False)],
            [first, (2, "n2", None, True), (3, "a", "7", False)],
        ]
        assert said == expected * 2
        assert not [row for row in capture.rows if not row["relation"]], "what it tells is no change"


def test_it_comes_when_it_is_asked_for_and_goes_again(database: Database, tmp_path: Path) -> None:
    database.sql("CREATE TABLE t (id int PRIMARY KEY)")
    with drive(database, tmp_path, options=TRIGGER):
        assert made_on(database) == (3, 4, 1)
    with drive(database, tmp_path):
        assert made_on(database) == (0, 0, 0)
    with drive(database, tmp_path, options=TRIGGER):
        database.sql(f"ALTER EVENT TRIGGER {database.name}_ddl DISABLE; CREATE TABLE _millstream.somebodys (id int)")
    events: list[Event] = []
    with drive(database, tmp_path, options=TRIGGER, events=events) as capture:
        capture.catch_up()
        assert database.sql("SELECT evtenabled FROM pg_event_trigger") == [("A",)] * 3
        assert [event.kind for event in events] == ["source.trigger_replaced"]
    remove(source_spec(database))
    assert made_on(database) == (0, 0, 1), "what is somebody else's stays"


def test_those_of_an_earlier_version_are_replaced_and_that_is_said(database: Database, tmp_path: Path) -> None:
    database.sql("CREATE TABLE t (id int PRIMARY KEY); CREATE SCHEMA _millstream")
    slot, body = database.name, "LANGUAGE plpgsql AS 'BEGIN END'"
    database.sql(
        f"CREATE FUNCTION _millstream.{slot}_tell(tables oid[]) RETURNS void {body}; "
        f"CREATE FUNCTION _millstream.{slot}_ddl() RETURNS event_trigger {body}; CREATE EVENT TRIGGER {slot}_ddl "
        f"ON ddl_command_end WHEN TAG IN ('ALTER TABLE') EXECUTE FUNCTION _millstream.{slot}_ddl()"
    )
    events: list[Event] = []
    with drive(database, tmp_path, options=TRIGGER, events=events) as capture:
        assert made_on(database) == (3, 4, 1)
        assert [event.kind for event in events] == ["source.trigger_replaced"]
        capture.connect()
        assert len(events) == 1, "once"
    remove(source_spec(database))
    assert made_on(database) == (0, 0, 0)


def test_who_may_not_have_it_is_told(database: Database, tmp_path: Path, role: str) -> None:
    database.sql(f"CREATE TABLE t (id int PRIMARY KEY); ALTER TABLE t OWNER TO {role}")
    uri = make_conninfo(database.uri, user=role)
    spec = replace(source_spec(database, options=TRIGGER), uri=uri)
    (finding,) = [one for one in preflight(spec, PostgresOptions.of(spec)) if one.check == "ddl_trigger"]
    assert "superuser" in finding.message
    with closing(PostgresSource(spec, tmp_path)) as source, pytest.raises(PreflightError, match="event trigger"):
        source.prepare()
    assert made_on(database) == (0, 0, 0)
    with drive(database, tmp_path / "superuser's", options=TRIGGER):
        assert made_on(database) == (3, 4, 1)
    plain = replace(source_spec(database), uri=uri)
    with closing(PostgresSource(plain, tmp_path)) as source, pytest.raises(PreflightError, match="may not drop") as no:
        source.prepare()
    assert f'DROP EVENT TRIGGER "{database.name}_ddl"' in str(no.value.hint)


def test_an_alter_goes_through_whatever_becomes_of_it(database: Database, tmp_path: Path, role: str) -> None:
    database.sql(f"CREATE TABLE t (id int PRIMARY KEY); ALTER TABLE t OWNER TO {role}")
    with drive(database, tmp_path, options=TRIGGER) as capture:
        uri = make_conninfo(database.uri, user=role)
        with psycopg.connect(uri, autocommit=True) as plain:
            plain.execute("ALTER TABLE t ADD COLUMN a int DEFAULT 1")
            database.sql(f"DROP FUNCTION _millstream.{database.name}_tell")
            plain.execute("ALTER TABLE t ADD COLUMN b int DEFAULT 2")
        database.sql("INSERT INTO t VALUES (1)")
        capture.catch_up()
        assert [column.missing for column in capture.relations[-1].columns] == [None, "1", "2"], "from the catalog"
        capture.connect()
        capture.catch_up()
