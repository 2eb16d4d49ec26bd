"""What goes into a journal comes out of it, and nothing else."""

from __future__ import annotations

import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from journal_tools import (
    START,
    Maker,
    block,
    create,
    numbered,
    read_all,
    relation,
    segment_files,
)

from millstream.errors import JournalError
from millstream.journal import JournalReader, JournalWriter, journal_exists, verify
from millstream.sources.base import Block


def test_committed_rows_come_back_with_dense_seqs(tmp_path: Path) -> None:
    maker = Maker()
    written = maker.transactions([1, 5, 3, 100, 1])
    with create(tmp_path / "j") as writer:
        for one in written[:3]:
            writer.append(block(one))
        first = writer.commit()
        writer.append(block(*written[3:]))
        second = writer.commit()
    assert first is not None
    assert second is not None
    assert (first.seq, first.resume_position, first.covered) == (9, written[2].resume, written[2].resume)
    assert (second.seq, second.commit_position, second.commit_ts_us) == (110, written[4].commit, written[4].ts)
    assert read_all(tmp_path / "j").equals(numbered(written))
    assert verify(tmp_path / "j") == []


def test_a_plain_arrow_reader_opens_a_segment(tmp_path: Path) -> None:
    written = Maker().transactions([4, 2, 7])
    with create(tmp_path / "j") as writer:
        for one in written:
            writer.append(block(one))
            writer.commit()
        [path] = segment_files(tmp_path / "j")
        assert pa.ipc.open_stream(str(path)).read_all().combine_chunks().equals(numbered(written))


def test_one_commit_makes_one_record_batch(tmp_path: Path) -> None:
    written = Maker().transactions([1] * 50)
    with create(tmp_path / "j") as writer:
        for one in written:
            writer.append(block(one))
        writer.commit()
        [path] = segment_files(tmp_path / "j")
    sizes = [batch.num_rows for batch in pa.ipc.open_stream(str(path))]
    assert sizes == [50, 0]


def test_nothing_is_visible_before_commit(tmp_path: Path) -> None:
    with create(tmp_path / "j") as writer:
        reader = JournalReader([str(tmp_path / "j")])
        assert not writer.pending
        writer.append(block(Maker().transaction(3)))
        assert writer.pending
        assert writer.pending_bytes > 0
        assert writer.pending_since is not None
        head = reader.head()
        assert head is not None
        assert head.seq == 0
        assert writer.end == START
        writer.commit()
        assert not writer.pending
        assert writer.pending_bytes == 0
        assert writer.commit() is None


def test_an_open_transaction_is_not_committed(tmp_path: Path) -> None:
    maker = Maker()
    small, large = maker.transaction(2), maker.transaction(90)
    with create(tmp_path / "j") as writer:
        writer.append(block(small))
        writer.append(Block(large.rows.slice(0, 60), open_transaction=True))
        assert writer.commit() is None
        writer.append(Block(large.rows.slice(60)))
        head = writer.commit()
    assert head is not None
    assert head.seq == 92
    assert read_all(tmp_path / "j").equals(numbered([small, large]))


def test_an_open_transaction_is_gone_after_reopening(tmp_path: Path) -> None:
    maker = Maker()
    small, large = maker.transaction(2), maker.transaction(90)
    with create(tmp_path / "j", flush_bytes=500) as writer:
        writer.append(block(small))
        writer.commit()
        writer.append(Block(large.rows.slice(0, 60), open_transaction=True))
    with JournalWriter.open(tmp_path / "j") as writer:
        assert (writer.head.seq, writer.end) == (2, small.resume)
        writer.append(block(large))
        writer.commit()
    assert read_all(tmp_path / "j").equals(numbered([small, large]))


def test_a_transaction_may_end_with_an_empty_block(tmp_path: Path) -> None:
    large = Maker().transaction(90)
    with create(tmp_path / "j", flush_bytes=500) as writer:
        writer.append(Block(large.rows, open_transaction=True))
        assert writer.commit() is None
        writer.append(Block())
        head = writer.commit()
    assert head is not None
    assert (head.seq, head.covered) == (90, large.resume)
    assert verify(tmp_path / "j") == []


def test_progress_raises_the_end_without_rows(tmp_path: Path) -> None:
    maker = Maker()
    one = maker.transaction(3)
    with create(tmp_path / "j") as writer:
        writer.append(block(one, progress=one.resume + 100))
        head = writer.commit()
        assert head is not None
        assert (head.resume_position, head.covered) == (one.resume, one.resume + 100)
        writer.append(Block(progress=one.resume + 50))
        assert not writer.pending, "covered never goes back"
        writer.append(Block(progress=one.resume + 500))
        assert writer.pending
        assert writer.pending_bytes == 0
        head = writer.commit()
        assert head is not None
        assert (head.seq, head.covered) == (3, one.resume + 500)
    with JournalWriter.open(tmp_path / "j") as writer:
        assert writer.end == one.resume + 500
    assert verify(tmp_path / "j") == []


def test_rows_that_are_covered_already_are_refused(tmp_path: Path) -> None:
    maker = Maker()
    one, two = maker.transaction(3), maker.transaction(3)
    with create(tmp_path / "j") as writer:
        writer.append(block(one, two))
        with pytest.raises(JournalError, match="already covers"):
            writer.append(block(two))
        with pytest.raises(JournalError, match="go back"):
            writer.append(block(maker.transaction(1), two))
        writer.commit()
    assert read_all(tmp_path / "j").equals(numbered([one, two]))


def test_a_part_of_a_transaction_is_refused(tmp_path: Path) -> None:
    one = Maker().transaction(10)
    with create(tmp_path / "j") as writer:
        for rows in (one.rows.slice(1), one.rows.take(pa.array([0, 1, 3]))):
            with pytest.raises(JournalError, match="part of a transaction"):
                writer.append(Block(rows))
        writer.append(Block(one.rows.slice(0, 4), open_transaction=True))
        with pytest.raises(JournalError, match="part of a transaction"):
            writer.append(Block(one.rows.slice(5)))
        writer.append(Block(one.rows.slice(4)))
    assert read_all(tmp_path / "j").equals(numbered([one]))


def test_rows_of_an_unknown_relation_are_refused(tmp_path: Path) -> None:
    with create(tmp_path / "j") as writer, pytest.raises(JournalError, match="registered"):
        writer.append(block(Maker().transaction(100, relations=40)))


def test_relations_are_stored_once_per_content(tmp_path: Path) -> None:
    maker = Maker()
    with create(tmp_path / "j") as writer:
        assert writer.register(relation(2)) == 2
        changed = replace(relation(2), identity="f")
        assert writer.register(changed) == 5
        writer.append(block(maker.transaction(1)))
        writer.commit()
    with JournalWriter.open(tmp_path / "j") as writer:
        assert writer.register(changed) == 5
        assert writer.register(relation(1)) == 1
        assert writer.register(relation(9)) == 6
        writer.append(block(maker.transaction(1)))
        writer.commit()
    reader = JournalReader([str(tmp_path / "j")])
    assert reader.relation(5) == changed
    assert reader.relations() == {**{n: relation(n) for n in (1, 2, 3, 4)}, 5: changed, 6: relation(9)}


def test_files_are_private(tmp_path: Path) -> None:
    with create(tmp_path / "j") as writer:
        writer.append(block(Maker().transaction(1)))
        writer.commit()
    for path in [tmp_path / "j", *(tmp_path / "j").rglob("*")]:
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path


def test_a_journal_is_created_only_where_nothing_is(tmp_path: Path) -> None:
    assert not journal_exists(tmp_path / "j")
    create(tmp_path / "j").close()
    assert journal_exists(tmp_path / "j")
    with pytest.raises(JournalError, match="cannot create a journal"):
        create(tmp_path / "j")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "letter.txt").write_text("mine")
    with pytest.raises(JournalError, match=r"letter\.txt"):
        create(tmp_path / "other")
    with pytest.raises(JournalError, match="there is no journal"):
        JournalWriter.open(tmp_path / "nowhere")


def test_a_rebased_journal_starts_above_all_old_seqs(tmp_path: Path) -> None:
    written = Maker().transactions([3, 4])
    with create(tmp_path / "j", first_seq=5001, incarnation=2) as writer:
        writer.append(block(*written))
        writer.commit()
    assert read_all(tmp_path / "j").equals(numbered(written, 5001))
    reader = JournalReader([str(tmp_path / "j")])
    assert (reader.first_seq(), reader.header().incarnation) == (5001, 2)
    assert verify(tmp_path / "j") == []


def test_reopening_counts_epochs_and_goes_on_in_the_same_segment(tmp_path: Path) -> None:
    maker = Maker()
    written = maker.transactions([2] * 10)
    create(tmp_path / "j").close()
    for expected, one in enumerate(written, start=2):
        with JournalWriter.open(tmp_path / "j") as writer:
            assert writer.epoch == expected
            writer.append(block(one))
            writer.commit()
    assert len(segment_files(tmp_path / "j")) == 1
    assert read_all(tmp_path / "j").equals(numbered(written))


def test_the_journal_does_not_import_pandas(tmp_path: Path) -> None:
    """It takes a second or two, in every process that plans or captures."""
    path = tmp_path / "j"
    with create(path) as writer:
        writer.append(block(*Maker().transactions([3, 200, 1])))
    body = f"""
import sys
import millstream.journal as journal
from millstream.model import SeqRange
reader = journal.JournalReader([{str(path)!r}])
planned = reader.plan_end(0, max_events=2, max_bytes=1 << 20)
rows = [journal.open_slice(piece, reader.locations) for piece in reader.slices(SeqRange(0, 204))]
assert sum(len(batch) for batch in rows) == 204
assert reader.cut_at(3) is not None
print("pandas" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", body], capture_output=True, check=True, text=True)
    assert done.stdout == "False\n"
