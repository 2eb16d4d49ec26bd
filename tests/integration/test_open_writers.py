"""Transactions that are open, or prepared and left behind, when a table is published, a slot made, a snapshot taken."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from millstream import Engine
from millstream.errors import SourceUnavailable
from millstream.sources import read_chunk, take_snapshot
from millstream.sources.postgres import chunks, early
from millstream.sources.postgres.options import PostgresOptions
from millstream.sources.postgres.preflight import preflight
from tests.fixtures.capture import drive, source_spec
from tests.fixtures.delivery import Watching
from tests.fixtures.postgres import Database
from tests.integration.test_reload import Everywhere

pytestmark = pytest.mark.postgres

TABLES = """
CREATE TABLE orders (id int PRIMARY KEY, note text);
CREATE TABLE items (id int PRIMARY KEY, note text);
INSERT INTO orders SELECT i, 'there before' FROM generate_series(1, 20) i;
INSERT INTO items VALUES (1, 'there before');
"""
QUOTED = "'two ''phases'''"
ENDINGS = ["COMMIT", "ROLLBACK"] if os.environ.get("MILLSTREAM_LOSSES") else ["COMMIT"]
"""How a transaction ends; `make losses` plays both."""


def said(watching: Watching, kind: str, text: str) -> Callable[[], bool]:
    return lambda: any(text in event.message for event in watching.of(kind))


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_table_is_published_while_somebody_writes_to_it(
    engine: Engine, watching: Watching, database: Database, tmp_path: Path, ending: str
) -> None:
    """What a transaction wrote before its table was published is in no log, though it commits long after."""
    database.sql(TABLES)
    shop = Everywhere(engine, database, tmp_path, "public.items", only="copy log changes")
    more = replace(shop.stream, source=replace(shop.stream.source, tables=("public.items", "public.orders")))
    with engine:
        engine.upsert_stream(shop.stream)
        engine.await_ready("shop", 120)
        with database.connect(autocommit=False) as writer:
            writer.execute("INSERT INTO orders VALUES (100, 'unpublished')")
            writer.execute("UPDATE orders SET note = 'unpublished' WHERE id IN (1, 2)")
            writer.execute("DELETE FROM orders WHERE id = 3")
            engine.upsert_stream(more)
            database.await_true("SELECT count(*) = 1 FROM pg_publication_tables WHERE tablename = 'orders'")
            writer.execute("INSERT INTO orders VALUES (101, 'published')")
            writer.execute("UPDATE orders SET note = 'published' WHERE id IN (2, 4, 100)")
            writer.execute("DELETE FROM orders WHERE id = 5")
            watching.wait_for(lambda: any(f"process {writer.info.backend_pid} " in e.message for e in watching.events))
            database.sql("INSERT INTO items VALUES (2, 'meanwhile'); INSERT INTO orders VALUES (102, 'meanwhile')")
            shop.await_equal("items")
            writer.execute(ending.encode())
        shop.await_reloaded()
        database.sql("UPDATE orders SET note = 'later' WHERE id IN (1, 6)")
        shop.await_equal("items", "orders")
    ((found,),) = database.sql("SELECT count(*) FROM orders WHERE id IN (100, 101)")
    assert found == (2 if ending == "COMMIT" else 0)


@contextmanager
def prepared(database: Database, *statements: str) -> Iterator[None]:
    """A transaction that nobody ends; who is gone has prepared it."""
    with database.connect(autocommit=False) as writer:
        for statement in statements:
            writer.execute(statement.encode())
        writer.execute(f"PREPARE TRANSACTION {QUOTED}".encode())
    try:
        yield
    finally:
        if database.sql(f"SELECT 1 FROM pg_prepared_xacts WHERE gid = {QUOTED}"):
            database.sql(f"ROLLBACK PREPARED {QUOTED}")


WRITES = (
    "INSERT INTO orders VALUES (100, 'prepared')",
    "UPDATE orders SET note = 'prepared' WHERE id = 1",
    "DELETE FROM orders WHERE id = 2",
)


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_prepared_transaction_that_was_left_behind_is_named_until_somebody_ends_it(
    engine: Engine, watching: Watching, database: Database, tmp_path: Path, ending: str
) -> None:
    database.sql(TABLES)
    shop = Everywhere(engine, database, tmp_path, only="copy log")
    remedy = f"in database {database.name}, COMMIT PREPARED {QUOTED} or ROLLBACK PREPARED {QUOTED}"
    with engine:
        with prepared(database, *WRITES):
            engine.upsert_stream(shop.stream)
            watching.wait_for(said(watching, "source.waiting", remedy))
            database.sql("INSERT INTO orders VALUES (200, 'meanwhile')")
            assert made(database) == 0, "there is no slot yet"
            database.sql(f"{ending} PREPARED {QUOTED}")
        engine.await_ready("shop", 120)
        shop.await_equal("orders", "items")
        # While it runs: changes go on, and only a copy waits.
        with prepared(database, "UPDATE orders SET note = 'prepared again' WHERE id < 9 OR id = 100"):
            database.sql("INSERT INTO orders VALUES (201, 'flows')")
            shop.await_equal("orders")
            engine.reload("shop", tables=["public.orders"])
            watching.wait_for(said(watching, "reload.waiting", remedy))
            database.sql("INSERT INTO orders VALUES (202, 'flows, too')")
            shop.await_equal("orders")
            database.sql(f"{ending} PREPARED {QUOTED}")
        shop.await_reloaded()
        database.sql("DELETE FROM orders WHERE id = 9")
        shop.await_equal("orders", "items")
    ((found,),) = database.sql("SELECT count(*) FROM orders WHERE note = 'prepared again'")
    assert (found > 0) == (ending == "COMMIT")


def made(database: Database) -> int:
    """How many slots are there and finished."""
    finished = f"database = '{database.name}' AND confirmed_flush_lsn IS NOT NULL"
    ((count,),) = database.sql(f"SELECT count(*) FROM pg_replication_slots WHERE {finished}")
    return int(count)


def test_who_waits_for_a_prepared_transaction_gives_up_in_time_and_preflight_tells_of_it(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database.sql(TABLES)
    spec = source_spec(database, options={"snapshot_wait": 1500})
    with drive(database, tmp_path):
        with prepared(database, *WRITES):
            with pytest.raises(SourceUnavailable, match=r"waited \d+ s for open transactions: prepared transaction"):
                take_snapshot(spec, lambda _: None)
            monkeypatch.setattr("millstream.sources.postgres.server.PREPARED_SECONDS", 0)
            (found,) = [
                one for one in preflight(spec, PostgresOptions.of(spec)) if one.check == "prepared_transactions"
            ]
            assert "a new slot and every snapshot wait for that" in found.message
            assert f"ROLLBACK PREPARED {QUOTED}" in (found.fix or "")
        # One that is prepared under the snapshot, and has the table locked.
        monkeypatch.setattr(early, "TABLE_BYTES", -1)
        monkeypatch.setattr(chunks, "LOCK_SECONDS", 1)
        with (
            closing(take_snapshot(spec, lambda _: None)) as taken,
            prepared(database, "ALTER TABLE orders ADD more int"),
        ):
            (orders,) = [chunk for chunk in taken.plan.chunks if chunk.relation.name == "orders"]
            with pytest.raises(SourceUnavailable, match=r"public\.orders has been locked by somebody else for 1 s"):
                list(read_chunk(spec, taken.plan, orders))


ROLLED_BACK = """
DO $$ BEGIN
  FOR number IN 1..2000 LOOP
    BEGIN
      INSERT INTO items VALUES (1000 + number, 'undone');
      RAISE EXCEPTION 'undone';
    EXCEPTION WHEN raise_exception THEN NULL;
    END;
  END LOOP;
END $$
"""


def test_a_snapshot_is_taken_again_where_the_server_cannot_list_what_it_leaves_out(
    database: Database, tmp_path: Path
) -> None:
    """A snapshot names the transactions that it does not show, and the server has room for so many only."""
    database.sql(TABLES)
    told: list[str] = []
    with drive(database, tmp_path), ExitStack() as stack:
        first, second, third = (stack.enter_context(database.connect(autocommit=False)) for _ in range(3))
        first.execute("INSERT INTO orders VALUES (101, 'open')")

        def waits(what: str) -> None:
            """The server waits for those who were there when it began, then for those who came meanwhile."""
            told.append(what)
            if f"process {first.info.backend_pid} " in what:
                second.execute("INSERT INTO orders VALUES (102, 'open')")
                first.commit()
            elif f"process {second.info.backend_pid} " in what:
                third.execute("INSERT INTO orders VALUES (103, 'open')")
                database.sql(ROLLED_BACK)
                database.sql("INSERT INTO items VALUES (2, 'after all of them')")
                second.commit()
            elif "too much was going on" in what:
                third.commit()

        with closing(take_snapshot(source_spec(database), waits)) as taken:
            (orders,) = [chunk for chunk in taken.plan.chunks if chunk.relation.name == "orders"]
            copied = sum(len(rows) for rows in read_chunk(source_spec(database), taken.plan, orders))
    assert any("too much was going on" in what for what in told), told
    assert copied == 23
