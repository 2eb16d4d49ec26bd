"""How fast a place is found in a journal of 100 GB: by seq, by position, by time.

Only the index of such a journal is made, not its rows: a lookup reads nothing else. Some segments hold
a transaction a row, the others long ones. Commit times jitter, as those of a busy server do. Each
answer is compared with a plain search over all transactions. *Cold* is a reader that was just made, *warm*
one that has looked before; the operating system may have the files in memory for both.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa

from millstream.bench.frame import Settings
from millstream.checksum import crc32
from millstream.journal import JOURNAL, JournalReader, JournalWriter
from millstream.journal.ends import ENDS, encode
from millstream.journal.files import HEAD, SEGMENTS
from millstream.journal.format import SEGMENT_BYTES, Head
from millstream.journal.index import CUTS, Records, cuts_of, integers
from millstream.journal.manifest import Entry, Manifest, entry_of
from millstream.journal.segment import End, Mark, segment_name
from millstream.model import Json

SEGMENTS_OF_100_GB = 1_600
ROWS = 430_000
"""Rows of 150 bytes in a sealed segment of 64 MiB."""
DENSE = 4
LONG = 2_000
NEAR = 4
LOOKUPS = 60
COLD_MUST_MS = 50.0
WARM_MUST_MS = 10.0

_START_US = 1_700_000_000_000_000
_JITTER_US = 2_000_000


@dataclass(frozen=True)
class Wide:
    """The index of a wide journal on disk, and every transaction end that it describes."""

    path: Path
    ends: Records
    dense: tuple[int, ...]
    """The numbers of the segments with a transaction a row."""

    def places(self, count: int, seed: int = 1) -> Records:
        """Some of the ends, most of them in dense segments, where most ends are."""
        return np.random.default_rng(seed).choice(self.ends, count, replace=False)


def build(path: Path, segments: int, rows: int, dense: int, *, all_files: bool = True) -> Wide:
    """Make the index of a journal of so many full segments.

    Without `all_files` only the dense ones and those near them have their own: times jitter that far.
    """
    JournalWriter.create(path, source="wide", source_kind="postgres", identity={}, start_position=1).close()
    numbers = tuple(int(n) for n in np.linspace(1, segments, dense + 2)[1:-1])
    dice = np.random.default_rng(7)
    entries: list[Entry] = []
    found: list[Records] = []
    first_seq, position = 1, 1_000
    for number in range(1, segments + 1):
        step = 1 if number in numbers else LONG
        ends = _ends(first_seq, rows, step, position, dice)
        cuts = _dense_cuts(ends) if step == 1 else _sparse_cuts(ends)
        near = any(abs(number - other) <= NEAR for other in numbers)
        entries.append(_entry(path, number, rows, ends, cuts, files=all_files or near))
        found.append(ends)
        first_seq, position = first_seq + rows, int(ends["resume_position"][-1])
    manifest = Manifest().adding(*entries)
    manifest.save(path)
    _publish(path, manifest)
    return Wide(path, np.concatenate(found), numbers)


def _ends(first_seq: int, rows: int, step: int, position: int, dice: np.random.Generator) -> Records:
    """Transactions of `step` rows each, with commit times that mostly grow."""
    count = rows // step
    ends = np.zeros(count, ENDS)
    ends["seq"] = first_seq + step * np.arange(1, count + 1) - 1
    ends["seq"][-1] = first_seq + rows - 1
    ends["commit_position"] = position + np.cumsum(dice.integers(60, 600, count) * step)
    ends["resume_position"] = ends["commit_position"] + 48
    ends["commit_ts_us"] = _START_US + ends["seq"] * 100 + dice.integers(-_JITTER_US, _JITTER_US, count)
    return ends


def _dense_cuts(ends: Records) -> Records:
    """Cuts of a transaction a row, by the journal's own thinning, as commits of 5,000 rows make them."""
    parts, size = [], 0
    for at in range(0, len(ends), 5_000):
        some = ends[at : at + 5_000]
        parts.append(cuts_of(_rows(some), open_end=False, bytes_before=size))
        size = int(parts[-1]["bytes"][-1])
    return np.concatenate(parts)


def _rows(ends: Records) -> pa.RecordBatch:
    """A row per end, without a payload."""
    columns = {"seq": "seq", "commit_position": "commit_position", "resume_position": "resume_position"}
    columns |= {"commit_ts": "commit_ts_us", "txid": "seq"}
    values = [
        integers(ends[columns[field.name]]).view(field.type)
        if field.name in columns
        else pa.array(np.zeros(len(ends)), field.type)
        if field.name != "payload"
        else pa.array([b""] * len(ends), pa.large_binary())
        for field in JOURNAL
    ]
    return pa.RecordBatch.from_arrays(values, schema=JOURNAL)


def _sparse_cuts(ends: Records) -> Records:
    """Cuts of transactions longer than what is thinned: all of them."""
    cuts = np.zeros(len(ends), CUTS)
    for name in ENDS.names or ():
        cuts[name] = ends[name]
    cuts["min_ts_us"] = cuts["max_ts_us"] = ends["commit_ts_us"]
    cuts["bytes"] = (ends["seq"] - ends["seq"][0] + 1) * 150
    return cuts


def _entry(path: Path, number: int, rows: int, ends: Records, cuts: Records, *, files: bool) -> Entry:
    last = ends[-1]
    mark = Mark(
        number=number,
        first_seq=int(last["seq"]) - rows + 1,
        last_seq=int(last["seq"]),
        length=SEGMENT_BYTES,
        cut_entries=len(cuts),
        cut_crc=crc32(cuts.tobytes()),
        row_bytes=int(cuts["bytes"][-1]),
        first_commit_position=int(ends["commit_position"][0]),
        min_ts_us=int(ends["commit_ts_us"].min()),
        max_ts_us=int(ends["commit_ts_us"].max()),
        last_cut=int(last["seq"]),
    )
    resume = int(last["resume_position"])
    end = End(mark.last_seq, int(last["commit_position"]), resume, resume, int(last["commit_ts_us"]))
    encoded = encode(ends)
    if files:
        (path / SEGMENTS / f"{segment_name(number, sealed=True)}.cuts").write_bytes(cuts.tobytes())
        (path / SEGMENTS / f"{segment_name(number, sealed=True)}.ends").write_bytes(encoded.raw)
    facts = {"ends_bytes": len(encoded.raw), "ends_blocks": encoded.blocks, "ends_crc": encoded.crc}
    return replace(entry_of(mark, end, 1), sealed_at=time.time(), **facts)


def _publish(path: Path, manifest: Manifest) -> None:
    """The head of a journal whose next segment is not begun yet."""
    last = manifest.entries[-1]
    old = Head.from_bytes((path / HEAD).read_bytes())
    assert old is not None  # noqa: S101 - the writer has just made it
    head = replace(
        old,
        seq=last.last_seq,
        commit_position=last.commit_position,
        resume_position=last.resume_position,
        covered=last.covered,
        commit_ts_us=last.commit_ts_us,
        segment=segment_name(last.number + 1),
        segment_first_seq=last.last_seq + 1,
        manifest_version=manifest.version,
    )
    (path / HEAD).write_bytes(head.to_bytes())


def by_seq(wide: Wide, place: Records) -> tuple[Callable[[JournalReader], object], object]:
    """A lookup of one end, and its answer by plain search."""
    at = int(np.searchsorted(wide.ends["seq"], place["seq"]))
    answer = tuple(int(wide.ends[at][name]) for name in ENDS.names or ())

    def look(reader: JournalReader) -> object:
        cut = reader.cut_at(int(place["seq"]))
        return cut and (cut.seq, cut.commit_position, cut.resume_position, cut.commit_ts_us)

    return look, answer


def by_position(wide: Wide, place: Records) -> tuple[Callable[[JournalReader], object], object]:
    position = int(place["commit_position"]) - 7
    at = int(np.flatnonzero(wide.ends["commit_position"] >= position)[0])
    return lambda reader: reader.seq_at_position(position), int(wide.ends["seq"][at - 1]) if at else 0


def by_time(wide: Wide, place: Records) -> tuple[Callable[[JournalReader], object], object]:
    """The first transaction in commit order with this time or a later one; some after it may be older."""
    ts = int(place["commit_ts_us"])
    at = int(np.flatnonzero(wide.ends["commit_ts_us"] >= ts)[0])
    return lambda reader: reader.seq_at_time(ts), int(wide.ends["seq"][at - 1]) if at else 0


WAYS = {"seq": by_seq, "position": by_position, "time": by_time}


def run(settings: Settings) -> Json:
    """Build, look up cold and warm, and scan the same index from its beginning for comparison."""
    with tempfile.TemporaryDirectory(prefix="millstream-lookup-") as directory:
        settings.steps.plan(2)
        settings.steps.step(f"making the index of {SEGMENTS_OF_100_GB} segments")
        wide = build(Path(directory) / "journal", SEGMENTS_OF_100_GB, ROWS, DENSE)
        settings.steps.step("looking up")
        return _measure(wide)


def _measure(wide: Wide) -> Json:
    locations = [str(wide.path)]
    warm_reader = JournalReader(locations)
    equal = True
    kinds: dict[str, Json] = {}
    for name, way in WAYS.items():
        cold: list[float] = []
        warm: list[float] = []
        for place in wide.places(LOOKUPS):
            look, answer = way(wide, place)
            for readers, taken in ((JournalReader(locations), cold), (warm_reader, warm)):
                milliseconds, found = _timed(look, readers)
                equal &= found == answer
                taken.append(milliseconds)
        kinds[name] = {"cold_ms": _figures(cold), "warm_ms": _figures(warm[1:])}
    seqs = [int(place["seq"]) for place in wide.places(9)]
    scans = [_timed(partial(_scan, seq=seq), JournalReader(locations))[0] for seq in seqs]
    value = max(kind["cold_ms"]["median"] for kind in kinds.values())
    warmest = max(kind["warm_ms"]["median"] for kind in kinds.values())
    baseline = statistics.median(scans)
    return {
        "name": "lookup",
        "value": value,
        "unit": "ms",
        "baseline": "the same index read from its beginning",
        "baseline_value": round(baseline, 2),
        "ratio": round(baseline / value, 1),
        "must": f"{COLD_MUST_MS:g} ms cold, {WARM_MUST_MS:g} ms warm",
        "reached": value <= COLD_MUST_MS and warmest <= WARM_MUST_MS,
        "rows": int(wide.ends["seq"][-1]),
        "equal": equal,
        "kinds": kinds,
        "runs": LOOKUPS,
    }


def _scan(reader: JournalReader, seq: int) -> bool:
    """Read cuts from the first segment on until one holds the seq."""
    head = reader.head()
    assert head is not None  # noqa: S101 - the journal was published
    return any((reader._catalog.cuts(view)["seq"] >= seq).any() for view in reader._catalog.views(head))


def _timed(look: Callable[[JournalReader], object], reader: JournalReader) -> tuple[float, object]:
    began = time.perf_counter()
    found = look(reader)
    return (time.perf_counter() - began) * 1000, found


def _figures(milliseconds: Sequence[float]) -> Json:
    ordered = sorted(milliseconds)
    return {"median": round(statistics.median(ordered), 3), "most": round(ordered[-1], 3)}
