"""Rolling and sealing: the same rows in other files, and few of them."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from journal_tools import (
    Maker,
    append_in_parts,
    block,
    create,
    numbered,
    read_all,
    read_range,
    seal_everything,
    segment_files,
)

from millstream.errors import JournalCorrupt, JournalError
from millstream.journal import JournalReader, JournalWriter, describe, grouping, open_slice, verify
from millstream.journal import sealing as sealing_module
from millstream.model import SeqRange
from tests.fixtures.engines import await_that


def test_a_segment_is_rolled_at_the_first_commit_after_its_size(tmp_path: Path) -> None:
    written = Maker().transactions([10] * 20)
    with create(tmp_path / "j", segment_bytes=3000) as writer:
        for one in written:
            writer.append(block(one))
            writer.commit()
        seal_everything(writer)
        segments = describe(tmp_path / "j").segments
    assert len(segments) > 3
    for one in segments[:-1]:
        assert one.form == "sealed"
        assert one.rows > 0
    assert [one.first_seq for one in segments[1:]] == [one.last_seq + 1 for one in segments[:-1]]
    assert read_all(tmp_path / "j").equals(numbered(written))
    assert verify(tmp_path / "j") == []


def test_sealed_rows_are_the_same_rows_in_runs_of_one_relation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouping, "RUN_ROWS", 40)
    monkeypatch.setattr(grouping, "RUN_BYTES", 3000)
    monkeypatch.setattr(grouping, "GATHER_BYTES", 3000)
    maker = Maker()
    written = maker.transactions([7] * 100)
    with create(tmp_path / "j", segment_bytes=20_000) as writer:
        for one in written:
            writer.append(block(one))
            writer.commit()
        seal_everything(writer)
        opened = pa.ipc.open_stream(str(tmp_path / "j/segments/00000001.arrows")).read_all()
        sealed = pa.ipc.open_stream(str(tmp_path / "j/segments/00000001.sealed.arrows"))
        batches = [batch for batch in sealed if batch.num_rows]
    assert pa.Table.from_batches(batches).sort_by("seq").combine_chunks().equals(opened.combine_chunks())
    relations = [set(batch.column("relation").to_pylist()) for batch in batches]
    assert all(len(one) == 1 for one in relations)
    assert relations == sorted(relations, key=min), "one relation after another"
    for batch in batches:
        assert batch.num_rows <= 40
        assert (np.diff(batch.column("seq").to_numpy()) > 0).all()
    assert verify(tmp_path / "j") == []


def test_a_giant_transaction_spans_segments_and_stays_whole(tmp_path: Path) -> None:
    maker = Maker()
    before, giant, after = maker.transaction(5), maker.transaction(600), maker.transaction(5)
    with create(tmp_path / "j", segment_bytes=4000, flush_bytes=800) as writer:
        writer.append(block(before))
        append_in_parts(writer, giant, 25)
        writer.commit()
        writer.append(block(after))
        writer.commit()
        reader = JournalReader([str(tmp_path / "j")])
        assert len(describe(tmp_path / "j").segments) > 5
        for _ in range(2):
            planned = reader.plan_end(5, max_events=10, max_bytes=100)
            assert planned is not None
            assert (planned.end, planned.rows, planned.full) == (605, 600, True)
            assert planned.position == giant.resume
            assert read_range(reader, SeqRange(5, 605)).equals(numbered([giant], 6))
            assert verify(tmp_path / "j") == []
            seal_everything(writer)
        assert reader.cut_at(605) is not None
        assert reader.cut_at(300) is None
        assert reader.seq_at_position(giant.commit) == 5
        assert reader.seq_at_position(giant.commit + 1) == 605
    assert read_all(tmp_path / "j").equals(numbered([before, giant, after]))


def test_thousands_of_small_commits_make_few_files(tmp_path: Path) -> None:
    written = Maker().singles(3000)
    size = 1 << 20
    with create(tmp_path / "j", segment_bytes=size) as writer:
        most = 0
        for number, one in enumerate(written):
            writer.append(block(one))
            writer.commit()
            writer.maintain()
            if number % 100 == 0:
                forms = [path for path in segment_files(tmp_path / "j") if ".sealed" not in path.name]
                superseded = len(writer._closed._superseded)
                most = max(most, len(forms) - superseded)
        seal_everything(writer)
        written_bytes = sum(path.stat().st_size for path in segment_files(tmp_path / "j"))
        writer.drop_superseded(float("inf"))
        left = segment_files(tmp_path / "j")
    assert most <= 2
    assert len(left) <= written_bytes // size + 1
    assert read_all(tmp_path / "j").equals(numbered(written))


def test_many_openings_do_not_make_many_segments(tmp_path: Path) -> None:
    maker = Maker()
    create(tmp_path / "j").close()
    for _ in range(30):
        with JournalWriter.open(tmp_path / "j") as writer:
            writer.append(block(maker.transaction(1)))
    assert len(segment_files(tmp_path / "j")) == 1


def test_a_slice_of_the_open_form_stays_readable_until_it_is_dropped(tmp_path: Path) -> None:
    written = Maker().transactions([10] * 20)
    with create(tmp_path / "j", segment_bytes=3000) as writer:
        writer.append(block(written[0]))
        writer.commit()
        reader = JournalReader([str(tmp_path / "j")])
        planned = reader.slices(SeqRange(0, 10))
        for one in written[1:]:
            writer.append(block(one))
            writer.commit()
        seal_everything(writer)
        writer.drop_superseded(1.0)
        got = pa.Table.from_batches([open_slice(slice, reader.locations) for slice in planned])
        assert got.sort_by("seq").combine_chunks().equals(numbered(written[:1]))
        writer.drop_superseded(float("inf"))
        with pytest.raises(JournalError, match="planned again"):
            open_slice(planned[0], [str(tmp_path / "j"), str(tmp_path / "j")])
        assert read_all(tmp_path / "j").equals(numbered(written)), "new plans use the sealed form"
        assert verify(tmp_path / "j") == []
    with JournalWriter.open(tmp_path / "j"):
        assert read_all(tmp_path / "j").equals(numbered(written))


def test_a_reader_with_an_old_view_finds_the_sealed_form(tmp_path: Path) -> None:
    written = Maker().transactions([10] * 20)
    with create(tmp_path / "j", segment_bytes=3000) as writer:
        for one in written:
            writer.append(block(one))
            writer.commit()
        reader = JournalReader([str(tmp_path / "j")])
        reader.plan_end(0, max_events=5, max_bytes=1 << 20)
        old = reader._catalog._manifest
        seal_everything(writer)
        writer.drop_superseded(float("inf"))
        # The race: this manifest was read before the sealing, and nothing of it is kept but itself.
        reader._catalog._manifest = type(old)(writer.head.manifest_version, old.entries)
        assert read_range(reader, SeqRange(0, 200)).equals(numbered(written))


def test_the_roll_waits_for_sealing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, original = threading.Event(), sealing_module.seal
    waiting = threading.Event()

    def slow(*arguments: object) -> object:
        waiting.set()
        assert gate.wait(240)
        return original(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(sealing_module, "seal", slow)
    written = Maker().transactions([30] * 6)
    with create(tmp_path / "j", segment_bytes=2000) as writer:
        done = threading.Event()

        def write() -> None:
            for one in written:
                writer.append(block(one))
                writer.commit()
            done.set()

        thread = threading.Thread(target=write)
        thread.start()
        assert waiting.wait(60)
        assert not done.wait(0.2), "a third open segment would be needed"
        await_that(lambda: len(segment_files(tmp_path / "j")) == 2)
        gate.set()
        thread.join(60)
        assert done.is_set()
    assert read_all(tmp_path / "j").equals(numbered(written))


def test_sealing_refuses_damaged_rows(tmp_path: Path) -> None:
    written = Maker().transactions([40, 40])
    with create(tmp_path / "j", segment_bytes=1000) as writer:
        writer.append(block(written[0]))
        writer.commit()
        [path] = segment_files(tmp_path / "j")
        raw = bytearray(path.read_bytes())
        raw[2000] ^= 4
        path.write_bytes(raw)
        with pytest.raises(JournalCorrupt, match="damaged at byte"):
            seal_everything(writer)
        writer._closed._sealer._queue.clear()
    assert not (tmp_path / "j/segments/00000001.sealed.arrows").exists()


def test_a_row_larger_than_a_batch_is_kept_whole(tmp_path: Path) -> None:
    maker = Maker()
    large = maker.transaction(3, payload=1 << 20)
    with create(tmp_path / "j", segment_bytes=1 << 20, flush_bytes=1 << 16) as writer:
        append_in_parts(writer, large, 1)
        writer.commit()
        seal_everything(writer)
    assert read_all(tmp_path / "j").equals(numbered([large]))
    assert verify(tmp_path / "j") == []
