"""The first rows of a mirror for which there are too many to come at once: it begins empty, and is filled then.

They come as tables that are copied anew do (`reloading`). The target itself remembers that it is not whole.
"""

from __future__ import annotations

from millstream.engine.reload import RELOAD, AskedTables, can_reload, progress_of, waiting
from millstream.failpoint import failpoint
from millstream.model import Json, OnReject, StreamSpec, TargetSpec
from millstream.sources import copy_limits, table_bytes
from millstream.state.base import StateStore
from millstream.targets.base import Fillable, Reloadable, Target


class Filling:
    """Of one target."""

    def __init__(self, stream: StreamSpec, spec: TargetSpec, target: Target, store: StateStore) -> None:
        self._stream = stream
        self._spec = spec
        self._target = target
        self._store = store

    @property
    def by_steps(self) -> bool:
        """Whether the target can get a table in parts, and so in ranges of several snapshots."""
        return isinstance(self._target, Reloadable) and self._target.reloads_by_steps

    def takes_over(self) -> bool:
        """Whether a target that has nothing gets its first rows in this way; if so, that is written down now.

        So does a mirror, if there is more than is copied at once. A changelog needs one position for all of its rows.
        So does who cannot wait for a value that a change left out, and that comes with a later range: where rows are
        transformed the source's cannot help, and where a change that is incomplete for a moment is the end.
        """
        waits = not self._stream.shape and self._spec.dead_letters.on_reject is OnReject.LETTER
        most = copy_limits(self._stream.source).at_once
        fit = self.by_steps and can_reload(self._target) and isinstance(self._target, Fillable)
        if not (waits and fit) or most is None or table_bytes(self._stream.source) <= most:
            return False
        self._ask_for_all()
        failpoint("reload.first_asked")
        return True

    def ask_if_lacking(self) -> None:
        """Have all rows come, if the target, which is open, says that its first ones have not, and nothing is due.

        Nobody remembers then which of them it has: the state is lost, or the target is an older copy.
        """
        if can_reload(self._target) and isinstance(self._target, Fillable) and self._target.filling():
            self._ask_for_all()

    def end(self, record: Json) -> None:
        """The target is whole, if these were its first rows. Before they are said to be done."""
        if isinstance(self._target, Fillable) and record.get("baseline"):
            self._target.set_filling(False)
            failpoint("reload.filled")

    def progress(self) -> Json | None:
        """How far the first rows of the target are, while they come in this way."""
        record = self._store.notes(self._stream.name, RELOAD).get(self._spec.name)
        return progress_of(record) if record is not None and record.get("baseline") else None

    def _ask_for_all(self) -> None:
        record = {**waiting(AskedTables()), "baseline": True}
        self._store.save_note(self._stream.name, self._spec.name, RELOAD, record)
