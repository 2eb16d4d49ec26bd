"""Tables that are copied anew, or for the first time, while changes go on coming. Without Spark, from a real source."""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import pytest
from deltalake import DeltaTable

from millstream import BatchLimits, Engine, Mode, StreamSpec, TargetSpec
from millstream.embedded import EmbeddedPostgres
from millstream.engine import reloading
from millstream.errors import ConfigError, NotReady, VerifyFailed
from millstream.model import DeadLetters, Relation
from millstream.sources.postgres import chunks
from millstream.sources.postgres.catalog import relations
from millstream.targets import open_target
from tests.fixtures.capture import source_spec
from tests.fixtures.delivery import Watching
from tests.fixtures.engines import await_that
from tests.fixtures.postgres import Database, fresh_database

pytestmark = pytest.mark.postgres

Rows = list[tuple[Any, ...]]

FEW = BatchLimits(max_ms=0, max_bytes=1 << 30, max_events=50)
TABLES = """
CREATE TABLE orders (id int PRIMARY KEY, note text);
CREATE TABLE items (id int PRIMARY KEY, note text);
CREATE TABLE parts (id int, note text, PRIMARY KEY (id)) PARTITION BY RANGE (id);
CREATE TABLE parts_a PARTITION OF parts FOR VALUES FROM (0) TO (100);
CREATE TABLE parts_b PARTITION OF parts FOR VALUES FROM (100) TO (200);
CREATE TABLE keyless (id int, note text);
INSERT INTO orders SELECT i, repeat('x', 200) || i FROM generate_series(1, 600) i;
INSERT INTO items SELECT i, 'item' FROM generate_series(1, 5) i;
INSERT INTO parts SELECT i, 'part' FROM generate_series(90, 110) i;
INSERT INTO keyless SELECT i % 3, 'same' FROM generate_series(1, 30) i;
"""
NAMES = ("orders", "items", "parts", "keyless")


class Everywhere:
    """A stream with a target of each kind, or with those that are named, and what is held where."""

    def __init__(self, engine: Engine, database: Database, root: Path, *tables: str, only: str = "") -> None:
        self.engine, self.database, self.root = engine, database, root
        self._relations: dict[str, Relation] = {}
        targets = (
            self._target("copy", "sqlite", "copy.db"),
            self._target("lake", "delta", "lake"),
            self._target("log", "files", "log"),
            self._target("changes", "sqlite", "changes.db", write="changelog"),
            self._target("past", "delta", "past", write="changelog"),
        )
        chosen = tuple(target for target in targets if not only or target.name in only.split())
        # What happens without a word in the log is found in time by itself: here somebody has to ask for it.
        source = source_spec(database, *tables, options={"watch_interval": "1h"})
        self.stream = StreamSpec("shop", source, Mode.SNAPSHOT_THEN_CDC, chosen, checkpoint_interval_ms=100)

    def _target(self, name: str, kind: str, place: str, **options: str) -> TargetSpec:
        return TargetSpec(name, kind, FEW, options={"path": str(self.root / place), **options})

    def held(self, target: str, table: str) -> Rows:
        """What a target holds of a table; of a changelog, what its changes leave."""
        if target == "copy":
            with closing(sqlite3.connect(self.root / "copy.db", timeout=60)) as lite:
                return sorted(lite.execute(f'SELECT id, note FROM "public.{table}"').fetchall())
        if table not in self._relations:
            with self.database.connect() as connection:
                (self._relations[table],) = relations(connection, [f"public.{table}"])
        relation = self._relations[table]
        if target == "lake":
            found = DeltaTable(str(self.root / "lake" / f"public.{table}")).to_pyarrow_table()
            return sorted(zip(*(found[name].to_pylist() for name in ("id", "note")), strict=True))
        reader = next(open_target(spec) for spec in self.stream.targets if spec.name == target).reader()  # type: ignore[attr-defined]
        try:
            read = [batch for part in reader.parts(relation) for batch in reader.read(relation, part)]
        except VerifyFailed:
            return [("it changed while it was read",)]
        rows = [row for part in read for row in zip(*(part[name].to_pylist() for name in ("id", "note")), strict=True)]
        # SQLite's values are told as JSON.
        return sorted(tuple(map(json.loads, row)) for row in rows) if target == "changes" else sorted(rows)

    def expected(self, table: str) -> Rows:
        return sorted(self.database.sql(f"SELECT id, note FROM {table}"))

    def differing(self, *tables: str) -> list[str]:
        return [
            f"{target.name}: {table}"
            for target in self.stream.targets
            for table in tables
            if self.held(target.name, table) != self.expected(table)
        ]

    def await_equal(self, *tables: str) -> None:
        """While nobody writes to these tables."""
        for table in tables:
            expected = self.expected(table)
            for target in self.stream.targets:
                await_that(lambda name=target.name, table=table, rows=expected: self.held(name, table) == rows)  # type: ignore[misc]

    def states(self) -> dict[str, dict[str, str]]:
        """By target and table, how its copy is."""
        return {
            target.name: {name: one["state"] for name, one in (target.reload or {"tables": {}})["tables"].items()}
            for target in self.engine.get_status("shop").targets
        }

    def await_reloaded(self) -> None:
        def ended() -> bool:
            found = [target.reload for target in self.engine.get_status("shop").targets]
            assert not [one for one in found if one and one["state"] == "failed"], found
            return all(one is not None and one["state"] == "done" for one in found)

        await_that(ended)


@contextmanager
def held_after_a_step(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Semaphore]:
    """Copies wait after their first step, outside of their turn; how many of them do is told."""
    waiting, go_on, seen = threading.Semaphore(0), threading.Event(), set[str]()

    def wait(name: str) -> None:
        thread = threading.current_thread().name
        if name == "reload.step_saved" and thread not in seen:
            seen.add(thread)
            waiting.release()
            assert go_on.wait(120)

    monkeypatch.setattr(reloading, "failpoint", wait)
    try:
        yield waiting
    finally:
        go_on.set()


def test_a_table_is_copied_anew_at_every_kind_of_target_while_all_tables_flow(
    engine: Engine, database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 32 << 10)
    database.sql(TABLES)
    shop = Everywhere(engine, database, tmp_path)
    with engine:
        engine.upsert_stream(shop.stream)
        engine.await_ready("shop", 120)
        database.sql("UPDATE orders SET note = 'changed' WHERE id <= 3")
        shop.await_equal(*NAMES)
        # Rows go from the source without a word in its log, and mirrors are damaged.
        database.sql("ALTER TABLE parts DETACH PARTITION parts_b")
        with closing(sqlite3.connect(tmp_path / "copy.db", timeout=60)) as lite, lite:
            lite.execute("UPDATE \"public.orders\" SET note = 'damaged' WHERE id % 2 = 0")
            lite.execute('DELETE FROM "public.orders" WHERE id = 600')
            lite.execute("INSERT INTO \"public.orders\" (id, note, _ms_seq) VALUES (-1, 'not the source', 2)")
            lite.execute('DELETE FROM "public.keyless" WHERE id = 1')
        assert shop.differing("parts") == [f"{target.name}: parts" for target in shop.stream.targets]
        with held_after_a_step(monkeypatch) as waiting:
            Engine(engine.home.path).reload("shop", tables=["public.orders", "public.parts", "public.keyless"])
            for _ in shop.stream.targets:
                assert waiting.acquire(timeout=120), "each target has made a step, and waits"
            assert all("waiting" in states.values() for states in shop.states().values())
            database.sql("INSERT INTO items VALUES (6, 'while others are copied')")
            database.sql("INSERT INTO keyless VALUES (9, 'while it is copied')")
            database.sql("DELETE FROM orders WHERE id IN (1, 300, 599)")
            database.sql("UPDATE orders SET id = id + 1000, note = 'moved' WHERE id IN (2, 598)")
            database.sql("INSERT INTO orders VALUES (300, 'came again'), (2000, 'new')")
            shop.await_equal("items")
            assert not [one for one in engine.get_status("shop").targets if (one.reload or {})["state"] != "running"]
        shop.await_reloaded()
        shop.await_equal(*NAMES)
        tables = {"public.orders": "done", "public.parts": "done", "public.keyless": "done"}
        assert shop.states() == {target.name: tables for target in shop.stream.targets}
        found = {table.name: table.snapshot for table in engine.get_status("shop").targets[0].tables}
        assert found == {**tables, "public.items": None}
        database.sql("DELETE FROM orders WHERE id <= 500")
        database.sql("UPDATE items SET note = 'later'")
        shop.await_equal(*NAMES)
    with closing(sqlite3.connect(tmp_path / "copy.db")) as lite:
        assert lite.execute("SELECT count(*) FROM _millstream_tombstones").fetchall() == [(0,)]
    assert not (tmp_path / "lake" / "_millstream" / "tombstones").exists()


@pytest.mark.parametrize("running", [True, False], ids=["while it runs", "while it is stopped"])
def test_a_table_that_is_added_to_a_stream_gets_its_rows_while_the_others_flow(
    engine: Engine, database: Database, tmp_path: Path, running: bool
) -> None:
    database.sql(TABLES)
    shop = Everywhere(engine, database, tmp_path, "public.items", only="copy log")
    more = replace(shop.stream, source=replace(shop.stream.source, tables=("public.items", "public.orders")))
    engine.start()
    engine.upsert_stream(shop.stream)
    engine.await_ready("shop", 120)
    database.sql("INSERT INTO items VALUES (6, 'first')")
    shop.await_equal("items")
    if not running:
        engine.stop()
    engine.upsert_stream(more)
    if not running:
        database.sql("UPDATE items SET note = 'while it is stopped'")
        engine.start()
    database.sql("INSERT INTO items VALUES (7, 'meanwhile')")
    database.sql("UPDATE orders SET note = 'meanwhile' WHERE id <= 10")
    database.sql("DELETE FROM orders WHERE id BETWEEN 500 AND 550")
    shop.await_reloaded()
    shop.await_equal("items", "orders")
    assert shop.states() == {target.name: {"public.orders": "done"} for target in shop.stream.targets}
    database.sql("DELETE FROM orders WHERE id <= 300")
    shop.await_equal("items", "orders")
    engine.stop()


def test_what_cannot_be_copied_is_said(engine: Engine, database: Database, tmp_path: Path, watching: Watching) -> None:
    database.sql(TABLES)
    shop = Everywhere(engine, database, tmp_path, only="copy")
    engine.upsert_stream(shop.stream)
    with pytest.raises(NotReady, match="target copy of stream shop has got nothing yet"):
        engine.reload("shop")
    with pytest.raises(ConfigError, match=r"stream shop has no table other\.orders"):
        engine.reload("shop", tables=["other.orders"])
    with engine:
        engine.await_ready("shop", 120)
        shop.await_equal("items")
        with pytest.raises(ConfigError, match=r"stream shop has no table public\.item: its source has none") as refused:
            engine.reload("shop", "copy", tables=["public.items", "public.item"])
        assert refused.value.hint == "did you mean public.items?"
        assert engine.get_status("shop").targets[0].reload is None
        # One that goes after it was asked for is told when its turn has come.
        engine.pause("shop")
        engine.reload("shop", "copy", tables=["public.keyless", "public.items"])
        database.sql("DROP TABLE keyless")
        engine.resume("shop")
        await_that(lambda: (engine.get_status("shop").targets[0].reload or {}).get("state") == "failed")
        tables = (engine.get_status("shop").targets[0].reload or {})["tables"]
        assert (tables["public.keyless"]["state"], tables["public.items"]["state"]) == ("failed", "done")
        assert tables["public.keyless"]["error"] == "the source has no such table"
        watching.wait_for(lambda: bool(watching.of("reload.finished")))
        assert [event.message for event in watching.of("reload.table_failed")] == [
            "public.keyless is not copied: the source has no such table"
        ]
        (ended,) = watching.of("reload.finished")
        assert ended.message.endswith("failed; public.keyless: the source has no such table")
        assert engine.get_status("shop").targets[0].error is None, "the stream goes on"


def test_a_table_that_is_rewritten_between_its_ranges_ends_as_it_is_then(
    engine: Engine, database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To an older snapshot a rewritten table is empty."""
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 32 << 10)
    database.sql("CREATE TABLE orders (id int PRIMARY KEY, note text)")
    database.sql("INSERT INTO orders SELECT i, repeat('x', 200) || i FROM generate_series(1, 600) i")
    shop = Everywhere(engine, database, tmp_path, only="copy lake")
    source = source_spec(database, options={"snapshot_at_once": 0})
    with engine:
        with held_after_a_step(monkeypatch) as waiting:
            engine.upsert_stream(replace(shop.stream, source=source))
            for _ in shop.stream.targets:
                assert waiting.acquire(timeout=120), "each target has made a step, and waits"

            def said() -> list[tuple[str, int | None]]:
                found = engine.get_status("shop").targets
                return [(one.state.value, (one.baseline or {}).get("done")) for one in found]

            await_that(lambda: said() == [("snapshot", 1), ("snapshot", 1)])
            database.sql("ALTER TABLE orders ALTER note TYPE text USING 'rewritten ' || id")
            database.sql("UPDATE orders SET id = -id WHERE id % 50 = 0; DELETE FROM orders WHERE id % 70 = 1")
        shop.await_reloaded()
        shop.await_equal("orders")
        assert shop.held("copy", "orders")[-1] == (599, "rewritten 599")
        engine.await_ready("shop", 120)


def test_a_mirror_that_is_filled_goes_on_however_many_changes_need_rows_that_are_still_to_come(
    engine: Engine, database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, watching: Watching
) -> None:
    """The copy waits for the delivery: were it the other way round too, neither would ever go on."""
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 64 << 10)
    database.sql("CREATE TABLE orders (id int PRIMARY KEY, note text, n int)")
    database.sql("ALTER TABLE orders ALTER note SET STORAGE EXTERNAL")
    database.sql("INSERT INTO orders SELECT i, repeat('x', 3000) || i FROM generate_series(1, 60) i")
    shop = Everywhere(engine, database, tmp_path, only="copy")
    source = source_spec(database, options={"snapshot_at_once": 0})
    targets = tuple(replace(one, dead_letters=DeadLetters(max=2)) for one in shop.stream.targets)
    told = ("letters.added", "delivery.retry", "letters.repaired")
    changed: list[str] = []

    def change(name: str) -> None:
        if name == "reload.begun" and not changed:
            changed.append(name)
            # The source's rows have changed again when the first of these changes comes to the target.
            with database.connect() as connection:
                for n in range(1, 4):
                    connection.execute("UPDATE orders SET n = %s", (n,))
            watching.wait_for(lambda: any(watching.of(kind) for kind in told))

    monkeypatch.setattr(reloading, "failpoint", change)
    with engine:
        engine.upsert_stream(replace(shop.stream, source=source, targets=targets))
        engine.await_ready("shop", 60)
        shop.await_equal("orders")
    with closing(sqlite3.connect(tmp_path / "copy.db")) as lite:
        assert lite.execute('SELECT DISTINCT n FROM "public.orders"').fetchall() == [(3,)]
    assert engine.get_status("shop").targets[0].dead_letters == 0


@pytest.mark.parametrize("kind", ["postgres", "duckdb"])
def test_a_mirror_that_was_changed_by_hand_equals_the_source_again(
    engine: Engine,
    database: Database,
    postgres: EmbeddedPostgres,
    tmp_path: Path,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 64 << 10)
    database.sql("CREATE TABLE orders (id int PRIMARY KEY, note text); CREATE TABLE keyless (id int, note text)")
    database.sql("INSERT INTO orders SELECT i, repeat('x', 3000) || i FROM generate_series(1, 50) i")
    database.sql("INSERT INTO keyless SELECT i % 3, 'same' FROM generate_series(1, 9) i")
    with fresh_database(postgres) as other:
        options = {"uri": other.uri} if kind == "postgres" else {"path": str(tmp_path / "copy.duckdb")}
        target = TargetSpec("copy", kind, FEW, options=options)
        # Its first rows come in ranges, too.
        source = source_spec(database, "public.orders", "public.keyless", options={"snapshot_at_once": 0})
        shop = StreamSpec("shop", source, Mode.SNAPSHOT_THEN_CDC, (target,), checkpoint_interval_ms=100)

        def run(statement: str) -> Rows:
            if kind == "postgres":
                return other.sql(statement)
            with duckdb.connect(str(tmp_path / "copy.duckdb")) as duck:
                return duck.execute(statement).fetchall()

        with engine:
            engine.upsert_stream(shop)
            engine.await_ready("shop", 120)
            first = engine.get_status("shop").targets[0].reload
            assert first is not None
            assert (first["baseline"], first["state"]) == (True, "done")
            engine.pause("shop")
            rows = "SELECT id, note FROM public.orders"
            assert sorted(run(rows)) == sorted(database.sql(rows))
            run("DELETE FROM public.orders WHERE id % 2 = 0")
            run("UPDATE public.orders SET note = 'damaged' WHERE id = 1")
            run("INSERT INTO public.orders (id, note, _ms_seq) VALUES (-1, 'not the source''s', 0)")
            run("DELETE FROM public.keyless WHERE id = 1")
            database.sql("DELETE FROM orders WHERE id = 50")
            engine.reload("shop")
            engine.resume("shop")
            await_that(lambda: (engine.get_status("shop").targets[0].reload or {}).get("state") == "done")
        for table in ("orders", "keyless"):
            rows = f"SELECT id, note FROM public.{table}"
            assert sorted(run(rows)) == sorted(database.sql(rows)), table


def test_a_table_that_targets_cannot_follow_comes_with_a_reload(
    engine: Engine, database: Database, tmp_path: Path
) -> None:
    database.sql(
        "CREATE TABLE orders (id int PRIMARY KEY, note text); CREATE TABLE items (id int PRIMARY KEY, note text)"
    )
    database.sql("INSERT INTO orders SELECT i, '0' || i FROM generate_series(1, 50) i")
    shop = Everywhere(engine, database, tmp_path, only="copy lake")
    with engine:
        engine.upsert_stream(shop.stream)
        engine.await_ready("shop", 120)
        database.sql("UPDATE orders SET note = '7' WHERE id = 7; INSERT INTO items VALUES (1, 'first')")
        shop.await_equal("orders", "items")
        database.sql("ALTER TABLE orders ALTER COLUMN note TYPE int USING note::int * 10")
        database.sql("INSERT INTO orders VALUES (51, 51); UPDATE items SET note = 'second'")

        def failed() -> list[str]:
            return [f"{one.error} {one.hint}" for one in engine.get_status("shop").targets if one.state == "failed"]

        await_that(lambda: len(failed()) == 2)
        assert all("public.orders.note was text at the source and is integer now" in said for said in failed())
        assert all("millstream reload shop --table public.orders" in said for said in failed()), failed()
        assert shop.held("copy", "orders")[0] == (1, "01"), "what it had stays"
        engine.reload("shop", tables=["public.orders"])
        shop.await_reloaded()
        database.sql("DELETE FROM orders WHERE id = 50; UPDATE orders SET note = 1 WHERE id = 1")
        shop.await_equal("orders", "items")


def test_a_reload_does_not_bring_what_the_gate_holds_back(engine: Engine, database: Database, tmp_path: Path) -> None:
    """An ALTER that no change has followed yet: nobody was asked about it."""
    database.sql(
        "CREATE TABLE orders (id int PRIMARY KEY, note text); CREATE TABLE items (id int PRIMARY KEY, note text); "
        "INSERT INTO orders VALUES (1, 'one'); INSERT INTO items VALUES (1, 'one')"
    )
    shop = Everywhere(engine, database, tmp_path, only="copy")
    with engine:
        engine.upsert_stream(replace(shop.stream, ddl=(("add_column", "gate"),)))
        engine.await_ready("shop", 120)
        database.sql("INSERT INTO orders VALUES (2, 'two')")
        shop.await_equal("orders", "items")
        database.sql("ALTER TABLE orders ADD COLUMN secret text DEFAULT 'hidden'")
        run_in_copy(tmp_path, 'DELETE FROM "public.items"', 'DELETE FROM "public.orders"')
        engine.reload("shop")
        await_that(lambda: (engine.get_status("shop").targets[0].reload or {}).get("state") == "failed")
        assert shop.states() == {"copy": {"public.orders": "failed", "public.items": "done"}}
        (target,) = engine.get_status("shop").targets
        assert target.reload is not None
        assert "add_column secret" in target.reload["tables"]["public.orders"]["error"]
        columns = run_in_copy(tmp_path, "SELECT name FROM pragma_table_info('public.orders') ORDER BY cid")
        assert columns == [("id",), ("note",), ("_ms_seq",)]
        # Its first change is what can be approved.
        database.sql("INSERT INTO orders VALUES (3, 'three', 'shown')")
        await_that(lambda: [one.state for one in engine.ddl_events("shop")][-1:] == ["pending"])
        engine.decide_ddl("shop", engine.ddl_events("shop")[-1].id, approved=True)
        await_that(lambda: (3, "three") in shop.held("copy", "orders"))
        engine.reload("shop", tables=["public.orders"])
        await_that(lambda: shop.states() == {"copy": {"public.orders": "done"}})
        shop.await_equal("orders", "items")
        rows = run_in_copy(tmp_path, 'SELECT id, secret FROM "public.orders" ORDER BY id')
        assert rows == [(1, "hidden"), (2, "hidden"), (3, "shown")]


def run_in_copy(root: Path, *statements: str) -> Rows:
    with closing(sqlite3.connect(root / "copy.db", timeout=60)) as lite:
        found = [lite.execute(statement).fetchall() for statement in statements]
        lite.commit()
    return found[-1]
