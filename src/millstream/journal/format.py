"""What a journal looks like on disk, and the values that name parts of it.

    journal/
      journal.json         header: id, incarnation, first seq, the source it is bound to
      writer.lock          flock of the one writer, with its pid, host and start
      epoch                the durable counter of the writer's openings
      head                 the visible end, overwritten by the writer after each commit
      manifest.json        the closed segments, replaced when one is closed, sealed or retired
      pruned.json          the last seq that retention removed, if it has removed any
      relations.jsonl      one description a line, once per content, the line number is its id
      schemas.jsonl        since which change each description was in force
      catalog.json         the last look at the source's catalog, and what was found without a word in the log
      segments/
        N.arrows           open form: an Arrow IPC stream in commit order, mixed relations; many rows that
                           were committed at once are in runs of one relation each
        N.sealed.arrows    the same rows, written once more in such runs; if the segment before came out
                           small, its rows too, and then that one is gone. Or, if all runs were long
                           already, a second name of the same file
        N.idx  N.sealed.idx     slices: one record per (record batch, relation)
        N.cuts N.sealed.cuts    transaction ends, one in 64 rows: seq, positions, commit time
        N.sealed.ends           all transaction ends, compressed

At most two segments are in open form and in nothing else: the one that is written and the one before
it, while it is being sealed. A transaction over many segments writes the inner ones in runs of one
relation and names them sealed at once; they count with the commit record in its last segment. Beside
them, the open form of a sealed segment stays while a running batch may read it.

Truth is in the segments alone: commit records inside the streams say what is whole, `head`,
`manifest.json`, `.idx`, `.cuts` and `.ends` can be rebuilt from them.

A commit record is a record batch without rows whose custom metadata holds a `CommitRecord`
(`commit.py`). Plain `pa.ipc.open_stream(path).read_all()` reads a segment of either form.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa

from millstream.checksum import crc32
from millstream.errors import JournalCorrupt
from millstream.model import Json
from millstream.sources.base import CAPTURED

JOURNAL = pa.schema([pa.field("seq", pa.int64(), nullable=False), *CAPTURED])
"""The columns of every segment."""

FORMAT = 1
"""The version of everything described here."""

SEGMENT_BYTES = 64 << 20
"""A segment is rolled at the first commit after which its rows take this (a larger transaction rolls inside)."""

MAX_BATCH_BYTES = 64 << 20
"""No record batch is larger, unless a single row is."""

MAX_BATCH_ROWS = 64 << 10
"""No record batch has more rows."""

HEAD_BYTES = 1024
"""`head` is padded to this size: one overwrite in place, no space and no new file needed.

A rename would be as atomic, but costs 1.6 ms on ext4 (it forces the new file's blocks out),
several times the fsync of a commit. A reader that meets a half-copied page sees a wrong CRC and
reads again.
"""


@dataclass(frozen=True)
class Slice:
    """A byte range of a segment that holds rows of one relation: all a reader ever opens.

    The bytes are one or more whole IPC record batch messages. They may hold rows of other
    relations and of other seqs, which `open_slice` leaves out. `rows`, `first_seq` and `last_seq`
    speak of the rows of `relation` in these bytes: the most that a slice can give. `crc` is the
    CRC-32 over the CRC-32s (little endian) of the messages that have rows.
    """

    journal_id: str
    epoch: int
    segment: str
    offset: int
    length: int
    crc: int
    relation: int
    rows: int
    first_seq: int
    last_seq: int


@dataclass(frozen=True)
class Head:
    """The visible end of a journal, as its writer published it after making it durable.

    `seq` is the last visible seq (first_seq - 1 while there is none). `resume_position` belongs to
    the transaction that ends there; `covered` is at least that and is the journal's end J: the
    only position capture starts from and the largest that may ever be acknowledged. `left` is how many
    bytes of the source's log were being read beyond it: changes that will come soon.
    """

    journal_id: str
    epoch: int
    seq: int
    commit_position: int
    resume_position: int
    covered: int
    commit_ts_us: int
    segment: str
    segment_first_seq: int
    segment_length: int
    index_entries: int
    cut_entries: int
    relations_bytes: int
    manifest_version: int
    published_us: int
    left: int = 0

    def to_bytes(self) -> bytes:
        body = json.dumps(vars(self), separators=(",", ":")).encode()
        return (b"%08x %s" % (crc32(body), body)).ljust(HEAD_BYTES, b"\n")

    @classmethod
    def from_bytes(cls, raw: bytes) -> Head | None:
        """None when the bytes are not a whole head (a crash of the machine while it was replaced)."""
        crc, _, body = raw.rstrip(b"\n").partition(b" ")
        try:
            if int(crc, 16) != crc32(body):
                return None
        except ValueError:
            return None
        return cls(**json.loads(body))


@dataclass(frozen=True)
class Header:
    """`journal.json`: who this journal is. Written once; only `identity` follows a source that has moved."""

    journal_id: str
    incarnation: int
    first_seq: int
    start_position: int
    source: str
    source_kind: str
    identity: Mapping[str, Any]
    created_at: str
    format: int = FORMAT

    @property
    def event_prefix(self) -> str:
        """The part of every event id that tells one incarnation of a journal from another."""
        return self.journal_id.replace("-", "")[:12]

    def to_json(self) -> Json:
        return asdict(self)

    def to_bytes(self) -> bytes:
        return json.dumps({**self.to_json(), "crc": self._crc()}, indent=2).encode() + b"\n"

    @classmethod
    def from_bytes(cls, raw: bytes) -> Header:
        """Raises JournalCorrupt unless this is a header, as it was written, of a format known here."""
        try:
            value = json.loads(raw)
            crc = value.pop("crc")
            if value.get("format") != FORMAT:
                raise JournalCorrupt(
                    f"the journal has format {value.get('format')}, this version reads {FORMAT}",
                    hint="use the version of millstream that wrote it",
                )
            header = cls(**value)
        except (ValueError, KeyError, TypeError) as error:
            raise JournalCorrupt(f"journal.json cannot be read: {error}", hint="restore it from a backup") from error
        if crc != header._crc():
            raise JournalCorrupt("journal.json was changed after it was written", hint="restore it from a backup")
        return header

    def _crc(self) -> int:
        return crc32(json.dumps(self.to_json(), sort_keys=True).encode())
