"""The catalog and the log must say the same of every table; where they do not, the log counts."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import replace

import pytest

from millstream.model import Column, Relation
from millstream.sources.base import Severity
from millstream.sources.postgres import descriptions
from millstream.sources.postgres.catalog import enrich, relations, select
from millstream.sources.postgres.descriptions import Descriptions
from tests.fixtures.postgres import Database
from tests.fixtures.postgres_source import Control, opened_at

pytestmark = pytest.mark.postgres

TABLES = """
    CREATE TYPE mood AS ENUM ('sad', 'fine', 'glad');
    CREATE DOMAIN price AS numeric(10, 2) NOT NULL;
    CREATE DOMAIN fair_price AS price CHECK (VALUE > 0);
    CREATE DOMAIN feeling AS mood;
    CREATE DOMAIN tags AS text[];
    CREATE TYPE pair AS (x int, y int);
    CREATE TABLE typed (
        gone int, id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, name varchar(40) NOT NULL DEFAULT 'nobody',
        cost fair_price DEFAULT 1, feels mood, felt feeling, words text[], tagged tags, two pair, span int4range);
    ALTER TABLE typed DROP COLUMN gone;
    CREATE TABLE computed (id int PRIMARY KEY, twice int GENERATED ALWAYS AS (id * 2) STORED, v text);
    CREATE TABLE whole (id int PRIMARY KEY, v text);
    ALTER TABLE whole REPLICA IDENTITY FULL;
    CREATE TABLE heap (v text, w text);
    CREATE TABLE by_index (id int PRIMARY KEY, a int NOT NULL, b int NOT NULL, UNIQUE (b, a));
    ALTER TABLE by_index REPLICA IDENTITY USING INDEX by_index_b_a_key;
    CREATE TABLE parts (v text, at int, id int, PRIMARY KEY (id, at)) PARTITION BY RANGE (at);
    CREATE TABLE parts_1 (id int NOT NULL, at int NOT NULL, v text);
    ALTER TABLE parts ATTACH PARTITION parts_1 FOR VALUES FROM (0) TO (10);
"""
ROWS = """
    INSERT INTO typed (name) VALUES ('a');
    INSERT INTO computed VALUES (1, DEFAULT, 'a');
    INSERT INTO whole VALUES (1, 'a');
    INSERT INTO heap VALUES ('a', 'b');
    INSERT INTO by_index VALUES (1, 2, 3);
    INSERT INTO parts VALUES ('a', 1, 1);
"""


@pytest.fixture
def control(any_database: Database) -> Iterator[Control]:
    any_database.sql(TABLES)
    with opened_at(any_database) as made:
        yield made


def logged_relations(control: Control) -> dict[str, Relation]:
    """The relation messages that the log has for us, read apart by hand."""
    options = control.options.plugin_options(control.conn.info.server_version)
    arguments = [text for pair in options.items() for text in pair]
    rows = control.conn.execute(
        "SELECT data FROM pg_logical_slot_peek_binary_changes(%s, NULL, NULL, VARIADIC %s)",
        (control.options.slot, arguments),
    ).fetchall()
    found = [_parse(bytes(data)) for (data,) in rows if bytes(data)[:1] == b"R"]
    return {relation.name: relation for relation in found}


def _parse(message: bytes) -> Relation:
    (oid,) = struct.unpack_from(">I", message, 1)
    schema, name, rest = message[5:].split(b"\0", 2)
    identity, count = chr(rest[0]), struct.unpack_from(">h", rest, 1)[0]
    rest, columns = rest[3:], []
    for _ in range(count):
        flag, (column, rest) = rest[0], rest[1:].split(b"\0", 1)
        columns.append(Column(column.decode(), *struct.unpack_from(">Ii", rest), key=bool(flag)))
        rest = rest[8:]
    return Relation(oid, schema.decode(), name.decode(), identity, tuple(columns))


def test_catalog_and_log_describe_each_table_alike(any_database: Database, control: Control) -> None:
    control.prepare()
    any_database.sql(ROWS)
    logged = logged_relations(control)
    # The server describes the partition too, though every row comes under the name of its table.
    assert enrich(control.conn, logged.pop("parts_1"), control.options.publications).key == ("id", "at")
    described = {relation.name: relation for relation in relations(control.conn, ["public.*"])}
    assert set(logged) == set(described) == {"typed", "computed", "whole", "heap", "by_index", "parts"}
    for name, relation in logged.items():
        assert enrich(control.conn, relation, control.options.publications) == described[name]
        assert described[name].enriched
    keys = {name: (relation.key, relation.primary_key) for name, relation in described.items()}
    assert keys == {
        "typed": (("id",), ("id",)),
        "computed": (("id",), ("id",)),
        "whole": (("id",), ("id",)),
        "heap": ((), ()),
        "by_index": (("b", "a"), ("id",)),
        "parts": (("id", "at"), ("id", "at")),
    }


def test_a_table_that_has_changed_since_keeps_what_the_log_said(any_database: Database, control: Control) -> None:
    control.prepare()
    any_database.sql(ROWS)
    logged = logged_relations(control)
    for relation, change in {
        "typed": "ALTER TABLE typed ADD COLUMN more int",
        "computed": "ALTER TABLE computed RENAME v TO u",
        "whole": "ALTER TABLE whole REPLICA IDENTITY DEFAULT",
        "heap": "ALTER TABLE heap ALTER w TYPE int USING 1",
        "by_index": "ALTER TABLE by_index RENAME TO renamed",
        "parts": "DROP TABLE parts",
    }.items():
        any_database.sql(change)
        told = enrich(control.conn, logged[relation], control.options.publications)
        flagged = tuple(column.name for column in logged[relation].columns if column.key)
        assert told == replace(logged[relation], key=flagged, enriched=False)


def test_one_look_is_enough_for_the_tables_of_a_call_and_none_is_kept_beyond_it(
    any_database: Database, control: Control
) -> None:
    control.prepare()
    any_database.sql(ROWS)
    logged = logged_relations(control)
    typed, heap = logged["typed"], logged["heap"]
    asking = Descriptions(control.conn, control.options.publications)

    def enriched(*relations: Relation) -> list[bool]:
        return [asking.completed(relation, None).enriched for relation in relations]

    asking.begin_call()
    assert enriched(typed, heap) == [True, True]
    any_database.sql("ALTER TABLE heap ADD COLUMN more int")
    assert enriched(heap) == [True], "as it was when the call began to send"
    asking.begin_call()
    assert enriched(typed) == [True]
    any_database.sql("ALTER TABLE heap DROP COLUMN more")
    assert enriched(heap) == [False], "looked at with the other one, before that"
    asking.begin_call()
    assert asking.completed(typed, None) == enrich(control.conn, typed, control.options.publications)
    any_database.sql("ALTER TABLE typed ADD COLUMN more int")
    asking.end_calls()
    assert enriched(typed, heap) == [False, True], "a stream asks each time"


def test_a_table_that_a_call_brings_for_the_first_time_or_that_is_gone(
    any_database: Database, control: Control
) -> None:
    control.prepare()
    any_database.sql(ROWS)
    logged = logged_relations(control)
    asking = Descriptions(control.conn, control.options.publications)
    asking.begin_call()
    assert asking.completed(logged["typed"], None).enriched
    asking.begin_call()
    assert asking.completed(logged["whole"], None).enriched
    any_database.sql("DROP TABLE whole")
    asking.begin_call()
    before = replace(logged["whole"], key=("id",), enriched=True)
    assert asking.completed(logged["whole"], before) == before
    assert not asking.completed(logged["whole"], None).enriched


@pytest.mark.parametrize(("most", "seen"), [(2, [True, True]), (1, [True, False])])
def test_a_first_call_expects_what_changed_before_if_that_is_little(
    any_database: Database, control: Control, monkeypatch: pytest.MonkeyPatch, most: int, seen: list[bool]
) -> None:
    monkeypatch.setattr(descriptions, "MOST_EXPECTED", most)
    control.prepare()
    any_database.sql(ROWS)
    typed, heap = (logged_relations(control)[name] for name in ("typed", "heap"))
    asking = Descriptions(control.conn, control.options.publications, {typed.oid, heap.oid})
    asking.begin_call()
    first = asking.completed(typed, None).enriched
    any_database.sql("ALTER TABLE heap ADD COLUMN more int")
    assert [first, asking.completed(heap, None).enriched] == seen


def test_what_older_rows_have_in_a_new_column_is_found_also_below_a_partitioned_table(
    any_database: Database, control: Control
) -> None:
    any_database.sql(ROWS)
    any_database.sql("ALTER TABLE whole ADD COLUMN late int NOT NULL DEFAULT 7, ADD COLUMN plain int")
    any_database.sql("ALTER TABLE parts ADD COLUMN late text NOT NULL DEFAULT 'x, y'")
    tables = relations(control.conn, ["public.*"])
    found = {one.name: {column.name: column.missing for column in one.columns} for one in tables}
    assert found["whole"] == {"id": None, "v": None, "late": "7", "plain": None}
    assert found["parts"] == {"v": None, "at": None, "id": None, "late": "x, y"}


def test_a_column_list_is_part_of_what_the_log_can_say(any_database: Database) -> None:
    any_database.sql(TABLES)
    with opened_at(any_database, "public.by_index", push=True, columns={"public.by_index": ["a", "b"]}) as control:
        control.prepare()
        any_database.sql("INSERT INTO by_index VALUES (1, 2, 3)")
        logged = logged_relations(control)["by_index"]
        known = enrich(control.conn, logged, control.options.publications)
        assert (known.enriched, [column.name for column in known.columns], known.key) == (True, ["a", "b"], ("b", "a"))
        assert not enrich(control.conn, logged).enriched


def test_types_are_described_down_to_their_base(any_database: Database, control: Control) -> None:
    (typed,) = relations(control.conn, ["public.typed"])
    columns = {column.name: column for column in typed.columns}
    mood, pair = (any_database.sql(f"SELECT '{name}'::regtype::oid::int8")[0][0] for name in ("mood", "pair"))

    def beneath(column: Column) -> tuple[int | None, int | None]:
        return column.base_type_oid, column.base_type_mod

    labels = ("sad", "fine", "glad")
    facts = {
        c.name: (c.attnum, c.type_name, c.type_kind, c.nullable, *beneath(c), c.element_type_oid, c.enum_labels)
        for c in typed.columns
    }
    assert facts == {
        "id": (2, "bigint", "b", False, None, None, None, None),
        "name": (3, "character varying(40)", "b", False, None, None, None, None),
        "cost": (4, "public.fair_price", "d", False, 1700, (10 << 16) + 2 + 4, None, None),
        "feels": (5, "public.mood", "e", True, None, None, None, labels),
        "felt": (6, "public.feeling", "d", True, mood, -1, None, labels),
        "words": (7, "text[]", "b", True, None, None, 25, None),
        "tagged": (8, "public.tags", "d", True, 1009, -1, 25, None),
        "two": (9, "public.pair", "c", True, None, None, None, None),
        "span": (10, "int4range", "r", True, None, None, None, None),
    }
    assert columns["two"].type_oid == pair
    delimiters = {column.name: column.element_delimiter for column in typed.columns if column.element_delimiter}
    assert delimiters == {"words": ",", "tagged": ","}
    assert (columns["name"].default, columns["name"].type_mod) == ("'nobody'::character varying", 44)


def test_patterns_choose_each_table_once(any_database: Database, control: Control) -> None:
    any_database.sql("""
        CREATE SCHEMA "Other One"; CREATE TABLE "Other One"."T.*" (id int PRIMARY KEY);
        CREATE TABLE "Other One".t_1 (id int PRIMARY KEY); CREATE TABLE "Other One".tx1 (id int PRIMARY KEY);
        CREATE VIEW a_view AS TABLE heap; CREATE UNLOGGED TABLE unlogged (id int PRIMARY KEY)""")

    def chosen(*patterns: str) -> list[str]:
        return [relation.table for relation in relations(control.conn, patterns)]

    assert chosen("Other One.t_*") == ["Other One.t_1"]
    assert chosen('"Other One"."T.*"', "public.heap", "public.he*") == ["Other One.T.*", "public.heap"]
    assert chosen("public.parts*") == ["public.parts"]
    assert chosen("public.parts_1") == ["public.parts_1"]
    assert set(chosen("*.*")) == {
        "Other One.T.*", "Other One.t_1", "Other One.tx1", "public.by_index", "public.computed", "public.heap",
        "public.parts", "public.typed", "public.whole",
    }  # fmt: skip
    findings = select(
        control.conn, ["*.*", "nowhere.*", "pg_catalog.pg_class", "public.Heap", "public.a_view"]
    ).findings
    assert {(finding.severity, finding.message) for finding in findings} == {
        (Severity.WARNING, "no table matches nowhere.* now"),
        (Severity.ERROR, "pg_catalog.pg_class is a system table and cannot be captured"),
        (Severity.ERROR, "table public.Heap does not exist"),
        (Severity.ERROR, "public.a_view is a view and cannot be captured"),
        (Severity.OK, "public.unlogged is an unlogged table and is left out"),
    }
    (misspelt,) = [one.fix for one in findings if one.table == "public.Heap"]
    assert str(misspelt).startswith("did you mean public.heap? Else correct its name in `tables`")
