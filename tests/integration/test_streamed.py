"""Transactions that the server sends before they commit: the journal is the one that an unstreamed slot leaves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from millstream.embedded import EmbeddedPostgres
from millstream.errors import SourceHalted
from millstream.sources.base import Severity
from millstream.sources.postgres import streamed
from millstream.sources.postgres.options import newest_protocol
from millstream.sources.postgres.pgoutput import parse_stream_commit
from millstream.sources.postgres.source import PostgresSource
from tests.chaos.rig import failpoints
from tests.fixtures.bulk import TABLES, capture_to_journal, copy_slot, drive_copy, facts, journal_facts, write_history
from tests.fixtures.capture import drive, source_spec
from tests.fixtures.postgres import Database, fresh_database

pytestmark = pytest.mark.postgres

LARGE = "CREATE TABLE one (id int PRIMARY KEY, v text); CREATE TABLE other (id int PRIMARY KEY, v text);"

NESTED = """
    INSERT INTO item SELECT {n} + i, 'first', repeat('x', 200) FROM generate_series(1, 400) i;
    SAVEPOINT a; INSERT INTO item SELECT {n} + 1000 + i, 'lost', repeat('x', 200) FROM generate_series(1, 400) i;
    SAVEPOINT b; INSERT INTO {table} SELECT {n} + i, 'lost too' FROM generate_series(1, 400) i; RELEASE b;
    ROLLBACK TO a;
    SAVEPOINT c; INSERT INTO {table} SELECT {n} + i, repeat('y', 100) FROM generate_series(1, 400) i;
    SAVEPOINT d; UPDATE {table} SET v = 'lost' WHERE id > {n}; ROLLBACK TO d; RELEASE c;
    SELECT pg_logical_emit_message(true, 'in', 'm{n}');
    UPDATE item SET name = 'x' WHERE id > {n} AND id % 3 = 0
"""
"""Tables of their own, since others truncate theirs meanwhile."""


def stream_early(database: Database) -> None:
    """Have the server send transactions above 64 kB before they end."""
    database.sql(f"ALTER DATABASE \"{database.name}\" SET logical_decoding_work_mem = '64kB'")


def stream_at_once(database: Database) -> None:
    """Have the server send every change at once, each in a block of its own. Takes Postgres 16."""
    database.sql(f'ALTER DATABASE "{database.name}" SET debug_logical_replication_streaming = immediate')


def write_in_turns(database: Database) -> None:
    """Two large transactions that write in turns, small ones that commit in between, one that is rolled back."""
    with database.connect(autocommit=False) as one, database.connect(autocommit=False) as other:
        one.execute(NESTED.format(n=1_000_000, table="one"))
        other.execute(NESTED.format(n=2_000_000, table="other"))
        write_history(database, range(1, 2))
        other.execute("ALTER TABLE other ADD COLUMN w text")
        other.execute("INSERT INTO other SELECT i, 'v', 'w' FROM generate_series(1, 300) i")
        one.execute("INSERT INTO item SELECT 3000000 + i, 'late', repeat('z', 3000) FROM generate_series(1, 100) i")
        other.commit()
        one.commit()
        other.execute(NESTED.format(n=5_000_000, table="other"))
        write_history(database, range(2, 3))
        other.rollback()


@pytest.fixture
def commits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The transactions that came streamed, in this process."""
    seen: list[int] = []

    def counting(payload: bytes) -> Any:
        found = parse_stream_commit(payload)
        seen.append(found.xid)
        return found

    monkeypatch.setattr(streamed.wire, "parse_stream_commit", counting)
    return seen


def test_every_protocol_gives_the_same_rows(any_database: Database, tmp_path: Path, commits: list[int]) -> None:
    database = any_database
    database.sql(TABLES + LARGE)
    protocols = range(1, newest_protocol(database.server.version * 10000) + 1)
    with drive(database, tmp_path / "own"):
        copy_slot(database, *(f"{database.name}_{protocol}" for protocol in protocols))
    stream_early(database)
    write_in_turns(database)
    found, counted = {}, {}
    for protocol in protocols:
        before = len(commits)
        slot = f"{database.name}_{protocol}"
        options = {"catch_up": "streaming", "protocol": protocol}
        with drive_copy(database, tmp_path, slot, [], **options) as driver:
            driver.catch_up()
            found[protocol] = facts(driver)
        counted[protocol] = len(commits) - before
    assert len(found[1]) > 2500
    assert counted[1] == 0
    for protocol in protocols[1:]:
        assert counted[protocol] >= 2
        assert found[protocol] == found[1]


def test_every_change_sent_at_once_gives_the_same_rows(database: Database, tmp_path: Path, commits: list[int]) -> None:
    database.sql(TABLES)
    with drive(database, tmp_path / "own"):
        copy_slot(database, f"{database.name}_1", f"{database.name}_4")
    stream_at_once(database)
    write_history(database, range(1, 3))
    found = {}
    for protocol in (1, 4):
        options = {"catch_up": "streaming", "protocol": protocol}
        with drive_copy(database, tmp_path, f"{database.name}_{protocol}", [], **options) as driver:
            driver.catch_up()
            found[protocol] = facts(driver)
    assert len(commits) >= 10
    assert found[4] == found[1]


def test_alters_that_are_told_in_streamed_transactions_are_heard_in_their_places(
    database: Database, tmp_path: Path, commits: list[int]
) -> None:
    database.sql("CREATE TABLE t (id int PRIMARY KEY, a text)")
    stream_at_once(database)
    with drive(database, tmp_path, options={"ddl_trigger": True, "protocol": 4, "catch_up": "streaming"}) as capture:
        database.sql("INSERT INTO t VALUES (1, 'a')")
        database.sql("ALTER TABLE t ADD COLUMN n int NOT NULL DEFAULT 7; INSERT INTO t VALUES (2, 'b', 8)")
        database.sql("BEGIN; ALTER TABLE t ADD COLUMN lost int; ROLLBACK")
        database.sql(
            "INSERT INTO t VALUES (3, 'c', 9); ALTER TABLE t RENAME COLUMN a TO b; INSERT INTO t VALUES (4, 'd', 9)"
        )
        database.sql("ALTER TABLE t DROP COLUMN b")
        rows = capture.catch_up()
    assert len(commits) >= 3
    described = [capture.relations[row["relation"] - 1] for row in rows]
    said = [[(column.attnum, column.name, column.missing) for column in one.columns] for one in described]
    first, second, third = (1, "id", None), (2, "a", None), (3, "n", "7")
    assert all(one.enriched for one in described)
    assert said == [[first, second], *[[first, second, third]] * 2, [first, (2, "b", None), third]]


SMALL = """
from millstream.sources.postgres.streamed import StreamedAssembler
StreamedAssembler.__init__.__kwdefaults__["budget"] = 9000
"""
"""Python that makes a capture keep little of streamed transactions in memory."""


def test_a_kill_at_every_step_leaves_the_same_journal(database: Database, tmp_path: Path) -> None:
    database.sql(TABLES + LARGE)
    with drive(database, tmp_path / "own"):
        plain, early = f"{database.name}_plain", f"{database.name}_early"
        copy_slot(database, plain, early)
    stream_early(database)
    write_in_turns(database)
    ((goal,),) = database.sql("SELECT (pg_current_wal_flush_lsn() - '0/0')::int8")
    steps = [name for name in failpoints() if name.startswith("streamed.")]
    assert len(steps) == 2
    kills = (*(f"{name}:3" for name in steps), "capture.spooled:9")
    chosen = {"catch_up": "streaming", "protocol": 4}
    capture_to_journal(database, tmp_path / "early", early, lambda: goal, kill_at=kills, first=SMALL, **chosen)
    with drive_copy(database, tmp_path, plain, [], catch_up="streaming") as driver:
        driver.catch_up()
        expected = facts(driver)
    assert len(expected) > 2500
    found = journal_facts(tmp_path / "early")
    assert [seq for seq, *_ in found] == list(range(1, len(expected) + 1))
    assert [tuple(row) for _, *row in found] == expected


def test_a_protocol_that_the_server_does_not_have_is_refused(postgres15: EmbeddedPostgres, tmp_path: Path) -> None:
    with fresh_database(postgres15) as database:
        database.sql(TABLES)
        spec = source_spec(database, options={"protocol": 4})
        wrong = [one.message for one in PostgresSource(spec, None).preflight() if one.severity is Severity.ERROR]
        assert wrong == ["`protocol: 4` needs Postgres 16"]
        with (
            drive(database, tmp_path, options={"protocol": 4}) as driver,
            pytest.raises(SourceHalted, match=r"Postgres 15 has no version 4 of pgoutput's protocol"),
        ):
            driver.connect()
