"""The options of format("millstream"): what is taken, and what is said about the rest."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest
from pyspark.sql.datasource import CaseInsensitiveDict

from millstream.errors import ConfigError
from millstream.spark.format_options import FormatOptions, SchemaChange


def parse(**options: str) -> FormatOptions:
    return FormatOptions.parse(CaseInsensitiveDict({"journal": "/j", **options}))


def test_every_option_is_read() -> None:
    options = {"table": "public.orders", "endingSeq": "90", "maxEventsPerBatch": "1000", "schemaChange": "FAIL"}
    assert parse(startingSeq="7", **options) == FormatOptions(
        "/j", "public.orders", 7, ending_seq=90, max_events=1000, schema_change=SchemaChange.FAIL
    )


def test_each_start_is_read() -> None:
    noon = round(datetime(2026, 1, 31, 12, tzinfo=UTC).timestamp() * 1_000_000)
    assert parse(startingSeq="earliest") == FormatOptions("/j")
    assert parse(startingPosition="0/16B3748").starting_position == "0/16B3748"
    assert parse(startingTimestamp="2026-01-31T13:00:00+01:00").starting_timestamp_us == noon
    assert parse(startingTimestamp="2026-01-31 12:00:00").starting_timestamp_us == noon, "without an offset it is UTC"


def test_the_journal_may_be_given_to_load_and_is_said_in_full(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert FormatOptions.parse({"path": "a b/journal", "startingSeq": "1"}).journal == str(tmp_path / "a b/journal")
    assert FormatOptions.parse({"path": "s3://bucket/j", "startingSeq": "1"}).journal == "s3://bucket/j"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "where to start is missing: one of startingSeq, startingPosition, startingTimestamp"),
        ({"startingSeq": "1", "startingPosition": "0/1"}, "startingSeq and startingPosition are given: choose one"),
        ({"startingSeq": "0"}, "`startingSeq`: '0' is not a whole number from 1 on, nor `earliest`"),
        ({"startingSeq": "latest"}, "`startingSeq`: 'latest' is not a whole number"),
        ({"startingTimestamp": "yesterday"}, "`startingTimestamp`: 'yesterday' is not a time such as"),
        ({"startingSeq": "1", "endingSeq": "-5"}, "`endingSeq`: '-5' is not a whole number"),
        ({"startingSeq": "1", "endingSeq": "9" * 20}, "`endingSeq`"),
        ({"startingSeq": "1", "maxEventsPerBatch": "1e3"}, "`maxEventsPerBatch`: '1e3'"),
        ({"startingSeq": "1", "schemaChange": "ignore"}, "`schemaChange`: 'ignore' is none of null, fail"),
        ({"startingSeq": "1", "table": " "}, "`table`: is empty"),
        ({"startingSeq": "1", "tabel": "x"}, "unknown option `tabel`: did you mean `table`?"),
        ({"startingSeq": "1", "zzz": "x"}, "unknown option `zzz`: the options are journal, table"),
        ({"startingSeq": "1", "path": "/k"}, "give the journal once"),
        ({"startingSeq": "1", "journal": ""}, "the option `journal` is missing"),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse(**options)
    assert said in refused.value.message


def test_everything_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(ConfigError) as refused:
        parse(startingSeq="x", endingSeq="y", maxEvents="5")
    for option in ("startingSeq", "endingSeq", "`maxevents`: did you mean `maxEventsPerBatch`"):
        assert option in refused.value.message
