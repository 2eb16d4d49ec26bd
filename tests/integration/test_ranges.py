"""Tables cut by their keys: every row in one range, the same one under another snapshot, while that is exact."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest

from millstream.model import Json, Op
from millstream.sources import read_chunk, take_snapshot
from millstream.sources.base import Chunk, SnapshotPlan, Wanted
from millstream.sources.decoders import decoder
from millstream.sources.postgres import chunks
from tests.fixtures.capture import source_spec
from tests.fixtures.postgres import Database

pytestmark = pytest.mark.postgres


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 64 << 10)


def planned(database: Database, table: str, known: Json | None = None) -> SnapshotPlan:
    """What is read of a table under a snapshot that is gone by now; cut as `known` says, if that still holds."""
    name = f"public.{table}"
    wanted = Wanted(frozenset({name}), ranges={name: known} if known else {})
    with closing(take_snapshot(source_spec(database), lambda _: None, captured=False, wanted=wanted)) as taken:
        return taken.plan


def ranges_of(database: Database, table: str, known: Json | None = None) -> Json | None:
    return planned(database, table, known).ranges.get(f"public.{table}")


def numbers(database: Database, table: str) -> list[list[int]]:
    """The first column of the rows of each chunk."""
    name = f"public.{table}"
    wanted = Wanted(frozenset({name}), ranges={})
    spec = source_spec(database)
    with closing(take_snapshot(spec, lambda _: None, captured=False, wanted=wanted)) as taken:
        return [_numbers(database, taken.plan, chunk) for chunk in taken.plan.chunks]


def _numbers(database: Database, plan: SnapshotPlan, chunk: Chunk) -> list[int]:
    found: list[int] = []
    for rows in read_chunk(source_spec(database), plan, chunk):
        decoded = decoder(chunk.relation).decode(np.full(len(rows), Op.READ, np.uint8), rows)
        found += decoded.after.column(0).to_pylist()
    return found


@pytest.mark.parametrize(
    ("key", "expression"),
    [
        ("int", "i"),
        ("bigint", "-i::bigint << 33"),
        ("numeric", "i / 7.0"),
        ("uuid", "md5(i::text)::uuid"),
        ("bytea", "decode(md5(i::text), 'hex')"),
        ("timestamptz", "timestamptz '2024-01-01' + i * interval '1 us'"),
        ("date", "date '0001-01-01 BC' + i"),
        ('text COLLATE "C"', "E'it''s \\\\ ' || i"),
    ],
)
def test_every_row_is_in_one_range(database: Database, key: str, expression: str) -> None:
    database.sql(f"CREATE TABLE t (n int, k {key} PRIMARY KEY, note text)")
    database.sql(f"INSERT INTO t SELECT i, {expression}, repeat('x', 150) FROM generate_series(1, 2000) i")
    found = numbers(database, "t")
    assert len(found) >= 4
    assert all(found), "no range is empty"
    assert sorted(number for part in found for number in part) == list(range(1, 2001))
    assert max(map(len, found)) < 1200, "none is much larger than the others"


def test_every_row_of_a_partitioned_table_with_a_key_of_two_columns_is_in_one_range(database: Database) -> None:
    database.sql("CREATE TABLE t (n int, region int, note text, PRIMARY KEY (region, n)) PARTITION BY LIST (region)")
    database.sql("CREATE TABLE t_1 PARTITION OF t FOR VALUES IN (1); CREATE TABLE t_2 PARTITION OF t FOR VALUES IN (2)")
    database.sql("INSERT INTO t SELECT i, 1 + (i < 50)::int, repeat('x', 150) FROM generate_series(1, 2000) i")
    found = numbers(database, "t")
    assert len(found) >= 5
    assert sorted(number for part in found for number in part) == list(range(1, 2001))


def test_long_values_count(database: Database) -> None:
    database.sql("CREATE TABLE t (n int PRIMARY KEY, note text); ALTER TABLE t ALTER note SET STORAGE EXTERNAL")
    database.sql("INSERT INTO t SELECT i, repeat('x', 10000) FROM generate_series(1, 100) i")
    found = numbers(database, "t")
    assert len(found) >= 10
    assert sorted(number for part in found for number in part) == list(range(1, 101))


@pytest.mark.parametrize(
    "table",
    ["(n int, note text)", "n text COLLATE other PRIMARY KEY, note text", "n float8 PRIMARY KEY, note text"],
    ids=["no key", "an order that libraries change", "another type"],
)
def test_what_has_no_order_for_ever_is_not_cut_by_its_key(database: Database, table: str) -> None:
    database.sql("CREATE COLLATION other (locale = 'POSIX', deterministic = true)")  # of any name but two
    database.sql(f"CREATE TABLE t ({table.strip('()')})")
    database.sql("INSERT INTO t SELECT i, repeat('x', 150) FROM generate_series(1, 2000) i")
    plan = planned(database, "t")
    assert plan.ranges == {}
    assert len(plan.chunks) > 1, "by its pages"


@pytest.mark.parametrize(
    ("statement", "holds"),
    [
        ("INSERT INTO t SELECT i, 'more' FROM generate_series(3000, 9000) i", True),
        ("UPDATE t SET n = -n; DELETE FROM t WHERE n < -500", True),
        ("ANALYZE t; VACUUM t", True),
        ("ALTER TABLE t ALTER note TYPE text USING note || '.'", False),
        ("ALTER TABLE t ADD more int", False),
        ("ALTER TABLE t RENAME note TO words", False),
        ("TRUNCATE t", False),
        ("VACUUM FULL t", False),
        ("ALTER TABLE t RENAME TO old; CREATE TABLE t (n int PRIMARY KEY, note text); "
         "INSERT INTO t SELECT * FROM old", False),
    ],
)  # fmt: skip
def test_ranges_hold_for_the_table_that_they_were_made_for(database: Database, statement: str, holds: bool) -> None:
    database.sql("CREATE TABLE t (n int PRIMARY KEY, note text)")
    database.sql("INSERT INTO t SELECT i, repeat('x', 150) FROM generate_series(1, 2000) i")
    known = ranges_of(database, "t")
    assert known is not None
    for one in statement.split("; "):
        database.sql(one)
    assert (ranges_of(database, "t", known) == known) is holds


def test_a_plan_says_nothing_of_values(database: Database) -> None:
    database.sql('CREATE TABLE t (n text COLLATE "C" PRIMARY KEY, note text)')
    database.sql("INSERT INTO t SELECT 'secret ' || i, repeat('x', 150) FROM generate_series(1, 2000) i")
    plan = planned(database, "t")
    assert "secret" in str(plan.ranges["public.t"])
    assert "secret" not in repr(replace(plan, chunks=()))
