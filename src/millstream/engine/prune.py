"""`millstream journal prune`: let a journal forget, whether or not a process writes it.

Without one the journal is opened, as its writer would, and pruned here. Beside one a request is left
in the journal's directory: the writer looks for it every second and does it between two transactions.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from millstream.engine.holders import Holder, holders, lowest
from millstream.engine.home import Home
from millstream.errors import ConfigError, JournalError, JournalLocked
from millstream.journal import Header, JournalWriter, Pruned
from millstream.journal.head import read_head, read_header
from millstream.journal.manifest import FILE as MANIFEST
from millstream.journal.manifest import Entry, Manifest
from millstream.journal.retention import Due, PruneRequest, due, size_of
from millstream.model import Json, Retention

PATIENCE = 30.0
"""Seconds that a writer has to do what it is asked."""

_POLL = 0.1


def prune(home: Home, source: str, rule: Retention | None, *, force: bool, dry_run: bool) -> Json:
    """Remove what `rule` (None: the source's own, from its stream file) says, and say what went.

    Never what a target still needs, unless `force`; such a target then halts. With `dry_run` nothing
    is done. Raises ConfigError when there is no rule, JournalError when a writer does not answer.
    """
    path = home.journal_path(source)
    header = read_header(path)
    rule, found = _known(home, source, header, rule)
    planned = _plan(path, rule, None if force else lowest(found, header))
    if planned.entries and not dry_run:
        _do(path, planned.entries[-1].number)
    return _told(source, planned, found, force=force, dry_run=dry_run)


def _known(home: Home, source: str, header: Header, rule: Retention | None) -> tuple[Retention, list[Holder]]:
    """The rule that counts, and who needs the journal."""
    if not home.state_path.exists():
        if rule is None:
            raise _no_rule(source)
        return rule, []
    store = home.open_state(read_only=True)
    try:
        for stream in store.list_streams() if rule is None else []:
            described: dict[str, Any] = (store.get_stream(stream) or {}).get("source", {})
            if described.get("name") == source and described.get("retention"):
                rule = Retention(**described["retention"])
        if rule is None:
            raise _no_rule(source)
        return rule, holders(store, source, header)
    finally:
        store.close()


def _no_rule(source: str) -> ConfigError:
    return ConfigError(
        f"nothing says how much of the journal of {source} is kept",
        hint="give --older-than or --max-bytes, or `retention` at the source in its stream file",
    )


def _plan(path: Path, rule: Retention, seq: int | None) -> Due:
    head = read_head(path)
    if head is None:
        raise JournalError(f"the journal in {path} has no head", hint="start capture once: it makes it again")
    try:
        manifest = Manifest.from_bytes((path / MANIFEST).read_bytes())
    except FileNotFoundError:
        manifest = Manifest()
    rows = head.seq - head.segment_first_seq + 1
    now = time.time_ns() // 1000
    return due(manifest.entries, rule, open_bytes=head.segment_length, open_rows=rows, lowest=seq, now_us=now)


def _do(path: Path, segment: int) -> None:
    try:
        with JournalWriter.open(path) as writer:
            writer.prune(segment)
    except JournalLocked as locked:
        PruneRequest(segment).save(path)
        _await(path, segment, locked)


def _await(path: Path, segment: int, locked: JournalLocked) -> None:
    deadline, pause = time.monotonic() + PATIENCE, threading.Event()
    while (pruned := Pruned.load(path)) is None or pruned.segment < segment:
        if time.monotonic() >= deadline:
            raise JournalError(
                f"{locked.message}, and it has not done what it was asked within {PATIENCE:g} s",
                hint="the request stays: it is done when capture next looks, at the latest at its next start",
            )
        pause.wait(_POLL)


def _told(source: str, planned: Due, found: Sequence[Holder], *, force: bool, dry_run: bool) -> Json:
    gone = planned.entries[-1].last_seq if planned.entries else None
    return {
        "source": source,
        "done": bool(planned.entries) and not dry_run,
        **_sum(planned.entries),
        "last_seq": gone,
        "held": {**_sum(planned.held), "by": _named(found, planned.held[-1].last_seq if planned.held else None)},
        "halted": _named(found, gone) if force else [],
    }


def _sum(entries: Sequence[Entry]) -> Json:
    return {
        "segments": len(entries),
        "rows": sum(entry.rows for entry in entries),
        "bytes": sum(size_of(entry) for entry in entries),
    }


def _named(found: Sequence[Holder], seq: int | None) -> list[Json]:
    """The targets that stand before a seq."""
    return [vars(holder) for holder in found if seq is not None and holder.seq < seq]
