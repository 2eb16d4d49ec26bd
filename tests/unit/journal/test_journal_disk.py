"""Full disks, read-only disks, disks that fail, and two writers."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
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
    script,
    seal_everything,
)

from millstream.errors import JournalError, JournalFull, JournalLocked
from millstream.journal import JournalWriter, verify
from millstream.journal.files import EXIT_FSYNC

MOUNT = "/bin/mount"
needs_mount = pytest.mark.skipif(
    os.geteuid() != 0 or not Path(MOUNT).exists(), reason="mounting a small tmpfs needs root"
)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "disk"
    path.mkdir()
    made = subprocess.run([MOUNT, "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(path)], capture_output=True, check=False)
    if made.returncode:
        pytest.skip(f"cannot mount a tmpfs here: {made.stderr.decode().strip()}")
    yield path
    subprocess.run(["/bin/umount", "--lazy", str(path)], check=True)


@needs_mount
def test_a_full_disk_stops_cleanly_and_goes_on_when_there_is_room(small_disk: Path) -> None:
    maker, path = Maker(payload=500), small_disk / "j"
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(500_000))
    written = []
    with create(path, segment_bytes=100_000, flush_bytes=20_000) as writer:
        refusals: list[str] = []
        while len(refusals) < 3:
            one = maker.transaction(60)
            try:
                append_in_parts(writer, one, 20)
                writer.commit()
                written.append(one)
            except JournalFull as full:
                refusals.append(str(full))
                maker.position = writer.end
                continue_from(writer, path, written)
        assert all("no room" in refusal for refusal in refusals)
        assert verify(path) == []
        ballast.unlink()
        for one in maker.transactions([60, 60]):
            writer.append(block(one))
            writer.commit()
            written.append(one)
        assert read_all(path).equals(numbered(written))
    with JournalWriter.open(path) as writer:
        assert writer.end == written[-1].resume
    assert verify(path) == []


def continue_from(writer: JournalWriter, path: Path, written: list[Transaction]) -> None:
    """After JournalFull everything stands at the last commit."""
    assert not writer.pending
    assert writer.end == written[-1].resume
    assert read_all(path).equals(numbered(written))


@needs_mount
def test_a_giant_transaction_that_does_not_fit_leaves_nothing(small_disk: Path) -> None:
    maker, path = Maker(payload=500), small_disk / "j"
    small = maker.transaction(5)
    with create(path, segment_bytes=100_000, flush_bytes=20_000) as writer:
        writer.append(block(small))
        writer.commit()
        with pytest.raises(JournalFull):
            append_in_parts(writer, maker.transaction(4000), 50)
        assert [file.name for file in sorted((path / "segments").iterdir())] == [
            "00000001.arrows",
            "00000001.cuts",
            "00000001.idx",
        ]
        assert read_all(path).equals(numbered([small]))


def append_and_commit(writer: JournalWriter, transaction: Transaction) -> None:
    append_in_parts(writer, transaction, 20)
    writer.commit()


@pytest.mark.parametrize("nth", range(1, 12))
def test_no_room_at_any_write_of_a_commit_goes_back_to_the_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nth: int
) -> None:
    maker = Maker()
    first, second, third = maker.transactions([3, 200, 4])
    writer = create(tmp_path / "j", segment_bytes=2500, flush_bytes=500)
    writer.append(block(first))
    writer.commit()
    seal_everything(writer)
    calls = 0
    real = os.writev

    def full(fd: int, parts: list[memoryview]) -> int:
        nonlocal calls
        calls += 1
        if calls == nth:
            return real(fd, [parts[0][: len(parts[0]) // 2]]) if len(parts[0]) > 1 else 0
        if calls > nth:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, parts)

    monkeypatch.setattr(os, "writev", full)
    with pytest.raises(JournalFull):
        append_and_commit(writer, second)
    monkeypatch.setattr(os, "writev", real)
    assert writer.end == first.resume
    assert read_all(tmp_path / "j").equals(numbered([first]))
    append_in_parts(writer, second, 20)
    writer.commit()
    writer.append(block(third))
    writer.close()
    assert read_all(tmp_path / "j").equals(numbered([first, second, third]))
    assert verify(tmp_path / "j") == []


def test_a_sealing_without_room_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = Maker().transactions([60, 5])
    writer = create(tmp_path / "j", segment_bytes=1000)
    writer.append(block(written[0]))
    writer.commit()
    real = os.writev

    def full(fd: int, parts: list[memoryview]) -> int:
        if Path(f"/proc/self/fd/{fd}").readlink().name.endswith(".sealed.arrows"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, parts)

    monkeypatch.setattr(os, "writev", full)
    with pytest.raises(JournalFull):
        seal_everything(writer)
    assert not (tmp_path / "j/segments/00000001.sealed.arrows").exists()
    monkeypatch.setattr(os, "writev", real)
    seal_everything(writer)
    assert (tmp_path / "j/segments/00000001.sealed.arrows").exists()
    writer.append(block(written[1]))
    writer.close()
    assert read_all(tmp_path / "j").equals(numbered(written))


@needs_mount
def test_a_read_only_directory_is_a_clear_error(small_disk: Path) -> None:
    create(small_disk / "j").close()
    subprocess.run([MOUNT, "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(JournalError, match="Read-only file system") as caught:
        JournalWriter.open(small_disk / "j")
    assert caught.value.hint is not None
    assert "writable" in caught.value.hint
    with pytest.raises(JournalError, match="Read-only file system"):
        create(small_disk / "k")


def test_a_failed_fsync_ends_the_process(tmp_path: Path) -> None:
    body = f"""
import os
from pathlib import Path
writer = create(Path({str(tmp_path / "j")!r}))
writer.append(block(Maker().transaction(3)))
def fail(fd):
    raise OSError(5, "Input/output error")
os.fdatasync = fail
try:
    writer.commit()
except BaseException:
    print("caught")
"""
    done = subprocess.run(script(body), capture_output=True, check=False)
    assert done.returncode == EXIT_FSYNC
    assert b"fsync of" in done.stderr
    assert b"caught" not in done.stdout


def test_two_writers_are_impossible_and_the_second_names_the_first(tmp_path: Path) -> None:
    with create(tmp_path / "j"):
        with pytest.raises(JournalLocked, match=f"process {os.getpid()} on "):
            JournalWriter.open(tmp_path / "j")
        body = f"from pathlib import Path\nJournalWriter.open(Path({str(tmp_path / 'j')!r}))"
        done = subprocess.run(script(body), capture_output=True, check=False)
        assert done.returncode == 1
        assert f"process {os.getpid()} on ".encode() in done.stderr
    JournalWriter.open(tmp_path / "j").close()


def test_the_lock_is_free_after_an_opening_that_failed(tmp_path: Path) -> None:
    create(tmp_path / "j").close()
    header = (tmp_path / "j" / "journal.json").read_bytes()
    (tmp_path / "j" / "journal.json").write_bytes(b"{}")
    with pytest.raises(JournalError):
        JournalWriter.open(tmp_path / "j")
    (tmp_path / "j" / "journal.json").write_bytes(header)
    JournalWriter.open(tmp_path / "j").close()
