"""Since when each description of a table is in force: written with the rows, kept when they go, found from them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from journal_tools import Maker, Transaction, block, create, relation, seal_everything

from millstream.errors import JournalCorrupt, JournalFull
from millstream.journal import InForce, JournalReader, JournalWriter, verify
from millstream.model import Column

FIRST = replace(relation(1), columns=(Column("id", 23, key=True),))


def rows_of(maker: Maker, *relations: int) -> Transaction:
    """A transaction with one row of each of these relations, in order."""
    rows = maker.transaction(len(relations)).rows
    at = rows.schema.get_field_index("relation")
    return Transaction(rows.set_column(at, rows.schema.field(at), pa.array(np.array(relations), pa.int32())))


def told(path: Path) -> list[tuple[int, int, int]]:
    return [(one.seq, one.after, one.relation) for one in JournalReader([str(path)]).schemas()]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal"


def write(path: Path, maker: Maker, **options: int) -> JournalWriter:
    """t1 is described as 1, then as 5, and as 1 again; t2 stays 2."""
    writer = create(path, **options)
    assert writer.register(FIRST) == 5
    for relations in ([1, 2, 1], [0, 1], [2, 5, 5], [5, 1, 2], [1]):
        writer.append(block(rows_of(maker, *relations)))
        writer.commit()
    return writer


EXPECTED = [(1, 0, 1), (2, 0, 2), (7, 5, 5), (10, 8, 1)]
"""Seq, the end of the transaction before, the description."""


def test_a_description_is_in_force_from_its_first_row_on(path: Path) -> None:
    maker = Maker()
    with write(path, maker) as writer:
        assert told(path) == EXPECTED
        found = JournalReader([str(path)]).schemas()
        assert all(one.tenant == "default" for one in found)
        assert [one.commit_position for one in found] == sorted(one.commit_position for one in found)
        assert verify(path) == []
        writer.append(block(rows_of(maker, 1, 2)))
        writer.commit()
        assert told(path) == EXPECTED, "what is in force already changes nothing"


def test_a_new_writer_knows_what_is_in_force(path: Path) -> None:
    maker = Maker()
    write(path, maker).close()
    with JournalWriter.open(path, tenant="acme") as writer:
        writer.append(block(rows_of(maker, 1, 2, 5)))
        writer.commit()
    assert told(path) == [*EXPECTED, (15, 12, 5)]
    assert JournalReader([str(path)]).schemas()[-1].tenant == "acme"


@pytest.mark.parametrize("sealed", [False, True])
def test_a_journal_that_did_not_write_them_has_them_from_its_rows(path: Path, sealed: bool) -> None:
    writer = write(path, Maker(), **({"segment_bytes": 600} if sealed else {}))
    if sealed:
        seal_everything(writer)
    expected = JournalReader([str(path)]).schemas()
    writer.close()
    (path / "schemas.jsonl").unlink()
    assert JournalReader([str(path)]).schemas() == expected
    with JournalWriter.open(path):
        assert (path / "schemas.jsonl").exists()
        assert JournalReader([str(path)]).schemas() == expected


def test_lines_of_rows_that_were_never_committed_are_cut(path: Path) -> None:
    maker = Maker()
    write(path, maker).close()
    whole = (path / "schemas.jsonl").read_bytes()
    with JournalWriter.open(path) as writer:
        writer.append(block(rows_of(maker, 5)))
        writer._schemas.sync()
        assert len((path / "schemas.jsonl").read_bytes()) > len(whole)
        assert told(path) == EXPECTED, "what is beyond the head is not visible"
        writer._pending.clear()  # as a kill would: the line is there, its row is not
    with JournalWriter.open(path):
        assert (path / "schemas.jsonl").read_bytes() == whole


def test_a_full_disk_takes_the_line_back_with_its_rows(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    maker = Maker()
    with write(path, maker) as writer:
        whole = (path / "schemas.jsonl").read_bytes()
        writer.append(block(rows_of(maker, 5)))
        with monkeypatch.context() as patched:

            def no_room(_: object) -> None:
                raise JournalFull("no room")

            patched.setattr(writer._tail, "commit", no_room)
            with pytest.raises(JournalFull):
                writer.commit()
        assert (path / "schemas.jsonl").read_bytes() == whole
        writer.append(block(rows_of(maker, 2, 5)))
        writer.commit()
        assert told(path) == [*EXPECTED, (14, 12, 5)]


def test_a_damaged_line_is_found(path: Path) -> None:
    write(path, Maker()).close()
    file = path / "schemas.jsonl"
    file.write_bytes(file.read_bytes().replace(b'"relation":2', b'"relation":3'))
    assert any("schemas.jsonl" in str(problem) for problem in verify(path))
    with pytest.raises(JournalCorrupt):
        JournalReader([str(path)]).schemas()


def test_what_was_pruned_is_still_told(path: Path) -> None:
    with write(path, Maker(), segment_bytes=600) as writer:
        seal_everything(writer)
        before = JournalReader([str(path)]).schemas()
        assert writer.prune(2) is not None
        assert JournalReader([str(path)]).first_seq() > 1
        assert JournalReader([str(path)]).schemas() == before
        assert isinstance(before[0], InForce)
