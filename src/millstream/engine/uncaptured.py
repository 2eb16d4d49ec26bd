"""Streams that only copy (`mode: snapshot`): a source that nobody captures, and a journal that is not there.

Such a stream leaves nothing on its source: no slot, no publication. Its rows have the version 0, the last seq of
a journal in which nothing ever stood.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from uuid import uuid4

from millstream.engine.captures import Capture
from millstream.engine.reports import CaptureReport
from millstream.engine.status import UNCAPTURED
from millstream.journal import JournalReader
from millstream.journal.format import Head, Header
from millstream.model import Relation, SourceSpec, StreamSpec


class NoJournal(JournalReader):
    """What a delivery asks of a journal before its first batch, of which there is none."""

    def __init__(self, source: SourceSpec) -> None:
        super().__init__([source.name])
        now = datetime.now(UTC).isoformat()
        self._header = Header(str(uuid4()), 1, 1, 0, source.name, source.kind, {}, now)

    def header(self) -> Header:
        return self._header

    def head(self) -> Head | None:
        return None

    def relations(self) -> dict[int, Relation]:
        return {}

    def first_seq(self) -> int:
        return 1


class Uncaptured(Capture):
    """Takes the place of a capture: ready at once, with nothing to start, acknowledge, keep or stop."""

    @property
    def started(self) -> bool:
        return True

    def check(self, streams: Iterable[str]) -> None:
        """Cursors of these streams speak of no journal."""

    def check_tables(self, stream: str) -> None:
        """Each of them is read by its own name."""

    def start(self) -> None:
        """There is nothing to start."""

    def change(self, source: SourceSpec, streams: Sequence[StreamSpec]) -> None:
        self.source, self.streams = source, tuple(streams)

    def restart(self) -> None:
        """Nor to start again."""

    def await_first_word(self, seconds: float) -> None:
        """Nobody will say one."""

    def ready(self, *, once: bool) -> bool:
        return True

    def report(self) -> CaptureReport:
        return CaptureReport(state=UNCAPTURED)
