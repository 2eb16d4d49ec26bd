"""A journal that forgets: what goes, what stays, and what readers are told."""

from __future__ import annotations

from pathlib import Path

import pytest
from journal_tools import (
    Maker,
    Transaction,
    append_in_parts,
    block,
    create,
    ends,
    numbered,
    read_all,
    read_range,
    seal_everything,
    segment_files,
)

from millstream.errors import JournalCorrupt, JournalMismatch, OutOfRange
from millstream.journal import JournalReader, JournalWriter, Pruned, check_cursor, describe, open_slice, verify
from millstream.journal.manifest import Entry
from millstream.journal.retention import PruneRequest, due, size_of
from millstream.model import Cursor, Retention, SeqRange

NOW = 1_800_000_000.0
EVERYTHING = Retention(bytes=1)


def filled(path: Path, sizes: list[int] | None = None) -> tuple[list[Transaction], JournalWriter]:
    """A journal of several sealed segments, and its writer."""
    written = Maker().transactions(sizes or [20] * 15)
    writer = create(path, segment_bytes=3000)
    for one in written:
        writer.append(block(one))
        writer.commit()
    seal_everything(writer)
    return written, writer


def boundaries(writer: JournalWriter) -> list[int]:
    return [entry.last_seq for entry in writer._closed.entries]


def test_the_oldest_go_and_the_rest_stays_as_it_was(tmp_path: Path) -> None:
    written, writer = filled(tmp_path / "j")
    second = boundaries(writer)[1]
    pruned = writer.retain(EVERYTHING, second, NOW, most=100)
    assert pruned is not None
    assert (pruned.segment, pruned.seq) == (2, second)
    reader = JournalReader([str(tmp_path / "j")])
    assert reader.first_seq() == second + 1
    assert read_all(tmp_path / "j").equals(numbered(written).slice(second).combine_chunks())
    assert not [file.name for file in (tmp_path / "j/segments").iterdir() if int(file.name[:8]) <= 2]
    assert verify(tmp_path / "j") == []
    writer.close()
    with JournalWriter.open(tmp_path / "j") as again:
        assert again.head.seq == 300
        assert read_all(tmp_path / "j").equals(numbered(written).slice(second).combine_chunks())


def test_nothing_goes_that_a_target_needs(tmp_path: Path) -> None:
    _, writer = filled(tmp_path / "j")
    first, second, *_ = boundaries(writer)
    assert writer.retain(EVERYTHING, first - 1, NOW, most=100) is None
    assert writer.retain(EVERYTHING, second - 1, NOW, most=100) == Pruned.load(tmp_path / "j")
    assert JournalReader([str(tmp_path / "j")]).first_seq() == first + 1
    writer.close()


def test_few_go_at_a_time(tmp_path: Path) -> None:
    _, writer = filled(tmp_path / "j")
    lasts = boundaries(writer)
    for count in range(1, 4):
        pruned = writer.retain(EVERYTHING, None, NOW, most=1)
        assert pruned is not None
        assert pruned.seq == lasts[count - 1]
    writer.close()


def test_the_last_rows_always_stay(tmp_path: Path) -> None:
    written, writer = filled(tmp_path / "j")
    writer.maintain()
    seal_everything(writer)
    writer.retain(EVERYTHING, None, NOW, most=100)
    writer.close()
    for _ in range(2):
        with JournalWriter.open(tmp_path / "j", segment_bytes=3000) as again:
            assert again.end == written[-1].resume
            seal_everything(again)
            again.retain(EVERYTHING, None, NOW, most=100)
            assert len(read_all(tmp_path / "j")) > 0
    more = Maker(position=written[-1].resume).transaction(3)
    with JournalWriter.open(tmp_path / "j") as again:
        again.append(block(more))
    assert read_all(tmp_path / "j")["seq"].to_pylist()[-3:] == [301, 302, 303]
    assert verify(tmp_path / "j") == []


def entry(number: int, *, first: int, last: int, ts: int, sealed_at: float = NOW) -> Entry:
    return Entry(number, 1, first, last, 1000, 900, 1, 1, 1, 1, ts, ts, ts, last, 0, 0, 0, 0, sealed_at)


def test_what_is_due_by_age_and_by_size() -> None:
    hour = 3_600_000_000
    now = int(NOW * 1e6)
    entries = [entry(n, first=10 * n - 9, last=10 * n, ts=now - (6 - n) * hour) for n in range(1, 6)]

    def gone(rule: Retention, lowest: int | None = None) -> tuple[int, int]:
        found = due(entries, rule, open_bytes=500, open_rows=1, lowest=lowest, now_us=now)
        return len(found.entries), len(found.held)

    assert gone(Retention(age_ms=3 * 3_600_000 + 1)) == (2, 0)
    assert gone(Retention(age_ms=3 * 3_600_000 + 1), lowest=19) == (1, 1)
    assert gone(Retention(bytes=3500)) == (2, 0)
    assert gone(Retention(bytes=3499)) == (3, 0)
    assert gone(Retention(bytes=3500), lowest=0) == (0, 2)
    assert gone(Retention(age_ms=3 * 3_600_000 + 1, bytes=1500)) == (4, 0), "what is over either limit goes"
    assert gone(Retention(age_ms=1)) == (5, 0)
    assert size_of(entries[0]) == 1000


def test_a_segment_is_as_old_as_its_youngest_change_or_its_sealing() -> None:
    now = int(NOW * 1e6)
    old, young, future = now - 10_000_000, now - 1_000_000, now + 10**12
    entries = [
        entry(1, first=1, last=10, ts=old),
        entry(2, first=11, last=20, ts=future, sealed_at=NOW - 8),
        entry(3, first=21, last=30, ts=young),
        entry(4, first=31, last=40, ts=old),
    ]
    found = due(entries, Retention(age_ms=5000), open_bytes=0, open_rows=1, lowest=None, now_us=now)
    assert [one.number for one in found.entries] == [1, 2], "a source's clock that was ahead holds nothing for ever"


def test_a_transaction_goes_whole_or_not_at_all(tmp_path: Path) -> None:
    maker = Maker()
    before, giant, after = maker.transaction(60), maker.transaction(900), maker.transaction(60)
    written = [before, giant, after]
    writer = create(tmp_path / "j", segment_bytes=3000, flush_bytes=800)
    for one in [*written, maker.transaction(60), maker.transaction(1)]:
        append_in_parts(writer, one, 40)
        writer.commit()
    seal_everything(writer)
    last = list(ends(written))
    for inside in (last[0] + 100, last[1] - 1):
        assert writer.retain(EVERYTHING, inside, NOW, most=100) in (None, Pruned.load(tmp_path / "j"))
        assert JournalReader([str(tmp_path / "j")]).first_seq() <= last[0] + 1
    writer.retain(EVERYTHING, last[2], NOW, most=100)
    first = JournalReader([str(tmp_path / "j")]).first_seq()
    assert first > last[0] + 1
    assert read_all(tmp_path / "j")["tx_index"][0].as_py() == 0
    assert verify(tmp_path / "j") == []
    writer.close()


def test_whoever_asks_for_what_is_gone_is_told_the_earliest(tmp_path: Path) -> None:
    written, writer = filled(tmp_path / "j")
    reader = JournalReader([str(tmp_path / "j")])
    planned = reader.slices(SeqRange(0, 20))
    kept = reader.slices(SeqRange(280, 300))
    seq = boundaries(writer)[1]
    gone, left = written[: seq // 20], written[seq // 20 :]
    writer.retain(EVERYTHING, seq, NOW, most=100)
    earliest = rf"begins at seq {seq + 1}, position 00000000/{left[0].commit:08X}, 2023-11-14T"
    for ask in (
        lambda: reader.plan_end(0, max_events=1, max_bytes=1),
        lambda: reader.slices(SeqRange(0, 300)),
        lambda: reader.seq_at_position(gone[-1].commit),
        lambda: reader.seq_at_time(max(one.ts for one in gone)),
    ):
        with pytest.raises(OutOfRange, match=earliest) as refused:
            ask()
        assert "new target" in (refused.value.hint or "")
    with pytest.raises(OutOfRange, match=f"seq [0-9]+ to [0-9]+ are.*begins at seq {seq + 1}"):
        open_slice(planned[0], reader.locations)
    assert sum(len(open_slice(slice, reader.locations, SeqRange(280, 300))) for slice in kept) == 20
    assert reader.seq_at_position(gone[-1].resume) == seq, "the end of what is gone is where the rest begins"
    assert reader.seq_at_position(left[1].commit) == seq + 20
    later = max(one.ts for one in gone) + 1
    expected = next(number for number, one in zip(ends(left, seq + 1), left, strict=True) if one.ts >= later)
    assert reader.seq_at_time(later) == expected - 20
    writer.close()


def test_a_cursor_at_the_end_of_what_is_gone_is_still_compared(tmp_path: Path) -> None:
    written, writer = filled(tmp_path / "j")
    seq = boundaries(writer)[0]
    writer.retain(EVERYTHING, seq, NOW, most=1)
    reader = JournalReader([str(tmp_path / "j")])
    position = written[seq // 20 - 1].resume
    journal_id = writer.header.journal_id
    check_cursor(reader, Cursor("s", "t", journal_id, 1, seq, position))
    with pytest.raises(JournalMismatch):
        check_cursor(reader, Cursor("s", "t", journal_id, 1, seq, position + 1))
    cut = reader.cut_at(seq)
    assert cut is not None
    assert cut.resume_position == position
    writer.close()


def test_pruning_that_was_only_decided_is_finished(tmp_path: Path) -> None:
    written, writer = filled(tmp_path / "j")
    manifest = (tmp_path / "j/manifest.json").read_bytes()
    segments = {path: path.read_bytes() for path in (tmp_path / "j/segments").iterdir()}
    writer.retain(EVERYTHING, boundaries(writer)[2], NOW, most=100)
    first = JournalReader([str(tmp_path / "j")]).first_seq()
    writer.close()
    for lost in (False, True):
        (tmp_path / "j/manifest.json").write_bytes(b"" if lost else manifest)
        for path, raw in segments.items():
            if int(path.name[:8]) in (2, 3):
                path.write_bytes(raw)
        JournalWriter.open(tmp_path / "j").close()
        assert read_all(tmp_path / "j").equals(numbered(written).slice(first - 1).combine_chunks())
        assert verify(tmp_path / "j") == []
        assert min(int(path.name[:8]) for path in segment_files(tmp_path / "j")) == 4


def test_a_segment_that_is_missing_at_the_beginning_is_not_taken_for_pruned(tmp_path: Path) -> None:
    _, writer = filled(tmp_path / "j")
    writer.close()
    for file in (tmp_path / "j/segments").glob("00000001*"):
        file.unlink()
    (tmp_path / "j/manifest.json").unlink()
    with pytest.raises(JournalCorrupt, match="starts at seq"):
        JournalWriter.open(tmp_path / "j")


def test_a_reader_beside_the_pruning_finds_the_rest(tmp_path: Path) -> None:
    written, writer = filled(tmp_path / "j")
    reader = JournalReader([str(tmp_path / "j")])
    reader.plan_end(0, max_events=5, max_bytes=1 << 20)
    old = reader._catalog._manifest
    seq = boundaries(writer)[1]
    writer.retain(EVERYTHING, seq, NOW, most=100)
    # The race: this manifest was read before, and nothing of it is kept but itself.
    reader._catalog._manifest = type(old)(writer.head.manifest_version, old.entries)
    with pytest.raises(OutOfRange, match=f"begins at seq {seq + 1}"):
        read_range(reader, SeqRange(0, 300))
    assert read_range(reader, SeqRange(seq, 300)).equals(numbered(written).slice(seq).combine_chunks())
    writer.close()


def test_a_request_is_done_once_and_removed(tmp_path: Path) -> None:
    _, writer = filled(tmp_path / "j")
    assert writer.prune_as_requested() is None
    PruneRequest(2).save(tmp_path / "j")
    pruned = writer.prune_as_requested()
    assert pruned is not None
    assert pruned.segment == 2
    assert writer.prune_as_requested() is None
    (tmp_path / "j/prune-request.json").write_bytes(b"no request")
    assert writer.prune_as_requested() is None
    assert not (tmp_path / "j/prune-request.json").exists()
    assert describe(tmp_path / "j").retained.pruned == pruned
    writer.close()


def test_a_transaction_over_more_segments_than_go_at_a_time_goes_too(tmp_path: Path) -> None:
    maker = Maker()
    writer = create(tmp_path / "j", segment_bytes=3000, flush_bytes=800)
    for one in [maker.transaction(900), maker.transaction(60), maker.transaction(1)]:
        append_in_parts(writer, one, 40)
        writer.commit()
    seal_everything(writer)
    assert len(writer._closed.entries) > 6
    pruned = writer.retain(EVERYTHING, None, NOW, most=2)
    assert pruned is not None
    assert pruned.seq >= 900
    writer.close()
