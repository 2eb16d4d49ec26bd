"""An engine on a real Postgres: what it makes there, what it leaves, what the doctor finds."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from millstream import Engine, Mode, StreamSpec, TargetSpec
from millstream.doctor import State, check_leftovers
from millstream.errors import ConfigError, NotReady
from millstream.sources.postgres.ddl_trigger import install
from millstream.sources.postgres.options import PostgresOptions
from millstream.sources.postgres.orphans import orphan_triggers
from tests.fixtures.capture import source_spec
from tests.fixtures.engines import QUICK, await_that, delivered
from tests.fixtures.postgres import Database

pytestmark = pytest.mark.postgres


def stream(root: Path, database: Database, name: str, *tables: str) -> StreamSpec:
    """On the source `shop`, which has the slot `millstream_` and the database's name."""
    source = source_spec(database, *tables, options={"slot": f"millstream_{database.name}"})
    target = TargetSpec("log", "files", QUICK, options={"path": str(root / name / "log")})
    return StreamSpec(name, source, Mode.CDC, (target,), checkpoint_interval_ms=100)


def made_on(database: Database) -> tuple[int, int]:
    """How many slots and publications the database has."""
    ((slots,),) = database.sql(f"SELECT count(*) FROM pg_replication_slots WHERE database = '{database.name}'")
    ((publications,),) = database.sql("SELECT count(*) FROM pg_publication")
    return int(slots), int(publications)


LEFT = (
    "SELECT (SELECT count(*) FROM pg_event_trigger), (SELECT count(*) FROM pg_proc WHERE proname ^@ 'millstream_'), "
    "(SELECT count(*) FROM pg_namespace WHERE nspname = '_millstream')"
)


def leave_triggers(database: Database, *slots: str) -> None:
    """What `ddl_trigger` makes for these slots, whether they are there or not."""
    for slot in slots:
        options = PostgresOptions.of(source_spec(database, options={"slot": slot}))
        with closing(database.connect()) as connection:
            install(connection, options, ["public.*"])


def create(database: Database) -> None:
    for table in ("orders", "items"):
        database.sql(f"CREATE TABLE {table} (id int PRIMARY KEY, note text)")


def test_deleting_the_last_stream_leaves_nothing_on_the_server(
    engine: Engine, database: Database, tmp_path: Path
) -> None:
    create(database)
    with engine:
        engine.upsert_stream(stream(tmp_path, database, "orders", "public.orders"))
        engine.upsert_stream(stream(tmp_path, database, "items", "public.items"))
        for name in ("orders", "items"):
            engine.await_ready(name, 120)
        database.sql("INSERT INTO orders VALUES (1, 'an order'); INSERT INTO items VALUES (2, 'an item')")
        for name, expected in (("orders", (1, "an order")), ("items", (2, "an item"))):
            await_that(lambda name=name: engine.get_status(name).events_replicated == 1)  # type: ignore[misc]
            assert delivered(tmp_path, name) == {f"public.{name}": [expected]}
        assert made_on(database) == (1, 2)
        assert engine.delete_stream("items")["source"] == "in use by orders"
        assert made_on(database) == (1, 2)
        # The capture that starts anew without the deleted stream's tables takes them out.
        database.await_true("SELECT array_agg(tablename::text) = ARRAY['orders'] FROM pg_publication_tables")
        # A table that is added is captured when the stream is ready again.
        engine.upsert_stream(stream(tmp_path, database, "orders", "public.orders", "public.items"))
        engine.await_ready("orders", 120)
        database.sql("INSERT INTO items VALUES (3, 'at once')")
        await_that(lambda: engine.get_status("orders").events_replicated == 2)
        assert delivered(tmp_path, "orders")["public.items"] == [(3, "at once")]
    database.sql("SELECT pg_create_logical_replication_slot('millstream_orphan_' || current_database(), 'pgoutput')")
    found = check_leftovers(engine.home.path)
    orphan = f"millstream_orphan_{database.name}"
    (warning,) = [one for one in found if orphan in one.found]
    assert warning.state is State.WARNING
    assert warning.fix is not None
    assert f"pg_drop_replication_slot('{orphan}')" in warning.fix
    database.sql(f"SELECT pg_drop_replication_slot('{orphan}')")
    assert not any(database.name in one.found for one in check_leftovers(engine.home.path))
    leave_triggers(database, "millstream_gone", f"millstream_{database.name}")
    (warning,) = [one for one in check_leftovers(engine.home.path) if one.check == "triggers"]
    assert warning.found == (
        f"those of slot millstream_gone in database {database.name}: the slot is gone; "
        "they write each DDL command into the log"
    )
    assert warning.fix is not None
    database.sql(warning.fix)
    assert [one.check for one in check_leftovers(engine.home.path)] == ["slots"]
    assert database.sql(LEFT) == [(3, 4, 1)], "those of the slot that has an owner"
    assert engine.delete_stream("orders")["source"] == "removed"
    assert made_on(database) == (0, 0)
    assert database.sql(LEFT) == [(0, 0, 0)]


def test_triggers_that_are_alone_in_their_schema_go_with_it(database: Database) -> None:
    leave_triggers(database, "millstream_gone")
    database.sql("SELECT pg_create_logical_replication_slot('millstream_gone', 'pgoutput')")
    spec = source_spec(database)
    (found,) = orphan_triggers(spec, [spec])
    assert found.slot_exists
    owner = source_spec(database, options={"slot": "millstream_gone"})
    assert orphan_triggers(spec, [spec, owner]) == []
    database.sql("SELECT pg_drop_replication_slot('millstream_gone')")
    database.sql("DROP EVENT TRIGGER millstream_gone_ddl")
    (found,) = orphan_triggers(spec, [spec, owner])
    assert not found.slot_exists
    database.sql(found.removal)
    assert database.sql(LEFT) == [(0, 0, 0)]


def test_a_partition_that_another_stream_captures_as_its_root_is_refused(
    engine: Engine, database: Database, tmp_path: Path
) -> None:
    database.sql("CREATE TABLE parts (id int PRIMARY KEY, note text) PARTITION BY RANGE (id)")
    database.sql("CREATE TABLE parts_low PARTITION OF parts FOR VALUES FROM (0) TO (100)")
    database.sql("CREATE TABLE parts_high (id int PRIMARY KEY, note text)")
    whole = stream(tmp_path, database, "whole", "public.parts")
    said = r"stream {0}: public\.parts_{0} is a partition of public\.parts, which another stream of this source names"
    engine.upsert_stream(stream(tmp_path, database, "low", "public.parts_low"))
    with pytest.raises(ConfigError, match=said.format("low")):
        engine.upsert_stream(whole)
    assert [one.name for one in engine.list_streams()] == ["low"]
    # What becomes a partition later is found when the streams start.
    engine.upsert_stream(stream(tmp_path, database, "low", "public.parts_high", "public.parts_low", "public.parts"))
    engine.upsert_streams([whole, stream(tmp_path, database, "high", "public.parts_high")])
    database.sql("ALTER TABLE parts ATTACH PARTITION parts_high FOR VALUES FROM (100) TO (200)")
    with engine:
        with pytest.raises(NotReady, match=said.format("high")):
            engine.await_ready("high", 120)
        for name in ("low", "whole"):
            engine.await_ready(name, 120)
        database.sql("INSERT INTO parts VALUES (1, 'low'), (101, 'high')")
        for name in ("low", "whole"):
            await_that(lambda name=name: engine.get_status(name).events_replicated == 2)  # type: ignore[misc]
            assert delivered(tmp_path, name) == {"public.parts": [(1, "low"), (101, "high")]}


@pytest.mark.spark
def test_two_streams_share_a_source_and_a_session(spark: SparkSession, database: Database, tmp_path: Path) -> None:
    create(database)
    with Engine(tmp_path / "home") as engine:
        engine.upsert_streams(
            [stream(tmp_path, database, name, f"public.{name}") for name in ("orders", "items")],
        )
        for name in ("orders", "items"):
            engine.await_ready(name, 120)
        database.sql("INSERT INTO orders SELECT i, 'order' FROM generate_series(1, 50) i")
        database.sql("INSERT INTO items SELECT i, 'item' FROM generate_series(1, 70) i")
        for name, count in (("orders", 50), ("items", 70)):
            await_that(lambda n=name, c=count: engine.get_status(n).events_replicated == c)  # type: ignore[misc]
    for name, count in (("orders", 50), ("items", 70)):
        assert delivered(tmp_path, name) == {f"public.{name}": [(i, name[:-1]) for i in range(1, count + 1)]}
    assert spark.range(3).count() == 3, "a session that was there before must be left running"
