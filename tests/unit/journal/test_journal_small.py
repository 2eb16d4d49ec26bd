"""Segments of tiny commits: sealed they are a tenth of their size, and go together with the next."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from journal_tools import (
    Maker,
    Transaction,
    block,
    create,
    numbered,
    read_all,
    read_range,
    seal_everything,
    segment_files,
)

from millstream.journal import JournalReader, JournalWriter, open_slice, sealing, verify
from millstream.model import Retention, SeqRange

SEGMENT = 20_000


def trickle(writer: JournalWriter, written: list[Transaction]) -> None:
    """One commit a transaction, with what the loop of capture does in between."""
    for one in written:
        writer.append(block(one))
        writer.commit()
        writer.maintain()


def closed(writer: JournalWriter) -> list[tuple[int, int, int]]:
    return [(entry.number, entry.first_seq, entry.last_seq) for entry in writer._closed.entries]


def test_tiny_commits_make_no_more_files_than_their_size_asks_for(tmp_path: Path) -> None:
    written = Maker().singles(1500)
    with create(tmp_path / "j", segment_bytes=SEGMENT) as writer:
        trickle(writer, written)
        seal_everything(writer)
        writer.drop_superseded(float("inf"))
        files = segment_files(tmp_path / "j")
        assert writer._closed.entries[-1].number > 50, "so many were closed"
        assert len(files) <= sum(path.stat().st_size for path in files) / SEGMENT + 2
        assert all(entry.bytes >= SEGMENT for entry in writer._closed.entries[:-1])
        left = {path.name[:8] for path in (tmp_path / "j/segments").iterdir()}
        assert left == {path.name[:8] for path in files}, "nothing is left of those that were taken over"
        assert read_all(tmp_path / "j").equals(numbered(written))
    assert verify(tmp_path / "j") == []


def test_every_place_is_found_in_joined_segments(tmp_path: Path) -> None:
    written = Maker().singles(400)
    with create(tmp_path / "j", segment_bytes=SEGMENT) as writer:
        trickle(writer, written)
        seal_everything(writer)
    reader = JournalReader([str(tmp_path / "j")])
    for seq, one in enumerate(written, start=1):
        cut = reader.cut_at(seq)
        assert cut is not None
        assert cut.resume_position == one.resume
        assert reader.seq_at_position(one.commit) == seq - 1
    sizes = [reader.plan_end(0, max_events=n, max_bytes=1 << 30) for n in (1, 100, 350)]
    assert [planned and planned.end for planned in sizes] == [1, 100, 350]
    assert [planned and planned.bytes for planned in sizes] == sorted(planned.bytes for planned in sizes if planned)


def test_a_slice_of_a_segment_that_was_taken_over_stays_readable_until_it_is_dropped(tmp_path: Path) -> None:
    written = Maker().singles(60)
    with create(tmp_path / "j", segment_bytes=SEGMENT) as writer:
        trickle(writer, written[:25])
        seal_everything(writer)
        first = writer._closed.entries[0]
        reader = JournalReader([str(tmp_path / "j")])
        planned = reader.slices(SeqRange(0, first.last_seq))
        assert {slice.segment for slice in planned} == {first.name}
        trickle(writer, written[25:])
        seal_everything(writer)
        assert writer._closed.entries[0].number > first.number
        assert sum(len(open_slice(slice, reader.locations)) for slice in planned) == first.last_seq
        writer.close()
    with JournalWriter.open(tmp_path / "j", segment_bytes=SEGMENT) as writer:
        assert sum(len(open_slice(slice, reader.locations)) for slice in planned) == first.last_seq
        writer.drop_superseded(float("inf"))
        assert not (tmp_path / f"j/segments/{first.name}.arrows").exists()
        assert read_range(reader, SeqRange(0, 60)).equals(numbered(written))


def test_the_manifest_is_made_again_while_both_are_there(tmp_path: Path) -> None:
    written = Maker().singles(60)
    with create(tmp_path / "j", segment_bytes=SEGMENT) as writer:
        trickle(writer, written)
        seal_everything(writer)
        before = closed(writer)
    (tmp_path / "j/manifest.json").unlink()
    with JournalWriter.open(tmp_path / "j", segment_bytes=SEGMENT) as writer:
        assert closed(writer) == before
        writer.drop_superseded(float("inf"))
    assert read_all(tmp_path / "j").equals(numbered(written))
    assert verify(tmp_path / "j") == []


def test_what_is_being_taken_over_is_not_pruned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = Maker().singles(60)
    gate, original = threading.Event(), sealing.seal
    with create(tmp_path / "j", segment_bytes=SEGMENT) as writer:
        trickle(writer, written[:25])
        seal_everything(writer)

        def slow(*arguments: object) -> object:
            assert gate.wait(60)
            return original(*arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(sealing, "seal", slow)
        for one in written[25:]:
            if writer._closed._sealer.absorbing is not None:
                break
            writer.append(block(one))
            writer.commit()
            writer.maintain()
        count = writer.head.seq
        assert writer._closed._sealer.absorbing == writer._closed.entries[0].number
        assert writer.retain(Retention(bytes=1), None, 1e12, most=100) is None
        gate.set()
        seal_everything(writer)
        assert len(read_all(tmp_path / "j")) == count
        trickle(writer, written[count:])
        seal_everything(writer)
        writer.retain(Retention(bytes=1), None, 1e12, most=100)
    assert verify(tmp_path / "j") == []
