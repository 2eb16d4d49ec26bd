"""What `millstream journal ls` shows: journals, and the segments of one."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from millstream.cli.columns import Column, print_columns
from millstream.cli.output import console, size
from millstream.journal import describe
from millstream.journal.places import position_text
from millstream.model import Json


def summary(path: Path) -> Json:
    """One journal: who it is, what it holds, what it takes."""
    found = describe(path)
    header, head, earliest = found.header, found.head, found.retained.earliest
    return {
        "source": header.source,
        "kind": header.source_kind,
        "journal_id": header.journal_id,
        "incarnation": header.incarnation,
        "first_seq": earliest.seq,
        "first_position": position_text(header.source_kind, earliest.position),
        "oldest_commit_at": _time(found.retained.oldest_ts_us) if found.retained.oldest_ts_us is not None else None,
        "pruned_seq": found.retained.pruned.seq if found.retained.pruned else None,
        "last_seq": head.seq,
        "end_position": position_text(header.source_kind, head.covered),
        "last_commit_at": _time(head.commit_ts_us) if head.seq >= header.first_seq else None,
        "tables": list(found.tables),
        "files": found.files,
        "bytes": found.bytes,
        "created_at": header.created_at,
    }


def segments(path: Path) -> list[Json]:
    """The closed segments in order, then the open one."""
    found = describe(path)
    return [
        {
            "segment": segment.name,
            "state": segment.form,
            "rows": segment.rows,
            "first_seq": segment.first_seq,
            "last_seq": segment.last_seq,
            "end_position": position_text(found.header.source_kind, segment.covered),
            "bytes": segment.bytes,
        }
        for segment in found.segments
    ]


def print_journals(journals: list[Json]) -> None:
    if not journals:
        console().print("There is no journal yet.")
        return
    rows = [
        {
            **one,
            "seqs": _seqs(one),
            "oldest change (UTC)": (one["oldest_commit_at"] or "-")[:19].replace("T", " "),
            "tables": len(one["tables"]),
        }
        for one in journals
    ]
    _print(rows, _JOURNALS)


def print_segments(found: list[Json]) -> None:
    rows = [{**one, "seqs": _seqs(one)} for one in found]
    _print(rows, _SEGMENTS)


_JOURNALS = {
    "source": Column("source"),
    "kind": Column("kind", spare=3),
    "incarnation": Column("incarnation", right=True, spare=6),
    "seqs": Column("seqs"),
    "first_position": Column("first position", spare=4),
    "oldest change (UTC)": Column("oldest change (UTC)", spare=1),
    "end_position": Column("end position"),
    "tables": Column("tables", right=True, spare=2),
    "files": Column("files", right=True, spare=5),
    "bytes": Column("bytes", right=True),
}
_SEGMENTS = {
    "segment": Column("segment"),
    "state": Column("state"),
    "rows": Column("rows", right=True),
    "seqs": Column("seqs"),
    "end_position": Column("end position"),
    "bytes": Column("bytes", right=True),
}


def _print(rows: list[Json], columns: dict[str, Column]) -> None:
    texts = [[size(row[key]) if key == "bytes" else str(row[key]) for key in columns] for row in rows]
    print_columns(list(columns.values()), texts)


def _seqs(one: Json) -> str:
    """1..7; of what holds none yet, which is counted from its first on, nothing."""
    return f"{one['first_seq']:,}..{one['last_seq']:,}" if one["last_seq"] >= one["first_seq"] else "-"


def _time(us: int) -> str:
    return datetime.fromtimestamp(us / 1_000_000, UTC).isoformat()
