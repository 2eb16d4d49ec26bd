"""Whatever a crash leaves behind: what was committed stays, what was not goes, damage is refused."""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from journal_tools import (
    START,
    Maker,
    Transaction,
    append_in_parts,
    block,
    create,
    numbered,
    read_all,
    seal_everything,
    segment_files,
)

from millstream.errors import JournalCorrupt
from millstream.journal import JournalReader, JournalWriter, verify
from millstream.sources.base import Block
from tests.fixtures.examples import examples

STEP = 1 if os.environ.get("MILLSTREAM_CHAOS_EACH") == "1" else 5
"""A tail is torn at every byte by `make chaos`, else at every fifth."""


def three_commits(path: Path) -> tuple[list[Transaction], list[int]]:
    """A journal of three commits, and the length of its segment after each."""
    written, lengths = Maker().transactions([3, 2, 4]), []
    with create(path) as writer:
        for one in written:
            writer.append(block(one))
            head = writer.commit()
            assert head is not None
            lengths.append(head.segment_length)
    return written, lengths


def without_head(path: Path) -> None:
    """As after a crash of the machine: the head was never written out."""
    (path / "head").unlink()


def test_a_tail_torn_at_any_byte_is_cut(memory_path: Path) -> None:
    written, lengths = three_commits(memory_path / "j")
    maker = Maker(seed=5, position=written[-1].resume)
    [path] = segment_files(memory_path / "j")
    raw = path.read_bytes()
    for size in range(lengths[1], lengths[2], STEP):
        path.write_bytes(raw[:size])
        without_head(memory_path / "j")
        with JournalWriter.open(memory_path / "j") as writer:
            assert (size, writer.head.seq, writer.end) == (size, 5, written[1].resume)
            if (size - lengths[1]) % 95 == 0:
                more = maker.transaction(2)
                writer.append(block(more))
                writer.commit()
                assert read_all(memory_path / "j").equals(numbered([*written[:2], more]))
                assert verify(memory_path / "j") == []


def test_a_tail_of_zeros_is_cut(tmp_path: Path) -> None:
    written, lengths = three_commits(tmp_path / "j")
    [path] = segment_files(tmp_path / "j")
    raw = path.read_bytes()
    for zeros_from in (lengths[1], lengths[1] + 100, lengths[2] - 400):
        path.write_bytes(raw[:zeros_from] + bytes(lengths[2] - zeros_from + 4096))
        without_head(tmp_path / "j")
        with JournalWriter.open(tmp_path / "j") as writer:
            assert writer.end == written[1].resume
    assert read_all(tmp_path / "j").equals(numbered(written[:2]))


def test_a_page_that_never_reached_the_disk_in_the_last_group_is_a_torn_tail(tmp_path: Path) -> None:
    written, lengths = three_commits(tmp_path / "j")
    [path] = segment_files(tmp_path / "j")
    raw = bytearray(path.read_bytes())
    raw[lengths[1] + 200 : lengths[1] + 300] = bytes(100)
    path.write_bytes(raw)
    without_head(tmp_path / "j")
    with JournalWriter.open(tmp_path / "j") as writer:
        assert writer.end == written[1].resume


def test_a_flipped_byte_in_a_group_that_has_a_successor_is_corruption(tmp_path: Path) -> None:
    written, lengths = three_commits(tmp_path / "j")
    [path] = segment_files(tmp_path / "j")
    raw = path.read_bytes()
    without_head(tmp_path / "j")
    for at in range(0, lengths[1], 13):
        path.write_bytes(raw[:at] + bytes([raw[at] ^ 0x10]) + raw[at + 1 :])
        with pytest.raises(JournalCorrupt, match="commit record"):
            JournalWriter.open(tmp_path / "j")
        assert path.stat().st_size == len(raw), "nothing was cut"
    path.write_bytes(raw)
    with JournalWriter.open(tmp_path / "j") as writer:
        assert writer.end == written[2].resume


def test_a_flipped_byte_in_the_last_group_is_corruption_when_the_head_names_it(tmp_path: Path) -> None:
    _, lengths = three_commits(tmp_path / "j")
    [path] = segment_files(tmp_path / "j")
    raw = path.read_bytes()
    for at in range(lengths[1], lengths[2], 13):
        path.write_bytes(raw[:at] + bytes([raw[at] ^ 0x10]) + raw[at + 1 :])
        with pytest.raises(JournalCorrupt, match="was committed"):
            JournalWriter.open(tmp_path / "j")
        assert path.stat().st_size == len(raw), "nothing was cut"
    assert not open_below(tmp_path), "who tries again and again does not run out of files"


def open_below(directory: Path) -> list[str]:
    """The files there that this process has open."""
    found = [entry.readlink() for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
    return [str(path) for path in found if path.is_relative_to(directory)]


def test_bytes_after_a_damaged_group_show_that_it_was_committed(tmp_path: Path) -> None:
    _, lengths = three_commits(tmp_path / "j")
    [path] = segment_files(tmp_path / "j")
    raw = bytearray(path.read_bytes())
    raw[lengths[1] + 200] ^= 1
    path.write_bytes(raw + b"the next group began")
    without_head(tmp_path / "j")
    with pytest.raises(JournalCorrupt, match="commit record"):
        JournalWriter.open(tmp_path / "j")


def test_a_missing_segment_is_corruption(tmp_path: Path) -> None:
    maker = Maker()
    with create(tmp_path / "j", segment_bytes=3000) as writer:
        for one in maker.transactions([20] * 12):
            writer.append(block(one))
            writer.commit()
        seal_everything(writer)
        writer.append(block(maker.transaction(1)))
    closed = segment_files(tmp_path / "j")
    sealed = [path for path in closed if ".sealed" in path.name]
    assert len(sealed) >= 3
    sealed[1].rename(tmp_path / "away")
    with pytest.raises(JournalCorrupt, match=rf"{sealed[1].name} is missing"):
        JournalWriter.open(tmp_path / "j")
    (tmp_path / "away").rename(sealed[1])
    last = closed[-1]
    last.rename(tmp_path / "away")
    with pytest.raises(JournalCorrupt, match="was committed"):
        JournalWriter.open(tmp_path / "j")


@pytest.mark.parametrize("lost", ["head", "00000001.idx", "00000001.cuts", "both", "damaged index", "damaged cuts"])
def test_derived_files_are_made_again(tmp_path: Path, lost: str) -> None:
    written, _ = three_commits(tmp_path / "j")
    segments = tmp_path / "j" / "segments"
    if lost == "head":
        without_head(tmp_path / "j")
    elif lost == "both":
        (segments / "00000001.idx").unlink()
        (segments / "00000001.cuts").unlink()
    elif lost.startswith("damaged"):
        path = segments / ("00000001.idx" if lost.endswith("index") else "00000001.cuts")
        path.write_bytes(bytes(path.stat().st_size))
    else:
        (segments / lost).unlink()
    with JournalWriter.open(tmp_path / "j") as writer:
        assert writer.head.seq == 9
    assert read_all(tmp_path / "j").equals(numbered(written))
    assert verify(tmp_path / "j") == []


def test_the_manifest_is_made_again_from_the_segments(tmp_path: Path) -> None:
    maker = Maker()
    written = maker.transactions([20] * 12)
    with create(tmp_path / "j", segment_bytes=3000) as writer:
        for one in written[:10]:
            writer.append(block(one))
            writer.commit()
        seal_everything(writer)
        for one in written[10:]:
            writer.append(block(one))
            writer.commit()
    (tmp_path / "j" / "manifest.json").write_bytes(b"{}")
    for name in ("00000001.sealed.idx", "00000002.sealed.cuts"):
        (tmp_path / "j" / "segments" / name).unlink()
    with JournalWriter.open(tmp_path / "j") as writer:
        assert writer.head.seq == 240
    assert read_all(tmp_path / "j").equals(numbered(written))
    assert verify(tmp_path / "j") == []


def test_derived_files_of_closed_segments_are_made_again(tmp_path: Path) -> None:
    written = Maker().transactions([20] * 12)
    with create(tmp_path / "j", segment_bytes=3000) as writer:
        for one in written:
            writer.append(block(one))
            writer.commit()
        seal_everything(writer)
    for name in ("00000001.sealed.idx", "00000001.sealed.cuts", "00000003.sealed.cuts"):
        (tmp_path / "j" / "segments" / name).unlink()
    assert {problem.file for problem in verify(tmp_path / "j")} == {
        "segments/00000001.sealed.idx",
        "segments/00000001.sealed.cuts",
        "segments/00000003.sealed.cuts",
    }
    JournalWriter.open(tmp_path / "j").close()
    assert verify(tmp_path / "j") == []
    assert read_all(tmp_path / "j").equals(numbered(written))


def test_a_giant_transaction_without_its_commit_is_cut_with_all_its_segments(tmp_path: Path) -> None:
    maker = Maker()
    small, giant = maker.transaction(5), maker.transaction(400)
    with create(tmp_path / "j", segment_bytes=3000, flush_bytes=600) as writer:
        writer.append(block(small))
        writer.commit()
        for start in range(0, 400, 20):
            writer.append(Block(giant.rows.slice(start, 20), open_transaction=True))
        assert len(segment_files(tmp_path / "j")) > 4
    with JournalWriter.open(tmp_path / "j", segment_bytes=3000, flush_bytes=600) as writer:
        assert (writer.head.seq, writer.end) == (5, small.resume)
        assert len(segment_files(tmp_path / "j")) == 1
        append_in_parts(writer, giant, 20)
        writer.commit()
    assert read_all(tmp_path / "j").equals(numbered([small, giant]))
    assert verify(tmp_path / "j") == []


def test_a_relation_line_that_was_never_finished_is_cut(tmp_path: Path) -> None:
    written, _ = three_commits(tmp_path / "j")
    with (tmp_path / "j" / "relations.jsonl").open("ab") as file:
        file.write(b'{"id":5,"fingerprint":"ab')
    JournalWriter.open(tmp_path / "j").close()
    assert len(JournalReader([str(tmp_path / "j")]).relations()) == 4
    assert read_all(tmp_path / "j").equals(numbered(written))


def test_a_changed_relation_is_corruption(tmp_path: Path) -> None:
    three_commits(tmp_path / "j")
    path = tmp_path / "j" / "relations.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"t2"', b'"tX"'))
    with pytest.raises(JournalCorrupt, match="line 2"):
        JournalReader([str(tmp_path / "j")]).relations()
    with pytest.raises(JournalCorrupt, match="line 2"):
        JournalWriter.open(tmp_path / "j")
    assert not open_below(tmp_path)


step = st.one_of(
    st.tuples(st.just("append"), st.lists(st.integers(1, 12), min_size=1, max_size=4)),
    st.tuples(st.just("giant"), st.integers(20, 60)),
    st.tuples(st.just("progress"), st.integers(1, 50)),
    st.tuples(st.just("commit"), st.none()),
    st.tuples(st.just("maintain"), st.none()),
    st.tuples(st.just("crash"), st.integers(0, 3000)),
)


@settings(max_examples=examples(25), deadline=None, suppress_health_check=list(HealthCheck))
@given(steps=st.lists(step, max_size=25), lost_head=st.booleans(), seed=st.integers(0, 1000))
def test_any_history_with_crashes_keeps_exactly_what_was_committed(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, object]], lost_head: bool, seed: int
) -> None:
    path = tmp_path_factory.mktemp("history") / "j"
    options = {"segment_bytes": 4000, "flush_bytes": 700}
    maker = Maker(seed)
    writer = create(path, **options)
    writer.close()
    writer = JournalWriter.open(path, **options)
    committed: list[Transaction] = []
    waiting: list[Transaction] = []
    covered, progress = START, START
    for what, value in steps:
        if what == "append":
            new = maker.transactions(value)  # type: ignore[arg-type]
            writer.append(block(*new))
            waiting += new
            progress = new[-1].resume
        elif what == "giant":
            one = maker.transaction(value)  # type: ignore[arg-type]
            append_in_parts(writer, one, 7)
            waiting.append(one)
            progress = one.resume
        elif what == "progress":
            maker.position += value  # type: ignore[operator]
            progress = maker.position
            writer.append(Block(progress=progress))
        elif what == "maintain":
            writer.maintain()
        elif what == "commit":
            writer.commit()
            committed, waiting, covered = committed + waiting, [], progress
        else:
            writer = crashed(writer, path, int(value), lost_head, options)  # type: ignore[call-overload]
            waiting, progress = [], covered
            maker.position = covered
        assert writer.end == covered
    writer.close()
    committed += waiting
    assert read_all(path).equals(numbered(committed))
    assert verify(path) == []
    with JournalWriter.open(path, **options) as writer:
        assert writer.end == progress


def crashed(writer: JournalWriter, path: Path, tail: int, lost_head: bool, options: dict[str, int]) -> JournalWriter:
    """Let go of a writer as a crash does, with some of its unwritten bytes on disk, and open another."""
    for batch, open_end in writer._pending.take():
        writer._tail.write(batch, open_end)
    raw = b"".join(bytes(memoryview(part)) for part in writer._tail._parts)
    number = writer._tail._at.number
    writer._closed.close()
    writer._tail.close()
    writer._lock.release()
    with (path / "segments" / f"{number:08d}.arrows").open("ab") as file:
        file.write(raw[:tail])
    if lost_head:
        (path / "head").unlink()
    return JournalWriter.open(path, **options)


def test_the_last_row_of_every_segment_is_readable_as_arrow(tmp_path: Path) -> None:
    written = Maker().transactions([30] * 10)
    with create(tmp_path / "j", segment_bytes=3000) as writer:
        for one in written:
            writer.append(block(one))
            writer.commit()
        seal_everything(writer)
    for path in segment_files(tmp_path / "j"):
        assert pa.ipc.open_stream(str(path)).read_all().num_rows > 0
