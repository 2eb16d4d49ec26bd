"""Removing a stream: each step can be repeated, so one that was killed anywhere is run again from the start."""

from __future__ import annotations

import shutil

from millstream.engine.fit import open_target
from millstream.engine.home import Home
from millstream.engine.rebase import request_path
from millstream.errors import MillstreamError, SourceUnavailable
from millstream.failpoint import failpoint
from millstream.model import Json, Mode, StreamSpec
from millstream.sources import remove_source
from millstream.state.base import StateStore
from millstream.targets.base import Releasing


class Deletion:
    """Of one stream that runs nowhere any more, and of which it is written down that it is being deleted.

    With `keep_slot` what captures the source stays (slot, publications, journal). So it does while
    another stream of the home is on that source. With `keep_target` the targets are not told.
    """

    def __init__(
        self, home: Home, store: StateStore, stream: StreamSpec, *, keep_slot: bool, keep_target: bool
    ) -> None:
        self._home = home
        self._store = store
        self._stream = stream
        self._keep_slot = keep_slot
        self._keep_target = keep_target

    def run(self) -> Json:
        """Do all of it. Returns what became of the source and of each target."""
        sharing = self._sharing()
        gives_back = not (self._keep_slot or sharing)
        copied = self._stream.mode is Mode.SNAPSHOT
        done: Json = {"stream": self._stream.name, "source": "removed", "targets": {}}
        if not gives_back:
            done["source"] = "kept" if self._keep_slot else f"in use by {', '.join(sharing)}"
        if copied:
            done["source"] = "nothing was made on it"
        elif gives_back:
            self._give_back()
            failpoint("engine.source_removed")
        if not self._keep_target:
            done["targets"] = {target.name: self._release(target.name) for target in self._stream.targets}
            failpoint("engine.targets_released")
        shutil.rmtree(self._home.path / "checkpoints" / self._stream.name, ignore_errors=True)
        failpoint("engine.checkpoints_removed")
        source = self._stream.source.name
        if gives_back:
            request_path(self._home, source).unlink(missing_ok=True)
            journal = self._home.journal_path(source)
            if journal.exists():
                shutil.rmtree(journal)
            failpoint("engine.journal_removed")
        self._store.delete_stream(self._stream.name, source=source if gives_back else None)
        failpoint("engine.stream_forgotten")
        return done

    def _sharing(self) -> list[str]:
        """The other streams on the source. One that is being deleted as well no longer counts."""
        gone = self._store.deletions()
        return [
            name
            for name in self._store.list_streams()
            if name not in gone and (self._store.get_stream(name) or {})["source"]["name"] == self._stream.source.name
        ]

    def _give_back(self) -> None:
        """Drop slot and publications: a slot that nobody reads would keep the source's log for ever."""
        try:
            remove_source(self._stream.source)
        except MillstreamError as failed:
            name = self._stream.name
            raise SourceUnavailable(
                f"the slot of source {self._stream.source.name} cannot be dropped: {failed.message}",
                hint=f"try again when it can be reached (millstream delete {name}), or leave the slot on the source "
                f"and drop it by hand: millstream delete {name} --keep-slot",
            ) from failed

    def _release(self, name: str) -> str:
        """Tell a target that nobody will go on where the stream ended. One that cannot be told is only left."""
        (spec,) = [target for target in self._stream.targets if target.name == name]
        try:
            target = open_target(spec)
            if not isinstance(target, Releasing):
                return "left as it is"
            target.release(self._stream.name, name)
        except MillstreamError as failed:
            return f"left as it is: {failed.message}"
        return "released"
