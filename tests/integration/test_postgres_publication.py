"""Publications: they hold what the patterns mean, and never hurt the application."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psycopg
import pytest

from millstream.errors import ConfigError, PreflightError, SourceHalted, SourceUnavailable
from millstream.sources import take_snapshot
from millstream.sources.postgres.catalog import select
from millstream.sources.postgres.membership import Publication
from millstream.sources.postgres.publication import try_publications, watch_publications
from tests.fixtures.capture import drive, source_spec
from tests.fixtures.postgres import Database
from tests.fixtures.postgres_source import Control, opened_at

pytestmark = pytest.mark.postgres

ODD_TABLES = """
    CREATE TABLE plain (id int PRIMARY KEY, v text);
    CREATE TABLE bare (id int, v text);
    CREATE TABLE late (id int PRIMARY KEY DEFERRABLE, v text);
    CREATE TABLE nothing (id int PRIMARY KEY, v text);
    ALTER TABLE nothing REPLICA IDENTITY NOTHING;
    CREATE TABLE whole (id int, v text);
    ALTER TABLE whole REPLICA IDENTITY FULL;
    CREATE TABLE by_index (id int NOT NULL UNIQUE, v text);
    ALTER TABLE by_index REPLICA IDENTITY USING INDEX by_index_id_key;
    CREATE TABLE lost_index (id int NOT NULL UNIQUE, v text);
    ALTER TABLE lost_index REPLICA IDENTITY USING INDEX lost_index_id_key;
    ALTER TABLE lost_index DROP CONSTRAINT lost_index_id_key;
    CREATE TABLE parts (id int PRIMARY KEY, v text) PARTITION BY RANGE (id);
    CREATE TABLE parts_low PARTITION OF parts FOR VALUES FROM (0) TO (100);
    CREATE TABLE other_parts (id int PRIMARY KEY, v text) PARTITION BY RANGE (id);
    CREATE TABLE other_parts_low PARTITION OF other_parts FOR VALUES FROM (0) TO (100);
    ALTER TABLE other_parts_low REPLICA IDENTITY NOTHING;
    CREATE TABLE parent (id int PRIMARY KEY, v text);
    CREATE TABLE child () INHERITS (parent);
"""
VIRTUAL = """
    CREATE TABLE computed (id int PRIMARY KEY, v text, twice int GENERATED ALWAYS AS (id * 2) VIRTUAL);
    ALTER TABLE computed REPLICA IDENTITY FULL;
"""
INSERT_ONLY = {"bare", "late", "nothing", "lost_index", "other_parts", "child"}
PUBLISHED = {"plain", "whole", "by_index", "parts", "parent"}


def make_odd_tables(database: Database) -> tuple[set[str], set[str]]:
    """Create them; the names of those to publish whole, and of those to publish inserts of."""
    database.sql(ODD_TABLES)
    if database.server.version < 18:
        return PUBLISHED, INSERT_ONLY
    database.sql(VIRTUAL)
    return PUBLISHED, INSERT_ONLY | {"computed"}


def names(publication: Publication) -> set[str]:
    return {member.name for member in publication.members}


@pytest.fixture
def control(any_database: Database) -> Iterator[Control]:
    with opened_at(any_database) as opened:
        yield opened


def test_the_applications_writes_go_on_whatever_its_tables_are(any_database: Database, control: Control) -> None:
    whole, inserts = make_odd_tables(any_database)
    plan = control.sync()
    main, second = (plan.publications[name] for name in control.options.publications)
    assert (names(main), names(second)) == (whole, inserts)
    assert (main.operations, second.operations) == (("insert", "update", "delete", "truncate"), ("insert", "truncate"))
    assert {finding.table for finding in plan.findings} == {f"public.{name}" for name in inserts}
    assert all(finding.fix and "ALTER TABLE" in finding.fix for finding in plan.findings)
    for table in sorted(whole | inserts):
        any_database.sql(f"INSERT INTO {table} VALUES (1, 'a'), (2, 'b')")
        any_database.sql(f"UPDATE {table} SET v = 'c' WHERE id = 1")
        any_database.sql(f"DELETE FROM {table} WHERE id = 2")
        only = "ONLY" if table == "parent" else ""
        assert any_database.sql(f"SELECT id, v FROM {only} {table}") == [(1, "c")]


def test_our_rule_is_the_servers_rule(any_database: Database, control: Control) -> None:
    """Publish each table whole, by force: the server refuses writes exactly where we would not have."""
    make_odd_tables(any_database)
    refused = set()
    for table in select(control.conn, ["public.*"]).tables:
        name = table.relation.name
        any_database.sql(f"INSERT INTO {name} VALUES (1, 'a'); CREATE PUBLICATION forced FOR TABLE ONLY {name}")
        try:
            any_database.sql(f"UPDATE ONLY {name} SET v = 'c'" if table.kind == "r" else f"UPDATE {name} SET v = 'c'")
        except psycopg.Error:
            refused.add(name)
        any_database.sql("DROP PUBLICATION forced")
    assert refused == {t.relation.name for t in select(control.conn, ["public.*"]).tables if t.unusable}


def test_a_second_sync_changes_nothing(any_database: Database, control: Control) -> None:
    make_odd_tables(any_database)
    first = control.sync()
    again = control.sync(first_start=False)
    assert first.created
    assert (again.created, again.statements) == (False, ())
    assert again.publications == first.publications


def test_the_publications_follow_the_patterns_and_the_tables(any_database: Database, control: Control) -> None:
    any_database.sql(
        "CREATE TABLE a (id int PRIMARY KEY); CREATE TABLE b (id int); CREATE TABLE c (id int PRIMARY KEY)"
    )
    main, second = control.options.publications
    first = control.sync("public.a", "public.b")
    assert (names(first.publications[main]), names(first.publications[second])) == ({"a"}, {"b"})
    any_database.sql("ALTER TABLE b ADD PRIMARY KEY (id)")
    then = control.sync("public.b", "public.c", first_start=False)
    assert (names(then.publications[main]), names(then.publications[second])) == ({"b", "c"}, set())
    last = control.sync("public.b", first_start=False)
    assert (names(last.publications[main]), names(last.publications[second])) == ({"b"}, set())


def test_partitions_come_under_the_name_of_their_table(any_database: Database, control: Control) -> None:
    any_database.sql(ODD_TABLES)
    plan = control.sync("public.parts*")
    assert names(plan.publications[control.options.publication]) == {"parts"}
    assert plan.publications[control.options.publication].via_root
    alone = control.sync("public.parts_low", first_start=False)
    assert names(alone.publications[control.options.publication]) == {"parts_low"}


TAMPERINGS = {
    "ALTER PUBLICATION {main} DROP TABLE a": "table public.a is no longer in publication {main}",
    "ALTER PUBLICATION {main} DROP TABLE a; ALTER PUBLICATION {main} ADD TABLE a": (
        "table public.a was taken out and put back in publication {main}"
    ),
    "ALTER PUBLICATION {main} ADD TABLE extra": "table public.extra was added to publication {main}",
    "ALTER PUBLICATION {main} SET (publish = 'insert')": "publication {main}: operations was",
    "ALTER PUBLICATION {main} SET (publish_via_partition_root = false)": "publication {main}: via_root was True",
    "ALTER PUBLICATION {main} SET TABLE a WHERE (id > 1)": (
        "table public.a has another column list or row filter in publication {main}"
    ),
    "DROP TABLE a; CREATE TABLE a (id int PRIMARY KEY)": "table public.a is no longer in publication {main}",
    "DROP PUBLICATION {main}": "publication {main} does not exist any more",
    "DROP PUBLICATION {main}; CREATE PUBLICATION {main} FOR TABLE a": "publication {main} was dropped and created",
}


def test_a_change_behind_our_back_halts(any_database: Database, control: Control) -> None:
    any_database.sql("CREATE TABLE a (id int PRIMARY KEY); CREATE TABLE extra (id int PRIMARY KEY)")
    main = control.options.publication
    for tampering, said in TAMPERINGS.items():
        plan = control.sync("public.a")
        assert watch_publications(control.conn, control.options, plan.publications) == []
        any_database.sql(tampering.format(main=main))
        (reason,) = watch_publications(control.conn, control.options, plan.publications)
        assert reason.startswith(said.format(main=main))
        if "CREATE PUBLICATION" not in tampering:  # one without our record is told by the journal's header
            with pytest.raises(SourceHalted, match="missing from the log"):
                control.sync("public.a", first_start=False)


def test_a_person_can_accept_what_happened(any_database: Database, control: Control) -> None:
    any_database.sql("CREATE TABLE a (id int PRIMARY KEY)")
    control.sync("public.a")
    any_database.sql(f"ALTER PUBLICATION {control.options.publication} DROP TABLE a")
    with pytest.raises(SourceHalted) as halted:
        control.sync("public.a", first_start=False)
    assert halted.value.hint is not None
    any_database.sql(halted.value.hint.partition("run: ")[2])
    plan = control.sync("public.a", first_start=False)
    assert names(plan.publications[control.options.publication]) == {"a"}
    assert watch_publications(control.conn, control.options, plan.publications) == []


def test_a_dropped_table_is_no_loss(any_database: Database, control: Control) -> None:
    any_database.sql("CREATE TABLE a (id int PRIMARY KEY); CREATE TABLE b (id int PRIMARY KEY)")
    plan = control.sync()
    any_database.sql("DROP TABLE b")
    assert watch_publications(control.conn, control.options, plan.publications) == []
    assert names(control.sync(first_start=False).publications[control.options.publication]) == {"a"}


def test_a_table_that_loses_its_key_is_moved_before_the_application_notices(
    any_database: Database, control: Control
) -> None:
    any_database.sql("CREATE TABLE a (id int PRIMARY KEY, v int); INSERT INTO a VALUES (1, 1)")
    plan = control.sync()
    any_database.sql("ALTER TABLE a DROP CONSTRAINT a_pkey")
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState):
        any_database.sql("UPDATE a SET v = 2")
    (reason,) = watch_publications(control.conn, control.options, plan.publications)
    assert reason.startswith("table public.a can no longer publish updates (it has no primary key), and was moved")
    any_database.sql("UPDATE a SET v = 2")
    # What is missing since then stays missing, however often capture is started.
    with pytest.raises(SourceHalted, match=r"table public\.a is no longer in publication") as halted:
        control.sync(first_start=False)
    any_database.sql((halted.value.hint or "").partition("run: ")[2])
    then = control.sync(first_start=False)
    assert then.statements == ()
    assert names(then.publications[control.options.insert_publication]) == {"a"}


def test_a_table_that_lost_its_key_while_capture_was_stopped_is_moved_and_capture_halts(
    any_database: Database, control: Control
) -> None:
    any_database.sql("CREATE TABLE a (id int PRIMARY KEY, v int); INSERT INTO a VALUES (1, 1)")
    any_database.sql("CREATE TABLE unwanted (id int PRIMARY KEY)")
    control.sync()
    any_database.sql("ALTER TABLE unwanted DROP CONSTRAINT unwanted_pkey")
    assert names(control.sync("public.a", first_start=False).publications[control.options.publication]) == {"a"}
    any_database.sql("DROP TABLE unwanted")
    any_database.sql("ALTER TABLE a DROP CONSTRAINT a_pkey")
    with pytest.raises(SourceHalted, match=r"table public\.a can no longer publish updates .* and was moved") as halted:
        control.sync(first_start=False)
    any_database.sql("UPDATE a SET v = 2")
    with pytest.raises(SourceHalted, match=r"table public\.a is no longer in publication"):
        control.sync(first_start=False)
    any_database.sql((halted.value.hint or "").partition("run: ")[2])
    last = control.sync(first_start=False)
    assert [names(one) for one in last.publications.values()] == [set(), {"a"}]


def test_columns_and_rows_are_left_out_only_where_that_is_safe(any_database: Database) -> None:
    any_database.sql("CREATE TABLE a (id int PRIMARY KEY, v text, w text)")
    with opened_at(any_database, push=True, columns={"public.a": ["id", "v"]}, rows={"public.a": "id > 5"}) as control:
        plan = control.sync()
        (member,) = plan.publications[control.options.publication].members
        assert (member.columns, member.filter, member.filter_columns) == (("id", "v"), "(id > 5)", ("id",))
        assert control.sync(first_start=False).statements == ()
        any_database.sql("INSERT INTO a VALUES (1, 'x', 'y'); UPDATE a SET v = 'z'; DELETE FROM a")
        changed = replace(control, options=control.options.model_copy(update={"rows": {"public.a": "id > 6"}}))
        (member,) = changed.sync(first_start=False).publications[control.options.publication].members
        assert member.filter == "(id > 6)"


@pytest.mark.parametrize(
    ("pushed", "said"),
    [
        ({"columns": {"public.a": ["v"]}}, "the column list lacks id of the replica identity"),
        ({"rows": {"public.a": "v = 'x' AND id > 1"}}, "the row filter uses v, not of the replica identity"),
    ],
)
def test_lists_and_filters_that_would_break_updates_are_refused(
    any_database: Database, pushed: dict[str, object], said: str
) -> None:
    any_database.sql("CREATE TABLE a (id int PRIMARY KEY, v text)")
    with opened_at(any_database, push=True, **pushed) as control:
        for attempt in (control.sync, lambda: try_publications(control.conn, control.spec.tables, control.options)):
            with pytest.raises(PreflightError, match="would make the application's UPDATE and DELETE fail") as refused:
                attempt()
            assert refused.value.message.endswith(said)
    assert any_database.sql("SELECT pubname FROM pg_publication") == []


def test_a_filter_of_a_table_that_is_not_captured_is_an_error(any_database: Database) -> None:
    any_database.sql("CREATE TABLE a (id int PRIMARY KEY)")
    with (
        opened_at(any_database, push=True, rows={"public.b": "id > 1"}) as control,
        pytest.raises(ConfigError, match=r"not captured: public\.b"),
    ):
        control.sync()


def test_a_publication_of_somebody_else_is_never_altered(any_database: Database, control: Control) -> None:
    any_database.sql("CREATE TABLE a (id int PRIMARY KEY); CREATE TABLE b (id int PRIMARY KEY)")
    main, second = control.options.publications
    any_database.sql(f"CREATE PUBLICATION {main} FOR TABLE a WITH (publish_via_partition_root)")
    with pytest.raises(PreflightError, match="was not made by this role for Millstream") as refused:
        control.sync()
    assert refused.value.hint is not None
    any_database.sql(refused.value.hint.partition(": ")[2])
    plan = control.sync()
    assert names(plan.publications[main]) == {"a", "b"}
    assert not plan.publications[main].ours
    assert plan.publications[second].ours


def test_a_publication_for_all_tables_is_refused(any_database: Database, control: Control) -> None:
    any_database.sql("CREATE TABLE a (id int PRIMARY KEY)")
    any_database.sql(f"CREATE PUBLICATION {control.options.publication} FOR ALL TABLES")
    with pytest.raises(PreflightError, match="is for all tables"):
        control.sync()


def test_tables_that_cannot_be_captured_are_errors_when_named(any_database: Database, control: Control) -> None:
    any_database.sql("CREATE TABLE a (id int PRIMARY KEY); CREATE UNLOGGED TABLE u (id int PRIMARY KEY)")
    any_database.sql("CREATE VIEW v AS TABLE a")
    with pytest.raises(PreflightError) as refused:
        control.sync("public.a", "public.u", "public.v", "public.missing")
    assert set(refused.value.message.split("; ")) == {
        "public.u is an unlogged table and cannot be captured",
        "public.v is a view and cannot be captured",
        "table public.missing does not exist",
    }
    with pytest.raises(PreflightError, match="name no table"):
        control.sync("nowhere.*")
    assert any_database.sql("SELECT pubname FROM pg_publication") == []


def test_a_locked_table_is_tried_again_later(database: Database) -> None:
    database.sql("CREATE TABLE a (id int PRIMARY KEY)")
    with opened_at(database) as control, database.connect(autocommit=False) as other:
        other.execute("LOCK TABLE a IN ACCESS EXCLUSIVE MODE")
        control.conn.execute("SET lock_timeout = '50ms'")
        with pytest.raises(SourceUnavailable, match="lock timeout"):
            control.sync()
        other.rollback()
        assert control.sync().created


def test_a_partition_that_is_captured_as_its_root_is_refused_and_not_waited_for(
    database: Database, tmp_path: Path
) -> None:
    database.sql("CREATE TABLE parts (id int PRIMARY KEY) PARTITION BY RANGE (id)")
    database.sql("CREATE TABLE parts_low PARTITION OF parts FOR VALUES FROM (0) TO (100)")
    said = r"public\.parts_low is a partition of public\.parts, which another stream"
    with drive(database, tmp_path), pytest.raises(SourceHalted, match=said):
        take_snapshot(source_spec(database, "public.parts_low"), lambda _: None)
