"""Rows that a Postgres does not take, and values that only the source still has: on real databases."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from millstream import BatchLimits, Engine, Mode, StreamSpec, TargetSpec
from millstream.cli.app import app
from millstream.embedded import EmbeddedPostgres
from millstream.targets.lanes import sessions
from millstream.transforms.shape import FieldFilter, Shape, Step
from tests.fixtures.capture import source_spec
from tests.fixtures.engines import QUICK, await_that
from tests.fixtures.postgres import Database, fresh_database

pytestmark = pytest.mark.postgres

ONE = BatchLimits(max_ms=0, max_bytes=1 << 30, max_events=1)
LONG = 4000


@pytest.fixture
def narrow(postgres: EmbeddedPostgres) -> Iterator[Database]:
    """A database whose encoding has no Japanese."""
    with fresh_database(postgres, "ENCODING 'LATIN1' TEMPLATE template0 LC_COLLATE 'C' LC_CTYPE 'C'") as made:
        yield made
        sessions.close_idle(made.uri, None)


def stream(root: Path, source: Database, copy: Database, limits: BatchLimits = QUICK) -> StreamSpec:
    """To a Postgres that is choosy, and to a SQLite file that is not."""
    spec = source_spec(source, "public.item", options={"slot": f"millstream_{source.name}"})
    targets = (
        TargetSpec("copy", "postgres", limits, options={"uri": copy.uri}),
        TargetSpec("other", "sqlite", QUICK, options={"path": str(root / "other.db")}),
    )
    return StreamSpec("shop", spec, Mode.CDC, targets, checkpoint_interval_ms=100)


def create(source: Database) -> None:
    source.sql("CREATE TABLE item (id int PRIMARY KEY, name text, body text)")
    source.sql("ALTER TABLE item ALTER body SET STORAGE EXTERNAL")


ITEMS = "SELECT id, name, body FROM item ORDER BY id"


def in_sqlite(root: Path) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(root / "other.db")) as db:
        return db.execute('SELECT id, name, body FROM "public.item" ORDER BY id').fetchall()


def caught_up(engine: Engine, source: Database, *targets: str) -> None:
    """Wait until these targets have everything that is committed now."""
    ((end,),) = source.sql("SELECT (pg_current_wal_flush_lsn() - '0/0')::int8")

    def there() -> bool:
        status = engine.get_status("shop")
        covered = int(status.source.end_position.replace("/", ""), 16) if status.source.end_position else 0
        return covered >= end and all(t.lag_events == 0 for t in status.targets if t.name in targets)

    await_that(there)


def command(engine: Engine, *arguments: str, code: int = 0) -> Any:
    ran = CliRunner().invoke(app, ["dlq", *arguments, "--json", "--home", str(engine.home.path)])
    assert ran.exit_code == code, ran.output
    return json.loads(ran.stdout)


def test_a_value_that_does_not_fit_is_kept_aside_and_everything_else_flows(
    engine: Engine, database: Database, narrow: Database, tmp_path: Path
) -> None:
    create(database)
    with engine:
        engine.upsert_stream(stream(tmp_path, database, narrow))
        engine.await_ready("shop", 120)
        database.sql("INSERT INTO item SELECT i, 'name ' || i, 'body' FROM generate_series(1, 200) i")
        database.sql("UPDATE item SET name = '日本' WHERE id IN (17, 150)")
        database.sql("INSERT INTO item VALUES (300, 'after', '日本')")
        caught_up(engine, database, "copy", "other")
        assert in_sqlite(tmp_path) == database.sql(ITEMS)
        found = {row[0]: row for row in narrow.sql(ITEMS)}
        expected = {row[0]: row for row in database.sql(ITEMS)}
        assert found == {id_: row for id_, row in expected.items() if id_ != 300} | {
            id_: (id_, f"name {id_}", "body") for id_ in (17, 150) if id_ in found
        }
        letters = command(engine, "list")
        assert {(one["target"], one["table"], one["kind"]) for one in letters} == {("copy", "public.item", "value")}
        assert "日本" not in json.dumps(letters, ensure_ascii=False)
        target = next(one for one in engine.get_status("shop").targets if one.name == "copy")
        assert target.dead_letters == len(letters)
        assert target.error is None
        last = letters[-1]
        shown = command(engine, "show", str(last["id"]))
        assert shown["change"]["values"] == {"id": 300, "name": "after", "body": "日本"}
        (again,) = command(engine, "retry", str(last["id"]), code=1)
        assert again["outcome"] == "rejected"
        # Delivery goes on after a retry, and a change that fits makes a letter obsolete.
        database.sql("UPDATE item SET name = 'nihon' WHERE id IN (17, 150)")
        caught_up(engine, database, "copy")
        found = {row[0]: row for row in narrow.sql(ITEMS)}
        assert found == {row[0]: row for row in database.sql(ITEMS) if row[0] != 300}
        done = command(engine, "retry", "--stream", "shop", "--target", "copy", code=1)
        assert {one["outcome"] for one in done if one["id"] != last["id"]} == {"superseded"}
        assert command(engine, "purge", str(last["id"])) == {"purged": 1}
        assert command(engine, "list") == []
        await_that(lambda: engine.get_status("shop").healthy)
    assert in_sqlite(tmp_path) == database.sql(ITEMS)


def test_a_value_that_nobody_has_is_read_from_the_source(
    engine: Engine, database: Database, narrow: Database, tmp_path: Path
) -> None:
    """Rows from before the stream: their long values are not sent with an update, and the target never had them."""
    create(database)
    database.sql(f"INSERT INTO item SELECT i, 'old', repeat(i::text, {LONG}) FROM generate_series(1, 9) i")
    made = stream(tmp_path, database, narrow, ONE)
    with engine:
        engine.upsert_stream(replace(made, targets=made.targets[:1]))
        engine.await_ready("shop", 120)
        engine.pause("shop")
        database.sql("UPDATE item SET name = 'new' WHERE id = 1")
        # By the time these are delivered, the source has gone on.
        database.sql("UPDATE item SET name = 'first' WHERE id = 2; ")
        database.sql("UPDATE item SET name = 'second' WHERE id = 2")
        database.sql("UPDATE item SET name = 'short lived' WHERE id = 3")
        database.sql("DELETE FROM item WHERE id = 3")
        database.sql("UPDATE item SET name = 'about to move' WHERE id = 4")
        database.sql("UPDATE item SET id = 40 WHERE id = 4")
        engine.resume("shop")
        caught_up(engine, database, "copy")
        assert narrow.sql(ITEMS) == database.sql(f"SELECT * FROM ({ITEMS}) t WHERE id IN (1, 2, 40)")
        assert engine.dead_letters() == []


def test_what_a_filter_needs_and_was_not_sent_is_read_from_the_source(
    engine: Engine, database: Database, narrow: Database, tmp_path: Path
) -> None:
    """A long value that did not change is not sent, and the filter looks at it."""
    create(database)
    made = stream(tmp_path, database, narrow, ONE)
    shape = Shape(fields=(FieldFilter("body", "prefix", ("in",)),), transforms=(Step("rename", (("id", "code"),)),))
    with engine:
        engine.upsert_stream(replace(made, shape=shape))
        engine.await_ready("shop", 120)
        database.sql(
            f"INSERT INTO item SELECT i, 'old', CASE i % 2 WHEN 0 THEN 'in' ELSE 'out' END || repeat('x', {LONG}) "
            "FROM generate_series(1, 6) i"
        )
        caught_up(engine, database, "copy", "other")
        engine.pause("shop")
        database.sql("UPDATE item SET name = 'new' WHERE id IN (1, 2)")
        # By the time these are delivered, the source has gone on.
        database.sql("UPDATE item SET name = 'first' WHERE id IN (3, 4)")
        database.sql("UPDATE item SET name = 'second' WHERE id IN (3, 4)")
        database.sql("UPDATE item SET name = 'short lived' WHERE id = 6")
        database.sql("DELETE FROM item WHERE id = 6")
        engine.resume("shop")
        caught_up(engine, database, "copy", "other")
        inside = database.sql("SELECT id, name, body FROM item WHERE body LIKE 'in%' ORDER BY id")
        assert narrow.sql("SELECT code, name, body FROM item ORDER BY code") == inside
        with closing(sqlite3.connect(tmp_path / "other.db")) as db:
            assert db.execute('SELECT code, name, body FROM "public.item" ORDER BY code').fetchall() == inside
        assert [row[:2] for row in inside] == [(2, "new"), (4, "second")]
        assert engine.dead_letters() == []


def test_a_row_of_a_baseline_that_does_not_fit_is_a_letter_too(
    engine: Engine, database: Database, narrow: Database, tmp_path: Path
) -> None:
    create(database)
    database.sql(
        "INSERT INTO item SELECT i, CASE i WHEN 77 THEN '日本' ELSE 'n' END, 'b' FROM generate_series(1, 100) i"
    )
    with engine:
        engine.upsert_stream(replace(stream(tmp_path, database, narrow), mode=Mode.SNAPSHOT_THEN_CDC))
        engine.await_ready("shop", 120)
        assert narrow.sql(ITEMS) == database.sql(f"SELECT * FROM ({ITEMS}) t WHERE id <> 77")
        assert in_sqlite(tmp_path) == database.sql(ITEMS)
        (letter,) = engine.dead_letters("shop", "copy")
        assert (letter.op, letter.kind, letter.key) == ("r", "value", "77")
        database.sql("UPDATE item SET name = 'latin' WHERE id = 77")
        caught_up(engine, database, "copy")
        assert narrow.sql(ITEMS) == database.sql(ITEMS)
        (outcome,) = engine.retry_letters([letter.id])
        assert outcome.outcome == "superseded"


def test_a_value_of_the_row_that_came_to_the_key_later_is_not_carried_along(
    engine: Engine, database: Database, narrow: Database, tmp_path: Path
) -> None:
    """Both rows say the same but for the value that was not sent. The first has gone to another key since."""
    create(database)
    database.sql(f"INSERT INTO item SELECT i, 'same', repeat('x', {LONG}) FROM generate_series(1, 3) i")
    made = stream(tmp_path, database, narrow, ONE)
    other = f"'same', repeat('y', {LONG})"
    with engine:
        engine.upsert_stream(replace(made, targets=made.targets[:1]))
        engine.await_ready("shop", 120)
        engine.pause("shop")
        database.sql("UPDATE item SET name = 'same' WHERE id = 1")
        database.sql("UPDATE item SET id = 10 WHERE id = 1")
        database.sql(f"INSERT INTO item VALUES (1, {other})")
        with database.connect() as connection, connection.transaction():
            connection.execute("UPDATE item SET name = 'same' WHERE id = 2")
            connection.execute("UPDATE item SET id = 20 WHERE id = 2")
            connection.execute(f"INSERT INTO item VALUES (2, {other})".encode())
        # What a savepoint has written does not have the name of its transaction.
        with database.connect() as connection, connection.transaction(), connection.transaction():
            connection.execute("UPDATE item SET name = 'in a savepoint' WHERE id = 3")
        engine.resume("shop")
        caught_up(engine, database, "copy")
        assert narrow.sql(ITEMS) == database.sql(ITEMS)
        assert [(row[0], row[2][0]) for row in narrow.sql(ITEMS)] == [
            (1, "y"),
            (2, "y"),
            (3, "x"),
            (10, "x"),
            (20, "x"),
        ]
        assert engine.dead_letters() == []
