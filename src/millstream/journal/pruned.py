"""The record of what a journal has forgotten: kept beside the manifest, which can be lost, and in it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from millstream.errors import JournalCorrupt
from millstream.journal.files import disk_errors, replace_file, sealed_json, unsealed_json
from millstream.journal.index import Cut

FILE = "pruned.json"


@dataclass(frozen=True)
class Pruned:
    """What is no longer in a journal: all segments up to this number, all seqs up to this one.

    Positions and commit time are those of the last transaction that is gone; `max_ts_us` is the
    latest commit time of all that are.
    """

    segment: int
    seq: int
    commit_position: int
    resume_position: int
    covered: int
    commit_ts_us: int
    max_ts_us: int

    @property
    def cut(self) -> Cut:
        """The end of the last transaction that is gone."""
        return Cut(self.seq, self.commit_position, self.resume_position, self.commit_ts_us)

    def to_bytes(self) -> bytes:
        return sealed_json(asdict(self))

    @classmethod
    def from_bytes(cls, raw: bytes) -> Pruned:
        body = unsealed_json(raw)
        if body is None:
            raise JournalCorrupt(f"{FILE} is damaged", hint="restore it from a backup")
        return cls(**body)

    @classmethod
    def load(cls, directory: Path) -> Pruned | None:
        """What was pruned from the journal in a directory of this host; None if nothing was."""
        try:
            return cls.from_bytes((directory / FILE).read_bytes())
        except FileNotFoundError:
            return None

    def save(self, directory: Path) -> None:
        with disk_errors(directory / FILE, "write down what is pruned"):
            replace_file(directory / FILE, self.to_bytes())
