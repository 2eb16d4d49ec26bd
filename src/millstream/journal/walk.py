"""Going through a segment record by record, as far as every byte of it checks out."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from millstream.checksum import crc32
from millstream.journal.commit import SCHEMA_MESSAGE, CommitRecord
from millstream.journal.segment import frames


@dataclass(frozen=True)
class Point:
    """The end of a record in a segment."""

    number: int
    offset: int
    record: CommitRecord


def walk_segment(data: pa.Buffer, number: int, journal_id: str) -> tuple[list[Point], bool]:
    """The records of one segment as far as every byte checks out, and whether that is all of it."""
    view = memoryview(data)
    points: list[Point] = []
    checked = 0
    if bytes(view[: len(SCHEMA_MESSAGE)]) != SCHEMA_MESSAGE:
        return points, False
    for frame in frames(data):
        if frame.has_rows or frame.message.type != "record batch":
            continue
        record = frame.record()
        if (
            record is None
            or record.journal_id != journal_id
            or (record.at, record.crc_from) != (frame.offset, checked)
            or record.crc != crc32(view[checked : frame.offset])
        ):
            return points, False
        checked = frame.end
        points.append(Point(number, frame.end, record))
    return points, checked == len(view)
