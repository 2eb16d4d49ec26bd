"""The manifest: every closed segment, in order. Readers find all but the last segment through it."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from millstream.errors import JournalCorrupt
from millstream.journal.files import disk_errors, replace_file, sealed_text, unsealed_json
from millstream.journal.pruned import Pruned
from millstream.journal.segment import End, Mark, segment_name

FILE = "manifest.json"


@dataclass(frozen=True)
class Entry:
    """A closed segment. It holds committed rows only and its files never change again.

    `last_cut` is the last transaction end in it, None when one transaction covers it all;
    `covered` the journal's end when it was closed. `bytes` is the length of its `.arrows`,
    `row_bytes` what its rows count in planning. `sealed_at` (unix time) is 0 in open form.
    """

    number: int
    epoch: int
    first_seq: int
    last_seq: int
    bytes: int
    row_bytes: int
    first_commit_position: int | None
    commit_position: int
    resume_position: int
    covered: int
    commit_ts_us: int
    min_ts_us: int | None
    max_ts_us: int | None
    last_cut: int | None
    index_entries: int
    index_crc: int
    cut_entries: int
    cut_crc: int
    sealed_at: float = 0.0
    ends_bytes: int | None = None
    """The length of its `.ends`; None when it has none, and its ends are read from its rows."""
    ends_blocks: int = 0
    ends_crc: int = 0

    @property
    def sealed(self) -> bool:
        return self.sealed_at > 0

    @property
    def rows(self) -> int:
        return self.last_seq - self.first_seq + 1

    @property
    def name(self) -> str:
        return segment_name(self.number, self.sealed)


_FIELDS = tuple(field.name for field in fields(Entry))


def _made(values: list[Any]) -> Entry:
    """`Entry(*values)` in a quarter of the time: a frozen class sets each field by a call, and there are thousands."""
    entry = object.__new__(Entry)
    vars(entry).update(zip(_FIELDS, values, strict=True))
    return entry


@lru_cache(maxsize=1 << 14)
def _text(entry: Entry) -> str:
    """The values of an entry as JSON. Kept: a manifest has thousands, and each new version changes one of them."""
    return json.dumps([getattr(entry, name) for name in _FIELDS], separators=(",", ":"))


def entry_of(mark: Mark, end: End, epoch: int) -> Entry:
    """The entry of a segment that is closed at `mark`, where the journal stood at `end`."""
    return Entry(
        number=mark.number,
        epoch=epoch,
        first_seq=mark.first_seq,
        last_seq=mark.last_seq,
        bytes=mark.length,
        row_bytes=mark.row_bytes,
        first_commit_position=mark.first_commit_position,
        commit_position=end.commit_position,
        resume_position=end.resume_position,
        covered=end.covered,
        commit_ts_us=end.commit_ts_us,
        min_ts_us=mark.min_ts_us,
        max_ts_us=mark.max_ts_us,
        last_cut=mark.last_cut,
        index_entries=mark.index_entries,
        index_crc=mark.index_crc,
        cut_entries=mark.cut_entries,
        cut_crc=mark.cut_crc,
    )


@dataclass(frozen=True)
class Manifest:
    """The closed segments at one version."""

    version: int = 0
    entries: tuple[Entry, ...] = ()
    pruned: Pruned | None = None
    """What was before the first of them and is gone."""

    def to_bytes(self) -> bytes:
        pruned = json.dumps(vars(self.pruned) if self.pruned else None)
        entries = ",".join(_text(entry) for entry in self.entries)
        names = json.dumps(_FIELDS)
        return sealed_text(f'{{"version":{self.version},"pruned":{pruned},"fields":{names},"entries":[{entries}]}}')

    @classmethod
    def from_bytes(cls, raw: bytes) -> Manifest:
        body = unsealed_json(raw)
        if body is None:
            raise JournalCorrupt(
                f"{FILE} is damaged", hint="open the journal for writing once: it is rebuilt from the segments"
            )
        pruned, names = body["pruned"], tuple(body["fields"])
        if names == _FIELDS:
            entries = tuple(_made(values) for values in body["entries"])
        else:
            entries = tuple(Entry(**dict(zip(names, values, strict=True))) for values in body["entries"])
        return cls(body["version"], entries, Pruned(**pruned) if pruned else None)

    def adding(self, *entries: Entry) -> Manifest:
        """The next version: `entries` added, each in the place of an older one of its number."""
        by_number = {entry.number: entry for entry in (*self.entries, *entries)}
        return replace(self, version=self.version + 1, entries=tuple(by_number[n] for n in sorted(by_number)))

    def without(self, number: int | None) -> Manifest:
        """The same version without a segment whose rows another one has taken over."""
        return replace(self, entries=tuple(entry for entry in self.entries if entry.number != number))

    def after(self, pruned: Pruned) -> Manifest:
        """The next version: without what is pruned."""
        left = tuple(entry for entry in self.entries if entry.number > pruned.segment)
        return Manifest(self.version + 1, left, pruned)

    def save(self, directory: Path) -> None:
        path = directory / FILE
        with disk_errors(path, "replace the manifest"):
            replace_file(path, self.to_bytes())
