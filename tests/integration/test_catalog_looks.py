"""What happens to tables without a word in the log: looks at the catalog find it, once, and nothing that is not so."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from millstream.model import Json
from millstream.sources.base import Found
from millstream.sources.postgres import catalog, looks
from tests.fixtures.capture import SECONDS, Driver, drive
from tests.fixtures.postgres import Database

pytestmark = pytest.mark.postgres

WATCHFUL = {"watch_interval": "100ms"}

PARTS = """
CREATE TABLE p (id int PRIMARY KEY, note text DEFAULT 'none', CHECK (id >= 0)) PARTITION BY RANGE (id);
CREATE TABLE p_1 PARTITION OF p FOR VALUES FROM (0) TO (100);
CREATE TABLE p_2 PARTITION OF p FOR VALUES FROM (100) TO (200);
CREATE TABLE p_3 PARTITION OF p FOR VALUES FROM (200) TO (300) PARTITION BY RANGE (id);
CREATE TABLE p_3a PARTITION OF p_3 FOR VALUES FROM (200) TO (250);
INSERT INTO p SELECT n, 'part' FROM generate_series(90, 220) n;
"""


def looked(capture: Driver) -> None:
    """Until the catalog was looked at once more, whether or not anything was found: a table that nobody has tells."""
    database = capture.database
    database.sql("CREATE TABLE IF NOT EXISTS looked (id int); TRUNCATE looked")
    before, deadline = len(capture.looks), time.monotonic() + SECONDS
    while len(capture.looks) == before:
        assert time.monotonic() < deadline, "nobody looks"
        capture.step()
    capture.catch_up()


def found_after(capture: Driver, statements: str) -> list[tuple[str, str | None, bool]]:
    """What the statements have done, as the catalog tells it: kind, partition or table, whether rows are concerned."""
    before = len(capture.looks)
    for statement in statements.split(";"):
        if statement.strip():
            capture.database.sql(statement.replace("|", ";"))
    looked(capture)
    looked(capture)
    told = [one for look in capture.looks[before:] for one in look.found]
    assert all(look.since <= look.position for look in capture.looks)
    return [_said(one) for one in told]


def _said(one: Found) -> tuple[str, str | None, bool]:
    return one.kind, (one.part or one.table).removeprefix("public."), one.copies


def test_partitions_that_come_and_go_and_are_emptied(any_database: Database, tmp_path: Path) -> None:
    database = any_database
    database.sql(PARTS + "CREATE TABLE looked (id int); CREATE TABLE away (LIKE p INCLUDING ALL)")
    with drive(database, tmp_path, "public.p", "public.looked", options=WATCHFUL) as capture:
        capture.catch_up()
        looked(capture)
        assert not [one for look in capture.looks for one in look.found], "the first look has nothing to compare with"
        sent = len(capture.rows)
        assert found_after(capture, "TRUNCATE p_1") == [("partition_truncated", "p_1", True)]
        assert found_after(capture, "ALTER TABLE p DETACH PARTITION p_2") == [("partition_detached", "p_2", True)]
        assert found_after(capture, "DROP TABLE p_3") == [("partition_dropped", "p_3a", True)]
        told = [row for row in capture.rows[sent:] if capture.table(row) == "public.p"]
        assert told == [], "the server sends nothing of all that"
        made = "CREATE TABLE p_4 PARTITION OF p FOR VALUES FROM (300) TO (400); INSERT INTO p VALUES (300, 'new')"
        assert found_after(capture, made) == [("partition_attached", "p_4", False)]
        database.sql("INSERT INTO away VALUES (401, 'old')")
        attach = "ALTER TABLE p ATTACH PARTITION away FOR VALUES FROM (400) TO (500)"
        assert found_after(capture, attach) == [("partition_attached", "away", True)]
        at_once = (
            "BEGIN| CREATE TABLE p_5 (LIKE p INCLUDING ALL)| INSERT INTO p_5 VALUES (501)| "
            "ALTER TABLE p ATTACH PARTITION p_5 FOR VALUES FROM (500) TO (600)| COMMIT"
        )
        assert found_after(capture, at_once) == [("partition_attached", "p_5", True)]
        again = (
            "ALTER TABLE p DETACH PARTITION p_4| INSERT INTO p_4 VALUES (301, 'while away')| "
            "ALTER TABLE p ATTACH PARTITION p_4 FOR VALUES FROM (300) TO (400)"
        )
        assert found_after(capture, again) == [("partition_attached", "p_4", True)]
        assert found_after(capture, "TRUNCATE p") == [], "the log has told that"
        ops = [chr(row["op"]) for row in capture.rows if capture.table(row) == "public.p"]
        assert ops[-1] == "t"
        rewrite = "ALTER TABLE p ADD COLUMN chance float DEFAULT random()"
        assert found_after(capture, rewrite) == [("rewrite", "p", True)]


def test_what_is_committed_while_the_catalog_is_read_is_found_by_the_next_look(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database.sql(PARTS + "CREATE TABLE looked (id int)")
    read, due, ends = looks.read, list[str](), list[int]()

    def read_slowly(*arguments: Any) -> Json:
        state = read(*arguments)
        while due:
            ends.extend(end for (end,) in database.sql("SELECT (pg_current_wal_insert_lsn() - '0/0')::int8"))
            database.sql(due.pop())
        return state

    with drive(database, tmp_path, "public.p", "public.looked", options=WATCHFUL) as capture:
        capture.catch_up()
        looked(capture)
        monkeypatch.setattr(looks, "read", read_slowly)
        due.append("TRUNCATE p_1")
        assert found_after(capture, "") == [("partition_truncated", "p_1", True)]
        (finder,) = [look for look in capture.looks if look.found]
        assert finder.since <= ends[0] < finder.position, "it was committed between them"
        due.append("TRUNCATE p")
        assert found_after(capture, "") == [], "the log has told that"


def test_tables_that_are_written_anew_come_and_go(database: Database, tmp_path: Path) -> None:
    database.sql("CREATE TABLE t (id int PRIMARY KEY, n int); INSERT INTO t VALUES (1, 1)")
    database.sql("CREATE TABLE gone (id int PRIMARY KEY); CREATE TABLE looked (id int)")
    with drive(database, tmp_path, options=WATCHFUL) as capture:
        capture.catch_up()
        looked(capture)
        assert found_after(capture, "VACUUM FULL t; TRUNCATE t; INSERT INTO t VALUES (2, 2)") == []
        assert found_after(capture, "ALTER TABLE t ADD COLUMN seven int DEFAULT 7") == []
        assert found_after(capture, "ALTER TABLE t ALTER n TYPE int USING n * 10") == [("rewrite", "t", True)]
        assert found_after(capture, "ALTER TABLE t ADD COLUMN s serial") == [("rewrite", "t", True)]
        assert found_after(capture, "DROP TABLE gone") == [("drop_table", "gone", False)]
        assert found_after(capture, "CREATE TABLE come (id int PRIMARY KEY)") == [("create_table", "come", True)]


def test_tables_that_patterns_name_are_those_that_would_be_captured(any_database: Database) -> None:
    database = any_database
    database.sql(PARTS + 'CREATE SCHEMA "Other_x"; CREATE TABLE "Other_x"."T%_" (id int)')
    database.sql("CREATE TABLE far (id int); CREATE UNLOGGED TABLE quick (id int); CREATE VIEW seen AS SELECT 1 AS id")
    chosen = (["public.*"], ["public.p_*", "Other_x.*"], ["public.p", "public.p_1", "*.T%_"], ["public.p_3a"])
    with database.connect() as conn:
        for patterns in chosen:
            named = looks.read(conn, [], patterns)["others"]
            expected = {str(one.relation.oid): one.relation.table for one in catalog.select(conn, patterns).tables}
            assert named == expected, patterns
            assert named


def test_what_happens_while_nobody_captures_is_found_by_the_next_one(database: Database, tmp_path: Path) -> None:
    database.sql(PARTS + "CREATE TABLE looked (id int)")
    with drive(database, tmp_path, "public.p", "public.looked", options=WATCHFUL) as capture:
        capture.catch_up()
        looked(capture)
        capture.source.close()
        database.sql("TRUNCATE p_2; INSERT INTO p VALUES (150, 'new'); TRUNCATE p_1")
        database.sql("VACUUM p_2")
        capture.connect()
        assert sorted(found_after(capture, "")) == [
            ("partition_truncated", "p_1", True),
            ("partition_truncated", "p_2", True),
        ]


def test_a_table_that_was_altered_again_before_capture_came_to_it(database: Database, tmp_path: Path) -> None:
    database.sql("CREATE TABLE t (id int PRIMARY KEY); INSERT INTO t VALUES (1); CREATE TABLE looked (id int)")
    with drive(database, tmp_path, options=WATCHFUL) as capture:
        capture.catch_up()
        looked(capture)
        capture.source.close()
        database.sql("ALTER TABLE t ADD COLUMN x int DEFAULT 7; INSERT INTO t VALUES (2); ALTER TABLE t RENAME x TO y")
        capture.connect()
        assert found_after(capture, "") == [("alter?", "t", True)]
        capture.connect()
        assert found_after(capture, "INSERT INTO t VALUES (3)") == [], "it was told"
        capture.source.close()
        database.sql("ALTER TABLE t RENAME y TO z; INSERT INTO t VALUES (4); ALTER TABLE t RENAME z TO y")
        capture.connect()
        while capture.relations[-1].columns[-1].name != "z":
            capture.step()
        capture.blocks = [block for block in capture.blocks if block.look is None or not block.look.found]
        capture.connect()
        assert found_after(capture, "") == [("alter?", "t", True)], "also if it was killed before it could be told"
