"""What only the catalog tells is brought to targets: tables are copied anew, by themselves or when somebody says so."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from typer.testing import CliRunner

from millstream import Engine, Mode, StreamState
from millstream.cli.app import app
from millstream.journal import JournalReader
from millstream.registry.versions import Registry
from tests.fixtures.delivery import Watching
from tests.fixtures.engines import await_that
from tests.fixtures.postgres import Database
from tests.integration.test_reload import TABLES, Everywhere

pytestmark = pytest.mark.postgres


def watchful(shop: Everywhere, **ddl: str) -> Everywhere:
    """The stream, with a short time between two looks."""
    source = replace(shop.stream.source, options={**shop.stream.source.options, "watch_interval": "200ms"})
    shop.stream = replace(shop.stream, source=source, ddl=tuple(sorted(ddl.items())))
    return shop


def noticed(engine: Engine) -> dict[str, str]:
    """By id, what was found and what has become of it."""
    found = [one for one in engine.ddl_events("shop") if str(one.id).startswith("c")]
    return {str(one.id): f"{one.version.changes[0].kind.value} {one.version.table} {one.state}" for one in found}


def test_targets_equal_the_source_after_what_no_change_tells(
    engine: Engine, database: Database, tmp_path: Path, watching: Watching
) -> None:
    database.sql(TABLES)
    shop = watchful(Everywhere(engine, database, tmp_path, "public.parts", "public.orders", only="copy log"))
    with engine:
        engine.upsert_stream(shop.stream)
        engine.await_ready("shop", 120)
        shop.await_equal("parts", "orders")
        database.sql("INSERT INTO parts VALUES (3, 'soon gone')")
        shop.await_equal("parts")
        database.sql("TRUNCATE parts_a")
        shop.await_equal("parts")
        await_that(lambda: noticed(engine) == {"c1": "partition_truncated public.parts applied"})
        # No change tells that its row is gone.
        engine.replay("shop", 1, "copy")
        await_that(lambda: (engine.get_status("shop").targets[0].replay or {}).get("state") == "done")
        copied = "copy", "public.parts"
        ended = "reload.table_finished"
        await_that(lambda: [(e.target, e.fields["table"]) for e in watching.of(ended)].count(copied) >= 2)
        shop.await_equal("parts")
        database.sql("ALTER TABLE orders ALTER note TYPE text USING note || '!'")
        shop.await_equal("orders")
        database.sql("INSERT INTO parts VALUES (1, 'after'); UPDATE orders SET note = 'after' WHERE id = 2")
        shop.await_equal("parts", "orders")
        # The new delivery epoch of the replay may have the first one copied once more.
        both = {"c1": "partition_truncated public.parts applied", "c2": "rewrite public.orders applied"}
        await_that(lambda: noticed(engine) == both)
    assert noticed(engine) == both
    (event,) = [one for one in engine.ddl_events("shop") if one.id == "c1"]
    assert dict(event.receipts) == {"copy": "applied", "log": "applied"}
    said = event.to_json()
    assert said["since"] <= said["checkpoint"]["position"]
    shown = CliRunner().invoke(app, ["ddl", "show", "shop", "c1", "--home", str(engine.home.path)]).stdout
    assert "partition_truncated" in shown
    assert f"committed between {said['since']} and {said['checkpoint']['position']}" in shown
    assert "target log: applied" in shown


def test_it_waits_for_approval_where_the_stream_says_so(engine: Engine, database: Database, tmp_path: Path) -> None:
    database.sql(TABLES)
    shop = Everywhere(engine, database, tmp_path, "public.parts", "public.orders", only="copy")
    watchful(shop, partition_detached="gate", partition_truncated="ignore")
    with engine:
        engine.upsert_stream(shop.stream)
        engine.await_ready("shop", 120)
        shop.await_equal("parts")
        before = shop.held("copy", "parts")
        database.sql("TRUNCATE parts_a")
        database.sql("ALTER TABLE parts DETACH PARTITION parts_b")
        await_that(lambda: [one.state for one in engine.ddl_events("shop")] == ["pending"])
        (pending,) = engine.ddl_events("shop")
        # Before any change comes.
        await_that(lambda: engine.get_status("shop").targets[0].state is StreamState.GATED)
        database.sql("INSERT INTO parts VALUES (1, 'after'); INSERT INTO orders VALUES (1000, 'after')")
        assert shop.held("copy", "parts") == before
        assert "partition_detached" in str(engine.get_status("shop").targets[0].error)
        assert engine.decide_ddl("shop", pending.id, approved=True).state in ("approved", "applied")
        shop.await_equal("parts", "orders")
        await_that(lambda: list(noticed(engine).values()) == ["partition_detached public.parts applied"])


def test_what_the_trigger_tells_is_gated_before_the_first_change_after_it(
    engine: Engine, database: Database, tmp_path: Path
) -> None:
    database.sql(TABLES)
    shop = Everywhere(engine, database, tmp_path, "public.orders", "public.items", "public.parts", only="copy")
    watchful(shop, rewrite="gate", drop_table="halt")
    options = {**shop.stream.source.options, "ddl_trigger": True}
    shop.stream = replace(shop.stream, source=replace(shop.stream.source, options=options))

    def state() -> StreamState:
        return engine.get_status("shop").targets[0].state

    with engine:
        engine.upsert_stream(shop.stream)
        engine.await_ready("shop", 120)
        shop.await_equal("items", "orders")
        orders = shop.held("copy", "orders")
        database.sql("INSERT INTO items VALUES (6, 'before')")
        items = shop.expected("items")
        rewrite = "ALTER TABLE orders ALTER note TYPE text USING note || '!'"
        database.sql(f"BEGIN; INSERT INTO items VALUES (7, 'with'); {rewrite}; COMMIT; DELETE FROM orders WHERE id = 1")
        await_that(lambda: state() is StreamState.GATED)
        assert noticed(engine) == {"c1": "rewrite public.orders pending"}
        rewritten = engine.ddl_event("shop", "c1")
        said = rewritten.to_json()
        assert (said["id"], said["since"], rewritten.version.changes[0].in_words()) == (
            *("c1", None),
            "rewrite: type of a column",
        )
        assert engine.get_status("shop").targets[0].seq == said["checkpoint"]["seq"]
        assert (shop.held("copy", "items"), shop.held("copy", "orders")) == (items, orders)
        engine.decide_ddl("shop", "c1", approved=False)
        await_that(lambda: state() is StreamState.FAILED)
        engine.decide_ddl("shop", "c1", approved=True)
        shop.await_equal("items", "orders")
        database.sql("DROP TABLE parts; INSERT INTO items VALUES (8, 'after')")
        await_that(lambda: state() is StreamState.FAILED)
        assert "drop_table: public.parts) is not to be applied" in str(engine.get_status("shop").targets[0].error)
        assert (8, "after") not in shop.held("copy", "items")
        engine.decide_ddl("shop", "c2", approved=True)
        shop.await_equal("items")
        both = {"c1": "rewrite public.orders applied", "c2": "drop_table public.parts applied"}
        await_that(lambda: noticed(engine) == both)
        # Looks that were taken meanwhile have found none of it again.
        database.sql("TRUNCATE items")
        shop.await_equal("items")
        assert noticed(engine) == both


def test_a_table_that_a_pattern_names_is_captured_and_copied_when_it_comes(
    engine: Engine, database: Database, tmp_path: Path
) -> None:
    database.sql("CREATE TABLE items (id int PRIMARY KEY, note text); INSERT INTO items VALUES (1, 'nut')")
    shop = watchful(Everywhere(engine, database, tmp_path, "public.*", only="copy"))
    with engine:
        engine.upsert_stream(shop.stream)
        engine.await_ready("shop", 120)
        shop.await_equal("items")
        database.sql("CREATE TABLE more (id int PRIMARY KEY, note text); INSERT INTO more VALUES (1, 'before')")
        await_that(lambda: noticed(engine) == {"c1": "create_table public.more applied"})
        database.sql("INSERT INTO more VALUES (2, 'after'); UPDATE items SET note = 'bolt'")
        shop.await_equal("items", "more")


def test_every_event_names_the_schema_it_was_written_under_far_behind_several_alters(
    engine: Engine, database: Database, tmp_path: Path
) -> None:
    database.sql("CREATE TABLE orders (id int PRIMARY KEY, note text)")
    shop = Everywhere(engine, database, tmp_path, "public.orders", only="log changes past")
    shop.stream = replace(shop.stream, mode=Mode.CDC, ddl=(("rename_column?", "apply"),))
    alters = ("ADD COLUMN x int DEFAULT 7", "RENAME COLUMN x TO y", "DROP COLUMN y", "ALTER COLUMN note TYPE varchar")
    written = {}
    with engine:
        engine.upsert_stream(shop.stream)
        engine.await_ready("shop", 120)
        engine.pause("shop")
        for id, alter in enumerate(("SET (fillfactor = 90)", *alters), start=1):
            database.sql(f"ALTER TABLE orders {alter}; INSERT INTO orders (id, note) VALUES ({id}, 'n')")
            described = "SELECT attname, atttypid::int8 FROM pg_attribute "
            described += "WHERE attrelid = 'orders'::regclass AND attnum > 0 AND NOT attisdropped ORDER BY attnum"
            written[id] = database.sql(described)
        engine.resume("shop")
        await_that(lambda: len(schemas(tmp_path)) == len(written))
        await_that(lambda: all((target.seq or 0) >= 5 for target in engine.get_status("shop").targets))
    registry = Registry(JournalReader([str(engine.home.journal_path("shop"))]))
    with closing(sqlite3.connect(tmp_path / "changes.db")) as lite:
        (changelog,) = [n for (n,) in lite.execute("SELECT name FROM sqlite_master WHERE name LIKE '%public.orders%'")]
        told = dict(lite.execute(f'SELECT id, _ms_schema FROM "{changelog}"').fetchall())
    lake = DeltaTable(str(tmp_path / "past" / "public.orders")).to_pyarrow_table()
    past = dict(zip(lake["id"].to_pylist(), lake["_ms_schema"].to_pylist(), strict=True))
    assert schemas(tmp_path) == told == past
    for id, columns in written.items():
        found = registry.by_id(told[id]).relation.columns
        assert [(one.name, one.type_oid) for one in found] == columns, id
    assert len(set(told.values())) >= 4, "a column that came and went leaves what was there before"


def schemas(root: Path) -> dict[int, int]:
    """By id of a row the schema that its change names, in files."""
    found: dict[int, int] = {}
    for path in (root / "log").glob("public.orders/*.parquet"):
        rows = pq.read_table(path, partitioning=None)
        found |= dict(zip(rows["id"].to_pylist(), rows["_ms_schema"].to_pylist(), strict=True))
    return found
