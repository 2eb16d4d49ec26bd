"""What a journal may forget: which closed segments are due, and the record of what is gone.

Segments go from the oldest on, sealed and whole, and only where a transaction ends with one, so that
the first retained row begins a transaction. The last segment with rows always stays.

Forgetting is three steps: `pruned.json` says what is gone from now on, then the manifest leaves the
segments out, then their files are removed. A crash in between is finished by the next writer. No
number of a segment is ever used again, so that an old slice finds its own bytes or none.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from millstream.journal.files import disk_errors, remove_file, replace_file, sync_directory
from millstream.journal.index import CUTS, INDEX
from millstream.journal.manifest import Entry
from millstream.journal.pruned import Pruned
from millstream.model import Retention

REQUEST = "prune-request.json"


@dataclass(frozen=True)
class Due:
    """The oldest segments that can go now, and those that should go as well but are still needed."""

    entries: tuple[Entry, ...]
    held: tuple[Entry, ...]


def pruned_after(before: Pruned | None, entries: Sequence[Entry]) -> Pruned:
    """What will be gone when these closed segments, the oldest ones, go too."""
    last = entries[-1]
    times = [entry.max_ts_us for entry in entries if entry.max_ts_us is not None]
    return Pruned(
        segment=last.number,
        seq=last.last_seq,
        commit_position=last.commit_position,
        resume_position=last.resume_position,
        covered=last.covered,
        commit_ts_us=last.commit_ts_us,
        max_ts_us=max([*times, before.max_ts_us if before else 0]),
    )


def size_of(entry: Entry) -> int:
    """Bytes of a closed segment's files."""
    index = entry.index_entries * INDEX.itemsize + entry.cut_entries * CUTS.itemsize
    return entry.bytes + index + (entry.ends_bytes or 0)


def due(
    entries: Sequence[Entry], rule: Retention, *, open_bytes: int, open_rows: int, lowest: int | None, now_us: int
) -> Due:
    """What a rule says of the closed segments of a journal. Pure.

    `lowest` is the lowest seq that a target stands at: nothing after it may go. None: nobody needs
    anything. A segment is as old as its latest transaction, by commit time, or as its sealing if
    the source's clock was ahead.
    """
    wanted = max(_too_old(entries, rule, now_us), _too_large(entries, rule, open_bytes))
    wanted = _whole(entries, min(wanted, _most(entries, open_rows)))
    free = sum(1 for entry in entries if lowest is None or entry.last_seq <= lowest)
    now = _whole(entries, min(wanted, free))
    return Due(tuple(entries[:now]), tuple(entries[now:wanted]))


def removable(entries: Sequence[Entry], segment: int, *, open_rows: int) -> tuple[Entry, ...]:
    """The closed segments up to this number, as far as they may go at all."""
    upto = sum(1 for entry in entries if entry.number <= segment)
    return tuple(entries[: _whole(entries, min(upto, _most(entries, open_rows)))])


def at_most(entries: Sequence[Entry], most: int) -> tuple[Entry, ...]:
    """The oldest of these, so many, or more if a transaction goes on beyond them: it goes whole."""
    whole = (count for count in range(most, len(entries)) if _whole(entries, count) == count)
    return tuple(entries[: next(whole, len(entries))])


def _most(entries: Sequence[Entry], open_rows: int) -> int:
    """How many of the oldest segments can go at all: sealed ones, and not the last one with rows."""
    sealed = next((count for count, entry in enumerate(entries) if not entry.sealed), len(entries))
    return sealed if open_rows else min(sealed, max(len(entries) - 1, 0))


def _too_old(entries: Sequence[Entry], rule: Retention, now_us: int) -> int:
    if rule.age_ms is None:
        return 0
    oldest = now_us - rule.age_ms * 1000
    for count, entry in enumerate(entries):
        if min(entry.max_ts_us or 0, int(entry.sealed_at * 1_000_000)) >= oldest:
            return count
    return len(entries)


def _too_large(entries: Sequence[Entry], rule: Retention, open_bytes: int) -> int:
    if rule.bytes is None:
        return 0
    size = open_bytes + sum(size_of(entry) for entry in entries)
    count = 0
    while size > rule.bytes and count < len(entries):
        size -= size_of(entries[count])
        count += 1
    return count


def _whole(entries: Sequence[Entry], count: int) -> int:
    """The largest number of segments, up to `count`, that ends with the end of a transaction."""
    while count and entries[count - 1].last_cut != entries[count - 1].last_seq:
        count -= 1
    return count


@dataclass(frozen=True)
class PruneRequest:
    """What a command asks of the process that writes the journal: let go of all segments up to this one."""

    segment: int

    def save(self, directory: Path) -> None:
        with disk_errors(directory / REQUEST, "leave the request"):
            replace_file(directory / REQUEST, json.dumps(asdict(self)).encode())

    @classmethod
    def load(cls, directory: Path) -> PruneRequest | None:
        try:
            return cls(int(json.loads((directory / REQUEST).read_bytes())["segment"]))
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError):
            return cls(0)

    @staticmethod
    def done(directory: Path) -> None:
        with disk_errors(directory / REQUEST, "remove the request"):
            if remove_file(directory / REQUEST):
                sync_directory(directory)
