"""What capture hands over, change by change, against a plain reading of the same log by SQL."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from millstream.errors import SourceHalted, SourceUnavailable
from millstream.sources.base import Block
from millstream.sources.postgres import slot
from tests.fixtures.capture import SECONDS, Driver, Oracle, drive, facts
from tests.fixtures.postgres import Database

pytestmark = pytest.mark.postgres


def same_as_the_oracle(rows: list[dict], oracle: Oracle) -> None:
    """Every field of every row; only the time of a message outside a transaction is not in the log."""
    expected = oracle.rows()
    assert len(rows) == len(expected)
    for row, wanted in zip(map(facts, rows), expected, strict=True):
        assert row[:4] + row[5:] == wanted[:4] + wanted[5:]
        assert wanted[4] in (row[4], None)


def count(blocks: list[Block]) -> int:
    return sum(block.rows.num_rows for block in blocks if block.rows is not None)


def read_for_ever(capture: Driver) -> None:
    while True:
        capture.step()


SHOP = """
    CREATE TABLE item (id int PRIMARY KEY, name text, body text);
    ALTER TABLE item ALTER body SET STORAGE EXTERNAL;
    CREATE TABLE whole (id int PRIMARY KEY, v text); ALTER TABLE whole REPLICA IDENTITY FULL;
    CREATE TABLE by_index (id int, code text NOT NULL, v text);
    CREATE UNIQUE INDEX by_index_code ON by_index (code);
    ALTER TABLE by_index REPLICA IDENTITY USING INDEX by_index_code;
    CREATE TABLE nothing (v text); ALTER TABLE nothing REPLICA IDENTITY NOTHING;
    CREATE TABLE keyless (v text);
"""


def test_every_kind_of_change_equals_the_log(any_database: Database, tmp_path: Path) -> None:
    database = any_database
    database.sql(SHOP)
    with drive(database, tmp_path) as capture:
        oracle = Oracle.beside(database)
        database.sql("INSERT INTO item SELECT n, 'n' || n, repeat('toast', 2000) FROM generate_series(1, 50) n")
        database.sql("UPDATE item SET name = 'x' WHERE id < 10; UPDATE item SET id = id + 1000 WHERE id = 20")
        database.sql("DELETE FROM item WHERE id = 30")
        database.sql("BEGIN; INSERT INTO whole VALUES (1, 'a'); UPDATE whole SET v = 'b'; DELETE FROM whole; COMMIT")
        database.sql("BEGIN; INSERT INTO by_index VALUES (1, 'a', 'b'); UPDATE by_index SET code = 'c', id = 2; COMMIT")
        database.sql("DELETE FROM by_index")
        database.sql("INSERT INTO nothing VALUES ('a'); INSERT INTO keyless VALUES ('b'); UPDATE keyless SET v = 'c'")
        database.sql("BEGIN; INSERT INTO item VALUES (5000); TRUNCATE item, whole, keyless; COMMIT")
        rows = capture.catch_up()
        same_as_the_oracle(rows, oracle)
        # A truncate of several tables names them in the order of their OIDs.
        ops = [(capture.table(row).removeprefix("public."), chr(row["op"])) for row in rows]
    assert ops == [
        *[("item", "c")] * 50,
        *[("item", "u")] * 10,
        ("item", "d"),
        *[("whole", op) for op in "cud"],
        *[("by_index", op) for op in "cud"],
        ("nothing", "c"),
        ("keyless", "c"),
        ("item", "c"),
        *[(table, "t") for table in ("item", "whole", "keyless")],
    ]
    updates = [row["payload"] for row in rows if row["op"] == ord("u")]
    assert updates[0].count(b"u") >= 1  # the unchanged TOAST value is a mark, not its 10,000 bytes
    assert len(updates[0]) < 100
    assert updates[9][5:6] == b"K"  # the PK change carries its old key
    assert updates[10][5:6] == b"O"  # and an update under FULL the whole old row


def test_the_description_of_a_table_is_complete(any_database: Database, tmp_path: Path) -> None:
    database = any_database
    database.sql(SHOP)
    database.sql("CREATE TYPE mood AS ENUM ('sad', 'glad'); ALTER TABLE whole ADD COLUMN m mood DEFAULT 'sad'")
    with drive(database, tmp_path) as capture:
        database.sql("INSERT INTO whole VALUES (1, 'a'); INSERT INTO by_index VALUES (1, 'a', 'b')")
        capture.catch_up()
        whole, by_index = capture.relations
    assert (whole.table, whole.identity, whole.key, whole.primary_key) == ("public.whole", "f", ("id",), ("id",))
    assert whole.enriched
    assert by_index.enriched
    assert by_index.key == ("code",)
    assert [column.enum_labels for column in whole.columns] == [None, None, ("sad", "glad")]


def test_subtransactions_that_were_rolled_back_leave_no_trace(any_database: Database, tmp_path: Path) -> None:
    database = any_database
    database.sql("CREATE TABLE t (id int PRIMARY KEY)")
    with drive(database, tmp_path) as capture:
        oracle = Oracle.beside(database)
        database.sql(
            "BEGIN; INSERT INTO t VALUES (1); SAVEPOINT a; INSERT INTO t VALUES (2); ROLLBACK TO a;"
            "SAVEPOINT b; INSERT INTO t VALUES (3); RELEASE b; INSERT INTO t VALUES (4); COMMIT"
        )
        database.sql("BEGIN; INSERT INTO t VALUES (5); ROLLBACK")
        rows = capture.catch_up()
        same_as_the_oracle(rows, oracle)
    assert [(row["tx_index"], row["payload"][-1:]) for row in rows] == [(0, b"1"), (1, b"3"), (2, b"4")]


def test_ddl_in_the_middle_gives_new_descriptions_from_there(any_database: Database, tmp_path: Path) -> None:
    database = any_database
    database.sql("CREATE TABLE t (id int PRIMARY KEY)")
    with drive(database, tmp_path) as capture:
        oracle = Oracle.beside(database)
        database.sql("INSERT INTO t VALUES (1)")
        database.sql(
            "BEGIN; INSERT INTO t VALUES (2); ALTER TABLE t ADD COLUMN a text; INSERT INTO t VALUES (3, 'x');"
            "ALTER TABLE t RENAME COLUMN a TO b; INSERT INTO t VALUES (4, 'y'); COMMIT"
        )
        rows = capture.catch_up()
        same_as_the_oracle(rows, oracle)
        columns = [[c.name for c in capture.relations[row["relation"] - 1].columns] for row in rows]
        enriched = [relation.enriched for relation in capture.relations]
    assert columns == [["id"], ["id"], ["id", "a"], ["id", "b"]]
    assert [row["tx_index"] for row in rows] == [0, 0, 1, 2]
    assert enriched[-1]
    assert not enriched[-2]  # when it was read, the live catalog was a version further


def test_messages_inside_and_outside_of_transactions(any_database: Database, tmp_path: Path) -> None:
    database = any_database
    database.sql("CREATE TABLE t (id int PRIMARY KEY)")
    with drive(database, tmp_path) as capture:
        oracle = Oracle.beside(database)
        # The commit record follows the record of the message at once: both begin where it ends.
        database.sql(
            "BEGIN; INSERT INTO t VALUES (1); SELECT pg_logical_emit_message(true, 'in', 'a');"
            "SELECT pg_logical_emit_message(false, 'out', 'b'); COMMIT"
        )
        database.sql("BEGIN; INSERT INTO t VALUES (2); SELECT pg_logical_emit_message(false, 'lost?', 'c'); ROLLBACK")
        rows = capture.catch_up()
        same_as_the_oracle(rows, oracle)
    assert [(chr(row["op"]), row["tx_index"]) for row in rows] == [("m", 0), ("c", 0), ("m", 1), ("m", 0)]
    outside, insert, inside, _ = rows
    assert (outside["resume_position"], outside["txid"]) == (outside["commit_position"] + 1, 0)
    assert outside["resume_position"] <= insert["commit_position"]
    assert inside["commit_position"] == insert["commit_position"]
    assert len({(row["commit_position"], row["tx_index"]) for row in rows}) == len(rows)


def test_messages_come_once_wherever_the_connection_is_cut(any_database: Database, tmp_path: Path) -> None:
    database = any_database
    database.sql("CREATE TABLE t (id int PRIMARY KEY)")
    with drive(database, tmp_path) as capture, database.connect(autocommit=False) as long_running:
        oracle = Oracle.beside(database)
        long_running.execute("INSERT INTO t VALUES (0)")
        for number in range(1, 7):
            database.sql(
                f"BEGIN; INSERT INTO t VALUES ({number});"
                f"SELECT pg_logical_emit_message(false, 'out', '{number}'); COMMIT"
            )
            capture.catch_up()
            capture.connect()
        long_running.execute("SELECT pg_logical_emit_message(false, 'out', 'last')")
        long_running.commit()
        rows = capture.catch_up()
        same_as_the_oracle(rows, oracle)
    assert [chr(row["op"]) for row in rows] == ["m", "c"] * 7


def test_messages_can_be_left_out(database: Database, tmp_path: Path) -> None:
    database.sql("CREATE TABLE t (id int PRIMARY KEY)")
    with drive(database, tmp_path, options={"messages": False}) as capture:
        database.sql("BEGIN; SELECT pg_logical_emit_message(true, 'in', 'a'); INSERT INTO t VALUES (1); COMMIT")
        assert [chr(row["op"]) for row in capture.catch_up()] == ["c"]


def test_an_idle_database_makes_progress_by_heartbeats(any_database: Database, tmp_path: Path) -> None:
    database = any_database
    database.sql("CREATE TABLE t (id int PRIMARY KEY)")
    with drive(database, tmp_path, options={"heartbeat_interval": "200ms"}) as capture:
        capture.connect()
        first = capture.end
        seen: list[int] = []
        while len(seen) < 3:
            block = capture.step()
            assert block.rows is None
            if block.progress is not None:
                seen.append(block.progress)
        assert first < seen[0] < seen[1] < seen[2]
        assert capture.end == seen[2]


def test_what_other_databases_write_is_progress(database: Database, tmp_path: Path) -> None:
    database.sql("CREATE TABLE t (id int PRIMARY KEY)")
    with drive(database, tmp_path, options={"heartbeat_interval": "0s"}) as capture:
        capture.connect()
        other = Database(database.server, "postgres")
        ((goal,),) = other.sql("SELECT (pg_current_wal_lsn() - '0/0')::int8")
        other.sql("CREATE TABLE noise AS SELECT 1; DROP TABLE noise")
        while capture.end <= goal:
            assert capture.step().rows is None


def test_a_killed_walsender_under_load_leaves_no_gap_and_no_double(database: Database, tmp_path: Path) -> None:
    database.sql("CREATE TABLE t (id serial PRIMARY KEY, v text)")
    stop = threading.Event()

    def load(worker: int) -> None:
        with database.connect(autocommit=False) as connection:
            number = 0
            while not stop.is_set():
                number += 1
                rows = 2000 if number % 20 == 0 else 1 + number % 7
                connection.execute("INSERT INTO t (v) SELECT repeat('x', n) FROM generate_series(1, %s) n", (rows,))
                connection.execute("SELECT pg_logical_emit_message(%s, 'note', 'm')", (number % 2 == 0,))
                connection.rollback() if number % 5 == 0 else connection.commit()

    # In bulk there would be no walsender to kill.
    with drive(database, tmp_path, options={"catch_up": "streaming"}) as capture:
        oracle = Oracle.beside(database)
        workers = [threading.Thread(target=load, args=(n,)) for n in range(3)]
        for worker in workers:
            worker.start()
        try:
            for _ in range(2):
                capture.connect()
                wanted = count(capture.blocks) + 2000
                while count(capture.blocks) < wanted:
                    capture.step()
                database.sql(
                    "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots "
                    f"WHERE slot_name = '{database.name}'"
                )
                with pytest.raises(SourceUnavailable):
                    read_for_ever(capture)
        finally:
            stop.set()
            for worker in workers:
                worker.join()
        capture.connect()
        rows = capture.catch_up()
        same_as_the_oracle(rows, oracle)
    assert len(rows) > 4000


def test_two_captures_of_one_source_are_refused(database: Database, tmp_path: Path) -> None:
    database.sql("CREATE TABLE t (id int PRIMARY KEY)")
    with drive(database, tmp_path) as capture:
        capture.connect()
        capture.step()
        with pytest.raises(SourceUnavailable, match="another capture holds slot"), drive(database, tmp_path / "b"):
            pass


def test_a_source_that_was_closed_is_free_for_the_next_capture(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slot, "RELEASE_SECONDS", SECONDS)
    database.sql("CREATE TABLE t (id int PRIMARY KEY)")
    reader = f"SELECT count(*) FROM pg_replication_slots WHERE slot_name = '{database.name}' AND active"
    lock = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND database = (SELECT oid FROM pg_database "
    taken = f"SELECT ({reader}), ({lock} WHERE datname = current_database()))"
    with drive(database, tmp_path) as capture, database.connect() as other:
        for number in range(20):
            capture.connect()
            database.sql(f"INSERT INTO t VALUES ({number})")
            capture.catch_up()
            assert other.execute(taken.encode()).fetchone() == (1, 1)
            capture.source.ack(capture.end)
            capture.source.close()
            assert other.execute(taken.encode()).fetchone() == (0, 0)


def test_a_server_that_does_not_answer_holds_up_no_close(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slot, "RELEASE_SECONDS", 0.2)
    database.sql("CREATE TABLE t (id int PRIMARY KEY)")
    with drive(database, tmp_path) as capture:
        capture.catch_up()
        ((holder,),) = database.sql(
            "SELECT pid FROM pg_locks WHERE locktype = 'advisory' "
            "AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
        )
        os.kill(holder, signal.SIGSTOP)
        try:
            closing = threading.Thread(target=capture.source.close)
            closing.start()
            closing.join(SECONDS)
            assert not closing.is_alive()
        finally:
            os.kill(holder, signal.SIGCONT)
        capture.connect()


def test_a_publication_that_is_changed_while_we_read_halts(database: Database, tmp_path: Path) -> None:
    database.sql("CREATE TABLE t (id int PRIMARY KEY); CREATE TABLE u (id int PRIMARY KEY)")
    with drive(database, tmp_path, options={"watch_interval": "100ms"}) as capture:
        database.sql("INSERT INTO t VALUES (1)")
        capture.catch_up()
        database.sql(f"ALTER PUBLICATION {database.name} DROP TABLE t")
        with pytest.raises(SourceHalted, match="changes may be missing"):
            read_for_ever(capture)


def test_the_server_hears_from_us_in_time_whatever_delivery_does(database: Database, tmp_path: Path) -> None:
    database.sql("CREATE TABLE t (id int PRIMARY KEY)")
    database.sql(f"ALTER DATABASE {database.name} SET wal_sender_timeout = '6s'")
    with drive(database, tmp_path, options={"heartbeat_interval": "0s"}) as capture:
        capture.connect()
        until = time.monotonic() + 8.0
        while time.monotonic() < until:  # nothing is ever acknowledged
            capture.step()
        database.sql("INSERT INTO t VALUES (1)")
        assert len(capture.catch_up()) == 1
        heard = f"reply_time > now() - interval '10 s' AND application_name = 'millstream {database.name}'"
        look = f"SELECT count(*) FROM pg_stat_replication WHERE {heard}"
        deadline = time.monotonic() + SECONDS
        while database.sql(look) != [(1,)]:
            assert time.monotonic() < deadline
            capture.step()
