"""Sealing a segment that has been written in long runs already: its bytes stay, only its name is new.

Who reads the log in bulk commits many rows at a time, and then rows are grouped by relation before they are
written. To write such a segment once more would bring nothing but work. It gets a second name instead: slices
planned on the first one stay readable until that is dropped, as after any sealing.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import pyarrow as pa

from millstream.failpoint import failpoint
from millstream.journal.ends import EncodedEnds, EndsOf, encode
from millstream.journal.files import disk_errors, open_file, sync_directory, sync_file, write_all
from millstream.journal.grouping import LONG_ROWS
from millstream.journal.manifest import Entry
from millstream.journal.segment import frames, record_batch, segment_name


def is_in_long_runs(entry: Entry) -> bool:
    """Whether a closed segment reads as well as a sealed one would."""
    return 0 < entry.index_entries * LONG_ROWS <= entry.rows


def adopt(segments: Path, entry: Entry, epoch: int) -> Entry | None:
    """The entry of the segment in sealed form, durable; it counts once it is in the manifest.

    None where the file system gives a file no second name: then it must be written once more.
    """
    source = segments / f"{entry.name}.arrows"
    target = segments / f"{segment_name(entry.number, sealed=True)}.arrows"
    encoded = _ends(source, entry)
    try:
        os.link(source, target)
    except OSError:
        return None
    failpoint("journal.adopted")
    # Small, and made again in place when they are damaged: not in both forms at once.
    for ending in (".idx", ".cuts"):
        write_beside(target.with_suffix(ending), source.with_suffix(ending).read_bytes())
    write_beside(target.with_suffix(".ends"), encoded.raw)
    sync_directory(segments)
    return replace(
        entry,
        epoch=epoch,
        sealed_at=time.time(),
        ends_bytes=len(encoded.raw),
        ends_blocks=encoded.blocks,
        ends_crc=encoded.crc,
    )


def _ends(source: Path, entry: Entry) -> EncodedEnds:
    """The transaction ends, from the few columns that have them; the others are not read."""
    ends = EndsOf(entry.first_seq, entry.rows)
    with disk_errors(source, "read the segment"), pa.memory_map(str(source)) as file:
        for frame in frames(file.read_buffer(entry.bytes)):
            if frame.has_rows:
                ends.add(record_batch(frame, str(source)))
    return encode(ends.ends(open_end=entry.last_cut != entry.last_seq))


def write_beside(path: Path, raw: bytes) -> None:
    """Write a derived file, durably."""
    with disk_errors(path, "write the index"):
        fd = open_file(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            write_all(fd, [raw])
            sync_file(fd, path)
        finally:
            os.close(fd)
