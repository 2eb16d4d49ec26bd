"""Ranges of a table's key that are copied anew while changes go on coming. Without Spark, from a real source."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import pytest
from deltalake import DeltaTable

from millstream import BatchLimits, Engine, Mode, StreamSpec, TargetSpec
from millstream.embedded import EmbeddedPostgres
from millstream.engine import reloading
from millstream.engine.reload import AskedTables, Reload, waiting
from millstream.errors import ConfigError, NotSupported
from millstream.sources import key_range
from millstream.targets.duckdb import MEMORY
from millstream.transforms.shape import Shape, Step
from tests.fixtures.capture import source_spec
from tests.fixtures.engines import await_that
from tests.fixtures.postgres import Database, fresh_database

pytestmark = pytest.mark.postgres

Key = tuple[str, str, int]

FEW = BatchLimits(max_ms=0, max_bytes=1 << 30, max_events=50)
SALES = """
CREATE TABLE sales (tenant text, day date, id int, note text, PRIMARY KEY (tenant, day, id));
INSERT INTO sales SELECT tenant, day::date, i, 'sold' FROM generate_series(1, 20) i,
    unnest(ARRAY['north', 'North', 'it''s a ?%']) tenant,
    unnest(ARRAY['-infinity', '0044-03-15 BC', '2025-12-31', '2026-01-15',
        '2026-02-01', '10000-01-01', 'infinity']) day;
"""
JANUARY = "tenant = 'north' AND day BETWEEN '2026-01-01' AND '2026-01-31'"
WORDS = "tenant in ('North', 'it''s a ?%') AND day > '2026-01-31' and id <= 10"


class Sales:
    """A mirror of the table, of any kind, and what it holds."""

    def __init__(self, kind: str, place: str) -> None:
        self._kind, self._place = kind, place
        self._table = {"sqlite": '"public.sales"'}.get(kind, "public.sales")

    @property
    def options(self) -> dict[str, str]:
        return {"uri" if self._kind == "postgres" else "path": self._place}

    def rows(self) -> dict[Key, str]:
        if self._kind == "delta":
            found = DeltaTable(f"{self._place}/public.sales").to_pyarrow_table()
            read: Any = zip(*(found[name].to_pylist() for name in ("tenant", "day", "id", "note")), strict=True)
        else:
            read = self._run(f"SELECT tenant, CAST(day AS text), id, note FROM {self._table}")
        return {(tenant, day, id_): note for tenant, day, id_, note in read}

    def damage(self) -> None:
        """Rows that are wrong, that are missing, and that the source does not have: everywhere."""
        if self._kind == "delta":
            table = DeltaTable(f"{self._place}/public.sales")
            table.update(updates={"note": "'damaged'"})
            table.delete("id % 5 = 0")
            table.update(updates={"id": "id + 1000"}, predicate="id = 3")
            return
        for statement in (
            f"UPDATE {self._table} SET note = 'damaged'",
            f"DELETE FROM {self._table} WHERE id % 5 = 0",
            f"UPDATE {self._table} SET id = id + 1000 WHERE id = 3",
        ):
            self._run(statement)

    def _run(self, statement: str) -> list[tuple[Any, ...]]:
        if self._kind == "postgres":
            return self.database.sql(statement)
        if self._kind == "sqlite":
            with closing(sqlite3.connect(self._place, timeout=60)) as lite, lite:
                return lite.execute(statement).fetchall()
        found: list[list[tuple[Any, ...]]] = []

        def ran() -> bool:
            # The engine opens and closes the same file in this process, and may be at it just then.
            with suppress(duckdb.Error), duckdb.connect(self._place, config={"memory_limit": MEMORY}) as duck:
                found.append(duck.execute(statement).fetchall())
            return bool(found)

        await_that(ran)
        return found[0]

    database: Database


def after_the_snapshot(monkeypatch: pytest.MonkeyPatch, do: Callable[[], None]) -> None:
    """Have something done when the snapshot of the next copy is taken, before any row of it is written."""
    done: list[str] = []

    def wait(name: str) -> None:
        if name == "reload.begun" and not done:
            done.append(name)
            do()

    monkeypatch.setattr(reloading, "failpoint", wait)


# DuckDB is asked in the words of SQLite: `make chaos` looks at it too.
MORE = ["duckdb"] if os.environ.get("MILLSTREAM_CHAOS_EACH") == "1" else []


@pytest.mark.parametrize("kind", ["sqlite", "delta", "postgres", *MORE])
def test_a_range_equals_the_source_and_the_rest_stays_as_it_was(
    engine: Engine,
    database: Database,
    postgres: EmbeddedPostgres,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    database.sql(SALES)
    with fresh_database(postgres) as other:
        sales = Sales(kind, other.uri if kind == "postgres" else str(tmp_path / "copy"))
        sales.database = other
        target = TargetSpec("copy", kind, FEW, options=sales.options)
        shop = StreamSpec("shop", source_spec(database), Mode.SNAPSHOT_THEN_CDC, (target,), checkpoint_interval_ms=100)
        with engine:
            engine.upsert_stream(shop)
            engine.await_ready("shop", 120)
            engine.pause("shop")
            sales.damage()
            expected = sales.rows()
            assert expected["north", "2026-01-15", 1] == "damaged"

            def change_more() -> None:
                before = engine.get_status("shop").events_replicated
                database.sql("DELETE FROM sales WHERE tenant = 'north' AND day = '2026-01-15' AND id = 7")
                database.sql("UPDATE sales SET note = 'newer' WHERE tenant = 'north' AND day = '2026-01-15' AND id = 8")
                database.sql("UPDATE sales SET id = 900 WHERE tenant = 'north' AND day = '2025-12-31' AND id = 9")
                database.sql("UPDATE sales SET day = '2026-01-16' WHERE tenant = 'north' AND id = 900")
                database.sql(
                    "UPDATE sales SET day = '2024-01-01' WHERE tenant = 'north' AND day = '2026-01-15' AND id = 6"
                )
                database.sql("INSERT INTO sales VALUES ('last', '2026-01-15', 1, 'sold')")
                await_that(lambda: engine.get_status("shop").events_replicated == before + 6)

            after_the_snapshot(monkeypatch, change_more)
            engine.reload("shop", tables=["public.sales"], where=JANUARY)
            engine.resume("shop")
            await_reloaded(engine)
            january = {key: note for key, note in source(database).items() if key[0] == "north" and in_january(key[1])}
            expected = {key: note for key, note in expected.items() if not (key[0] == "north" and in_january(key[1]))}
            # What was changed after the snapshot, outside of the range.
            del expected["north", "2025-12-31", 9]
            expected |= {("north", "2024-01-01", 6): "sold", ("last", "2026-01-15", 1): "sold", **january}
            assert january["north", "2026-01-15", 8] == "newer"
            assert ("north", "2026-01-16", 900) in january
            assert sales.rows() == expected
            engine.reload("shop", tables=["public.sales"], where=WORDS)
            await_reloaded(engine)
            chosen = [
                key
                for key in {**source(database), **expected}
                if key[0] in ("North", "it's a ?%")
                and key[1] in ("2026-02-01", "10000-01-01", "infinity")
                and key[2] <= 10
            ]
            expected = {key: note for key, note in expected.items() if key not in chosen}
            assert len(chosen) == 60
            assert sales.rows() == expected | {key: source(database)[key] for key in chosen}
            (table,) = (engine.get_status("shop").targets[0].reload or {})["tables"].values()
            assert (table["state"], table["rows"], table["where"]) == ("done", 60, WORDS)


def await_reloaded(engine: Engine) -> None:
    def ended() -> bool:
        found = engine.get_status("shop").targets[0].reload
        assert found is None or found["state"] != "failed", [one["error"] for one in found["tables"].values()]
        return found is not None and found["state"] == "done"

    await_that(ended)


def source(database: Database) -> dict[Key, str]:
    return {(t, day, id_): note for t, day, id_, note in database.sql("SELECT tenant, day::text, id, note FROM sales")}


def in_january(day: str) -> bool:
    return day.startswith("2026-01-")


def test_what_is_no_range_of_a_key_is_refused_with_the_reason(database: Database) -> None:
    database.sql(
        "CREATE TABLE orders (id int PRIMARY KEY, note text); CREATE TABLE keyless (id int);"
        "CREATE TABLE priced (price numeric(8, 2) PRIMARY KEY); CREATE TABLE days (at timestamptz PRIMARY KEY)"
    )
    spec = source_spec(database)

    def refused(where: str, table: str = "public.orders") -> str:
        with pytest.raises(ConfigError) as wrong:
            key_range(spec, table, where)
        return f"{wrong.value.message} | {wrong.value.hint}"

    assert 'the server says: syntax error at or near ")"' in refused("id >")
    assert 'the server says: column "nothing" does not exist' in refused("nothing + 1 = 2")
    assert "'% 2 = 0' is not understood; such a condition could not be answered alike" in refused("id % 2 = 0")
    assert 'the server says: invalid input syntax for type bigint: "ten"' in refused("id = 'ten'")
    assert 'the server says: invalid input syntax for type bigint: "1.5"' in refused("id > 1.5")
    assert "note is no column of its key" in refused("note = 'a'")
    assert "its key is id" in refused("note = 'a'")
    assert "other is no column of it;" in refused("other = 'a'")
    assert "public.keyless has no key" in refused("id = 1", "public.keyless")
    assert "price is numeric(8,2), which targets may compare otherwise" in refused("price > 1", "public.priced")
    assert "with those of the years 1 to 9999 only" in refused("at < 'infinity'", "public.days")
    assert "cannot insert multiple commands" in refused("true); DROP TABLE orders; SELECT (1")
    assert database.sql("SELECT count(*) FROM orders") == [(0,)]
    assert key_range(spec, "public.days", "at < '2026-01-01 02:00+02'").holds({"at": "2025-12-31 23:59:59+00"})


def test_a_range_is_for_mirrors_of_tables_that_are_not_transformed(
    engine: Engine, database: Database, tmp_path: Path
) -> None:
    database.sql(SALES)
    copy = TargetSpec("copy", "sqlite", FEW, options={"path": str(tmp_path / "copy.db")})
    log = TargetSpec("log", "files", FEW, options={"path": str(tmp_path / "log")})
    shop = StreamSpec("shop", source_spec(database), Mode.SNAPSHOT_THEN_CDC, (copy, log), checkpoint_interval_ms=100)
    engine.upsert_stream(shop)
    with engine:
        engine.await_ready("shop", 120)
        with pytest.raises(NotSupported, match="target log of stream shop keeps what has happened, of which no part"):
            engine.reload("shop", tables=["public.sales"], where=JANUARY)
        with pytest.raises(ConfigError, match="where is a condition on the key of one table, and no tables are named"):
            engine.reload("shop", "copy", where=JANUARY)
        with pytest.raises(ConfigError, match="the server says: syntax error"):
            engine.reload("shop", "copy", tables=["public.sales"], where="id = = 1")
        masked = replace(shop, shape=Shape(transforms=(Step("mask", (("note", "*"),), ("public.s*",)),)))
        with closing(engine.home.open_state(read_only=True)) as store:
            asked = Reload(store, masked, ["copy"], AskedTables(("public.sales",), where=JANUARY))
            with pytest.raises(NotSupported, match=r"stream shop transforms public\.sales"):
                asked.check()


def test_ranges_that_are_asked_for_before_the_last_one_is_done_are_copied_together() -> None:
    def asked(where: str | None, *names: str) -> AskedTables:
        return AskedTables(names, where=where)

    first = waiting(asked("id < 5", "public.a"))
    assert first["where"] == {"public.a": "id < 5"}
    assert waiting(asked("id < 5", "public.a"), first)["where"] == {"public.a": "id < 5"}
    both = waiting(asked("id > 9", "public.a"), first)
    assert both["where"] == {"public.a": "(id < 5) OR (id > 9)"}
    assert waiting(asked("id > 9", "public.b"), first)["where"] == {"public.a": "id < 5", "public.b": "id > 9"}
    assert waiting(asked(None, "public.a"), both)["where"] == {}
    assert waiting(asked(None), both)["where"] == {}
    assert waiting(asked("id > 9", "public.a"), waiting(asked(None, "public.a")))["where"] == {}
    assert waiting(asked("id > 9", "public.a"), waiting(asked(None)))["where"] == {}
    ended = {**first, "state": "done"}
    assert waiting(asked("id > 9", "public.a"), ended)["where"] == {"public.a": "id > 9"}
    halfway = {**both, "tables": {"public.a": {"state": "done"}}}
    assert waiting(asked("id = 7", "public.a"), halfway)["where"] == {"public.a": "id = 7"}
