"""A real standby takes the place of the source while the stream runs."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import psycopg
import pytest

from millstream import Engine
from millstream.embedded import EmbeddedPostgres
from tests.fixtures.delivery import Watching
from tests.fixtures.engines import await_that
from tests.fixtures.postgres import TEST_SETTINGS, Database
from tests.integration.test_reload import Everywhere

pytestmark = pytest.mark.postgres

SLOT = "standby"


@contextmanager
def primary_and_standby(directory: Path, *, synchronized: bool) -> Iterator[tuple[Database, Database]]:
    """Two servers, one of which follows the other; with `synchronized` slots too, and nobody is ahead of it."""
    settings = {**TEST_SETTINGS, "autovacuum": "off"}
    with EmbeddedPostgres(directory / "primary", 18, settings) as primary:
        source = Database(primary, "postgres")
        source.sql(f"SELECT pg_create_physical_replication_slot('{SLOT}', true)")
        standby = primary.basebackup(directory / "standby")
        if synchronized:
            source.sql(f"ALTER SYSTEM SET synchronized_standby_slots = '{SLOT}'")
            source.sql("SELECT pg_reload_conf()")
            standby.settings |= {"sync_replication_slots": "on", "hot_standby_feedback": "on"}
        standby.settings |= {"primary_slot_name": SLOT, "wal_receiver_status_interval": "1"}
        with (standby.data_dir / "postgresql.auto.conf").open("a") as conf:
            conf.write(f"primary_conninfo = 'host=127.0.0.1 port={primary.port} user=postgres dbname=postgres'\n")
        with standby:
            yield source, Database(standby, "postgres")


def stream_of(engine: Engine, source: Database, standby: Database, root: Path, **options: object) -> Everywhere:
    """A stream whose uri names both servers."""
    made = Everywhere(engine, source, root, "public.t", only="copy log")
    ports = f"127.0.0.1:{source.server.port},127.0.0.1:{standby.server.port}"
    uri = f"postgresql://postgres@{ports}/postgres?target_session_attrs=read-write"
    spec = replace(made.stream.source, uri=uri, options={**made.stream.source.options, "slot": "shop", **options})
    made.stream = replace(made.stream, source=spec)
    return made


@contextmanager
def load(database: Database) -> Iterator[None]:
    """Small transactions, one after another, until the end or that of the server."""
    over = threading.Event()

    def write() -> None:
        with suppress(psycopg.OperationalError), database.connect() as connection:
            while not over.wait(0.01):
                with connection.transaction():
                    connection.execute("INSERT INTO t SELECT max(id) + 1, 'row' FROM t")
                    connection.execute("UPDATE t SET note = (note::int + 1)::text WHERE id = 0")

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_a_stream_goes_on_with_the_standby_that_was_promoted_and_stays_there(
    engine: Engine, watching: Watching, server_dir: Path, tmp_path: Path
) -> None:
    with primary_and_standby(server_dir, synchronized=True) as (source, standby):
        source.sql("CREATE TABLE t (id int PRIMARY KEY, note text); INSERT INTO t VALUES (0, '0')")
        shop = stream_of(engine, source, standby, tmp_path, failover=True)
        with engine:
            engine.upsert_stream(shop.stream)
            engine.await_ready("shop", 120)
            source.sql("SELECT pg_log_standby_snapshot()")
            standby.await_true("SELECT count(*) = 1 FROM pg_replication_slots WHERE synced AND NOT temporary")
            with load(source):
                await_that(lambda: len(shop.held("copy", "t")) > 20)
                source.server.kill()
            standby.server.promote()
            shop.database = standby
            with load(standby):
                watching.wait_for(lambda: bool(watching.of("capture.source_moved")))
                ((before,),) = standby.sql("SELECT max(id) FROM t")
                standby.await_true(f"SELECT max(id) > {before} + 20 FROM t")
                # Capture is beyond the place where the timelines parted by now, and comes back once more.
                await_that(lambda: len(shop.held("copy", "t")) > before + 2)
                running = len(watching.of("capture.running"))
                standby.sql("SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE active_pid > 0")
                watching.wait_for(lambda: len(watching.of("capture.running")) > running)
            shop.await_equal("t")
        assert len(watching.of("capture.source_moved")) == 1
        assert engine.get_status("shop").source.error is None
        assert dict(shop.held("copy", "t"))[0] == str(len(shop.expected("t")) - 1), "whole transactions"


@pytest.mark.skipif(
    not os.environ.get("MILLSTREAM_LOSSES"),
    reason="`make losses` runs it; test_postgres_checks has it without an engine",
)
def test_a_standby_that_was_promoted_without_our_last_transactions_halts_the_stream(
    engine: Engine, server_dir: Path, tmp_path: Path
) -> None:
    with primary_and_standby(server_dir, synchronized=False) as (source, standby):
        source.sql("CREATE TABLE t (id int PRIMARY KEY, note text); INSERT INTO t VALUES (0, '0')")
        shop = stream_of(engine, source, standby, tmp_path)
        with engine:
            engine.upsert_stream(shop.stream)
            engine.await_ready("shop", 120)
            ((reached,),) = source.sql("INSERT INTO t VALUES (1, 'everywhere'); SELECT pg_current_wal_lsn()")
            standby.await_true(f"SELECT pg_last_wal_replay_lsn() >= '{reached}'")
            standby.server.stop()
            source.sql("INSERT INTO t VALUES (2, 'lost with its server')")
            await_that(lambda: len(shop.held("copy", "t")) == 3 == len(shop.held("log", "t")))
            source.server.kill()
            standby.server.start()
            standby.server.promote()
            standby.sql("INSERT INTO t VALUES (3, 'never seen')")
            await_that(lambda: engine.get_status("shop").source.state == "halted")
            status = engine.get_status("shop")
            assert "the journal has transactions that this server lost" in f"{status.source.error}"
            assert "millstream journal rebase" in f"{status.source.hint}"
            assert not status.healthy
        assert [id_ for id_, _ in shop.held("copy", "t")] == [0, 1, 2]
