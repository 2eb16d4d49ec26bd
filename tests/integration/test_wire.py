"""Capture with `wire: binary`: where it works, where it is refused, and how one goes back."""

from __future__ import annotations

from datetime import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from millstream.embedded import EmbeddedPostgres
from millstream.errors import SourceHalted
from millstream.model import Relation
from millstream.observe import Event
from millstream.sources.base import Severity
from millstream.sources.decoders import decoder
from millstream.sources.postgres.options import PostgresOptions
from millstream.sources.postgres.preflight import preflight
from millstream.sources.postgres.source import PostgresSource
from tests.fixtures.bulk import TABLES, copy_slot, count, drive_copy, facts, small_steps, write_history
from tests.fixtures.capture import Driver, drive, source_spec
from tests.fixtures.postgres import Database, fresh_database

pytestmark = pytest.mark.postgres

BINARY = {"wire": "binary"}
TABLE = "CREATE TABLE t (id int PRIMARY KEY, v text, n numeric(10,2), at timestamptz)"


def decoded(driver: Driver, relation: Relation) -> list[dict[str, object]]:
    number = driver.relations.index(relation) + 1
    rows = [row for row in driver.rows if row["relation"] == number]
    op = np.array([row["op"] for row in rows], np.uint8)
    result = decoder(relation).decode(op, pa.array([row["payload"] for row in rows], pa.large_binary()))
    return list(result.after.to_pylist())


def go_on(driver: Driver, work: Path, **options: object) -> None:
    """Close the source and open it with other options, as after a change of the stream file."""
    driver.source.close()
    driver.source = PostgresSource(source_spec(driver.database, options=options), work)
    driver.connect()


def errors(database: Database) -> list[tuple[str, str | None, str | None]]:
    spec = source_spec(database, options=BINARY)
    found = preflight(spec, PostgresOptions.of(spec))
    return [(each.message, each.fix, each.table) for each in found if each.severity is Severity.ERROR]


def test_changes_come_in_binary_form_and_mean_the_same(any_database: Database, tmp_path: Path) -> None:
    any_database.sql(TABLE)
    assert errors(any_database) == []
    with drive(any_database, tmp_path, options=BINARY) as driver:
        assert driver.identity.facts["plugin_options"]["binary"] == "true"
        any_database.sql("INSERT INTO t VALUES (1, 'é', 1.5, '2024-01-01 00:00:00.25+02'), (2, NULL, NULL, NULL)")
        any_database.sql("UPDATE t SET v = 'x' WHERE id = 2")
        driver.catch_up()
        (relation,) = driver.relations
        sent = [row["payload"] for row in driver.rows]
        assert b"b\0\0\0\4\0\0\0\1" in sent[0], "the key is not sent as a number of four bytes"
        said = any_database.sql("SELECT id, v, n, at FROM t WHERE id = 1")
    rows = decoded(driver, relation)
    assert [tuple(row.values()) for row in rows[:1]] == said
    assert [tuple(row.values()) for row in rows[1:]] == [(2, None, None, None), (2, "x", None, None)]


def test_a_journal_goes_on_when_the_form_is_changed(database: Database, tmp_path: Path) -> None:
    database.sql(TABLE)
    with drive(database, tmp_path) as driver:
        for number, options in enumerate(({}, BINARY, {"wire": "text"}, BINARY)):
            go_on(driver, tmp_path, **options)
            database.sql(f"INSERT INTO t VALUES ({number}, 'v{number}', {number}.25, 'infinity')")
            driver.catch_up()
        driver.source.close()
    (relation,) = driver.relations
    forms = [row["payload"][8:9] for row in driver.rows]
    assert forms == [b"t", b"b", b"t", b"b"]
    assert [(row["id"], row["v"], str(row["n"]), row["at"]) for row in decoded(driver, relation)] == [
        (number, f"v{number}", f"{number}.25", None) for number in range(4)
    ]


@pytest.mark.parametrize("wire", ["text", "binary"])
def test_a_choice_of_types_holds_from_where_it_is_made(database: Database, tmp_path: Path, wire: str) -> None:
    database.sql("CREATE TABLE t (id int PRIMARY KEY, at time, took interval)")
    with drive(database, tmp_path) as driver:
        for number, asked in enumerate(({}, {"time": "time", "interval": "struct"}, {"interval": "struct"})):
            go_on(driver, tmp_path, wire=wire, types=asked)
            database.sql(f"INSERT INTO t VALUES ({number}, '12:30:00.5', '1 mon -{number} days 00:00:01')")
            driver.catch_up()
            assert driver.source.relations(["public.t"])[0].types == driver.relations[-1].types
        driver.source.close()
    rows = [row for relation in driver.relations for row in decoded(driver, relation)]
    assert rows == [
        {"id": 0, "at": "12:30:00.5", "took": "1 mon 00:00:01"},
        {"id": 1, "at": time(12, 30, 0, 500_000), "took": {"months": 1, "days": -1, "microseconds": 1_000_000}},
        {"id": 2, "at": "12:30:00.5", "took": {"months": 1, "days": -2, "microseconds": 1_000_000}},
    ]


def test_tables_that_are_not_of_built_in_types_are_refused_by_name(database: Database) -> None:
    database.sql(
        "CREATE TYPE mood AS ENUM ('glad'); CREATE DOMAIN price AS numeric(10,2);"
        "CREATE TABLE t (id int PRIMARY KEY, m mood, p price[], l aclitem[], c regclass);"
        "CREATE TABLE fine (id int PRIMARY KEY, a uuid[], j jsonb)"
    )
    found = errors(database)
    assert [table for _, _, table in found] == ["public.t"] * 4
    assert {fix for _, fix, _ in found} == {"set wire: text for this source; a journal that has begun goes on with it"}
    assert [message.partition(" is ")[0] for message, _, _ in found] == ["wire: binary"] * 4
    named = [message.split("column ")[1].split(",")[0] for message, _, _ in found]
    assert named == [
        "m of public.t is public.mood",
        "p of public.t is public.price[]",
        "l of public.t is aclitem[]",
        "c of public.t is regclass",
    ]
    assert "the number of an object on the wire and its name in text" in found[-1][0]


def test_a_database_without_encoding_is_refused(postgres: EmbeddedPostgres) -> None:
    with fresh_database(postgres, "TEMPLATE template0 ENCODING 'SQL_ASCII' LOCALE 'C'") as made:
        made.sql(TABLE)
        ((message, _, table),) = errors(made)
    assert "its database is SQL_ASCII" in message
    assert table == "public.t"


def test_bulk_reading_gives_the_same_in_binary_form(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_steps(monkeypatch)
    database.sql(TABLES)
    with drive(database, tmp_path / "own"):
        stream, in_bulk = (f"{database.name}_{way}" for way in ("stream", "bulk"))
        copy_slot(database, stream, in_bulk)
    write_history(database, range(1, 5))
    with drive_copy(database, tmp_path, stream, [], catch_up="streaming", **BINARY) as driver:
        driver.catch_up()
        expected = facts(driver)
    events: list[Event] = []
    with drive_copy(database, tmp_path, in_bulk, events, **BINARY) as driver:
        driver.catch_up()
        assert facts(driver) == expected
    assert count(events, "source.bulk_started") == 1
    assert any(b"b\0\0\0\4" in row["payload"] for row in driver.rows)


LATER = {
    "mood": ("sad", "sad", r"column m of public\.t is public\.mood, which is not among the built-in types"),
    "regclass": ("pg_class", "pg_class", r"column m of public\.t is regclass, and regclass is the number of an object"),
    # The server itself cannot send this one, and says so before it has told us of the column.
    "aclitem[]": ("{=X/pg_monitor}", ["=X/pg_monitor"], "no binary output function available for type aclitem"),
}


@pytest.mark.parametrize("kind", LATER)
def test_a_column_of_another_type_that_comes_later_halts_and_nothing_is_lost(
    database: Database, tmp_path: Path, kind: str
) -> None:
    written, read, said = LATER[kind]
    database.sql(TABLE)
    database.sql("CREATE TYPE mood AS ENUM ('glad', 'sad')")
    with drive(database, tmp_path, options=BINARY) as driver:
        database.sql("INSERT INTO t VALUES (1, 'before')")
        driver.catch_up()
        database.sql(f"BEGIN; INSERT INTO t VALUES (2, 'still'); ALTER TABLE t ADD m {kind}; COMMIT")
        database.sql(f"INSERT INTO t VALUES (3, 'after', NULL, NULL, '{written}')")
        for _ in range(2):  # a restart does not get past it
            with pytest.raises(SourceHalted, match=said) as raised:
                driver.catch_up()
            driver.stream = None
            assert raised.value.hint == "set wire: text for this source; a journal that has begun goes on with it"

        go_on(driver, tmp_path, wire="text")
        driver.catch_up()
        driver.source.close()
    rows = [row for relation in driver.relations for row in decoded(driver, relation)]
    assert [(row["id"], row["v"], row.get("m")) for row in rows] == [
        (1, "before", None),
        (2, "still", None),
        (3, "after", read),
    ]
