"""What `millstream journal cat` shows: changes in seq order, decoded.

A journal keeps rows in runs of one table. They are read a few thousand seqs at a time, decoded by
column, and put back into the order in which they were committed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import date, datetime, time
from decimal import Decimal
from typing import Any

from millstream.changelog import BEFORE, METADATA, assemble, pieces
from millstream.cli.places import at_place
from millstream.errors import UnknownName
from millstream.journal import JournalReader, open_slice
from millstream.model import Json, Relation, SeqRange
from millstream.names import instead
from millstream.sources.decoders import messages

STEP = 10_000
"""How many seqs are read at a time: this bounds memory, whatever the journal's size."""


def changes(
    reader: JournalReader, *, tables: frozenset[str], start: str | None, end: str | None, limit: int | None
) -> Iterator[Json]:
    """The changes from `start` to `end`, at most `limit`, of these tables (none: of all)."""
    head = reader.head()
    if head is None:
        return
    relations = {0: messages(reader.header().source_kind), **reader.relations()}
    _refuse_unknown(tables, relations)
    after = reader.first_seq() - 1 if start is None else cursor_before(reader, start)
    last = head.seq if end is None else min(head.seq, _last(reader, end))
    shown = 0
    while after < last and (limit is None or shown < limit):
        step = STEP if tables or limit is None else min(STEP, limit - shown)
        upto = min(last, after + step)
        for change in _read(reader, SeqRange(after, upto), relations, tables):
            yield change
            shown += 1
            if shown == limit:
                return
        after = upto


def cursor_before(reader: JournalReader, text: str) -> int:
    """The seq before the first change that `text` (a seq, a position or a time) means."""
    return at_place(text, lambda seq: seq - 1, reader.seq_at_position, reader.seq_at_time)


def _last(reader: JournalReader, text: str) -> int:
    return int(text) if text.isdecimal() else cursor_before(reader, text)


def _refuse_unknown(tables: frozenset[str], relations: dict[int, Relation]) -> None:
    known = sorted({relation.table for relation in relations.values()})
    for table in sorted(tables):
        if table not in known:
            there = instead(table, known, none="it has none yet")
            raise UnknownName(f"the journal has no changes of {table}: {there}")


def _read(reader: JournalReader, range: SeqRange, relations: dict[int, Relation], tables: frozenset[str]) -> list[Json]:
    found: list[Json] = []
    prefix = reader.header().event_prefix
    for slice in reader.slices(range):
        relation = relations[slice.relation]
        if tables and relation.table not in tables:
            continue
        for piece in pieces(open_slice(slice, reader.locations, range)):
            decoded = assemble(piece, relation, slice.relation, prefix)
            found += [one_change(relation, row) for row in decoded.to_pylist()]
    return sorted(found, key=lambda change: int(change["seq"]))


def one_change(relation: Relation, row: dict[str, Any]) -> Json:
    """A row of a changelog as JSON."""
    before = row.get(BEFORE)
    return {
        "seq": row["_ms_seq"],
        "op": row["_ms_op"],
        "table": relation.table,
        "position": row["_ms_position"],
        "txid": row["_ms_txid"],
        "tx_index": row["_ms_tx_index"],
        "commit_ts": row["_ms_commit_ts"].isoformat(),
        "event_id": row["_ms_event_id"],
        "schema": row["_ms_schema"],
        "values": {key: _plain(value) for key, value in row.items() if key not in METADATA},
        "before": None if before is None else {key: _plain(value) for key, value in before.items()},
        "unchanged": row["_ms_unchanged"],
        "special": dict(row["_ms_special"]),
    }


def _plain(value: Any) -> Any:
    """A value that JSON has. Numbers that a JSON number cannot hold exactly become text."""
    if isinstance(value, bytes):
        return "\\x" + value.hex()
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, Decimal):
        return str(value)
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return value


_WORDS = {"c": "insert", "u": "update", "d": "delete", "r": "read", "t": "truncate", "m": "message"}


def in_words(change: Json) -> str:
    """A change on one line, for people."""
    parts = [f"{key}={_short(value)}" for key, value in change["values"].items() if key not in change["unchanged"]]
    parts += [f"{key}=(unchanged)" for key in change["unchanged"]]
    if change["before"] is not None:
        parts.append("before: " + " ".join(f"{key}={_short(value)}" for key, value in change["before"].items()))
    at = re.sub(r"\+00:00$", "Z", change["commit_ts"])
    return (
        f"{change['seq']:>10}  {change['position']}  {at}  tx {change['txid']}  "
        f"{_WORDS[change['op']]:<8} {change['table']}  {' '.join(parts)}"
    )


def _short(value: Any) -> str:
    text = "NULL" if value is None else repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
