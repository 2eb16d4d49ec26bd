"""A journal that is gone, too old, or behind its slot: the run halts before a row is written, and says what to do."""

from __future__ import annotations

import shutil
from pathlib import Path

import pyarrow as pa
import pytest

from millstream.demo.proof import check_log, read_changes
from millstream.journal import JournalReader
from tests.fixtures.postgres import Database
from tests.integration.test_run_refuses import millstream, stream_file

pytestmark = [pytest.mark.postgres, pytest.mark.spark, pytest.mark.timeout(400)]


class Stream:
    """A stream on one table, run by the command again and again."""

    def __init__(self, directory: Path, database: Database) -> None:
        self.directory = directory
        self.database = database
        self.file = stream_file(directory, database.uri)
        self.journal = directory / ".millstream" / "journals" / "shop"

    def deliver(self) -> None:
        done = millstream(self.directory, "run", self.file, "--once", timeout=120)
        assert done.returncode == 0, done.stderr

    def refuse(self) -> str:
        """The run must end with 1 and have written nothing, neither to the journal nor to the target."""
        before = self.state()
        done = millstream(self.directory, "run", self.file, "--once", timeout=120)
        assert done.returncode == 1, done.stderr
        assert self.state() == before
        return done.stderr

    def state(self) -> tuple[object, ...]:
        head = JournalReader([str(self.journal)]).head() if (self.journal / "journal.json").exists() else None
        files = sorted(str(path) for path in (self.directory / "log").rglob("*.parquet"))
        return (head.seq if head else None, head.covered if head else None, files)

    def changes(self) -> pa.Table:
        return pa.concat_tables(read_changes(self.directory / "log" / "public.orders")).sort_by("_ms_seq")


@pytest.fixture
def stream(tmp_path: Path, database: Database) -> Stream:
    database.sql("CREATE TABLE orders (id int PRIMARY KEY, note text)")
    return Stream(tmp_path, database)


def test_an_older_journal_a_lost_journal_and_a_moved_slot(stream: Stream, database: Database) -> None:
    stream.deliver()  # creates slot and journal; there is nothing to deliver yet
    database.sql("INSERT INTO orders SELECT i, 'first' FROM generate_series(1, 100) i")
    stream.deliver()
    copy = stream.directory / "older copy"
    shutil.copytree(stream.journal, copy)
    database.sql("INSERT INTO orders SELECT i, 'second' FROM generate_series(101, 200) i")
    stream.deliver()
    right = stream.directory / "right one"
    stream.journal.rename(right)

    # The older copy would give its next seqs a second time.
    shutil.copytree(copy, stream.journal)
    said = stream.refuse()
    assert "seq 200" in said
    assert "100" in said

    # No journal at all: nothing is made anew behind a cursor's back.
    shutil.rmtree(stream.journal)
    said = stream.refuse()
    assert "millstream journal rebase shop" in said

    # On command a new incarnation begins above every old seq, at the position the targets have.
    planned = millstream(stream.directory, "journal", "rebase", "shop")
    assert planned.returncode == 0
    assert "Nothing was done" in planned.stdout
    assert millstream(stream.directory, "journal", "rebase", "shop", "--confirm").returncode == 0
    database.sql("INSERT INTO orders SELECT i, 'third' FROM generate_series(201, 300) i")
    stream.deliver()
    changes = stream.changes()
    assert changes["id"].to_pylist() == list(range(1, 301))
    assert changes["_ms_seq"].to_pylist()[200] > 200
    assert check_log([changes]).distinct_events == 300

    # A slot that was moved on without us has skipped what nobody has.
    database.sql("INSERT INTO orders VALUES (301, 'lost')")
    database.sql(
        "SELECT pg_replication_slot_advance(slot_name, pg_current_wal_lsn()) FROM pg_replication_slots "
        f"WHERE database = '{database.name}'"
    )
    said = stream.refuse()
    assert "slot" in said


def test_a_flipped_byte_in_the_journal_is_found(stream: Stream, database: Database) -> None:
    stream.deliver()
    database.sql("INSERT INTO orders SELECT i, repeat('x', 200) FROM generate_series(1, 500) i")
    stream.deliver()
    (segment,) = stream.journal.glob("segments/*.arrows")
    data = bytearray(segment.read_bytes())
    data[len(data) // 2] ^= 0x40
    segment.write_bytes(data)
    assert "damaged" in stream.refuse()
    verified = millstream(stream.directory, "journal", "verify")
    assert verified.returncode == 1
    assert segment.name.split(".")[0] in verified.stdout
