"""What the engine asks of a capture process: the first line it reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from millstream.model import AckPolicy, Json, OnLimit, SourceSpec

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

    def to_json(self) -> Json:
        return {
            "source": {**asdict(self.source), "options": dict(self.source.options)},
            "journal": str(self.journal),
            "expect_journal": self.expect_journal,
            "rebase": asdict(self.rebase) if self.rebase is not None else None,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> CaptureOrder:
        source = value["source"]
        rebase = value.get("rebase")
        return cls(
            SourceSpec(
                **{
                    **source,
                    "tables": tuple(source["tables"]),
                    "ack": AckPolicy(source["ack"]),
                    "on_limit": OnLimit(source["on_limit"]),
                }
            ),
            Path(value["journal"]),
            bool(value.get("expect_journal", False)),
            Rebase(**rebase) if rebase is not None else None,
        )
