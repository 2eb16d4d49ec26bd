"""The rows that a COPY gives, straight from the socket and through libpq: the same, and the session goes on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pyarrow as pa
import pytest

from millstream.sources.postgres import copy_socket, copying
from millstream.sources.postgres.connection import connect_session
from millstream.sources.postgres.copy_socket import HEAD
from millstream.sources.postgres.copying import copied
from millstream.sources.postgres.options import PostgresOptions
from millstream.sources.postgres.session import Refused, Session
from millstream.sources.postgres.waiting import awaited
from tests.fixtures.capture import source_spec
from tests.fixtures.postgres import Database

pytestmark = pytest.mark.postgres

COPIES = {
    "many rows": "SELECT g, nullif(g % 3, 0), repeat(md5(g::text), g % 60) FROM generate_series(1, 30000) g",
    "long rows": "SELECT g, repeat('dx', g * 9000) FROM generate_series(1, 12) g UNION ALL SELECT 0, 'short'",
    "a row larger than a run": "SELECT repeat('x', 6000000), 1",
    "rows that hold what looks like rows": r"SELECT '\\x64000000080002'::bytea, g FROM generate_series(1, 999) g",
    "no rows": "SELECT 1 WHERE false",
    "no columns": "SELECT FROM generate_series(1, 3)",
}


@pytest.fixture
def session(database: Database) -> Iterator[Session]:
    spec = source_spec(database)
    with closing(Session(connect_session(spec, PostgresOptions.of(spec)))) as made:
        yield made


def copy_of(query: str) -> str:
    return f"COPY ({query}) TO STDOUT (FORMAT binary)"


def rows_of(session: Session, query: str) -> pa.Array:
    return pa.concat_arrays([pa.array([], pa.large_binary()), *copied(session, copy_of(query))])


@pytest.mark.parametrize("case", COPIES)
def test_the_socket_gives_the_rows_that_libpq_gives(
    session: Session, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    assert copy_socket.is_open_to_read(session.connection)
    awaited(session.run("BEGIN"))
    straight = rows_of(session, COPIES[case])
    assert awaited(session.run("SELECT 1")) == [("1",)], "the session goes on"
    monkeypatch.setattr(copying, "is_open_to_read", lambda _: False)
    assert [row[HEAD:] for row in straight.to_pylist()] == rows_of(session, COPIES[case]).to_pylist()
    ((count,),) = awaited(session.run(f"SELECT count(*) FROM ({COPIES[case]}) AS counted"))
    assert len(straight) == int(count or 0)


@pytest.mark.parametrize("straight", [True, False])
def test_a_copy_that_fails_on_its_way_says_why_and_leaves_the_session_to_be_used(
    session: Session, monkeypatch: pytest.MonkeyPatch, straight: bool
) -> None:
    monkeypatch.setattr(copying, "is_open_to_read", lambda _: straight)
    awaited(session.run("BEGIN"))
    with pytest.raises(Refused, match="division by zero") as refused:
        rows_of(session, "SELECT 1 / (g - 20000) FROM generate_series(1, 30000) g")
    assert refused.value.sqlstate == "22012"
    while not session.finished():
        session.await_input(0.1)
    awaited(session.run("ROLLBACK"))
    assert awaited(session.run("SELECT 1")) == [("1",)]


def test_who_leaves_early_ends_what_the_server_does(session: Session, database: Database) -> None:
    reading = copied(session, copy_of("SELECT repeat('x', 1000) FROM (SELECT generate_series(1, 100000000)) AS n"))
    next(reading)
    reading.close()
    database.await_true(
        "SELECT NOT EXISTS (SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND query LIKE 'COPY%')"
    )
