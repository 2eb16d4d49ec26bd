"""What the engine and a capture process say to each other."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from millstream.model import AckPolicy, JournalLimit, Json, OnFull, OnLimit, Retention, SourceSpec
from millstream.observe import Event

STOPPED: Final = 0
"""Exit code: stopped as asked, everything whole is in the journal."""
HALTED: Final = 3
"""Exit code: going on needs a person; the last event says why. Not started again."""
TRANSIENT: Final = 4
"""Exit code: trying again can help."""


@dataclass(frozen=True)
class Rebase:
    """A new incarnation of a lost journal: above every old seq, from where the targets are."""

    first_seq: int
    incarnation: int
    start_position: int


@dataclass(frozen=True)
class CaptureOrder:
    """Capture `source` into the journal at `journal`.

    `expect_journal` says that targets have cursors in this journal: a missing one is then an error
    and never made anew, unless `rebase` says how.
    """

    source: SourceSpec
    journal: Path
    expect_journal: bool = False
    rebase: Rebase | None = None
    segment_bytes: int | None = None
    """None: the journal's own size. (The journal is not imported here: it brings pyarrow, and that pandas.)"""

    def to_json(self) -> Json:
        return {
            "source": {**asdict(self.source), "options": dict(self.source.options)},
            "journal": str(self.journal),
            "expect_journal": self.expect_journal,
            "rebase": asdict(self.rebase) if self.rebase is not None else None,
            "segment_bytes": self.segment_bytes,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> CaptureOrder:
        source = value["source"]
        rebase, limit = value.get("rebase"), source.get("journal")
        return cls(
            SourceSpec(
                **{
                    **source,
                    "tables": tuple(source["tables"]),
                    "ack": AckPolicy(source["ack"]),
                    "on_limit": OnLimit(source["on_limit"]),
                    "retention": Retention(**source["retention"]) if source.get("retention") else None,
                    "journal": JournalLimit(**{**limit, "on_full": OnFull(limit["on_full"])}) if limit else None,
                }
            ),
            Path(value["journal"]),
            bool(value.get("expect_journal", False)),
            Rebase(**rebase) if rebase is not None else None,
            value.get("segment_bytes"),
        )


class Control:
    """What the engine wants, set from another thread."""

    def __init__(self) -> None:
        self.stopping = threading.Event()
        self.ack: int | None = None
        """Everything up to here has been delivered; None while nobody has said anything."""
        self.planned_before: float | None = None
        """No running batch was planned before this Unix time."""
        self.lowest: int | None = None
        """No target needs a seq up to this one any more; None while nobody has said so."""
        self.delivered: int | None = None
        """Every target has the changes up to this seq; the same."""


class Report(Protocol):
    """Where capture tells what happens. Never blocks."""

    def event(self, event: Event) -> None: ...

    def status(self, status: Json) -> None: ...
