"""What a whole engine's source stands on goes, under load: it says so, and targets hold nothing that never was."""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psycopg
import pytest

from millstream import Engine
from tests.fixtures.engines import await_that
from tests.fixtures.postgres import Database
from tests.integration.test_reload import Everywhere

pytestmark = pytest.mark.postgres

TABLES = """
CREATE TABLE t (id int PRIMARY KEY, note text);
CREATE TABLE t_new (id int PRIMARY KEY, note text);
INSERT INTO t VALUES (0, '0');
INSERT INTO t_new VALUES (0, '1000000');
"""


@dataclass
class Load:
    """One transaction after another: the next row, and how many there are in the row 0."""

    database: Database
    refused: list[psycopg.Error] = field(default_factory=list)

    def write(self, over: threading.Event) -> None:
        with self.database.connect() as connection:
            while not over.wait(0.01):
                try:
                    with connection.transaction():
                        connection.execute("INSERT INTO t SELECT max(id) + 1, 'row' FROM t")
                        connection.execute("UPDATE t SET note = (note::int + 1)::text WHERE id = 0")
                except psycopg.Error as refused:
                    self.refused.append(refused)

    @contextmanager
    def going_on(self) -> Iterator[None]:
        over = threading.Event()
        thread = threading.Thread(target=self.write, args=(over,))
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


def counted(rows: list[tuple[int, str]]) -> int:
    """How many transactions a target has. It must have each of them whole, and none of what comes after a gap."""
    ids = sorted(id_ for id_, _ in rows)
    assert ids == list(range(len(ids)))
    assert dict(rows)[0] == str(len(ids) - 1)
    return len(ids) - 1


def mirrored(root: Path) -> list[tuple[int, str]]:
    with closing(sqlite3.connect(root / "copy.db", timeout=60)) as lite:
        return lite.execute('SELECT id, note FROM "public.t"').fetchall()


def lose_connection(database: Database) -> None:
    """What is gone is noticed once a minute, and when capture comes back to the source."""
    reader = f"FROM pg_replication_slots WHERE slot_name = '{database.name}' AND active"
    database.sql(f"SELECT pg_terminate_backend(active_pid) {reader}")


def invalidate_slot(database: Database) -> None:
    """The server may drop what a slot needs, and somebody keeps a transaction open from long ago."""
    for statement in ("ALTER SYSTEM SET max_slot_wal_keep_size = '1MB'", "SELECT pg_reload_conf()"):
        database.sql(statement)
    try:
        with database.connect(autocommit=False) as open_writer:
            open_writer.execute("INSERT INTO t_new VALUES (1, 'open')")
            for _ in range(4):
                database.sql("SELECT pg_logical_emit_message(false, 'test', 'x'), pg_switch_wal()")
            database.sql("CHECKPOINT")
            state = f"SELECT wal_status = 'lost' FROM pg_replication_slots WHERE slot_name = '{database.name}'"
            database.await_true(state)
    finally:
        for statement in ("ALTER SYSTEM RESET max_slot_wal_keep_size", "SELECT pg_reload_conf()"):
            database.sql(statement)


def drop_slot(database: Database) -> None:
    slot = f"slot_name = '{database.name}'"

    def dropped() -> bool:
        lose_connection(database)
        try:
            database.sql(f"SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE {slot}")
        except psycopg.errors.ObjectInUse:
            return False
        return True

    await_that(dropped)


def drop_publication(database: Database) -> None:
    """The server only warns of it: nothing ends the connection."""
    database.sql(f"DROP PUBLICATION {database.name}")


def drop_identity(database: Database) -> None:
    database.sql("ALTER TABLE t REPLICA IDENTITY NOTHING")
    lose_connection(database)


def swap(database: Database) -> None:
    database.sql("BEGIN; ALTER TABLE t RENAME TO t_old; ALTER TABLE t_new RENAME TO t; COMMIT")
    lose_connection(database)


LOSSES: dict[str, tuple[Callable[[Database], None], str]] = {
    "slot invalidated": (invalidate_slot, "slot {name} has lost log that we need"),
    "slot dropped": (drop_slot, "slot {name} does not exist any more, so changes may be lost"),
    "publication dropped": (drop_publication, "publication {name} does not exist any more"),
    "identity dropped": (drop_identity, "table public.t can no longer publish updates"),
    "table replaced": (swap, "table public.t is called public.t_old now, and another one is called public.t"),
}


CHOSEN = list(LOSSES) if os.environ.get("MILLSTREAM_LOSSES") else ["slot invalidated"]
"""Each of them takes a whole engine: `make losses` plays all. Without one, `test_lost_while_running` has the others."""


@pytest.mark.parametrize("loss", CHOSEN)
def test_what_is_lost_is_said_and_targets_hold_whole_transactions_only(
    engine: Engine, database: Database, tmp_path: Path, loss: str
) -> None:
    lose, said = LOSSES[loss]
    database.sql(TABLES)
    shop, load = Everywhere(engine, database, tmp_path, "public.t", only="copy log"), Load(database)
    with engine:
        with load.going_on():
            engine.upsert_stream(shop.stream)
            engine.await_ready("shop", 120)
            shop.held("log", "t")  # its key is known from here on, whatever the source says later
            await_that(lambda: counted(mirrored(tmp_path)) > 5)
            lose(database)

            def halted() -> bool:
                return engine.get_status("shop").source.state == "halted"

            await_that(halted)
        status = engine.get_status("shop")
        assert said.format(name=database.name) in f"{status.source.error}"
        assert status.source.hint
        assert not status.healthy
    delivered = counted(mirrored(tmp_path)), counted(shop.held("log", "t"))
    ((written,),) = database.sql("SELECT max(id) FROM " + ("t_old" if loss == "table replaced" else "t"))
    assert 5 < min(delivered) <= max(delivered) <= written
    if loss != "identity dropped":
        assert load.refused == [], "the application's writes go on"
    else:
        database.sql("UPDATE t SET note = note WHERE id = 0")
