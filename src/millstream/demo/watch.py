"""What the demo sees of a stream from outside: journal head, cursors, published batches."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from millstream.engine.home import Home
from millstream.errors import MillstreamError
from millstream.journal import JournalReader
from millstream.model import Cursor


@dataclass(frozen=True)
class Sight:
    """One look: how far capture is, how far delivery is."""

    captured: int
    delivered: int
    position: int
    covered: int

    @property
    def lag(self) -> int:
        return max(0, self.captured - self.delivered)


@dataclass
class Watch:
    """Looks at a home and a files target without disturbing them."""

    home: Home
    stream: str
    path: Path
    changes: dict[str, int] = field(default_factory=dict)
    _seen: set[str] = field(default_factory=set)

    @property
    def journal_exists(self) -> bool:
        return (self.home.journal_path(self.stream) / "head").exists()

    def look(self) -> Sight:
        if not self.journal_exists:
            return Sight(0, 0, 0, 0)
        head = JournalReader([str(self.home.journal_path(self.stream))]).head()
        cursor = self._cursor()
        self._count()
        return Sight(
            captured=head.seq if head else 0,
            delivered=cursor.seq if cursor else 0,
            position=cursor.position if cursor else 0,
            covered=head.covered if head else 0,
        )

    def _cursor(self) -> Cursor | None:
        try:
            store = self.home.open_state(read_only=True)
        except MillstreamError:
            return None
        try:
            cursors = store.cursors(self.stream)
        finally:
            store.close()
        return min(cursors, key=lambda cursor: cursor.seq, default=None)

    def _count(self) -> None:
        """Add up the batches that were published since the last look."""
        commits = self.path / "_millstream" / "commits"
        if not commits.exists():
            return
        for commit in sorted(commits.glob("*.json")):
            if commit.name not in self._seen:
                self._seen.add(commit.name)
                for file in json.loads(commit.read_text())["files"]:
                    self.changes[file["table"]] = self.changes.get(file["table"], 0) + file["rows"]
