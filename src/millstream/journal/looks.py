"""What the source's catalog was like when capture last looked, and what has changed in it without a word in the log.

One small file, replaced whole: what a look found and the look itself, with which the next one is compared, are durable
together. So a crash neither loses a change nor finds it twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from millstream.errors import JournalCorrupt
from millstream.journal.files import disk_errors, replace_file, sealed_json, unsealed_json
from millstream.model import Json
from millstream.sources.base import Look

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


def parse(raw: bytes) -> tuple[Json, list[CatalogChange]]:
    """The last look as it was noted, and the changes in order. Raises JournalCorrupt."""
    body = unsealed_json(raw)
    if body is None:
        raise JournalCorrupt(
            f"{FILE} is not what was written",
            hint="remove the file: capture looks at the catalog anew, but what happened since the last look is lost",
        )
    return body["look"], [CatalogChange(**one) for one in body["changes"]]


class LookFile:
    """The writer's side."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / FILE
        self.look: Json | None = None
        """The last look: `state` (the source's own), `position`, `at`. None before the first."""
        self._changes: list[CatalogChange] = []
        with disk_errors(self._path, "read the last look at the catalog"):
            if self._path.exists():
                self.look, self._changes = parse(self._path.read_bytes())

    def note(self, look: Look, seq: int) -> Sequence[CatalogChange]:
        """Make a look durable, with what it found, which is returned. Everything up to `seq` is committed."""
        at, count = look.at.isoformat(), len(self._changes)
        place = {"since": look.since, "position": look.position, "seq": seq}
        found = [
            CatalogChange(number, one.kind, one.table, one.oid, one.part, one.copies, at=at, **place)
            for number, one in enumerate(look.found, start=count + 1)
        ]
        noted: Json = {"state": look.state, "position": look.position, "at": at}
        changes: list[dict[str, Any]] = [asdict(one) for one in (*self._changes, *found)]
        with disk_errors(self._path, "write a look at the catalog"):
            replace_file(self._path, sealed_json({"look": noted, "changes": changes}))
        self.look, self._changes = noted, [*self._changes, *found]
        return found
