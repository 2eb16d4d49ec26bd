"""Filters entered and left on a real Postgres, which is also the judge: a mirror has what a SELECT with WHERE gives."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from millstream.embedded import EmbeddedPostgres
from millstream.errors import MissingBase
from millstream.targets.base import LaneBatch
from millstream.targets.lanes import sessions
from millstream.targets.lanes.lane import LaneTarget
from millstream.targets.postgres import PostgresTarget
from millstream.targets.postgres_options import PostgresTargetOptions
from millstream.transforms.compiled import compiled
from millstream.transforms.shape import FieldFilter, Shape, Shaping, Step
from tests.fixtures.capture import Driver, drive
from tests.fixtures.lanes import CONTEXT, batches, captured, deliver
from tests.fixtures.postgres import Database, fresh_database
from tests.integration.test_postgres_target import HISTORIES, TABLES, Trader

pytestmark = pytest.mark.postgres

NAMED = FieldFilter("name", "regex", (r"^0\.[0-4]",))


@pytest.fixture
def copy(postgres: EmbeddedPostgres) -> Iterator[Database]:
    with fresh_database(postgres) as made:
        yield made
        sessions.close_idle(made.uri, None)


def mirror(capture: Driver, copy: Database, shape: Shape, seed: int = 1) -> None:
    target = PostgresTarget(PostgresTargetOptions(uri=copy.uri))
    target.open(CONTEXT)
    capture.catch_up()
    shaping = Shaping("shop", shape, True)
    for batch in batches(capture, captured(capture), random.Random(seed)):
        deliver_shaped(target, batch, shaping)


def deliver_shaped(target: LaneTarget, batch: LaneBatch, shaping: Shaping) -> None:
    parts = []
    for part in batch.parts:
        bound = compiled(shaping, part.relation)
        assert bound is not None
        parts.append(replace(part, relation=bound.relation, batches=map(bound.changes, part.batches)))
    deliver(target, replace(batch, parts=parts))


def rows(database: Database, sql: str) -> list[tuple[Any, ...]]:
    return sorted(database.sql(sql), key=repr)


@pytest.mark.parametrize("seed", range(HISTORIES))
def test_a_mirror_has_the_rows_inside_the_filter_after_any_history(
    database: Database, copy: Database, tmp_path: Path, seed: int
) -> None:
    database.sql(TABLES)
    large = Step("drop", (("body", None),), ("public.item", "public.pair"))
    with drive(database, tmp_path) as capture:
        trader = Trader(database, seed)
        trader.trade(60)
        database.sql(
            "ALTER TABLE item ADD COLUMN later numeric(10,2); UPDATE item SET later = id / 3.0 WHERE id % 2 = 0"
        )
        # A column comes with the first row inside the filter that has it.
        database.sql("INSERT INTO item (id, name, later) VALUES (9000, '0.1 and inside', 3)")
        trader.trade(20)
        mirror(capture, copy, Shape(fields=(NAMED,), transforms=(large,)), seed)
    columns = {"item": "id, name, later", "whole": "id, name, body", "pair": "a, b, name", "keyless": "name, body"}
    found = 0
    for table, names in {**columns, "by_index": "id, code, name"}.items():
        sql = f"SELECT {names} FROM {table}"
        inside = rows(database, f"{sql} WHERE name ~ '^0\\.[0-4]'")
        assert rows(copy, sql) == inside, table
        found += len(inside)
    assert found, "there is something to compare"


def test_tables_are_made_with_the_types_that_transforms_leave(
    database: Database, copy: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database.sql(
        "CREATE TABLE typed (id uuid PRIMARY KEY, price numeric(12,2), at timestamptz, day date, n int, tags text[])"
    )
    monkeypatch.setenv("SHOP_SALT", "pepper")
    shape = Shape(
        transforms=(
            Step("rename", (("n", "amount"),)),
            Step(
                "cast", (("price", "string"), ("at", "string"), ("amount", "decimal(20,4)"), ("day", "timestamp_ntz"))
            ),
            Step("add", (("origin", "eu"), ("level", 7), ("rate", 0.5), ("live", True))),
            Step("hash", (("id", "env:SHOP_SALT"),)),
        )
    )
    with drive(database, tmp_path) as capture:
        database.sql(
            "INSERT INTO typed VALUES (gen_random_uuid(), 'NaN', '2024-01-01 10:00:0.5+2', '2024-2-3', 5, '{a,NULL}'); "
            "INSERT INTO typed VALUES (gen_random_uuid(), 12.5, 'infinity', NULL, NULL, NULL)"
        )
        mirror(capture, copy, shape)
    types = dict(
        copy.sql(
            "SELECT attname, format_type(atttypid, atttypmod) FROM pg_attribute WHERE attrelid = 'typed'::regclass "
            "AND attnum > 0"
        )
    )
    assert types == {
        "id": "text",
        "price": "text",
        "at": "text",
        "day": "timestamp without time zone",
        "amount": "numeric(20,4)",
        "tags": "text[]",
        "origin": "text",
        "level": "bigint",
        "rate": "double precision",
        "live": "boolean",
        "_ms_seq": "bigint",
    }
    found = copy.sql(
        "SELECT price, at, day::text, amount::text, tags, origin, level, rate, live FROM typed ORDER BY 1 DESC"
    )
    assert found == [
        ("NaN", "2024-01-01 08:00:00.5+00", "2024-02-03 00:00:00", "5.0000", ["a", None], "eu", 7, 0.5, True),
        ("12.50", "infinity", None, None, None, "eu", 7, 0.5, True),
    ]
    hashes = "SELECT encode(sha256(convert_to('pepper' || id::text, 'UTF8')), 'hex') FROM typed"
    assert rows(copy, "SELECT id FROM typed") == rows(database, hashes)


def test_a_filter_on_a_large_value_that_was_not_sent_is_never_guessed(
    database: Database, copy: Database, tmp_path: Path
) -> None:
    database.sql(TABLES)
    shape = Shape(fields=(FieldFilter("body", "prefix", ("a",)),))
    with drive(database, tmp_path) as capture:
        database.sql("INSERT INTO item VALUES (1, 'n', repeat('abc', 2000)); UPDATE item SET name = 'm'")
        with pytest.raises(MissingBase, match=r"public\.item: 1 changed rows came without body, which a filter needs"):
            mirror(capture, copy, shape)
        # With whole old rows there is nothing to guess.
        database.sql("INSERT INTO whole VALUES (1, 'n', repeat('abc', 2000)), (2, 'n', repeat('bcd', 2000))")
        database.sql("UPDATE whole SET name = 'm'")
        mirror(
            capture,
            copy,
            replace(shape, fields=(replace(shape.fields[0], tables=("public.whole",)),), ops=("insert", "update")),
        )
    assert copy.sql("SELECT id, name, length(body) FROM whole") == [(1, "m", 6000)]
