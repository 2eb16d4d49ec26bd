"""What tasks of several targets share: taken instead of decoded again, and missed by nobody when it is not there."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from millstream.spark import shelf as shelves
from millstream.spark.shelf import Decoded, Shelf


def made(first: int = 0) -> Decoded:
    """Two batches, with all that a column can be awkward by: nulls, empty texts, structs, lists and maps."""
    batches = []
    for start in (first, first + 500):
        ids = list(range(start, start + 500))
        columns = {
            "_ms_seq": pa.array(ids, pa.int64()),
            "note": pa.array([None if i % 3 == 0 else "x" * (i % 7) for i in ids], pa.string()),
            "was": pa.array([{"a": i} if i % 2 else None for i in ids], pa.struct([("a", pa.int32())])),
            "some": pa.array([["a"] * (i % 3) for i in ids], pa.list_(pa.string())),
            "special": pa.array([[("k", "v")] if i % 5 == 0 else [] for i in ids], pa.map_(pa.string(), pa.string())),
        }
        batches.append(pa.RecordBatch.from_pydict(columns))
    return Decoded(batches, taken=1000, skipped=7, bytes=1234)


def never() -> Decoded:
    raise AssertionError("it was decoded again")


def same(one: Decoded, other: Decoded) -> bool:
    counts = [(each.taken, each.skipped, each.bytes) for each in (one, other)]
    return counts[0] == counts[1] and pa.Table.from_batches(one.batches).equals(pa.Table.from_batches(other.batches))


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    made = Shelf(str(tmp_path / "a shelf"), readers=3)
    made.prepare()
    return made


def names(shelf: Shelf) -> list[str]:
    return sorted(path.name for path in Path(shelf.directory).iterdir())


def test_each_reader_gets_the_same_and_the_last_one_leaves_nothing(shelf: Shelf) -> None:
    first = shelf.changes("k", made)
    assert same(first, made())
    assert names(shelf) == ["k.arrow", "k.lock"]
    assert same(shelf.changes("k", never), first)
    last = shelf.changes("k", never)
    assert names(shelf) == []
    # What was taken outlives its file.
    assert same(last, first)


def test_other_changes_are_decoded(shelf: Shelf) -> None:
    shelf.changes("k", made)
    assert same(shelf.changes("other", lambda: made(5000)), made(5000))


def test_an_error_goes_to_who_decodes_and_leaves_nothing_to_be_taken(shelf: Shelf) -> None:
    with pytest.raises(AssertionError, match="decoded again"):
        shelf.changes("k", never)
    assert same(shelf.changes("k", made), made())
    assert same(shelf.changes("k", never), made())


def test_who_was_killed_while_decoding_is_not_waited_for(shelf: Shelf) -> None:
    def die() -> Decoded:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    process = multiprocessing.get_context("fork").Process(target=shelf.changes, args=("k", die))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    began = time.monotonic()
    assert same(shelf.changes("k", made), made())
    assert time.monotonic() - began < shelves.PATIENCE_SECONDS
    assert same(shelf.changes("k", never), made())


def test_who_does_not_come_back_stops_nobody(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shelves, "PATIENCE_SECONDS", 0.05)
    lock = os.open(Path(shelf.directory, "k.lock"), os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    assert same(shelf.changes("k", made), made())
    assert names(shelf) == ["k.lock"]
    os.close(lock)


def torn(shelf: Shelf) -> None:
    path = Path(shelf.directory, "k.arrow")
    path.write_bytes(path.read_bytes()[:1000])


def unlabelled(shelf: Shelf) -> None:
    Path(shelf.directory, "k.lock").write_bytes(b"")


def gone(shelf: Shelf) -> None:
    Path(shelf.directory, "k.arrow").unlink()


@pytest.mark.parametrize("damage", [torn, unlabelled, gone])
def test_what_is_not_whole_is_decoded_and_laid_there_anew(shelf: Shelf, damage: Callable[[Shelf], None]) -> None:
    shelf.changes("k", made)
    damage(shelf)
    assert same(shelf.changes("k", made), made())
    assert same(shelf.changes("k", never), made())


def test_nothing_is_added_to_a_full_shelf_and_what_lies_there_stays(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = sum(batch.nbytes for batch in made().batches)
    monkeypatch.setattr(shelves, "MOST_BYTES", 2 * size)
    shelf.changes("first", made)
    assert same(shelf.changes("second", made), made())
    assert names(shelf) == ["first.arrow", "first.lock"]
    assert same(shelf.changes("first", never), made())


def test_what_nobody_took_for_long_makes_room(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    size = sum(batch.nbytes for batch in made().batches)
    monkeypatch.setattr(shelves, "MOST_BYTES", 2 * size)
    shelf.changes("first", made)
    long_ago = time.time() - shelves.KEPT_SECONDS - 1
    for name in names(shelf):
        os.utime(Path(shelf.directory, name), (long_ago, long_ago))
    shelf.changes("second", made)
    assert names(shelf) == ["second.arrow", "second.lock"]


def test_two_who_hold_a_lock_of_the_same_changes_write_two_files(shelf: Shelf) -> None:
    """A lock that is thirty seconds old may be removed while somebody decodes: the next one finds none, and decodes."""

    def decode() -> Decoded:
        Path(shelf.directory, "k.lock").unlink()
        assert same(shelf.changes("k", made), made())
        (laid,) = [path.stat().st_ino for path in Path(shelf.directory).glob("k.arrow")]
        taken = shelf.changes("k", never)
        inner.append((laid, taken))
        return made()

    inner: list[tuple[int, Decoded]] = []
    assert same(shelf.changes("k", decode), made())
    ((laid, taken),) = inner
    assert Path(shelf.directory, "k.arrow").stat().st_ino != laid
    assert same(taken, made()), "what was mapped before has not changed"


def test_without_a_place_each_decodes_for_himself(shelf: Shelf) -> None:
    Path(shelf.directory, "k.arrow").mkdir()  # nothing can be put there
    assert same(shelf.changes("k", made), made())
    assert same(shelf.changes("k", made), made())
    assert names(shelf) == ["k.arrow", "k.lock"]
    nowhere = Shelf(str(Path(shelf.directory) / "nowhere"), readers=3)
    assert same(nowhere.changes("k", made), made())


def test_where_nothing_can_be_written_what_lies_there_is_still_taken(shelf: Shelf) -> None:
    shelf.changes("k", made)
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, usual[1]))  # as on a full disk: no file may get any longer
    try:
        found = shelf.changes("k", never)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)
    assert same(found, made())
    # Nobody knows any more what lies there: the next one decodes for himself, and lays it there anew.
    assert same(shelf.changes("k", made), made())
    assert same(shelf.changes("k", never), made())


def test_a_shelf_is_empty_when_it_is_prepared(shelf: Shelf) -> None:
    shelf.changes("k", made)
    shelf.prepare()
    assert names(shelf) == []
    assert Path(shelf.directory).stat().st_mode & 0o777 == 0o700


KEYS = 12


def _take_all(shelf: Shelf, counted: Path) -> None:
    for number in range(KEYS):

        def decode(number: int = number) -> Decoded:
            with counted.open("a") as file:
                file.write(f"{number}\n")
            return made(number * 1000)

        assert same(shelf.changes(str(number), decode), made(number * 1000))


def test_of_those_who_come_at_once_one_decodes(shelf: Shelf, tmp_path: Path) -> None:
    counted = tmp_path / "decoded"
    context = multiprocessing.get_context("fork")
    tasks = [context.Process(target=_take_all, args=(shelf, counted)) for _ in range(3)]
    for task in tasks:
        task.start()
    for task in tasks:
        task.join(60)
    assert [task.exitcode for task in tasks] == [0, 0, 0]
    assert sorted(map(int, counted.read_text().split())) == list(range(KEYS))
    assert names(shelf) == []
