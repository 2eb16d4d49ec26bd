"""What a writer does with what it finds: keep what was committed, cut what was not, refuse damage.

The line between the last two: a group is fsynced before a byte of the next one is written. So bytes
that do not check out are a torn tail if they are the last thing in the journal and nobody was told
of them; if a commit record stands further on, or `head` names a later end, they were committed
once, and cutting them would lose rows silently.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa

from millstream.errors import JournalCorrupt
from millstream.failpoint import failpoint
from millstream.journal.commit import places
from millstream.journal.files import disk_errors, remove_file, sync_directory
from millstream.journal.format import Head, Header
from millstream.journal.manifest import FILE as MANIFEST
from millstream.journal.manifest import Entry, Manifest, entry_of
from millstream.journal.pruned import Pruned
from millstream.journal.rebuild import derived_files_fit, ensure_index, rebuilt_entry, sealed_entry
from millstream.journal.segment import End, Mark, frames, remove_segment, segment_name, segment_number
from millstream.journal.walk import Point, walk_segment


@dataclass(frozen=True)
class Recovered:
    """The journal as it stands: its closed segments, the open one (length 0 if there is none), its end."""

    manifest: Manifest
    mark: Mark
    end: End
    superseded: tuple[int, ...]
    """Segments that are there in a form that only batches which run now may still read."""


def start_of(header: Header) -> End:
    """Where a journal without rows stands."""
    at = header.start_position
    return End(header.first_seq - 1, at, at, at, 0)


def end_of(manifest: Manifest, header: Header) -> End:
    """Where the journal stood when the last closed segment was closed."""
    pruned = manifest.pruned
    if manifest.entries:
        last = manifest.entries[-1]
        return End(last.last_seq, last.commit_position, last.resume_position, last.covered, last.commit_ts_us)
    if pruned is not None:
        return End(pruned.seq, pruned.commit_position, pruned.resume_position, pruned.covered, pruned.commit_ts_us)
    return start_of(header)


def recover(directory: Path, header: Header, head: Head | None, epoch: int) -> Recovered:
    """Bring a journal that the caller has locked into a state that ends with a commit record."""
    segments = directory / "segments"
    with disk_errors(segments, "recover the journal"):
        pruned = Pruned.load(directory)
        names = _finish_pruning(segments, pruned)
        manifest = _manifest(directory, header, names, epoch)
        if pruned is not None and pruned != manifest.pruned:
            manifest = manifest.after(pruned)
            manifest.save(directory)
        _check_closed(segments, manifest, pruned.seq if pruned else header.first_seq - 1)
        names = _remove_leftovers(segments, manifest, names)
        manifest = _repair_closed(directory, manifest)
        recovered = replace(
            _recover_tail(directory, header, head, manifest, names, epoch), superseded=_superseded(manifest, names)
        )
    failpoint("journal.recovered")
    return recovered


def _finish_pruning(segments: Path, pruned: Pruned | None) -> list[str]:
    """Remove what was pruned and is still there. Returns the names of what is left, in order."""
    names = sorted(path.name for path in segments.iterdir())
    gone = [name for name in names if pruned is not None and segment_number(name) <= pruned.segment]
    for name in gone:
        remove_file(segments / name)
    if gone:
        sync_directory(segments)
    return names[len(gone) :]


def _recover_tail(
    directory: Path, header: Header, head: Head | None, manifest: Manifest, names: Sequence[str], epoch: int
) -> Recovered:
    """The segments that are not in the manifest: keep them up to the last good commit record."""
    segments = directory / "segments"
    last = manifest.entries[-1].number if manifest.entries else manifest.pruned.segment if manifest.pruned else 0
    tail = _tail(names, last)
    walked = walk(segments, header, tail, last + 1)
    good = next((point for point in reversed(walked) if point.record.committed), None)
    end = End.of(good.record) if good else end_of(manifest, header)
    judge(segments, header, head, tail, good, end)
    _cut(segments, tail, good)
    if good is None:
        return Recovered(manifest, Mark(last + 1, end.seq + 1, end.seq), end, ())
    last_of = {point.number: point for point in walked if point.number <= good.number}
    last_of[good.number] = good
    points = [last_of[number] for number in sorted(last_of)]
    marks = [ensure_index(segments, tail[point.number], point.offset, point.record) for point in points]
    if len(marks) > 1:
        closed = [entry_of(mark, End.of(last_of[mark.number].record), epoch) for mark in marks[:-1]]
        parts = {number for number, name in tail.items() if name == segment_name(number, sealed=True)}
        now = time.time()
        manifest = manifest.adding(*(replace(e, sealed_at=now) if e.number in parts else e for e in closed))
        manifest.save(directory)
    return Recovered(manifest, marks[-1], end, ())


def _tail(names: Sequence[str], last: int) -> dict[int, str]:
    """The segments that are not in the manifest, in order, each with the name of the form it has.

    One in sealed form alone is an inner part of a transaction over several segments; what a sealing
    left behind has an open form beside it.
    """
    stems = sorted(name.removesuffix(".arrows") for name in names if name.endswith(".arrows"))
    found: dict[int, str] = {}
    for stem in stems:
        if segment_number(stem) > last:
            found.setdefault(segment_number(stem), stem)
    return found


def walk(segments: Path, header: Header, tail: Mapping[int, str], first: int) -> list[Point]:
    """All records, in order, as far as every byte checks out."""
    points: list[Point] = []
    for expected, (number, name) in enumerate(tail.items(), start=first):
        if number != expected:
            break
        with pa.memory_map(str(segments / f"{name}.arrows")) as source:
            data = source.read_buffer()
            found, clean = walk_segment(data, number, header.journal_id)
            del data
        points += found
        if not clean:
            break
    return points


def judge(
    segments: Path, header: Header, head: Head | None, tail: Mapping[int, str], good: Point | None, end: End
) -> None:
    """Raise JournalCorrupt if anything after the last good record is known to have been committed."""
    place = (good.number, good.offset) if good else (min(tail, default=0), 0)
    where = segments / f"{tail.get(place[0], segment_name(place[0]))}.arrows"
    remedy = "restore the journal's files, or re-base the stream; `millstream journal verify` shows the damage"
    if head and head.journal_id == header.journal_id and (head.seq > end.seq or head.covered > end.covered):
        raise JournalCorrupt(
            f"{where} is damaged after byte {place[1]}: seq {head.seq} was committed, only {end.seq} can be read",
            hint=remedy,
        )
    for number in (number for number in tail if number >= place[0]):
        raw = (segments / f"{tail[number]}.arrows").read_bytes()
        start = place[1] if number == place[0] else 0
        for at in places(raw):
            frame = next(frames(pa.py_buffer(raw).slice(at), at), None)
            record = frame.record() if frame else None
            if at >= start and frame and record and record.journal_id == header.journal_id and record.committed:
                followed = frame.end < len(raw) or max(tail) > number
                if followed or (record.group_segment, record.group_offset) > place:
                    raise JournalCorrupt(
                        f"{where} is damaged after byte {place[1]}: "
                        f"a commit record (segment {number}, byte {at}) shows that it was committed",
                        hint=remedy,
                    )


def _cut(segments: Path, tail: Iterable[int], good: Point | None) -> None:
    """Remove every byte after the last good record, whole segments included, last one first."""
    beyond = [number for number in tail if good is None or number > good.number]
    for number in reversed(beyond):
        remove_segment(segments, number)
    if beyond:
        sync_directory(segments)
    if good and (segments / f"{segment_name(good.number)}.arrows").stat().st_size > good.offset:
        fd = os.open(segments / f"{segment_name(good.number)}.arrows", os.O_WRONLY)
        try:
            os.ftruncate(fd, good.offset)
            os.fsync(fd)
        finally:
            os.close(fd)


def _manifest(directory: Path, header: Header, names: Sequence[str], epoch: int) -> Manifest:
    """The manifest, rebuilt from sealed segments if it is damaged or gone."""
    try:
        return Manifest.from_bytes((directory / MANIFEST).read_bytes())
    except (FileNotFoundError, JournalCorrupt):
        pass
    found = [
        sealed_entry(directory / "segments", segment_number(name), header.journal_id)
        for name in names
        if name.endswith(".sealed.arrows")
    ]
    sealed: list[tuple[Entry, bool]] = []
    for one in (one for one in found if one is not None):
        while sealed and sealed[-1][0].first_seq >= one[0].first_seq:
            sealed.pop()  # its rows have been taken over by this one
        sealed.append(one)
    while sealed and not sealed[-1][1]:
        sealed.pop()  # the inner parts of a transaction whose commit must be found first
    manifest = replace(Manifest().adding(*(entry for entry, _ in sealed)), version=epoch * 1_000_000)
    manifest.save(directory)
    return manifest


def _check_closed(segments: Path, manifest: Manifest, before: int) -> None:
    """Every closed segment must be there, whole, and follow the one before it, the first one seq `before`."""
    for entry in manifest.entries:
        path = segments / f"{entry.name}.arrows"
        try:
            size = path.stat().st_size
        except FileNotFoundError:
            raise JournalCorrupt(
                f"{path} is missing: it holds seq {entry.first_seq} to {entry.last_seq}",
                hint="restore the file, or re-base the stream",
            ) from None
        if size < entry.bytes:
            raise JournalCorrupt(f"{path} has {size} of its {entry.bytes} bytes", hint="restore the file")
        if before + 1 != entry.first_seq:
            raise JournalCorrupt(f"{path} starts at seq {entry.first_seq}, what is before it ends at {before}")
        before = entry.last_seq


def _repair_closed(directory: Path, manifest: Manifest) -> Manifest:
    """Rebuild derived files of closed segments that are missing or too short; what is in them is not read here."""
    segments = directory / "segments"
    repaired = [entry for entry in manifest.entries if not derived_files_fit(segments, entry)]
    if not repaired:
        return manifest
    manifest = manifest.adding(*(rebuilt_entry(segments, entry) for entry in repaired))
    manifest.save(directory)
    return manifest


def _remove_leftovers(segments: Path, manifest: Manifest, names: Sequence[str]) -> list[str]:
    """Remove what a sealing left behind that never got into the manifest, and half-written files.

    Returns the names of what is left.
    """
    last = manifest.entries[-1].number if manifest.entries else 0
    waiting = {entry.number for entry in manifest.entries if not entry.sealed}
    opened = {segment_number(name) for name in names if name == f"{name[:8]}.arrows"}
    left = []
    for name in names:
        number = segment_number(name)
        half_sealed = ".sealed." in name and (number in waiting or (number > last and number in opened))
        without_rows = name[8:] in (".idx", ".cuts") and number not in opened
        if name.endswith(".tmp") or half_sealed or without_rows:
            remove_file(segments / name)
        else:
            left.append(name)
    return left


def _superseded(manifest: Manifest, names: Sequence[str]) -> tuple[int, ...]:
    """Segments with an open form beside the sealed one, and those whose rows the next one has taken over."""
    last = manifest.entries[-1].number if manifest.entries else 0
    forms = {entry.number: entry.name for entry in manifest.entries}
    found = {
        segment_number(name)
        for name in names
        if name.endswith(".arrows") and segment_number(name) <= last
        if forms.get(segment_number(name)) != name.removesuffix(".arrows")
    }
    return tuple(sorted(found))
