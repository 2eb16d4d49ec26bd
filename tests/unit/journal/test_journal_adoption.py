"""A segment that was written in long runs is sealed without being written again."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from journal_tools import Maker, Transaction, block, create, numbered, read_all, read_range, seal_everything

from millstream.journal import JournalReader, JournalWriter, open_slice, verify
from millstream.journal.grouping import LONG_ROWS
from millstream.model import SeqRange

SEGMENT = 64 << 10


def write(path: Path, sizes: list[int]) -> tuple[JournalWriter, list[Transaction]]:
    """A commit for each of these numbers of rows; sealing is left for later."""
    writer = create(path, segment_bytes=SEGMENT)
    written = Maker(payload=8).transactions(sizes)
    for one in written:
        writer.append(block(one))
        writer.commit()
    return writer, written


def test_many_rows_at_once_are_sealed_by_a_second_name(tmp_path: Path) -> None:
    writer, written = write(tmp_path / "j", [6000, 6000, 3])
    seal_everything(writer)
    segments = tmp_path / "j" / "segments"
    opened, sealed = (segments / f"00000001{form}.arrows" for form in ("", ".sealed"))
    assert opened.stat().st_ino == sealed.stat().st_ino
    before = read_all(tmp_path / "j")
    assert before.equals(numbered(written))
    writer.drop_superseded(float("inf"))
    writer.close()
    assert sealed.exists()
    assert not opened.exists()
    assert read_all(tmp_path / "j").equals(before)
    assert verify(tmp_path / "j") == []


def test_every_transaction_end_is_found_in_it(tmp_path: Path) -> None:
    writer = create(tmp_path / "j", segment_bytes=SEGMENT)
    singles = Maker(payload=8).singles(8000)
    writer.append(block(*singles))
    writer.commit()
    seal_everything(writer)
    writer.close()
    reader = JournalReader([str(tmp_path / "j")])
    for seq in (1, 17, 4099, 8000):
        cut = reader.cut_at(seq)
        assert cut is not None
        assert (cut.commit_position, cut.resume_position) == (singles[seq - 1].commit, singles[seq - 1].resume)


def test_a_task_reads_only_its_own_relation_before_sealing_too(tmp_path: Path) -> None:
    writer, written = write(tmp_path / "j", [6000])
    reader = JournalReader([str(tmp_path / "j")])
    whole = SeqRange(0, 6000)
    slices = reader.slices(whole)
    assert len({piece.offset for piece in slices}) == len(slices), "no two relations share their bytes"
    half = SeqRange(1000, 3500)
    assert read_range(reader, half).equals(numbered(written).slice(1000, 2500).combine_chunks())
    seal_everything(writer)
    writer.drop_superseded(0.0)
    for piece in slices:
        assert open_slice(piece, reader.locations, whole).num_rows == piece.rows, "what was planned stays readable"
    writer.close()


def test_a_lost_manifest_is_made_again_from_it(tmp_path: Path) -> None:
    writer, written = write(tmp_path / "j", [6000, 6000, 5])
    seal_everything(writer)
    writer.drop_superseded(float("inf"))
    writer.close()
    (tmp_path / "j" / "manifest.json").unlink()
    for derived in (tmp_path / "j" / "segments").glob("*.sealed.idx"):
        derived.unlink()
    JournalWriter.open(tmp_path / "j", segment_bytes=SEGMENT).close()
    assert read_all(tmp_path / "j").equals(numbered(written))
    assert verify(tmp_path / "j") == []


def test_a_changed_byte_in_it_is_found(tmp_path: Path) -> None:
    writer, _ = write(tmp_path / "j", [6000, 6000])
    seal_everything(writer)
    writer.drop_superseded(float("inf"))
    writer.close()
    file = tmp_path / "j" / "segments" / "00000001.sealed.arrows"
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 1
    file.write_bytes(raw)
    assert [problem.file for problem in verify(tmp_path / "j")][:1] == ["segments/00000001.sealed.arrows"]


def test_short_runs_are_written_again_in_long_ones(tmp_path: Path) -> None:
    writer, written = write(tmp_path / "j", [LONG_ROWS // 4] * 12)
    seal_everything(writer)
    segments = tmp_path / "j" / "segments"
    opened, sealed = (segments / f"00000001{form}.arrows" for form in ("", ".sealed"))
    assert opened.stat().st_ino != sealed.stat().st_ino
    assert read_all(tmp_path / "j").equals(numbered(written))
    writer.close()


def test_where_a_file_has_one_name_only_it_is_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_names: object) -> None:
        raise OSError(errno.EPERM, "no second name here")

    monkeypatch.setattr(os, "link", refuse)
    writer, written = write(tmp_path / "j", [6000, 6000])
    seal_everything(writer)
    writer.drop_superseded(float("inf"))
    writer.close()
    assert (tmp_path / "j" / "segments" / "00000001.sealed.arrows").exists()
    assert read_all(tmp_path / "j").equals(numbered(written))
    assert verify(tmp_path / "j") == []
