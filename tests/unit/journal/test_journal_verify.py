"""`verify` finds whatever is wrong, and nothing where nothing is."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import pytest
from journal_tools import Maker, append_in_parts, block, create, seal_everything, segment_files

from millstream.errors import JournalMismatch
from millstream.journal import JournalReader, JournalWriter, check_cursor, verify
from millstream.journal.manifest import Manifest
from millstream.model import Cursor


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    """Sealed segments, a giant transaction over several, and an open one."""
    maker = Maker()
    with create(tmp_path / "j", segment_bytes=5000, flush_bytes=900) as writer:
        for one in maker.transactions([20] * 8):
            writer.append(block(one))
            writer.commit()
        append_in_parts(writer, maker.transaction(300), 25)
        writer.commit()
        seal_everything(writer)
        writer.append(block(*maker.transactions([3, 4])))
        writer.commit()
    assert verify(tmp_path / "j") == []
    return tmp_path / "j"


def test_a_flipped_byte_anywhere_in_a_segment_is_found(journal: Path) -> None:
    for path in segment_files(journal):
        raw = path.read_bytes()
        for at in range(3, len(raw), max(1, len(raw) // 6)):
            path.write_bytes(raw[:at] + bytes([raw[at] ^ 8]) + raw[at + 1 :])
            assert path.name in {Path(problem.file).name for problem in verify(journal)}, (path.name, at)
        path.write_bytes(raw)
    assert verify(journal) == []


def test_a_flipped_byte_in_any_other_file_is_found(journal: Path) -> None:
    others = [path for path in journal.rglob("*") if path.is_file() and path.suffix != ".arrows"]
    sealed = {path.name[:8] for path in segment_files(journal) if ".sealed" in path.name}
    superseded = {f"{name}.{ending}" for name in sealed for ending in ("idx", "cuts")}
    for path in others:
        if path.name in {"writer.lock", "epoch", *superseded} or not path.stat().st_size:
            continue
        raw = path.read_bytes()
        at = len(raw) // 3
        path.write_bytes(raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :])
        assert verify(journal), path.name
        path.write_bytes(raw)


def test_a_missing_file_is_found(journal: Path) -> None:
    superseded = {path.name[:8] for path in segment_files(journal) if ".sealed" in path.name}
    for path in [path for path in journal.rglob("*") if path.is_file()]:
        # Journals of earlier versions have no schemas.jsonl; the writer makes it from the rows.
        if path.name in {"writer.lock", "epoch", "schemas.jsonl"}:
            continue
        if path.name[:8] in superseded and ".sealed" not in path.name:
            continue
        raw = path.read_bytes()
        path.unlink()
        problems = verify(journal)
        assert any(Path(problem.file).name == path.name for problem in problems), path.name
        path.write_bytes(raw)
    assert verify(journal) == []


def test_a_gap_is_found_even_when_everything_else_agrees(journal: Path) -> None:
    manifest = Manifest.from_bytes((journal / "manifest.json").read_bytes())
    without = Manifest(manifest.version, tuple(entry for entry in manifest.entries if entry.number != 2))
    (journal / "manifest.json").write_bytes(without.to_bytes())
    [first, *_] = verify(journal)
    assert "a gap" in first.message
    assert first.file == "segments/00000003.sealed.arrows"


def test_a_head_that_says_too_much_is_found(journal: Path) -> None:
    raw = (journal / "head").read_bytes().rstrip(b"\n")
    body = json.dumps({**json.loads(raw[9:]), "seq": 10_000}, separators=(",", ":")).encode()
    (journal / "head").write_bytes(b"%08x %s" % (zlib.crc32(body), body))
    assert {problem.file for problem in verify(journal)} >= {"head"}


def test_what_is_no_journal_is_said(tmp_path: Path) -> None:
    assert [str(problem) for problem in verify(tmp_path)] == ["journal.json: is missing: this is no journal"]


def test_progress_counts_every_byte(journal: Path) -> None:
    seen: list[tuple[int, int]] = []
    verify(journal, lambda done, of: seen.append((done, of)))
    assert seen[-1][0] == seen[-1][1] > 0


def cursor(journal: Path, seq: int, position: int, journal_id: str | None = None) -> Cursor:
    return Cursor("shop", "lake", journal_id or JournalReader([str(journal)]).header().journal_id, 1, seq, position)


def test_a_cursor_belongs_to_its_journal(journal: Path) -> None:
    reader = JournalReader([str(journal)])
    for seq in (20, 160, 460, 463, 467):
        cut = reader.cut_at(seq)
        assert cut is not None
        check_cursor(reader, cursor(journal, seq, cut.resume_position))
        with pytest.raises(JournalMismatch, match=f"position {cut.resume_position} there"):
            check_cursor(reader, cursor(journal, seq, cut.resume_position + 1))
    start = reader.header().start_position
    check_cursor(reader, cursor(journal, 0, start))
    with pytest.raises(JournalMismatch, match="before the first row"):
        check_cursor(reader, cursor(journal, 0, start + 1))
    with pytest.raises(JournalMismatch, match="middle of a transaction"):
        check_cursor(reader, cursor(journal, 25, 5))
    with pytest.raises(JournalMismatch, match="ends at 467"):
        check_cursor(reader, cursor(journal, 468, 5))
    with pytest.raises(JournalMismatch, match="names journal other") as caught:
        check_cursor(reader, cursor(journal, 20, 5, "other"))
    assert caught.value.hint is not None
    with JournalWriter.open(journal) as writer, pytest.raises(JournalMismatch, match="ends at 467"):
        check_cursor(writer, cursor(journal, 468, 5))
