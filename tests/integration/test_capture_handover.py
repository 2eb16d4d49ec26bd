"""A slot that another session still reads when a stream of it shall begin."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest
from psycopg import pq

from millstream.errors import SourceUnavailable
from millstream.sources.postgres import reading
from tests.fixtures.capture import drive
from tests.fixtures.postgres import Database

pytestmark = pytest.mark.postgres


@contextmanager
def other_reader(database: Database) -> Iterator[pq.abc.PGconn]:
    """Somebody who streams from the slot."""
    connection = pq.PGconn.connect(psycopg.conninfo.make_conninfo(database.uri, replication="database").encode())
    try:
        options = f"proto_version '1', publication_names '{database.name}', messages 'true'"
        started = connection.exec_(f'START_REPLICATION SLOT "{database.name}" LOGICAL 0/0 ({options})'.encode())
        assert started.status == pq.ExecStatus.COPY_BOTH, connection.get_error_message()
        yield connection
    finally:
        connection.finish()


def test_a_stream_waits_for_the_session_before_it_to_go(database: Database, tmp_path: Path) -> None:
    database.sql("CREATE TABLE item (id int PRIMARY KEY)")
    with drive(database, tmp_path) as driver:
        database.sql("INSERT INTO item VALUES (1)")
        with other_reader(database):
            driver.connect()
            assert all(driver.step().rows is None for _ in range(5))
        assert [driver.table(row) for row in driver.catch_up()] == ["public.item"]


def test_but_not_for_ever(database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "HANDOVER_SECONDS", 0.1)
    database.sql("CREATE TABLE item (id int PRIMARY KEY)")
    with drive(database, tmp_path) as driver, other_reader(database):
        database.sql("INSERT INTO item VALUES (1)")
        driver.connect()
        with pytest.raises(SourceUnavailable, match=r"is active for PID .*another session reads the slot"):
            driver.catch_up()
