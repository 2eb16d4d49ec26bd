"""Delivering once more what came after a checkpoint, at targets that can take their last batches back.

The target goes back to the end of an earlier batch; delivery then sees that it is behind its saved cursor,
and begins a new epoch there. The changes come from the journal: the source is not asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from millstream.engine.fit import open_target
from millstream.engine.home import Home
from millstream.errors import NotSupported, OutOfRange
from millstream.journal import JournalReader
from millstream.model import Checkpoint, Mode, StreamSpec
from millstream.targets.base import Rewinding, TargetCursor


class Replay:
    """Of some targets of a stream. `check` changes nothing; `run` may only be called while none of them delivers."""

    def __init__(self, home: Home, stream: StreamSpec, targets: Sequence[str], start: Checkpoint | datetime) -> None:
        self._stream = stream
        self._reader = JournalReader([str(home.journal_path(stream.source.name))])
        self._targets = {spec.name: open_target(spec) for spec in stream.targets if spec.name in targets}
        self._start = start
        self.seq = 0

    def check(self) -> None:
        """Raise NotSupported, or OutOfRange, before anything is changed."""
        for name, target in self._targets.items():
            if not isinstance(target, Rewinding):
                raise NotSupported(
                    f"target {name} of stream {self._stream.name} cannot be replayed: a target of kind {target.kind} "
                    "does not take back what it has",
                    hint="replay targets that write every change (kind files), or deliver to a new target",
                )
        if isinstance(self._start, datetime):
            self.seq = self._reader.seq_at_time(round(self._start.timestamp() * 1_000_000))
        else:
            self.seq = self._start.seq
        for name, target in self._targets.items():
            assert isinstance(target, Rewinding)  # noqa: S101 - looked at above
            self._check_place(name, target.rewind(self._stream.name, name, self.seq, look_only=True))

    def run(self) -> None:
        """Take the batches back. Killed in between, the target is at the end of another batch, and goes on there."""
        for name, target in self._targets.items():
            assert isinstance(target, Rewinding)  # noqa: S101 - `check` has looked
            target.rewind(self._stream.name, name, self.seq)

    def _check_place(self, name: str, place: TargetCursor | None) -> None:
        """Everything after that place must still be in this journal."""
        header, first = self._reader.header(), self._reader.first_seq()
        if place is None:
            whole = first == header.first_seq and header.incarnation == 1
            if self._stream.mode is not Mode.CDC or not whole:
                raise OutOfRange(
                    f"target {name} has no batch that ends at or before seq {self.seq}, and what it began with is not "
                    "in the journal",
                    hint=f"replay from a later checkpoint; the journal begins at seq {first}",
                )
        elif place.journal_id != header.journal_id or place.seq + 1 < first:
            raise OutOfRange(
                f"target {name} would go on after seq {place.seq}, which the journal does not have any more",
                hint=f"replay from a later checkpoint; the journal begins at seq {first}",
            )
