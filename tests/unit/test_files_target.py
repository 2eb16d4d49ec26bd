"""What is special to the target `files`: names, commit files, row groups, what the file system says."""

from __future__ import annotations

import errno
import json
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from millstream.changelog import assemble, schema
from millstream.errors import TargetRefused, TargetUnavailable
from millstream.model import BatchLimits, Relation, SeqRange, TargetSpec
from millstream.targets import directory, files, open_target
from millstream.targets.base import Attempt, TargetContext
from millstream.targets.directory import directory_of
from millstream.targets.files import FilesOptions, FilesTarget
from tests.fixtures.journals import shop_table
from tests.fixtures.tuples import OID, insert, journal_rows

ORDERS = shop_table("orders", OID)
CONTEXT = TargetContext("shop", "log", "journal-a", "aaaa", 1, "run-1")


def changes(first: int, count: int) -> pa.RecordBatch:
    rows = journal_rows([insert(str(seq), "x") for seq in range(first, first + count)], first)
    return assemble(rows, ORDERS, 1, "aaaa")


def opened(path: Path, **options: str) -> FilesTarget:
    target = FilesTarget(FilesOptions(path=path, **options))  # type: ignore[arg-type]
    target.open(CONTEXT)
    return target


def publish(target: FilesTarget, first: int, count: int) -> None:
    receipts = target.stager().stage(ORDERS, 1, iter([changes(first, count)]), Attempt(0, first))
    target.publish(SeqRange(first - 1, first + count - 1), first, receipts)


@pytest.mark.parametrize(
    ("schema_name", "name", "directory"),
    [
        ("public", "orders", "public.orders"),
        ("public", "Größe", "public.Größe"),
        ("a.b", "c", "a%2Eb.c"),
        ("a", "b.c", "a.b%2Ec"),
        ("_own", "t", "%5Fown.t"),
        ("s", "a/b c=d", "s.a%2Fb%20c%3Dd"),
        ("s", "..", "s.%2E%2E"),
        ("s", "100%", "s.100%25"),
    ],
)
def test_a_table_has_a_directory_of_its_own(schema_name: str, name: str, directory: str) -> None:
    assert directory_of(Relation(1, schema_name, name, "d", ())) == directory


def test_a_very_long_name_is_cut_and_stays_unique() -> None:
    names = {directory_of(Relation(1, "/" * 63, "/" * 62 + end, "d", ())) for end in "ab"}
    assert len(names) == 2
    assert all(len(name) <= 200 for name in names)


def test_names_sort_in_seq_order(tmp_path: Path) -> None:
    target = opened(tmp_path)
    for first in (1, 9, 10, 11):
        publish(target, first, {1: 8}.get(first, 1))
    names = sorted(path.name for path in (tmp_path / "public.orders").iterdir())
    assert names[0] == "000001-00000000000000000001-00000000000000000008-000001.parquet"
    assert [int(name.split("-")[1]) for name in names] == [1, 9, 10, 11]


def test_a_commit_file_lists_the_batch(tmp_path: Path) -> None:
    publish(opened(tmp_path), 1, 3)
    commit = json.loads((tmp_path / "_millstream/commits/00000000000000000003.json").read_text())
    (file,) = commit.pop("files")
    commit.pop("committed_at")
    assert commit == {
        "stream": "shop",
        "target": "log",
        "journal_id": "journal-a",
        "epoch": 1,
        "start": 0,
        "end": 3,
        "position": 1,
    }
    assert (file["table"], file["rows"], file["first_seq"], file["last_seq"]) == ("public.orders", 3, 1, 3)
    assert file["bytes"] == (tmp_path / file["path"]).stat().st_size


@pytest.mark.parametrize(("compression", "codec"), [("zstd", "ZSTD"), ("snappy", "SNAPPY"), ("none", "UNCOMPRESSED")])
def test_the_compression_is_the_one_asked_for(tmp_path: Path, compression: str, codec: str) -> None:
    publish(opened(tmp_path, compression=compression), 1, 3)
    (path,) = (tmp_path / "public.orders").iterdir()
    assert pq.ParquetFile(path).metadata.row_group(0).column(0).compression == codec


def test_columns_are_compressed_as_every_other_writer_of_parquet_does_it_unless_told(tmp_path: Path) -> None:
    publish(opened(tmp_path), 1, 3)
    (path,) = (tmp_path / "public.orders").iterdir()
    assert pq.ParquetFile(path).metadata.row_group(0).column(0).compression == "SNAPPY"


def test_a_large_part_is_written_in_row_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "GROUP_ROWS", 10)
    target = opened(tmp_path)
    batches = iter([changes(1, 4), changes(5, 4), changes(9, 4), changes(13, 4), changes(17, 4)])
    target.publish(SeqRange(0, 20), 1, target.stager().stage(ORDERS, 1, batches, Attempt(0, 0)))
    (path,) = (tmp_path / "public.orders").iterdir()
    file = pq.ParquetFile(path)
    assert [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)] == [8, 8, 4]
    assert file.read()["_ms_seq"].to_pylist() == list(range(1, 21))
    assert file.schema_arrow.names == schema(ORDERS).names


def test_a_try_that_failed_after_renaming_leaves_no_second_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = opened(tmp_path)
    with monkeypatch.context() as broken:
        broken.setattr(directory, "write_whole", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
        with pytest.raises(TargetUnavailable, match="ENOSPC"):
            publish(target, 1, 4)
    stager = target.stager()
    parts = [
        receipt
        for task, first in enumerate((1, 3))
        for receipt in stager.stage(ORDERS, 1, iter([changes(first, 2)]), Attempt(task, 10 + task))
    ]
    target.publish(SeqRange(0, 4), 1, parts)
    found = [pq.read_table(path)["_ms_seq"].to_pylist() for path in sorted((tmp_path / "public.orders").iterdir())]
    assert found == [[1, 2], [3, 4]]


def test_a_damaged_commit_file_stops_the_target(tmp_path: Path) -> None:
    publish(opened(tmp_path), 1, 3)
    (tmp_path / "_millstream/commits/00000000000000000003.json").write_text("{")
    with pytest.raises(TargetRefused, match="is damaged"):
        opened(tmp_path)


def test_a_path_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("")
    with pytest.raises(TargetRefused, match=r"cannot write .*: EEXIST"):
        opened(tmp_path / "x")


def test_recover_leaves_what_is_not_ours(tmp_path: Path) -> None:
    target = opened(tmp_path)
    (tmp_path / "public.orders").mkdir()
    (tmp_path / "public.orders" / "notes.parquet").write_text("mine")
    (tmp_path / "readme.txt").write_text("mine")
    target.recover(None)
    assert (tmp_path / "public.orders" / "notes.parquet").read_text() == "mine"
    assert (tmp_path / "readme.txt").read_text() == "mine"


def test_unknown_options_are_refused() -> None:
    spec = TargetSpec("log", "files", BatchLimits(1, 1, 1), options={"path": "x", "formt": "parquet"})
    with pytest.raises(ValidationError, match="formt"):
        open_target(spec)


def test_a_directory_without_a_commit_is_taken_over_by_a_state_that_knows_less(tmp_path: Path) -> None:
    target = opened(tmp_path)
    target.open(replace(CONTEXT, epoch=5, run_id="run-5"))
    target.open(replace(CONTEXT, run_id="run-6"))
    publish(target, 1, 3)
    target.open(replace(CONTEXT, epoch=5, run_id="run-7"))
    with pytest.raises(TargetRefused, match="epoch 5 has taken over"):
        target.open(replace(CONTEXT, run_id="run-8"))


def test_a_directory_into_which_nothing_was_published_is_left_to_the_next_without_a_row(tmp_path: Path) -> None:
    """Its stream was killed in the middle of a baseline, and deleted."""
    target = opened(tmp_path)
    (receipt,) = target.stager().stage(ORDERS, 1, iter([changes(1, 3)]), Attempt(0, 1, baseline=True))
    target._put_in_place([receipt])
    target.stager().stage(ORDERS, 1, iter([changes(1, 3)]), Attempt(1, 2, baseline=True))
    target.release("another", "log")
    assert len(list(tmp_path.rglob("*.parquet"))) == 2, "it is not theirs"
    target.release("shop", "log")
    target.release("shop", "log")
    assert list(tmp_path.rglob("*.parquet")) == []
    target.open(replace(CONTEXT, stream="next", journal_id="journal-b", run_id="run-2"))
    publish(target, 1, 3)
