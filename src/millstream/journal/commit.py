"""Commit records: what makes rows whole and visible.

A commit record is written with the last bytes of its group, and the group is fsynced before a
byte of the next one is written. So a group is either whole (its CRC holds) or it is the last
thing in the journal and was never promised to anybody.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from millstream.checksum import crc32
from millstream.journal.format import JOURNAL

KEY = "millstream.commit"

SCHEMA_MESSAGE: bytes = JOURNAL.serialize().to_pybytes()
"""The first message of every segment."""

COMMIT_BODY = 64
"""A record batch message with a smaller body has no rows: nine columns of one row take 80 bytes."""


@dataclass(frozen=True)
class CommitRecord:
    """The end of a group: the last seq, the positions there, and how to check the bytes before it.

    `at` is the record's own offset in its segment and `crc` is over the bytes from `crc_from` to
    there. The group began at (`group_segment`, `group_offset`). A transaction too large for one
    segment is a group over several: each but the last then ends with a record that is not
    `committed` and says that the group goes on in the next segment.

    The message that carries a record has a CRC over all of its own bytes.

    The other fields describe the segment up to here, so that nothing needs to be read twice:
    what `Mark` and the files beside the segment hold.
    """

    journal_id: str
    epoch: int
    committed: bool
    seq: int
    commit_position: int
    resume_position: int
    covered: int
    commit_ts_us: int
    group_segment: int
    group_offset: int
    at: int
    crc_from: int
    crc: int
    first_seq: int
    row_bytes: int
    first_commit_position: int | None
    min_ts_us: int | None
    max_ts_us: int | None
    last_cut: int | None
    index_entries: int
    index_crc: int
    cut_entries: int
    cut_crc: int

    def to_text(self) -> bytes:
        """The record as it stands in the metadata of its message, before the message's CRC is known."""
        return _UNKNOWN + json.dumps(vars(self), separators=(",", ":")).encode()

    @classmethod
    def of_message(cls, message: bytes) -> CommitRecord | None:
        """The record in the bytes of an IPC message; None unless every byte of the message is right."""
        match = _RECORD.search(message)
        if match is None or int(match[1], 16) != crc32(_without_crc(message, match.start())):
            return None
        return cls(**json.loads(match[2]))


_RECORD = re.compile(rb"ms1 ([0-9a-f]{8}) (\{[^{}]{1,2000}\})")
_UNKNOWN = b"ms1 00000000 "


def _without_crc(message: bytes, at: int) -> bytes:
    """The message as it was when its CRC was taken."""
    return message[:at] + _UNKNOWN + message[at + len(_UNKNOWN) :]


def places(raw: bytes) -> Iterator[int]:
    """Where messages with commit records may start in `raw`, by what the records themselves say.

    For bytes whose frames cannot be trusted. Nothing is checked but that it reads like a record.
    """
    for match in _RECORD.finditer(raw):
        try:
            at = json.loads(match[2])["at"]
        except (ValueError, KeyError, TypeError):
            continue
        if isinstance(at, int) and 0 <= at < match.start():
            yield at


class _Parts:
    """A sink that keeps what Arrow's stream writer writes, so that we know every byte."""

    closed = False

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.size = 0

    def write(self, data: Any) -> int:
        self.parts.append(bytes(data))
        self.size += len(data)
        return len(data)

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        """Nothing is held back."""

    def take(self) -> bytes:
        data = b"".join(self.parts)
        self.parts.clear()
        return data


class CommitMessages:
    """Makes the IPC messages of commit records. One stream writer serves for all of them."""

    def __init__(self) -> None:
        self._sink = _Parts()
        self._writer = pa.ipc.new_stream(pa.PythonFile(self._sink, "w"), JOURNAL)
        self._empty = pa.RecordBatch.from_arrays([pa.nulls(0, field.type) for field in JOURNAL], schema=JOURNAL)
        self._writer.write_batch(self._empty)
        self._sink.take()

    def message(self, record: CommitRecord) -> bytes:
        self._writer.write_batch(self._empty, custom_metadata={KEY: record.to_text()})
        message = self._sink.take()
        at = message.index(_UNKNOWN)
        crc = b"ms1 %08x " % crc32(message)
        return message[:at] + crc + message[at + len(crc) :]
