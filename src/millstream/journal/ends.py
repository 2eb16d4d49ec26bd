"""Every transaction end of a sealed segment, in little space: `N.sealed.ends`.

`.cuts` keeps one end in 64 rows, which is enough to plan batches. To find a place exactly, the ends
between two of them are needed, and the rows that know them lie scattered over the segment's runs. So
sealing writes them down once more, in blocks: a block is the differences from end to end, by column,
bytes of the same weight together, compressed; about 5 bytes an end. The file begins with a directory of
its blocks, which carries their CRCs; the directory's own is in the manifest.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from isal import isal_zlib

from millstream.checksum import crc32
from millstream.errors import JournalCorrupt
from millstream.journal.index import Records, column, transaction_ends

ENDS = np.dtype([("seq", "<i8"), ("commit_position", "<i8"), ("resume_position", "<i8"), ("commit_ts_us", "<i8")])
BLOCKS = np.dtype([("first_seq", "<i8"), ("last_seq", "<i8"), ("offset", "<i8"), ("length", "<i4"), ("crc", "<u4")])

BLOCK_ENDS = 4096
_LEVEL = 1


@dataclass(frozen=True)
class EncodedEnds:
    """The bytes of a `.ends` file, and what the manifest says of it."""

    raw: bytes
    blocks: int
    crc: int


class EndsOf:
    """Gathers the ends of a segment from its runs, in whatever order these come."""

    def __init__(self, first_seq: int, rows: int) -> None:
        self._first = first_seq
        self._columns = {name: np.zeros(rows, "<i8") for name in ("commit_position", "resume_position", "commit_ts")}

    def add(self, batch: pa.RecordBatch) -> None:
        at = column(batch, "seq") - self._first
        for name, values in self._columns.items():
            values[at] = column(batch, name)

    def ends(self, *, open_end: bool) -> Records:
        """All of them; with `open_end` the last transaction goes on in the next segment."""
        commit, resume, ts = self._columns.values()
        at = transaction_ends(commit, open_end) if len(commit) else np.zeros(0, np.intp)
        found = np.zeros(len(at), ENDS)
        found["seq"] = self._first + at
        found["commit_position"] = commit[at]
        found["resume_position"] = resume[at]
        found["commit_ts_us"] = ts[at]
        return found


def ends_of(batches: Iterable[pa.RecordBatch], first_seq: int, last_seq: int, last_cut: int | None) -> Records:
    """The transaction ends of a segment that holds these seqs."""
    gathered = EndsOf(first_seq, last_seq - first_seq + 1)
    for batch in batches:
        gathered.add(batch)
    return gathered.ends(open_end=last_cut != last_seq)


def encode(ends: Records) -> EncodedEnds:
    """A `.ends` file of these ends."""
    parts = [_encode_block(ends[at : at + BLOCK_ENDS]) for at in range(0, len(ends), BLOCK_ENDS)]
    directory = np.zeros(len(parts), BLOCKS)
    directory["first_seq"] = ends["seq"][::BLOCK_ENDS]
    directory["last_seq"] = [ends["seq"][min(at + BLOCK_ENDS, len(ends)) - 1] for at in range(0, len(ends), BLOCK_ENDS)]
    directory["length"] = [len(part) for part in parts]
    directory["crc"] = [crc32(part) for part in parts]
    directory["offset"] = directory.nbytes + np.cumsum(directory["length"]) - directory["length"]
    head = directory.tobytes()
    return EncodedEnds(b"".join([head, *parts]), len(parts), crc32(head))


def _encode_block(ends: Records) -> bytes:
    values = ends.view("<i8").reshape(len(ends), -1).T
    steps = np.concatenate([values[:, :1], np.diff(values, axis=1)], axis=1)
    return isal_zlib.compress(np.ascontiguousarray(steps).view("u1").reshape(-1, 8).T.tobytes(), _LEVEL)


def read_directory(raw: bytes, blocks: int, crc: int, where: str) -> Records:
    """The directory at the beginning of a `.ends` file."""
    head = raw[: blocks * BLOCKS.itemsize]
    if len(head) < blocks * BLOCKS.itemsize or crc32(head) != crc:
        raise _damaged(where)
    return np.frombuffer(head, BLOCKS)


def decode_block(raw: bytes, crc: int, where: str) -> Records:
    """The ends in the bytes of one block."""
    if crc32(raw) != crc:
        raise _damaged(where)
    octets = np.frombuffer(zlib.decompress(raw), "u1").reshape(8, -1)
    steps = np.ascontiguousarray(octets.T).view("<i8").reshape(len(ENDS.names or ()), -1)
    return np.ascontiguousarray(np.cumsum(steps, axis=1).T).view(ENDS).reshape(-1)


def decode(raw: bytes, blocks: int, crc: int, where: str) -> Records:
    """All ends of a `.ends` file."""
    found = [np.zeros(0, ENDS)]
    for block in read_directory(raw, blocks, crc, where):
        part = raw[block["offset"] : block["offset"] + block["length"]]
        found.append(decode_block(part, int(block["crc"]), where))
    return np.concatenate(found)


def _damaged(where: str) -> JournalCorrupt:
    hint = "remove the file: the writer rebuilds it when it opens the journal"
    return JournalCorrupt(f"{where} is damaged", hint=hint)
