"""What the event triggers tell of tables, where it happens in the log; a look at the catalog finds none of it again."""

from __future__ import annotations

from pathlib import Path

import pytest

from millstream.journal import JournalReader
from millstream.observe import Event
from millstream.sources.base import Found
from tests.fixtures.capture import SECONDS, Driver, captured, drive
from tests.fixtures.postgres import Database
from tests.integration.test_catalog_looks import PARTS, looked

pytestmark = pytest.mark.postgres

TOLD = {"ddl_trigger": True, "watch_interval": "100ms"}

Said = list[tuple[str, str | None, bool]]


def said(found: list[Found]) -> Said:
    return [(one.kind, (one.part or one.table).removeprefix("public."), one.copies) for one in found]


def told_after(capture: Driver, statements: str) -> Said:
    """What the statements have done, as it was told, each before the change that follows it; looks find nothing."""
    before, looks = len(capture.told), len(capture.looks)
    # A transaction each, and afterwards a change of a table that stays.
    for statement in statements.split(";"):
        capture.database.sql(statement.replace("|", ";"))
    capture.database.sql("INSERT INTO t VALUES ((SELECT max(id) + 1 FROM t))")
    capture.catch_up()
    after = [row["commit_position"] for row in capture.rows if capture.table(row) == "public.t"][-1]
    told = capture.told[before:]
    assert all(one.position < after for one in told)
    looked(capture)
    assert said([one for look in capture.looks[looks:] for one in look.found]) == [], "it was told"
    return said([each for one in told for each in one.found])


def test_each_command_is_told_once_in_its_place(any_database: Database, tmp_path: Path) -> None:
    database = any_database
    database.sql(PARTS + "CREATE TABLE t (id int PRIMARY KEY, n int); INSERT INTO t VALUES (1, 1)")
    database.sql("CREATE TYPE mood AS ENUM ('fine'); CREATE TABLE gone (id int PRIMARY KEY, m mood); CREATE SCHEMA far")
    database.sql("CREATE TABLE looked (id int); CREATE TABLE far.away (LIKE p INCLUDING ALL)")
    with drive(database, tmp_path, "public.*", options=TOLD) as capture:
        capture.catch_up()
        looked(capture)
        assert told_after(capture, "ALTER TABLE t ADD COLUMN seven int DEFAULT 7; CREATE TABLE far.x (id int)") == []
        assert told_after(capture, "ALTER TABLE t ALTER n TYPE bigint USING n * 10") == [("rewrite", "t", True)]
        assert capture.told[-2].found[0].reason == "type of a column"
        twice = "BEGIN| ALTER TABLE t ADD COLUMN u int| ALTER TABLE t ALTER u TYPE bigint USING 7| COMMIT"
        assert told_after(capture, twice) == [("rewrite", "t", True)]
        rewrite = "ALTER TABLE p ADD COLUMN chance float DEFAULT random()"
        assert told_after(capture, rewrite) == [("rewrite", "p", True)], "once, whatever the number of partitions"
        assert told_after(capture, "CREATE TABLE p_4 PARTITION OF p FOR VALUES FROM (300) TO (400)") == [
            ("partition_attached", "p_4", False)
        ]
        database.sql("ALTER TABLE far.away ADD COLUMN chance float; INSERT INTO far.away VALUES (401, 'old')")
        attach = "ALTER TABLE p ATTACH PARTITION far.away FOR VALUES FROM (400) TO (500)"
        assert told_after(capture, attach) == [("partition_attached", "far.away", True)]
        assert told_after(capture, "ALTER TABLE p DETACH PARTITION far.away") == [
            ("partition_detached", "far.away", True)
        ]
        assert told_after(capture, "DROP TABLE p_3") == [("partition_dropped", "p_3a", True)]
        for make in ("CREATE TABLE c1 AS SELECT 1 AS id", "SELECT 1 AS id INTO c2", "CREATE TABLE c3 (id int)"):
            name = "c2" if "INTO" in make else make.split()[2]
            assert told_after(capture, make) == [("create_table", name, True)]
        assert told_after(capture, "DROP TYPE mood CASCADE") == []
        assert told_after(capture, "ALTER TABLE far.x SET SCHEMA public") == [("create_table", "x", True)]
        assert told_after(capture, "BEGIN| DROP TABLE gone| ROLLBACK; CREATE TEMP TABLE brief (id int)") == []
        assert told_after(capture, "DROP TABLE gone") == [("drop_table", "gone", False)]
        assert told_after(capture, "DROP TABLE p CASCADE") == [("drop_table", "p", False)]


def test_it_stands_between_the_changes_around_it_though_nobody_captured(database: Database, tmp_path: Path) -> None:
    database.sql(
        PARTS + "CREATE TABLE t (id int PRIMARY KEY); CREATE TABLE gone (id int); CREATE TABLE looked (id int)"
    )
    with drive(database, tmp_path, options=TOLD) as capture:
        capture.catch_up()
        looked(capture)
        capture.source.close()
        database.sql("INSERT INTO t VALUES (1)")
        database.sql("DROP TABLE gone")
        database.sql("INSERT INTO t VALUES (2)")
        database.sql("BEGIN; INSERT INTO t VALUES (3); ALTER TABLE t ADD COLUMN r float DEFAULT random(); COMMIT")
        database.sql("TRUNCATE p_1")
        database.sql("ALTER TABLE p DETACH PARTITION p_2; INSERT INTO t VALUES (4)")
        capture.connect()
        capture.catch_up()
        told = [(one.position, each.kind) for one in capture.told for each in one.found]
        rows = [(row["commit_position"], "row") for row in capture.rows if capture.table(row) == "public.t"]
        assert [what for _, what in sorted(told + rows)] == [
            *("row", "drop_table", "row"),
            *("rewrite", "row"),  # of one transaction: what is told stands before it
            *("partition_detached", "row"),
        ]
        before = len(capture.looks)
        capture.connect()
        looked(capture)
        found = said([one for look in capture.looks[before:] for one in look.found])
        # Others that the patterns name: what was a partition is a table now.
        assert found == [("create_table", "p_2", True), ("partition_truncated", "p_1", True)], "what nobody can tell"


def test_killed_before_the_transaction_is_in_the_journal_it_is_told_once(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database.sql("CREATE TABLE t (id int PRIMARY KEY); CREATE TABLE gone (id int PRIMARY KEY)")
    monkeypatch.setenv("MILLSTREAM_FAILPOINT", "journal.told_written")
    monkeypatch.setenv("MILLSTREAM_FAILPOINT_STATE", str(tmp_path))
    journal = tmp_path / "journal"
    seen: list[int] = []

    def hear(event: Event) -> None:
        if event.kind == "capture.restarting":
            seen.append(len(JournalReader([str(journal)]).catalog_changes()))

    with captured(database, journal, options={"ddl_trigger": True}, hear=hear) as capture:
        capture.await_state("running")
        database.sql("INSERT INTO t VALUES (1); INSERT INTO t VALUES (2)")
        database.sql("BEGIN; INSERT INTO t VALUES (3); DROP TABLE gone; COMMIT; INSERT INTO t VALUES (4)")
        assert capture.supervisor.wait_for(lambda s: s.restarts == 1, SECONDS), capture.events
        capture.await_state("running")
        capture.await_log_end()
    assert seen == [0], "what is not captured yet is not to be seen"
    (found,) = JournalReader([str(journal)]).catalog_changes()
    assert (found.number, found.kind, found.table, found.seq) == (1, "drop_table", "public.gone", 2)
    assert [row["seq"] for row in capture.rows()] == [1, 2, 3, 4]
