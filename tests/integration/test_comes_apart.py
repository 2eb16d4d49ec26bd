"""A journal that is gone, too old or damaged, a slot that moved: the run halts before a row is written."""

from __future__ import annotations

import shutil
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from typer.testing import CliRunner

from millstream import Home, MillstreamError, Observers, home_status, load_streams, run, verify
from millstream.cli.app import app
from millstream.demo.proof import check_log, read_changes
from millstream.errors import JournalCorrupt, JournalMismatch, SourceHalted
from millstream.journal import JournalReader
from tests.fixtures.postgres import Database
from tests.integration.test_run_refuses import stream_file

pytestmark = [pytest.mark.postgres, pytest.mark.spark, pytest.mark.timeout(300)]


class Stream:
    """A stream on one table, run again and again as `millstream run --once` does it."""

    def __init__(self, directory: Path, database: Database) -> None:
        self.directory = directory
        self.database = database
        self.home = Home(directory / "home")
        self.specs = load_streams([directory / stream_file(directory, database.uri)])
        self.journal = self.home.journal_path("shop")

    def deliver(self) -> None:
        assert run(self.specs, home=self.home, once=True, master=None, observers=Observers()) == 0

    def refuse(self, error: type[MillstreamError]) -> str:
        """The run must fail and have written nothing, neither to the journal nor to the target."""
        before = self.state()
        with pytest.raises(error) as raised:
            self.deliver()
        assert self.state() == before
        (status,) = home_status(self.home).streams
        assert not status.healthy
        assert status.state == "failed"
        return str(raised.value)

    def state(self) -> tuple[object, ...]:
        head = JournalReader([str(self.journal)]).head() if (self.journal / "journal.json").exists() else None
        files = sorted(str(path) for path in (self.directory / "log").rglob("*.parquet"))
        return (head.seq if head else None, head.covered if head else None, files)

    def changes(self) -> pa.Table:
        return pa.concat_tables(read_changes(self.directory / "log" / "public.orders")).sort_by("_ms_seq")

    def rebase(self, *options: str) -> str:
        done = CliRunner().invoke(app, ["journal", "rebase", "shop", "--home", str(self.home.path), *options])
        assert done.exit_code == 0, done.output
        return done.stdout

    def slot(self) -> str:
        ((name,),) = self.database.sql(
            f"SELECT slot_name FROM pg_replication_slots WHERE database = '{self.database.name}'"
        )
        return str(name)


@pytest.fixture
def stream(tmp_path: Path, database: Database, spark: SparkSession) -> Stream:
    database.sql("CREATE TABLE orders (id int PRIMARY KEY, note text)")
    made = Stream(tmp_path, database)
    made.deliver()  # creates slot and journal; there is nothing to deliver yet
    return made


def test_an_older_journal_and_a_lost_journal(stream: Stream, database: Database) -> None:
    database.sql("INSERT INTO orders SELECT i, 'first' FROM generate_series(1, 100) i")
    stream.deliver()
    copy = stream.directory / "older copy"
    shutil.copytree(stream.journal, copy)
    database.sql("INSERT INTO orders SELECT i, 'second' FROM generate_series(101, 200) i")
    stream.deliver()

    # The older copy would give its next seqs a second time.
    shutil.rmtree(stream.journal)
    shutil.copytree(copy, stream.journal)
    said = stream.refuse(JournalMismatch)
    assert "is at seq 200, the journal ends at 100" in said

    # No journal at all: nothing is made anew behind a cursor's back.
    shutil.rmtree(stream.journal)
    assert "millstream journal rebase shop" in stream.refuse(JournalMismatch)

    # On command a new incarnation begins above every old seq, at the position the targets have.
    assert "Nothing was done" in stream.rebase()
    stream.refuse(JournalMismatch)
    stream.rebase("--confirm")
    database.sql("INSERT INTO orders SELECT i, 'third' FROM generate_series(201, 300) i")
    stream.deliver()
    changes = stream.changes()
    assert changes["id"].to_pylist() == list(range(1, 301))
    assert changes["_ms_seq"].to_pylist()[200] > 200
    assert check_log([changes]).distinct_events == 300
    stream.deliver()
    assert stream.changes().num_rows == 300


def test_a_slot_that_was_moved_or_dropped(stream: Stream, database: Database) -> None:
    slot = stream.slot()
    database.sql("INSERT INTO orders VALUES (1, 'lost')")
    database.sql(f"SELECT pg_replication_slot_advance('{slot}', pg_current_wal_lsn())")
    assert slot in stream.refuse(SourceHalted)
    database.sql(f"SELECT pg_drop_replication_slot('{slot}')")
    assert slot in stream.refuse(SourceHalted)


def test_a_flipped_byte_in_the_journal_is_found(stream: Stream, database: Database) -> None:
    database.sql("INSERT INTO orders SELECT i, repeat('x', 200) FROM generate_series(1, 500) i")
    stream.deliver()
    (segment,) = stream.journal.glob("segments/*.arrows")
    data = bytearray(segment.read_bytes())
    data[len(data) // 2] ^= 0x40
    segment.write_bytes(data)
    assert segment.name in stream.refuse(JournalCorrupt)
    assert any(segment.name in str(problem) for problem in verify(stream.journal))
