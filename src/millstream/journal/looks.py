"""What the source's catalog was like when capture last looked, and what has changed in it without a row in the log.

One small file, replaced whole: what a look found and the look itself, with which the next one is compared, are durable
together. So a crash neither loses a change nor finds it twice.

What the log itself told of tables is durable before the transaction that told it is visible. If that never comes to be,
it is left out again: readers do not see it before the journal covers it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from millstream.errors import JournalCorrupt
from millstream.failpoint import failpoint
from millstream.journal.files import disk_errors, replace_file, sealed_json, unsealed_json
from millstream.journal.index import column
from millstream.model import Json
from millstream.sources.base import Found, Look, Told

FILE = "catalog.json"


@dataclass(frozen=True)
class CatalogChange:
    """Something that happened to a table between two looks at the catalog."""

    number: int
    """Counts from 1 in its journal."""
    kind: str
    table: str
    oid: int
    part: str | None
    """The partition that it is about, if it is."""
    copies: bool
    """Whether rows came, went or changed by it, so that targets need a copy of the table."""
    since: int
    """The log's end at the look before,"""
    position: int
    """and at the look that found it: it was committed between them."""
    seq: int
    """The journal's last change then: all that committed before the look are at or before it."""
    at: str
    """When it was found, in ISO form."""
    told: bool = False
    """Whether a transaction told it. Then `since` and `position` are its commit, `at` is the time of that, and `seq` is
    the last change before it."""
    reason: str | None = None
    """By what it came, if that is known."""

    def is_covered(self, covered: int) -> bool:
        """Whether it counts in a journal that has everything up to this position."""
        return not self.told or self.position < covered


def parse(raw: bytes) -> tuple[Json | None, list[CatalogChange], list[Json]]:
    """The last look as it was noted, the changes in order, and what was told since that look.

    Raises JournalCorrupt.
    """
    body = unsealed_json(raw)
    if body is None:
        raise JournalCorrupt(
            f"{FILE} is not what was written",
            hint="remove the file: capture looks at the catalog anew, but what happened since the last look is lost",
        )
    return body["look"], [CatalogChange(**one) for one in body["changes"]], body.get("told", [])


class LookFile:
    """The writer's side."""

    def __init__(self, directory: Path, covered: int) -> None:
        """Open. What was told beyond `covered`, which the journal does not have, is forgotten."""
        self._path = directory / FILE
        self._look: Json | None = None
        self._changes: list[CatalogChange] = []
        self._told: list[Json] = []
        self._waiting: list[tuple[Told, int]] = []
        self._stale = False
        """Whether the file has what is forgotten here."""
        self.heard: Sequence[CatalogChange] = ()
        """What was told with the last commit."""
        with disk_errors(self._path, "read the last look at the catalog"):
            if self._path.exists():
                self._look, self._changes, self._told = parse(self._path.read_bytes())
        self.go_back(covered)

    @property
    def look(self) -> Json | None:
        """The last look: `state` (the source's own), `position`, `at`, and what was `told` since. None before it."""
        return None if self._look is None else {**self._look, "told": list(self._told)}

    def note(self, look: Look, seq: int) -> Sequence[CatalogChange]:
        """Make a look durable, with what it found, which is returned. Everything up to `seq` is committed."""
        at = look.at.isoformat()
        place = {"since": look.since, "position": look.position, "seq": seq, "at": at}
        found = self._numbered([(one, place) for one in look.found])
        noted: Json = {"state": look.state, "position": look.position, "at": at}
        self._write(noted, found, list(look.told))
        return found

    def hear(self, told: Sequence[Told], rows: pa.RecordBatch | None, first_seq: int) -> None:
        """Something was told by transactions of these rows, or by such as have none. Durable with the next `sync`."""
        self._waiting += [(one, _before(one.position, rows, first_seq)) for one in told]

    def sync(self) -> None:
        """Make durable what was heard. Raises JournalFull; the caller then goes back."""
        self.heard = ()
        if not self._waiting and not self._stale:
            return
        found = self._numbered(
            [
                (each, {"since": one.position, "position": one.position, "seq": seq, "at": one.at.isoformat()})
                for one, seq in self._waiting
                for each in one.found
            ],
            told=True,
        )
        self._write(self._look, found, [*self._told, *(one.event for one, _ in self._waiting)])
        self._waiting, self.heard = [], found
        failpoint("journal.told_written")

    def go_back(self, covered: int) -> None:
        """Forget what was told beyond what the journal has: it comes again."""
        changes = [one for one in self._changes if one.is_covered(covered)]
        told = [one for one in self._told if one["position"] < covered]
        self._stale |= len(changes) < len(self._changes) or len(told) < len(self._told)
        self._waiting, self._changes, self._told = [], changes, told

    def _numbered(self, found: Sequence[tuple[Found, Any]], *, told: bool = False) -> list[CatalogChange]:
        return [
            CatalogChange(number, **asdict(one), **place, told=told)
            for number, (one, place) in enumerate(found, start=len(self._changes) + 1)
        ]

    def _write(self, look: Json | None, found: Sequence[CatalogChange], told: list[Json]) -> None:
        changes: list[dict[str, Any]] = [asdict(one) for one in (*self._changes, *found)]
        with disk_errors(self._path, "write a look at the catalog"):
            replace_file(self._path, sealed_json({"look": look, "changes": changes, "told": told}))
        self._look, self._changes, self._told, self._stale = look, [*self._changes, *found], told, False


def _before(position: int, rows: pa.RecordBatch | None, first_seq: int) -> int:
    """The last seq before the transaction with this commit position; the first of `rows` has `first_seq`."""
    if rows is None or not rows.num_rows:
        return first_seq - 1
    at = int(np.searchsorted(column(rows, "commit_position"), position))
    inside = at < rows.num_rows and int(column(rows, "commit_position")[at]) == position
    # A large transaction comes in several blocks: its first row says how many were before.
    return first_seq + at - 1 - (int(column(rows, "tx_index")[at]) if inside else 0)
