"""A database that knows no encoding: any bytes are text there, and every one of them arrives."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from millstream.embedded import EmbeddedPostgres
from millstream.errors import SourceHalted
from millstream.model import Relation
from millstream.observe import Event
from millstream.sources.base import Decoded
from millstream.sources.decoders import decoder
from tests.fixtures.bulk import BEHIND, count, small_steps
from tests.fixtures.capture import Driver, drive
from tests.fixtures.postgres import Database, fresh_database

pytestmark = pytest.mark.postgres


@pytest.fixture
def ascii_database(any_postgres: EmbeddedPostgres) -> Iterator[Database]:
    with fresh_database(any_postgres, "TEMPLATE template0 ENCODING 'SQL_ASCII' LOCALE 'C'") as made:
        yield made


def decoded(driver: Driver, table: str) -> tuple[Relation, Decoded]:
    """All changes of a table that has one description only."""
    rows = [row for row in driver.rows if row["relation"] and driver.table(row) == table]
    (number,) = {row["relation"] for row in rows}
    relation = Relation.from_json(driver.relations[number - 1].to_json())
    op = np.array([row["op"] for row in rows], np.uint8)
    result = decoder(relation).decode(op, pa.array([row["payload"] for row in rows], pa.large_binary()))
    return relation, result


def test_bytes_that_are_no_utf8_arrive_as_they_are(ascii_database: Database, tmp_path: Path) -> None:
    ascii_database.sql(
        "CREATE DOMAIN label AS varchar(20);"
        "CREATE TABLE t (id text PRIMARY KEY, v text, j json, d label, l text[], n int, m numeric, u uuid,"
        " ts timestamp)"
    )
    with drive(ascii_database, tmp_path) as driver:
        assert driver.identity.facts["session_settings"]["client_encoding"] == "SQL_ASCII"
        ascii_database.sql(
            r"""INSERT INTO t VALUES
                (E'k\377', E'\377\001', E'"\200"', E'caf\351', ARRAY[E'\351,', NULL, 'x'], 1, 1.50,
                 '00000000-0000-0000-0000-000000000001', 'infinity'),
                ('k', E'\303\251', '"ok"', 'plain', '{{a},{b}}', 2, 'NaN', NULL, '2024-01-01');
            UPDATE t SET v = E'\376' WHERE id = 'k';
            DELETE FROM t WHERE id = E'k\377'"""
        )
        driver.catch_up()
        relation, result = decoded(driver, "public.t")

    assert relation.encoding == "SQL_ASCII"
    assert result.after.schema == pa.schema(
        [
            *((name, pa.binary()) for name in ("id", "v", "j", "d")),
            *[("l", pa.list_(pa.binary())), ("n", pa.int32()), ("m", pa.string()), ("u", pa.string())],
            ("ts", pa.timestamp("us")),
        ]
    )
    assert result.after["id"].to_pylist() == [b"k\xff", b"k", b"k", b"k\xff"]
    assert result.after["v"].to_pylist() == [b"\xff\x01", "é".encode(), b"\xfe", None]
    assert result.after["j"].to_pylist()[:2] == [b'"\x80"', b'"ok"']
    assert result.after["d"].to_pylist()[:2] == [b"caf\xe9", b"plain"]
    assert result.after["l"].to_pylist()[:2] == [[b"\xe9,", None, b"x"], None]
    assert result.after["m"].to_pylist()[:2] == ["1.50", "NaN"]
    assert result.after["u"].to_pylist()[:1] == ["00000000-0000-0000-0000-000000000001"]
    assert result.special.to_pylist() == [
        [("ts", "infinity")],
        [("l", "{{a},{b}}")],
        [("l", "{{a},{b}}")],
        [],
    ]


def test_a_connection_that_is_cut_goes_on_with_the_same_settings(ascii_database: Database, tmp_path: Path) -> None:
    ascii_database.sql("CREATE TABLE t (id int PRIMARY KEY, v text)")
    with drive(ascii_database, tmp_path) as driver:
        ascii_database.sql(r"INSERT INTO t VALUES (1, E'\377')")
        driver.catch_up()
        driver.connect()
        ascii_database.sql(r"INSERT INTO t VALUES (2, E'\376')")
        driver.catch_up()
        _, result = decoded(driver, "public.t")
    assert result.after.to_pylist() == [{"id": 1, "v": b"\xff"}, {"id": 2, "v": b"\xfe"}]


def test_bulk_reading_takes_any_bytes_too(
    ascii_database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_steps(monkeypatch)
    ascii_database.sql("CREATE TABLE t (id int PRIMARY KEY, v text)")
    events: list[Event] = []
    with drive(ascii_database, tmp_path, events=events, options={"catch_up_behind": BEHIND}) as driver:
        ascii_database.sql(r"INSERT INTO t SELECT i, E'\377' || i FROM generate_series(1, 3000) i")
        driver.catch_up()
        _, result = decoded(driver, "public.t")
    assert count(events, "source.bulk_started") == 1
    assert result.after["v"].to_pylist() == [b"\xff%d" % number for number in range(1, 3001)]


def test_a_name_that_is_no_utf8_is_told(ascii_database: Database, tmp_path: Path) -> None:
    ascii_database.sql("CREATE TABLE t (id int PRIMARY KEY, v text DEFAULT E'\\377')")
    with (
        pytest.raises(SourceHalted, match="invalid byte sequence") as raised,
        drive(ascii_database, tmp_path),
    ):
        pytest.fail("it was prepared")
    assert raised.value.hint == "a name, default or enum label in the database is no UTF-8: give it one that is"
