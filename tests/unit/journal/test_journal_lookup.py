"""Lookups in a journal of 100 GB read its index, and of that next to nothing."""

from __future__ import annotations

from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from journal_tools import Maker, block, create, seal_everything

from millstream.bench.lookup import WAYS, Wide, build
from millstream.errors import JournalCorrupt
from millstream.journal import JournalReader, JournalWriter, ends, verify
from millstream.journal.locations import Locations

SEGMENTS, ROWS = 1_650, 20_000


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Wide:
    """The index of 1,650 segments of 64 MiB. Only few have files, so whoever reads another one fails."""
    return build(tmp_path_factory.mktemp("wide") / "j", SEGMENTS, ROWS, 2, all_files=False)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Every read of a file: its name and how many bytes."""
    found: list[tuple[str, int]] = []
    original = Locations.read

    def read(self: Locations, name: str, offset: int, length: int) -> pa.Buffer:
        buffer = original(self, name, offset, length)
        found.append((name, buffer.size))
        return buffer

    monkeypatch.setattr(Locations, "read", read)
    return found


def some(wide: Wide, count: int) -> Any:
    """Ends in the segments that have files, with a transaction a row."""
    dense = [(number - 1) * ROWS for number in wide.dense]
    inside = np.concatenate([wide.ends[np.searchsorted(wide.ends["seq"], at + 1) :][:ROWS] for at in dense])
    return np.random.default_rng(3).choice(inside, count, replace=False)


@pytest.mark.parametrize("way", WAYS)
def test_a_cold_lookup_reads_five_small_files(wide: Wide, reads: list[tuple[str, int]], way: str) -> None:
    for place in some(wide, 10):
        look, answer = WAYS[way](wide, place)
        reads.clear()
        assert look(JournalReader([str(wide.path)])) == answer
        kinds = sorted({name.rpartition("/")[2].partition(".")[2] or name for name, _ in reads})
        assert set(kinds) <= {"json", "head", "sealed.cuts", "sealed.ends"}
        assert len({name for name, _ in reads}) <= 5
        assert sum(size for _, size in reads) < 600_000


@pytest.mark.parametrize("way", WAYS)
def test_a_warm_lookup_reads_the_head_and_one_block(wide: Wide, reads: list[tuple[str, int]], way: str) -> None:
    reader = JournalReader([str(wide.path)])
    places = some(wide, 6)
    for place in places:
        WAYS[way](wide, place)[0](reader)
    for place in places:
        look, answer = WAYS[way](wide, place)
        reads.clear()
        assert look(reader) == answer
        assert [name for name, _ in reads] == ["head"], "what was read once is kept"


def test_a_lookup_looks_at_few_of_many_segments(wide: Wide, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = JournalReader([str(wide.path)])
    looked: list[int] = []
    head = reader.head()
    assert head is not None
    views = reader._catalog.views(head)
    assert len(views) == SEGMENTS

    class Counted(list[Any]):
        def __getitem__(self, at: Any) -> Any:
            looked.append(1)
            return super().__getitem__(at)

    monkeypatch.setattr(reader._catalog, "views", lambda _: Counted(views))
    for way in WAYS.values():
        for place in some(wide, 5):
            look, answer = way(wide, place)
            looked.clear()
            assert look(reader) == answer
            assert len(looked) <= 2 * SEGMENTS.bit_length()


def test_the_first_transaction_at_a_time_is_found_though_times_go_back(wide: Wide) -> None:
    """Found by the latest time so far, which only grows; a later transaction may be older."""
    times = wide.ends["commit_ts_us"]
    assert (np.diff(times) < 0).any()
    reader = JournalReader([str(wide.path)])
    views = reader._catalog.views(reader._visible())
    assert [view.latest_us for view in views] == sorted(map(attrgetter("latest_us"), views))
    for place in some(wide, 20):
        found = reader.seq_at_time(int(place["commit_ts_us"]))
        first = int(np.flatnonzero(times >= place["commit_ts_us"])[0])
        assert found == wide.ends["seq"][first - 1]


@pytest.mark.parametrize("count", [0, 1, 4095, 4096, 4097, 20_000])
def test_ends_come_back_as_they_were_written(count: int) -> None:
    dice = np.random.default_rng(count)
    written = np.zeros(count, ends.ENDS)
    for name in ends.ENDS.names or ():
        written[name] = np.cumsum(dice.integers(-5 if name == "commit_ts_us" else 1, 1 << 40, count))
    encoded = ends.encode(written)
    assert np.array_equal(ends.decode(encoded.raw, encoded.blocks, encoded.crc, "x"), written)


def test_ends_take_little_space(wide: Wide) -> None:
    dense = wide.path / f"segments/{wide.dense[0]:08d}.sealed.ends"
    assert dense.stat().st_size < 10 * ROWS


def test_damaged_ends_are_refused_found_and_made_again(tmp_path: Path) -> None:
    written = Maker().singles(900)
    with create(tmp_path / "j", segment_bytes=40_000) as writer:
        for at in range(0, 900, 90):
            writer.append(block(*written[at : at + 90]))
            writer.commit()
        seal_everything(writer)
    path = tmp_path / "j/segments/00000001.sealed.ends"
    raw = path.read_bytes()
    for at in (3, len(raw) - 3):
        path.write_bytes(raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :])
        with pytest.raises(JournalCorrupt, match=r"00000001\.sealed\.ends is damaged"):
            JournalReader([str(tmp_path / "j")]).seq_at_position(written[37].commit)
        assert [problem.file for problem in verify(tmp_path / "j")] == ["segments/00000001.sealed.ends"]
    path.unlink()
    JournalWriter.open(tmp_path / "j").close()
    assert path.read_bytes() == raw
    assert verify(tmp_path / "j") == []
    assert JournalReader([str(tmp_path / "j")]).seq_at_position(written[37].commit) == 37
