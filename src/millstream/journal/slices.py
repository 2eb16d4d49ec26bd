"""Slices: naming the bytes that hold a range of a relation, and opening them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from millstream.checksum import crc32
from millstream.errors import JournalCorrupt, JournalError, JournalMismatch, OutOfRange
from millstream.journal.files import HEADER
from millstream.journal.format import JOURNAL, MAX_BATCH_ROWS, Header, Slice
from millstream.journal.grouping import LONG_ROWS
from millstream.journal.index import Records, column, integers
from millstream.journal.locations import Locations
from millstream.journal.pruned import FILE as PRUNED
from millstream.journal.pruned import Pruned
from millstream.journal.segment import frames, record_batch
from millstream.model import SeqRange

WINDOW_BYTES = 8 << 20
"""Small messages of an open-form segment are opened together, up to this size."""

_KEEP_BYTES = 2 * WINDOW_BYTES


def sealed_slices(index: Records, range: SeqRange, **names: Any) -> Iterator[Slice]:
    """The runs of a sealed segment that hold seqs of the range: one slice each."""
    for record in index[(index["last_seq"] > range.start) & (index["first_seq"] <= range.end)]:
        yield Slice(
            offset=int(record["offset"]),
            length=int(record["length"]),
            crc=_chained(np.array([record["crc"]])),
            relation=int(record["relation"]),
            rows=int(record["rows"]),
            first_seq=int(record["first_seq"]),
            last_seq=int(record["last_seq"]),
            **names,
        )


def open_slices(index: Records, range: SeqRange, **names: Any) -> Iterator[Slice]:
    """Slices of an open-form segment: windows of whole messages, the same bytes for each relation in them.

    A thousand one-row commits are so a few slices, and a task that opens several relations of one
    window reads it once.
    """
    wanted = (index["last_seq"] > range.start) & (index["first_seq"] <= range.end)
    places = index["offset"][wanted]
    if len(places) == 0:
        return
    if (index["rows"][wanted] >= LONG_ROWS).all() and len(np.unique(places)) == len(places):
        # Long runs of one relation each: no task has to read another's rows.
        yield from sealed_slices(index, range, **names)
        return
    # Of a batch in runs of one relation, a run outside the range can lie between two inside it.
    near = (index["offset"] >= places.min()) & (index["offset"] <= places.max())
    chosen, wanted = index[near], wanted[near]
    _, first, inverse = np.unique(chosen["offset"], return_index=True, return_inverse=True)
    messages = chosen[first]
    rows = np.bincount(inverse, weights=chosen["rows"])
    ends = messages["offset"] + messages["length"]
    start = 0
    while start < len(messages):
        size_end = np.searchsorted(ends, messages["offset"][start] + WINDOW_BYTES, side="right")
        rows_end = start + np.searchsorted(np.cumsum(rows[start:]), MAX_BATCH_ROWS, side="right")
        stop = max(start + 1, int(min(size_end, rows_end)))
        window = chosen[(inverse >= start) & (inverse < stop) & wanted]
        yield from _window_slices(window, messages[start:stop], names)
        start = stop


def _window_slices(window: Records, messages: Records, names: dict[str, Any]) -> Iterator[Slice]:
    offset = int(messages["offset"][0])
    length = int(messages["offset"][-1] + messages["length"][-1]) - offset
    crc = _chained(messages["crc"])
    for relation in np.unique(window["relation"]):
        mine = window[window["relation"] == relation]
        yield Slice(
            offset=offset,
            length=length,
            crc=crc,
            relation=int(relation),
            rows=int(mine["rows"].sum()),
            first_seq=int(mine["first_seq"].min()),
            last_seq=int(mine["last_seq"].max()),
            **names,
        )


def _chained(crcs: Records) -> int:
    return crc32(np.asarray(crcs, "<u4").tobytes())


def open_slice(
    slice: Slice, locations: Sequence[str], range: SeqRange | None = None, after_position: int | None = None
) -> pa.RecordBatch:
    """The rows of a slice: only of its relation, only in `range`, only with resume_position > `after_position`.

    In seq order, schema JOURNAL. Raises JournalCorrupt when the bytes are not those that were
    written, JournalMismatch when the location holds another journal, OutOfRange when the rows were
    pruned, JournalError when the segment is gone in this form (the range must be planned again).
    """
    try:
        return read_slice(slice, locations, range, after_position)
    except FileNotFoundError as error:
        raise _gone(slice, Locations(locations)) from error


def _gone(slice: Slice, locations: Locations) -> JournalError:
    """Why there is no file: pruned for good, or only in another form."""
    try:
        pruned = Pruned.from_bytes(locations.read_all(PRUNED))
    except FileNotFoundError:
        pruned = None
    if pruned is None or slice.first_seq > pruned.seq:
        return JournalError(f"segment {slice.segment} is gone", hint="the range must be planned again")
    return OutOfRange(
        f"seq {slice.first_seq} to {slice.last_seq} are not in the journal any more: it begins at seq {pruned.seq + 1}",
        hint="begin there, or deliver to a new target, which begins there",
    )


def read_slice(
    slice: Slice, locations: Sequence[str], range: SeqRange | None = None, after_position: int | None = None
) -> pa.RecordBatch:
    """As `open_slice`, for those who plan again themselves when they meet FileNotFoundError."""
    batch = _checked(slice, tuple(locations))
    chosen = column(batch, "relation") == slice.relation
    if range is not None:
        seq = column(batch, "seq")
        chosen &= (seq > range.start) & (seq <= range.end)
    if after_position is not None:
        chosen &= column(batch, "resume_position") > after_position
    return batch if chosen.all() else batch.take(integers(np.flatnonzero(chosen)))


_last: tuple[object, pa.RecordBatch] | None = None
"""The window this process opened last. Relations of one window are usually opened one after another."""
_journals: dict[tuple[str, ...], str] = {}


def _checked(slice: Slice, bases: tuple[str, ...]) -> pa.RecordBatch:
    """All rows in the bytes of a slice, whatever their relation."""
    global _last
    key = (bases, slice.journal_id, slice.segment, slice.offset, slice.length, slice.crc)
    last = _last  # another thread of this process may open another window meanwhile
    if last is not None and last[0] == key:
        return last[1]
    locations = Locations(bases)
    _check_journal(slice, locations)
    data = locations.read(f"segments/{slice.segment}.arrows", slice.offset, slice.length)
    batch = _parse(slice, data)
    _last = (key, batch) if data.size <= _KEEP_BYTES else None
    return batch


def _parse(slice: Slice, data: pa.Buffer) -> pa.RecordBatch:
    where = f"segment {slice.segment}"
    found = list(frames(data, slice.offset))
    with_rows = [frame for frame in found if frame.has_rows]
    crcs = [frame.crc() for frame in with_rows]
    whole = data.size == slice.length and bool(found) and found[-1].end == slice.offset + slice.length
    if not whole or not with_rows or _chained(np.array(crcs)) != slice.crc:
        raise JournalCorrupt(
            f"{where}: the bytes {slice.offset} to {slice.offset + slice.length} are not those that were written",
            hint="`millstream journal verify` shows what is damaged",
        )
    batches = [record_batch(frame, where) for frame in with_rows]
    return batches[0] if len(batches) == 1 else pa.concat_batches(batches)


def _check_journal(slice: Slice, locations: Locations) -> None:
    if _journals.get(locations.bases) == slice.journal_id:
        return
    header = read_header(locations)
    _journals[locations.bases] = header.journal_id
    if header.journal_id != slice.journal_id:
        raise JournalMismatch(
            f"{locations} holds journal {header.journal_id}, not {slice.journal_id}",
            hint="the journal was replaced; the stream must be re-based",
        )


def read_header(locations: Locations) -> Header:
    """The header of the journal at these locations."""
    try:
        return Header.from_bytes(locations.read_all(HEADER))
    except FileNotFoundError as error:
        raise JournalError(
            f"there is no journal at {locations}", hint="start capture once, or check the path"
        ) from error


EMPTY = pa.RecordBatch.from_arrays([pa.nulls(0, field.type) for field in JOURNAL], schema=JOURNAL)
"""No rows, in the schema of a segment."""
