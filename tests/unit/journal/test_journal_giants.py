"""Transactions over many segments, and how many segments are ever in open form."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from journal_tools import (
    Maker,
    Transaction,
    append_in_parts,
    block,
    create,
    numbered,
    read_all,
    read_range,
    seal_everything,
    segment_files,
)

from millstream.journal import JournalReader, JournalWriter, describe, sealing, segment, tail, verify, writer
from millstream.model import SeqRange

SEGMENT = 6000
OPTIONS = {"segment_bytes": SEGMENT, "flush_bytes": 900}


@contextmanager
def at_every_step(monkeypatch: pytest.MonkeyPatch, look: Callable[[], None]) -> Iterator[None]:
    """Call `look` wherever a test could kill the process."""
    with monkeypatch.context() as patch:
        for module in (writer, tail, segment, sealing):
            patch.setattr(module, "failpoint", lambda _name: look())
        yield


def in_open_form(journal: JournalWriter) -> list[int]:
    """The segments whose rows are on disk in open form alone: closed and not sealed yet, or not closed yet."""
    entries = journal._closed.entries
    closed = {entry.number: entry.sealed for entry in entries}
    last = entries[-1].number if entries else 0
    names = os.listdir(journal.path / "segments")  # noqa: PTH208 - often, and fast
    numbers = [int(name[:8]) for name in names if name == f"{name[:8]}.arrows"]
    return [number for number in numbers if number > last or closed.get(number) is False]


def write(journal: JournalWriter, written: list[Transaction], maker: Maker, dice: random.Random) -> None:
    """A random piece of traffic: small transactions, tiny ones, a giant, many in one group, or none at all."""
    kind = dice.choice(["small", "small", "tiny", "giant", "group", "quiet"])
    if kind == "small":
        new = maker.transactions(dice.choices(range(1, 20), k=dice.randrange(1, 5)))
        journal.append(block(*new))
    elif kind == "tiny":
        new = maker.transactions([1] * 15)
        for one in new:
            journal.append(block(one))
            journal.commit()
    elif kind == "giant":
        new = [maker.transaction(dice.randrange(50, 900))]
        append_in_parts(journal, new[0], dice.randrange(5, 60))
    elif kind == "group":
        new = maker.transactions(dice.choices(range(1, 30), k=60))
        for one in new:
            journal.append(block(one))
    else:
        new = []
        journal.maintain()
    written += new
    journal.commit()


@pytest.mark.parametrize("seed", range(3))
def test_at_most_two_segments_are_in_open_form_at_any_traffic(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    dice, maker = random.Random(seed), Maker(seed)
    written: list[Transaction] = []
    most: list[int] = []
    with create(tmp_path / "j", **OPTIONS) as journal:
        with at_every_step(monkeypatch, lambda: most.append(len(in_open_form(journal)))):
            for _ in range(15):
                write(journal, written, maker, dice)
                if dice.random() < 0.3:
                    journal.drop_superseded(float("inf"))
            seal_everything(journal)
        assert max(most) == 2
        journal.drop_superseded(float("inf"))
        size = sum(path.stat().st_size for path in segment_files(tmp_path / "j"))
        assert len(segment_files(tmp_path / "j")) <= size / SEGMENT + 2
        assert len(in_open_form(journal)) <= 1
    assert read_all(tmp_path / "j").equals(numbered(written))
    assert verify(tmp_path / "j") == []


def test_a_giant_makes_no_more_files_than_its_size_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    maker = Maker(payload=400)
    size, flush = 400_000, 50_000
    written = [maker.transaction(10), maker.transaction(8000), maker.transaction(10)]
    most: list[int] = []
    with create(tmp_path / "j", segment_bytes=size, flush_bytes=flush) as journal:
        with at_every_step(monkeypatch, lambda: most.append(len(in_open_form(journal)))):
            for one in written:
                append_in_parts(journal, one, 70)
                journal.commit()
        assert max(most) == 2
        assert len(in_open_form(journal)) == 2, "the first and the last of the giant"
        seal_everything(journal)
        journal.drop_superseded(float("inf"))
        files = segment_files(tmp_path / "j")
        assert len(files) <= sum(path.stat().st_size for path in files) // size + 1
        assert [one.form for one in describe(tmp_path / "j").segments[1:-1]] == ["sealed"] * (len(files) - 2)
    assert read_all(tmp_path / "j").equals(numbered(written))
    assert verify(tmp_path / "j") == []


def giant_on_disk(path: Path) -> tuple[list[Transaction], JournalWriter]:
    """A small transaction, a giant over many segments, and another small one; nothing is sealed but what is inside."""
    maker = Maker()
    written = [maker.transaction(5), maker.transaction(900), maker.transaction(7)]
    journal = create(path, **OPTIONS)
    for one in written:
        append_in_parts(journal, one, 30)
        journal.commit()
    return written, journal


def test_inner_parts_of_a_giant_are_in_runs_of_one_relation(tmp_path: Path) -> None:
    written, journal = giant_on_disk(tmp_path / "j")
    reader = JournalReader([str(tmp_path / "j")])
    inner = [entry for entry in journal._closed.entries if entry.sealed]
    assert len(inner) > 3
    for view in reader._catalog.views(journal.head):
        if view.sealed:
            index = reader._catalog.index(view)
            assert len(index) == len(set(index["offset"].tolist())), "a message holds rows of one relation"
    for start in range(0, 912, 37):
        found = read_range(reader, SeqRange(start, min(start + 37, 912)))
        assert found.equals(numbered(written).slice(start, 37).combine_chunks())
    journal.close()


@pytest.mark.parametrize("lost", ["idx", "cuts", "manifest", "head", "manifest, before anything else was sealed"])
def test_what_is_derived_from_a_giant_is_made_again(tmp_path: Path, lost: str) -> None:
    written, journal = giant_on_disk(tmp_path / "j")
    if "before" not in lost:
        seal_everything(journal)
    journal.close()
    if lost in ("idx", "cuts"):
        for file in (tmp_path / "j/segments").glob(f"*.{lost}"):
            file.unlink()
    else:
        (tmp_path / "j" / ("head" if lost == "head" else "manifest.json")).unlink()
    with JournalWriter.open(tmp_path / "j", **OPTIONS) as again:
        assert again.head.seq == 912
    assert read_all(tmp_path / "j").equals(numbered(written))
    assert verify(tmp_path / "j") == []
    assert JournalReader([str(tmp_path / "j")]).cut_at(905) is not None


def test_the_last_segment_of_a_giant_is_indexed_again(tmp_path: Path) -> None:
    """Its first rows were written in runs, so that a transaction's last seq is not in its last message."""
    maker = Maker()
    written = [maker.transaction(3), maker.transaction(300)]
    many = maker.transactions([2] * 90)
    with create(tmp_path / "j", segment_bytes=3000, flush_bytes=800) as journal:
        journal.append(block(written[0]))
        journal.commit()
        append_in_parts(journal, written[1], 40)
        for one in many:  # a group of many transactions that rolls inside is written in runs too
            journal.append(block(one))
        journal.commit()
        last = journal.head.segment
    for ending in ("idx", "cuts"):
        (tmp_path / f"j/segments/{last}.{ending}").unlink()
    JournalWriter.open(tmp_path / "j").close()
    assert read_all(tmp_path / "j").equals(numbered([*written, *many]))
    assert verify(tmp_path / "j") == []
