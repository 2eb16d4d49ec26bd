"""What capture stands on goes away while it reads: it halts, says what is gone, and has written nothing wrong."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path

import pytest

from millstream.errors import SourceHalted, SourceUnavailable
from millstream.sources.postgres import source
from tests.fixtures.capture import SECONDS, Driver, drive, source_spec
from tests.fixtures.postgres import Database

pytestmark = pytest.mark.postgres


WATCHFUL = {"watch_interval": "100ms"}


def read_until_it_halts(capture: Driver) -> str:
    """A lost connection is opened again, as the engine does it. Returns why that is no use."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        try:
            capture.step()
        except SourceHalted as halted:
            return f"{halted} {halted.hint}"
        except SourceUnavailable:
            try:
                capture.connect()
            except SourceHalted as halted:
                return f"{halted} {halted.hint}"
    pytest.fail("it goes on as if nothing had happened")


def test_a_slot_that_is_lost(any_database: Database, tmp_path: Path) -> None:
    database = any_database
    database.sql("CREATE TABLE t (id int PRIMARY KEY)")
    with drive(database, tmp_path, options=WATCHFUL) as capture:
        database.sql("INSERT INTO t VALUES (1)")
        capture.catch_up()
        slot = database.name
        database.sql(f"SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE slot_name = '{slot}'")
        database.await_true(f"SELECT active_pid IS NULL FROM pg_replication_slots WHERE slot_name = '{slot}'")
        database.sql(f"SELECT pg_drop_replication_slot('{slot}'); INSERT INTO t VALUES (2)")
        said = read_until_it_halts(capture)
        assert f"slot {slot} does not exist any more, so changes may be lost" in said
        assert "reload" in said
        assert len([row for row in capture.rows if row["relation"]]) == 1


def test_a_publication_that_is_dropped(any_database: Database, tmp_path: Path) -> None:
    database = any_database
    database.sql("CREATE TABLE t (id int PRIMARY KEY)")
    with drive(database, tmp_path, options=WATCHFUL) as capture:
        database.sql("INSERT INTO t VALUES (1)")
        capture.catch_up()
        database.sql(f"DROP PUBLICATION {database.name}; INSERT INTO t VALUES (2)")
        assert database.name in read_until_it_halts(capture)
        assert len([row for row in capture.rows if row["relation"]]) == 1


def test_a_replica_identity_that_tells_nothing_any_more(database: Database, tmp_path: Path) -> None:
    database.sql("CREATE TABLE t (id int PRIMARY KEY, v text); INSERT INTO t VALUES (1)")
    with drive(database, tmp_path, options=WATCHFUL) as capture:
        database.sql("UPDATE t SET v = 'a'")
        capture.catch_up()
        database.sql("ALTER TABLE t REPLICA IDENTITY NOTHING")
        said = read_until_it_halts(capture)
        assert "table public.t can no longer publish updates" in said
        assert "moved to the insert-only publication" in said
        database.sql("UPDATE t SET v = 'b'")


SWAP = "BEGIN; ALTER TABLE t RENAME TO t_old; ALTER TABLE t_new RENAME TO t; COMMIT"


def test_a_name_that_goes_to_a_table_that_is_not_captured(database: Database, tmp_path: Path) -> None:
    database.sql("CREATE TABLE t (id int PRIMARY KEY); CREATE TABLE t_new (id int PRIMARY KEY)")
    with drive(database, tmp_path, "public.t", options=WATCHFUL) as capture:
        database.sql("INSERT INTO t VALUES (1)")
        capture.catch_up()
        database.sql(f"{SWAP}; INSERT INTO t VALUES (2)")
        said = read_until_it_halts(capture)
        swapped = "table public.t is called public.t_old now, and another one is called public.t"
        assert f"{swapped}, whose changes were not captured" in said
        capture.source.close()
        again = source.PostgresSource(source_spec(database, "public.t"))
        with closing(again), pytest.raises(SourceHalted, match="whose changes were not captured"):
            again.check(capture.identity, capture.end)


def test_a_table_that_is_called_what_nobody_asked_for(database: Database, tmp_path: Path) -> None:
    database.sql("CREATE TABLE t (id int PRIMARY KEY)")
    with drive(database, tmp_path, "public.t", options=WATCHFUL) as capture:
        database.sql("INSERT INTO t VALUES (1)")
        capture.catch_up()
        database.sql("ALTER TABLE t RENAME TO u")
        assert "table public.t is called public.u now, which `tables` does not name" in read_until_it_halts(capture)


def test_names_that_captured_tables_exchange_are_in_their_descriptions(database: Database, tmp_path: Path) -> None:
    database.sql("CREATE TABLE t (id int PRIMARY KEY); CREATE TABLE t_new (id int PRIMARY KEY)")
    with drive(database, tmp_path, options=WATCHFUL) as capture:
        database.sql("INSERT INTO t VALUES (1); INSERT INTO t_new VALUES (2)")
        capture.catch_up()
        one, other = (capture.relations[row["relation"] - 1] for row in capture.rows)
        database.sql(f"{SWAP}; INSERT INTO t VALUES (3); INSERT INTO t_old VALUES (4)")
        capture.catch_up()
        names = [(found.oid, found.table) for row in capture.rows if (found := capture.relations[row["relation"] - 1])]
        assert names[2:] == [(other.oid, "public.t"), (one.oid, "public.t_old")]


def test_a_transaction_that_a_publication_goes_in_the_midst_of_does_not_come_in_part(
    any_database: Database, tmp_path: Path
) -> None:
    database = any_database
    database.sql("CREATE TABLE t (id int PRIMARY KEY)")
    with drive(database, tmp_path, options={"watch_interval": "1h"}) as capture:
        database.sql("INSERT INTO t VALUES (1)")
        capture.catch_up()
        with database.connect(autocommit=False) as writer:
            writer.execute("INSERT INTO t VALUES (2)")
            database.sql(f"DROP PUBLICATION {database.name}")
            writer.execute("INSERT INTO t VALUES (3)")
            writer.commit()
        assert database.name in read_until_it_halts(capture)
        assert len([row for row in capture.rows if row["relation"]]) == 1
