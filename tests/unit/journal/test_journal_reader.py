"""Planning, slicing and finding places, against a plain list of the same transactions."""

from __future__ import annotations

import os
import pickle
import subprocess
import time
from bisect import bisect_right
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
    ends,
    numbered,
    read_all,
    read_range,
    script,
    seal_everything,
)

from millstream.errors import JournalCorrupt, JournalError, JournalMismatch, OutOfRange
from millstream.journal import JournalReader, JournalWriter, describe, grouping, open_slice, rows, verify
from millstream.journal import slices as slices_module
from millstream.model import SeqRange
from tests.fixtures.examples import examples


def filled(path: Path, sizes: list[int], commit_every: int = 3, **options: int) -> list[Transaction]:
    written = Maker().transactions(sizes)
    with create(path, **options) as writer:
        for number, one in enumerate(written, start=1):
            writer.append(block(one))
            if number % commit_every == 0:
                writer.commit()
        writer.commit()
        if "segment_bytes" in options:
            seal_everything(writer)
    return written


def test_a_batch_ends_with_a_transaction_within_its_limits(tmp_path: Path) -> None:
    filled(tmp_path / "j", [10, 10, 10, 500, 10], commit_every=1)
    reader = JournalReader([str(tmp_path / "j")])
    planned = reader.plan_end(0, max_events=25, max_bytes=1 << 30)
    assert planned is not None
    assert (planned.end, planned.rows, planned.full) == (20, 20, True)
    planned = reader.plan_end(30, max_events=25, max_bytes=1 << 30)
    assert planned is not None
    assert (planned.end, planned.rows, planned.full) == (530, 500, True), "a transaction is never split"
    planned = reader.plan_end(0, max_events=1 << 30, max_bytes=1 << 30)
    assert planned is not None
    assert (planned.end, planned.full) == (540, False)
    whole = planned.bytes
    planned = reader.plan_end(0, max_events=1 << 30, max_bytes=whole - 1)
    assert planned is not None
    assert planned.end == 530
    assert reader.plan_end(540, max_events=1, max_bytes=1) is None


def test_limits_smaller_than_the_thinning_still_hold(tmp_path: Path) -> None:
    filled(tmp_path / "j", [1, 2, 3, 4, 5, 6], commit_every=6)
    reader = JournalReader([str(tmp_path / "j")])
    found, start = [], 0
    while planned := reader.plan_end(start, max_events=4, max_bytes=1 << 30):
        found.append(planned.rows)
        start = planned.end
    assert found == [3, 3, 4, 5, 6]


def test_a_range_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with create(tmp_path / "j", first_seq=101) as writer:
        reader = JournalReader([str(tmp_path / "j")])
        assert reader.first_seq() == 101
        assert reader.plan_end(100, max_events=1, max_bytes=1) is None
        assert reader.seq_at_position(START) == 100
        assert reader.slices(SeqRange(100, 100)) == []
        writer.append(block(Maker().transaction(5)))
        writer.commit()
        with pytest.raises(OutOfRange, match="begins at seq 101, position 00000000/"):
            reader.plan_end(99, max_events=1, max_bytes=1)
        with pytest.raises(OutOfRange, match="visible end 105"):
            reader.plan_end(106, max_events=1, max_bytes=1)
        with pytest.raises(OutOfRange, match="visible end 105"):
            reader.slices(SeqRange(100, 106))


@settings(max_examples=examples(15), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    sizes=st.lists(st.one_of(st.integers(1, 4), st.integers(60, 200)), min_size=1, max_size=25),
    commit_every=st.integers(1, 9),
    sealed=st.booleans(),
    max_events=st.integers(1, 300),
    max_bytes=st.sampled_from([1, 2000, 20_000, 1 << 30]),
)
def test_planning_and_finding_agree_with_a_plain_list(
    tmp_path_factory: pytest.TempPathFactory,
    sizes: list[int],
    commit_every: int,
    sealed: bool,
    max_events: int,
    max_bytes: int,
) -> None:
    path = tmp_path_factory.mktemp("plan") / "j"
    options = {"segment_bytes": 6000} if sealed else {}
    written = filled(path, sizes, commit_every, **options)
    at = [0, *ends(written)]
    reader = JournalReader([str(path)])
    start, got = 0, []
    while planned := reader.plan_end(start, max_events=max_events, max_bytes=max_bytes):
        assert planned.end in at
        assert planned.rows == planned.end - start > 0
        one = written[at.index(planned.end) - 1]
        assert (planned.position, planned.commit_ts_us) == (one.resume, one.ts)
        first_end = at[bisect_right(at, start)]
        assert planned.rows <= max_events or planned.end <= first_end + 64
        got.append(read_range(reader, SeqRange(start, planned.end)))
        start = planned.end
    assert pa.concat_tables(got).combine_chunks().equals(numbered(written))
    for before, end, one in zip(at, at[1:], written, strict=False):
        cut = reader.cut_at(end)
        assert cut is not None
        assert (cut.seq, cut.commit_position, cut.resume_position, cut.commit_ts_us) == (
            end,
            one.commit,
            one.resume,
            one.ts,
        )
        if end - before > 1:
            assert reader.cut_at(end - 1) is None
        assert reader.seq_at_position(one.commit) == before
        assert reader.seq_at_position(one.resume) == end
        expected = next(at[n] for n, other in enumerate(written) if other.ts >= one.ts)
        assert reader.seq_at_time(one.ts) == expected
    assert reader.cut_at(0) is None
    assert reader.cut_at(at[-1] + 1) is None


def test_places_outside_the_journal_name_the_earliest(tmp_path: Path) -> None:
    written = filled(tmp_path / "j", [2, 2])
    reader = JournalReader([str(tmp_path / "j")])
    assert reader.seq_at_position(START) == 0
    with pytest.raises(OutOfRange, match=f"beginning of the journal, 00000000/{START:08X}"):
        reader.seq_at_position(START - 1)
    with pytest.raises(OutOfRange, match=f"covers, 00000000/{written[-1].resume:08X}"):
        reader.seq_at_position(written[-1].resume + 1)
    with pytest.raises(OutOfRange, match="beginning of the journal, 2023-"):
        reader.seq_at_time(1_000_000)
    assert reader.seq_at_time(written[0].ts) == 0
    assert reader.seq_at_time(max(one.ts for one in written) + 1) == 4


@pytest.mark.parametrize("name", ["plain", "with space", "50%", "a%20b", "ünï"])
def test_paths_are_taken_literally(tmp_path: Path, name: str) -> None:
    written = filled(tmp_path / name, [3])
    for location in (str(tmp_path / name), f"file://{tmp_path / name}", f"{tmp_path / name}/"):
        reader = JournalReader([location])
        assert read_range(reader, SeqRange(0, 3)).equals(numbered(written))


def test_the_first_location_that_works_is_taken(tmp_path: Path) -> None:
    written = filled(tmp_path / "j", [3])
    reader = JournalReader([str(tmp_path / "nowhere"), str(tmp_path / "j")])
    assert read_range(reader, SeqRange(0, 3)).equals(numbered(written))
    with pytest.raises(JournalError, match="no journal at"):
        JournalReader([str(tmp_path / "nowhere")]).header()
    assert JournalReader([str(tmp_path / "nowhere")]).head() is None


def test_a_reader_is_picklable(tmp_path: Path) -> None:
    written = filled(tmp_path / "j", [3])
    reader = JournalReader([str(tmp_path / "j")])
    reader.plan_end(0, max_events=1, max_bytes=1)
    copy = pickle.loads(pickle.dumps(reader))  # noqa: S301
    assert read_range(copy, SeqRange(0, 3)).equals(numbered(written))


def test_a_reader_never_lists_stats_or_maps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = filled(tmp_path / "j", [30] * 10, segment_bytes=4000)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a reader must not do this")

    reader = JournalReader([str(tmp_path / "j")])
    with monkeypatch.context() as patched:
        for name in ("listdir", "scandir", "stat", "lstat", "open"):
            patched.setattr(os, name, refuse)
        patched.setattr(pa, "memory_map", refuse)
        patched.setattr("builtins.open", refuse)
        got = read_range(reader, SeqRange(0, 300))
    assert got.equals(numbered(written))


def test_a_slice_gives_only_its_relation_its_range_and_what_is_new(tmp_path: Path) -> None:
    written = filled(tmp_path / "j", [20, 20, 20])
    reader = JournalReader([str(tmp_path / "j")])
    table = numbered(written)
    for slice in reader.slices(SeqRange(0, 60)):
        batch = open_slice(slice, reader.locations, SeqRange(10, 50), after_position=written[0].resume)
        expected = [
            row["seq"] for row in table.to_pylist() if row["relation"] == slice.relation and 20 < row["seq"] <= 50
        ]
        assert batch.column("seq").to_pylist() == expected
        assert open_slice(slice, reader.locations).num_rows == slice.rows


def test_many_small_commits_are_few_slices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = filled(tmp_path / "j", [1] * 300, commit_every=1)
    reader = JournalReader([str(tmp_path / "j")])
    slices = reader.slices(SeqRange(0, 300))
    assert len(slices) == 5, "one for each relation, all of one window"
    monkeypatch.setattr(slices_module, "WINDOW_BYTES", 20_000)
    assert len(reader.slices(SeqRange(0, 300))) > 20
    assert read_range(reader, SeqRange(17, 233)).equals(numbered(written).slice(17, 216))


def test_a_damaged_slice_is_never_read(tmp_path: Path) -> None:
    filled(tmp_path / "j", [20, 20])
    reader = JournalReader([str(tmp_path / "j")])
    [slice, *_] = reader.slices(SeqRange(0, 40))
    path = tmp_path / "j" / "segments" / "00000001.arrows"
    raw = path.read_bytes()
    records = 0
    for at in range(slice.offset, slice.offset + slice.length, 29):
        path.write_bytes(raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :])
        try:
            batch = open_slice(slice, reader.locations)
        except JournalCorrupt:
            continue
        # A commit record between two messages has its own CRC and holds no rows.
        records += 1
        path.write_bytes(raw)
        assert batch.equals(open_slice(slice, [*reader.locations, "again"]))
    assert records < slice.length / 29 / 4


def test_a_slice_of_another_journal_is_refused(tmp_path: Path) -> None:
    filled(tmp_path / "j", [20])
    filled(tmp_path / "k", [20])
    [slice, *_] = JournalReader([str(tmp_path / "j")]).slices(SeqRange(0, 20))
    with pytest.raises(JournalMismatch):
        open_slice(slice, [str(tmp_path / "k")])


def test_a_journal_that_was_replaced_is_noticed(tmp_path: Path) -> None:
    filled(tmp_path / "j", [20])
    reader = JournalReader([str(tmp_path / "j")])
    old = reader.header().journal_id
    reader.plan_end(0, max_events=5, max_bytes=5)
    (tmp_path / "j").rename(tmp_path / "old")
    written = Maker(seed=9).transactions([4])
    with create(tmp_path / "j", first_seq=1000, incarnation=2) as writer:
        writer.append(block(*written))
    head = reader.head()
    assert head is not None
    assert reader.header().journal_id == head.journal_id != old
    assert read_range(reader, SeqRange(999, 1003)).equals(numbered(written, 1000))


def test_a_reader_follows_a_writer_in_another_process(tmp_path: Path) -> None:
    body = f"""
from pathlib import Path
maker = Maker(seed=3)
with create(Path({str(tmp_path / "j")!r}), segment_bytes=30_000, flush_bytes=2_000) as writer:
    print("ready", flush=True)
    for number in range(150):
        if number % 25 == 7:
            append_in_parts(writer, maker.transaction(150), 20)
        else:
            writer.append(block(*maker.transactions([3, 1])))
        writer.commit()
        writer.maintain()
        writer.drop_superseded(float("inf"))
"""
    process = subprocess.Popen(script(body), stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    reader = JournalReader([str(tmp_path / "j")])
    got, cursor, deadline = [], 0, time.monotonic() + 120
    while time.monotonic() < deadline:
        over = process.poll() is not None
        planned = reader.plan_end(cursor, max_events=200, max_bytes=1 << 20)
        if planned is None and over:
            break
        if planned is not None:
            got.append(read_again(reader, SeqRange(cursor, planned.end)))
            cursor = planned.end
    assert process.wait(60) == 0
    maker, written = Maker(seed=3), []
    for number in range(150):
        written += [maker.transaction(150)] if number % 25 == 7 else maker.transactions([3, 1])
    assert pa.concat_tables(got).combine_chunks().equals(numbered(written))
    assert verify(tmp_path / "j") == []


def read_again(reader: JournalReader, range: SeqRange) -> pa.Table:
    """This writer drops open forms at once, so a plan may have to be made again."""
    while True:
        try:
            return read_range(reader, range)
        except JournalError as error:
            if "planned again" not in str(error):
                raise


def test_the_head_is_cheap_to_poll(tmp_path: Path) -> None:
    filled(tmp_path / "j", [3])
    reader = JournalReader([str(tmp_path / "j")])
    times = []
    for _ in range(200):
        start = time.perf_counter()
        reader.head()
        times.append(time.perf_counter() - start)
    assert sorted(times)[20] < 0.001


def test_rows_come_in_order_and_by_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouping, "RUN_ROWS", 16)
    written = filled(tmp_path / "j", [40] * 10, segment_bytes=5000)
    reader = JournalReader([str(tmp_path / "j")])
    got = pa.Table.from_batches(rows(reader, SeqRange(30, 390))).combine_chunks()
    assert got.equals(numbered(written).slice(30, 360))
    some = pa.Table.from_batches(rows(reader, SeqRange(0, 400), ["public.t[12]"])).to_pylist()
    assert some == [row for row in numbered(written).to_pylist() if row["relation"] in (1, 2)]


def test_a_journal_describes_itself(tmp_path: Path) -> None:
    written = filled(tmp_path / "j", [40] * 10, segment_bytes=5000)
    summary = describe(tmp_path / "j")
    assert (summary.retained.earliest.seq, summary.retained.oldest_ts_us) == (1, summary.segments[0].min_ts_us)
    assert summary.head.seq == 400
    assert summary.tables == ("public.t1", "public.t2", "public.t3", "public.t4")
    assert sum(one.rows for one in summary.segments) == 400
    assert {one.form for one in summary.segments[:-1]} == {"sealed"}
    assert summary.segments[-1].covered == written[-1].resume
    times = [one.ts for one in written]
    filled_segments = [one for one in summary.segments if one.rows]
    assert min(one.min_ts_us or 0 for one in filled_segments) == min(times)
    assert max(one.max_ts_us or 0 for one in filled_segments) == max(times)


def test_a_giant_in_the_open_form_is_planned_after_reopening(tmp_path: Path) -> None:
    giant = Maker().transaction(500)
    with create(tmp_path / "j", segment_bytes=4000, flush_bytes=800) as writer:
        append_in_parts(writer, giant, 25)
        writer.commit()
    (tmp_path / "j" / "manifest.json").unlink()
    with JournalWriter.open(tmp_path / "j", segment_bytes=4000):
        assert read_all(tmp_path / "j").equals(numbered([giant]))
        assert verify(tmp_path / "j") == []
