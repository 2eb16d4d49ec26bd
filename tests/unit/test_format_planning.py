"""What a DataFrame of changes reads: start and end, columns, tasks, the offsets of a stream. Without Spark."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.datasource import DataSourceReader
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows

from millstream.errors import ConfigError, JournalError, JournalMismatch, MillstreamError, OutOfRange, SchemaChanged
from millstream.journal import JournalReader
from millstream.spark import format_readers
from millstream.spark.format import ChangesSource
from millstream.spark.format_readers import ChangesStreamReader
from pyspark_millstream import DefaultSource
from tests.fixtures.journals import Journal, shop_table
from tests.fixtures.tuples import delete, insert, relation, update

Offset = dict[str, Any]

T = "public.t"
FIRST = relation(("id", 23), ("n", 23), key=["id"], identity="f")
ADDED = relation(("id", 23), ("n", 23), ("note", 25), key=["id"], identity="f")
RETYPED = relation(("id", 23), ("n", 25), key=["id"], identity="f")


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    """Two tables; `public.t` has the odd seqs from 11 on, `public.other` the even ones."""
    made = Journal.create(tmp_path / "a journal", first_seq=11)
    made.register(shop_table("other", 2))
    return made


def fill(journal: Journal, count: int = 3, table: Any = FIRST, extra: tuple[str, ...] = ()) -> None:
    for i in range(count):
        journal.append(table, [insert(str(i), str(i * 10), *extra)])
        journal.transaction([("public.other", i, "x")])


def source(journal: Journal, **options: object) -> ChangesSource:
    given = {"journal": str(journal.path), **{name: str(value) for name, value in options.items()}}
    if not any(name.startswith("starting") for name in given):
        given["startingSeq"] = "earliest"
    # As Spark does: what plans and what reads is never what was made.
    return pickle.loads(pickle.dumps(DefaultSource(given)))  # noqa: S301


def frame(journal: Journal, **options: object) -> tuple[ChangesSource, DataSourceReader]:
    made = source(journal, **options)
    schema = made.schema()
    made = pickle.loads(pickle.dumps(made))  # noqa: S301
    return made, made.reader(schema)


def rows_of(reader: Any, partitions: list[Any]) -> list[dict[str, Any]]:
    reader = pickle.loads(pickle.dumps(reader))  # noqa: S301
    found = [row for one in partitions for batch in reader.read(one) for row in batch.to_pylist()]
    return sorted(found, key=lambda row: int(row["_ms_seq"]))


def batch(journal: Journal, **options: object) -> list[dict[str, Any]]:
    _, reader = frame(journal, **options)
    return rows_of(reader, list(reader.partitions()))


def seqs(journal: Journal, **options: object) -> list[int]:
    return [row["_ms_seq"] for row in batch(journal, **options)]


# Where it starts and ends


def test_a_start_and_an_end_are_part_of_what_is_read(journal: Journal) -> None:
    fill(journal)
    assert seqs(journal) == [11, 12, 13, 14, 15, 16]
    assert seqs(journal, table=T) == [11, 13, 15]
    assert seqs(journal, table=T, startingSeq=12, endingSeq=15) == [13, 15]
    assert seqs(journal, table=T, startingSeq=17) == [], "the next change is a place to start"


def test_a_start_by_position_or_time_is_the_first_transaction_from_there_on(journal: Journal) -> None:
    fill(journal)
    third = batch(journal)[2]
    assert seqs(journal, startingPosition=third["_ms_position"]) == [13, 14, 15, 16]
    assert seqs(journal, startingTimestamp=third["_ms_commit_ts"].isoformat()) == [13, 14, 15, 16]


def test_one_dataframe_always_means_the_same_changes(journal: Journal) -> None:
    fill(journal)
    _, reader = frame(journal, table=T)
    fill(journal)
    assert [row["_ms_seq"] for row in rows_of(reader, list(reader.partitions()))] == [11, 13, 15]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"startingSeq": 10}, "startingSeq 10 is not in the journal: it begins at seq 11"),
        ({"startingSeq": 18}, "startingSeq 18 is beyond the journal's end, seq 16"),
        ({"endingSeq": 17}, "endingSeq 17 is beyond the journal's end, seq 16"),
        ({"startingSeq": 14, "endingSeq": 12}, "endingSeq 12 is before the start, which is seq 14"),
        (
            {"startingPosition": "0/1"},
            "position 00000000/00000001 is before the beginning of the journal, 00000000/000003E8",
        ),
        ({"startingPosition": "FF/0"}, "position 000000FF/00000000 is beyond what the journal covers"),
        ({"startingPosition": "seven"}, "`startingPosition`: 'seven' is not a log position such as 0/16B3748"),
        (
            {"startingTimestamp": "1969-01-01"},
            "1969-01-01T00:00:00+00:00 is before the beginning of the journal",
        ),
    ],
)
def test_what_the_journal_does_not_have_is_said_with_what_it_has(
    journal: Journal, options: dict[str, object], said: str
) -> None:
    fill(journal)
    with pytest.raises((OutOfRange, ConfigError)) as refused:
        seqs(journal, table=T, **options)
    assert said in refused.value.message


def test_a_journal_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="there is no journal at"):
        DefaultSource({"journal": str(tmp_path / "nowhere"), "startingSeq": "1"}).schema()


def test_it_cannot_be_written_to(journal: Journal) -> None:
    made = DefaultSource({"path": str(journal.path)})
    with pytest.raises(ConfigError, match="only reads"):
        made.writer(from_arrow_schema(pa.schema([("id", pa.int32())])), False)


def test_an_unknown_table_is_named_with_the_nearest_one(journal: Journal) -> None:
    fill(journal)
    for asked, near in [("public.othre", "public.other"), ("other", "public.other")]:
        with pytest.raises(ConfigError, match=f"no changes of {asked} yet: did you mean `{near}`"):
            source(journal, table=asked).schema()


# Which columns


def test_the_columns_are_those_of_the_last_change_though_its_description_is_an_old_one(journal: Journal) -> None:
    fill(journal, 1, FIRST)
    fill(journal, 1, ADDED, extra=("x",))
    assert [row["note"] for row in batch(journal, table=T)] == [None, "x"]
    fill(journal, 1, FIRST)
    assert source(journal, table=T).schema().names[:3] == ["id", "n", "_ms_op"]
    assert source(journal, table=T, endingSeq=14).schema().names[:3] == ["id", "n", "note"]
    assert source(journal, table=T, endingSeq=12).schema().names[:3] == ["id", "n", "_ms_op"]


def test_a_change_of_columns_fails_on_demand_with_the_first_of_them(journal: Journal) -> None:
    fill(journal, 2, ADDED, extra=("x",))
    fill(journal, 2, FIRST)
    _, reader = frame(journal, table=T, startingSeq=12, schemaChange="fail")
    with pytest.raises(SchemaChanged) as refused:
        reader.partitions()
    assert refused.value.message == (
        "seq 13 of public.t has other columns than the DataFrame: note is not in the DataFrame"
    )
    assert seqs(journal, table=T, startingSeq=14, schemaChange="fail") == [15, 17]


def test_a_type_that_cannot_be_carried_over_fails_in_any_case(journal: Journal) -> None:
    fill(journal, 2, FIRST)
    assert [row["n"] for row in batch(journal, table=T)] == [0, 10]
    _, reader = frame(journal, table=T)
    stream = source(journal, table=T).streamReader(source(journal, table=T).schema())
    fill(journal, 1, RETYPED)
    assert [row["n"] for row in batch(journal, table=T)] == ["0", "10", "0"], "an integer has an exact text"
    start = stream.initialOffset()
    with pytest.raises(SchemaChanged, match=r"seq 15 of public.t .*: n is string there and int in the DataFrame"):
        stream.partitions(start, stream.latestOffset(start, ReadAllAvailable()))
    assert len(rows_of(reader, list(reader.partitions()))) == 2, "what was before is as it was"


def test_a_schema_of_the_user_s_own_is_what_is_read(journal: Journal) -> None:
    fill(journal, 2)
    chosen = from_arrow_schema(pa.schema([("_ms_seq", pa.int64()), ("n", pa.int64()), ("later", pa.string())]))
    reader = source(journal, table=T).reader(chosen)
    assert rows_of(reader, list(reader.partitions())) == [
        {"_ms_seq": 11, "n": 0, "later": None},
        {"_ms_seq": 13, "n": 10, "later": None},
    ]
    empty = source(journal, table="public.not_yet").reader(chosen)
    assert empty.partitions() == [], "with a schema one can begin before the table's first change"


def test_old_rows_and_unchanged_values_are_there(journal: Journal) -> None:
    journal.append(ADDED, [update(["1", "2", ...], row=["1", "1", "long"]), delete(row=["1", "2", "long"])])
    changed, gone = batch(journal, table=T)
    assert changed["_ms_before"] == {"id": 1, "n": 1, "note": "long"}
    assert (changed["_ms_unchanged"], changed["note"], changed["_ms_schema"]) == (["note"], None, 2)
    assert (gone["_ms_op"], gone["_ms_deleted"], gone["_ms_before"]["n"]) == ("d", True, 2)


def test_all_tables_are_in_one_envelope(journal: Journal) -> None:
    fill(journal, 1)
    own, other = batch(journal)
    assert (own["table"], json.loads(own["key"]), json.loads(own["after"])) == (T, {"id": 0}, {"id": 0, "n": 0})
    assert (other["table"], json.loads(other["after"])) == ("public.other", {"id": 0, "body": "x"})


# How it is shared out


def test_a_large_range_is_read_by_many_tasks(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    from millstream.spark import partition

    monkeypatch.setattr(partition, "TASK_BYTES", 2000)
    journal.writer.close()
    journal.writer = type(journal.writer).open(journal.path, segment_bytes=3000)
    fill(journal, 40)
    _, reader = frame(journal, table=T)
    tasks = list(reader.partitions())
    assert len(tasks) > 3
    assert [row["id"] for row in rows_of(reader, tasks)] == list(range(40))


def test_slices_whose_file_is_gone_are_found_again(journal: Journal) -> None:
    fill(journal, 10)
    _, reader = frame(journal, table=T, startingSeq=14, endingSeq=27)
    tasks = list(reader.partitions())
    before = rows_of(reader, tasks)
    journal.writer.close()
    journal.writer = type(journal.writer).open(journal.path, segment_bytes=2000)
    fill(journal, 1)
    while journal.writer._closed.backlog:
        journal.writer.maintain()
    journal.writer.drop_superseded(time.time() + 1)
    (piece,) = tasks[0].slices
    assert not (journal.path / "segments" / f"{piece.segment}.arrows").exists()
    assert rows_of(reader, tasks) == before
    assert [row["_ms_seq"] for row in before] == [15, 17, 19, 21, 23, 25, 27]


# Streams


def stream_of(journal: Journal, **options: object) -> ChangesStreamReader:
    made = source(journal, **options)
    reader = made.streamReader(made.schema())
    assert isinstance(reader, ChangesStreamReader)
    return reader


def run_once(reader: ChangesStreamReader, start: Offset, limit: ReadLimit | None = None) -> tuple[Offset, list[int]]:
    end = reader.latestOffset(start, limit or reader.getDefaultReadLimit())
    again = json.loads(json.dumps(end))
    return again, [row["_ms_seq"] for row in rows_of(reader, reader.partitions(start, again))]


def test_batches_follow_each_other_and_never_split_a_transaction(journal: Journal) -> None:
    for _ in range(3):
        journal.append(FIRST, [insert(str(i), "0") for i in range(3)])
    reader = stream_of(journal, table=T, maxEventsPerBatch=4)
    assert reader.getDefaultReadLimit() == ReadMaxRows(4)
    first, some = run_once(reader, reader.initialOffset())
    second, more = run_once(reader, first)
    assert (some, more) == ([11, 12, 13], [14, 15, 16])
    third, rest = run_once(reader, second, ReadAllAvailable())
    assert rest == [17, 18, 19]
    assert reader.latestOffset(third, ReadAllAvailable()) == third


def test_an_idle_stream_waits_instead_of_being_asked_all_the_time(journal: Journal) -> None:
    fill(journal, 1)
    reader = stream_of(journal, table=T)
    end, _ = run_once(reader, reader.initialOffset())
    began = time.monotonic()
    assert reader.latestOffset(end, ReadAllAvailable()) == end
    assert time.monotonic() - began >= format_readers.LONGEST_POLL


def test_changes_of_other_tables_make_no_batch_but_move_the_stream_on_in_time(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(journal, 1)
    reader = stream_of(journal, table=T)
    end, found = run_once(reader, reader.initialOffset())
    assert found == [11]
    journal.transaction([("public.other", 7, "x")])
    assert reader.latestOffset(end, ReadAllAvailable()) == end
    monkeypatch.setattr(format_readers, "HOLD_SECONDS", 0.0)
    moved, nothing = run_once(reader, end)
    assert (moved["seq"], nothing) == (13, [])


def test_available_now_ends_where_the_journal_ended(journal: Journal) -> None:
    fill(journal, 2)
    reader = stream_of(journal, table=T)
    reader.prepareForTriggerAvailableNow()
    fill(journal, 2)
    end, found = run_once(reader, reader.initialOffset())
    assert (end["seq"], found) == (14, [11, 13])
    assert reader.latestOffset(end, ReadAllAvailable()) == end


def test_a_stream_ends_at_its_ending_seq(journal: Journal) -> None:
    fill(journal, 3)
    reader = stream_of(journal, table=T, endingSeq=13)
    end, found = run_once(reader, reader.initialOffset())
    assert (end["seq"], found) == (13, [11, 13])


def test_the_first_batch_starts_where_it_did_when_it_comes_again(journal: Journal) -> None:
    fill(journal, 3)
    old = stream_of(journal, table=T, startingSeq=13)
    end, found = run_once(old, old.initialOffset())
    assert found == [13, 15]
    # After a crash Spark asks a new reader for the start; by now "earliest" (or a time) means another place.
    new = stream_of(journal, table=T, startingSeq=15)
    assert [row["_ms_seq"] for row in rows_of(new, new.partitions(new.initialOffset(), end))] == [13, 15]


def test_who_goes_on_from_a_checkpoint_need_not_have_its_start_any_more(journal: Journal) -> None:
    fill(journal, 2)
    reader = stream_of(journal, table=T, startingSeq=1)
    with pytest.raises(OutOfRange, match="startingSeq 1 is not in the journal: it begins at seq 11"):
        reader.initialOffset()
    journal_id = JournalReader(journal.locations).header().journal_id
    _, found = run_once(reader, {"journal": journal_id, "start": 0, "seq": 12})
    assert found == [13]
    with pytest.raises(OutOfRange, match="seq 6 is not in the journal: it begins at seq 11"):
        run_once(reader, {"journal": journal_id, "start": 0, "seq": 5})


def test_a_checkpoint_of_another_journal_or_from_its_future_is_refused(journal: Journal) -> None:
    fill(journal, 1)
    reader = stream_of(journal, table=T)
    start = reader.initialOffset()
    refused: list[tuple[Offset, str]] = [
        ({**start, "journal": "another"}, "the checkpoint belongs to journal another"),
        ({"seq": 3}, "the checkpoint belongs to journal None"),
        ({**start, "seq": 99}, "the checkpoint is at seq 99, but the journal ends at 12"),
    ]
    for offset, said in refused:
        with pytest.raises(JournalMismatch, match=said):
            reader.latestOffset(offset, ReadAllAvailable())


def test_an_error_crosses_processes(journal: Journal) -> None:
    made = pickle.loads(pickle.dumps(DefaultSource({"journal": str(journal.path)})))  # noqa: S301
    with pytest.raises(MillstreamError, match="where to start is missing"):
        made.schema()


def test_planning_does_without_pandas(journal: Journal) -> None:
    """pyarrow imports it at the first `pa.array`, for half a second in each of Spark's planning processes."""
    fill(journal)
    program = f"""
import sys
from pyspark_millstream import DefaultSource
assert "pyarrow" not in sys.modules, "Spark imports the format to learn its name, whatever it is asked for"
source = DefaultSource({{"journal": {str(journal.path)!r}, "table": "{T}", "startingSeq": "earliest"}})
stream = source.streamReader(source.schema())
stream.partitions(stream.initialOffset(), stream.latestOffset(stream.initialOffset(), stream.getDefaultReadLimit()))
assert len(source.reader(source.schema()).partitions()) == 1
assert "pandas" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
