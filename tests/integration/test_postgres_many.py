"""Batches over many tables of a Postgres target: few round trips, and each error with its table and column."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from psycopg.pq import PipelineStatus

from millstream.embedded import EmbeddedPostgres
from millstream.errors import RowRefused
from millstream.targets.lanes import sessions
from tests.fixtures.capture import drive
from tests.fixtures.lanes import assert_equal, mirror, mirror_rest, opened
from tests.fixtures.postgres import Database, fresh_database

pytestmark = pytest.mark.postgres


@pytest.fixture
def copy(postgres: EmbeddedPostgres) -> Iterator[Database]:
    """The database that is written to."""
    with fresh_database(postgres) as made:
        yield made
        sessions.close_idle(made.uri, None)


def test_round_trips_do_not_grow_with_the_number_of_tables(
    database: Database, copy: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"t{number}" for number in range(12)]
    columns = "id int PRIMARY KEY, name varchar(20), doc jsonb, tags text[], at timestamptz"
    for name in names:
        database.sql(f"CREATE TABLE {name} ({columns})")
    waits: list[int] = []
    wait = sessions.Connection.wait

    def counted(self: sessions.Connection, *arguments: Any, **more: Any) -> Any:
        # Of what is sent together, only the first waits for an answer.
        waits[-1] += self.pgconn.pipeline_status == PipelineStatus.OFF
        return wait(self, *arguments, **more)

    monkeypatch.setattr(sessions.Connection, "wait", counted)
    waits.append(0)
    target = opened(copy)
    row = """'a "b" \\\\ c', '{"a": [1, null, "x\\\\ty"]}', '{"x",NULL,"y z"}', '2026-01-02 03:04:05.678901+00'"""
    with drive(database, tmp_path) as capture:
        for count, changes in ((1, 1), (12, 1), (12, 3), (2, 1)):
            for number in range(changes):
                for name in names[:count]:
                    key = len(waits) * 10 + number
                    database.sql(f"INSERT INTO {name} VALUES ({key}, {row}); DELETE FROM {name} WHERE id < {key - 5}")
                    database.sql(f"UPDATE {name} SET name = NULL WHERE id = {key} AND {number} = 1")
            waits.append(0)
            deliver_all = mirror if count == 1 else mirror_rest
            deliver_all(capture, target)
        for name in names:
            assert_equal(database, copy, name)
    # The first batch of a table makes it.
    assert waits[-2] == waits[-1] <= 12


def test_what_is_refused_among_many_tables_is_told_with_its_column(
    database: Database, copy: Database, tmp_path: Path
) -> None:
    for name in ("a", "b", "c"):
        database.sql(f"CREATE TABLE {name} (id int PRIMARY KEY, size int, note text)")
        copy.sql(f"CREATE TABLE {name} (id int PRIMARY KEY, size smallint, note text CHECK (note <> 'no'))")
    target = opened(copy)
    with drive(database, tmp_path) as capture:
        database.sql("INSERT INTO a VALUES (1, 1); INSERT INTO b VALUES (1, 1); INSERT INTO c VALUES (1, 1)")
        mirror(capture, target)
        for values, said, kind in (
            ("size = 40000", r"a value does not fit into public\.b\.size", "value"),
            ("size = 2, note = 'no'", r"constraint b_note_check of public\.b does not allow", "constraint"),
        ):
            database.sql(f"UPDATE a SET note = 'yes'; UPDATE b SET {values}; UPDATE c SET note = 'yes'")
            with pytest.raises(RowRefused, match=said) as caught:
                mirror_rest(capture, target)
            assert caught.value.kind == kind
        assert [copy.sql(f"SELECT size, note FROM {name}") for name in ("a", "b", "c")] == [[(1, None)]] * 3
        database.sql("UPDATE b SET note = 'maybe'")
        mirror_rest(capture, target)
    assert [copy.sql(f"SELECT size, note FROM {name}") for name in ("a", "b", "c")] == [
        [(1, "yes")],
        [(2, "maybe")],
        [(1, "yes")],
    ]


def test_a_narrower_column_takes_the_rows_that_fit(database: Database, copy: Database, tmp_path: Path) -> None:
    database.sql("CREATE TABLE item (id int PRIMARY KEY, name text, size bigint)")
    copy.sql("CREATE TABLE item (id int PRIMARY KEY, name varchar(3), size smallint)")
    target = opened(copy)
    with drive(database, tmp_path) as capture:
        database.sql("INSERT INTO item VALUES (1, 'äöü', 1), (2, 'no', 2)")
        mirror(capture, target)
        for values, said in (
            ("size = 32768", r"does not fit into public\.item\.size"),
            ("size = 2, name = 'no   '", r"public\.item\.name: a text has more characters"),
        ):
            database.sql(f"UPDATE item SET {values} WHERE id = 2")
            with pytest.raises(RowRefused, match=said):
                mirror_rest(capture, target)
    assert copy.sql("SELECT id, name, size FROM item ORDER BY id") == [(1, "äöü", 1), (2, "no", 2)]
