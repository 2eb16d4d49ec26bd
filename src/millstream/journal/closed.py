"""The closed segments of a journal while it is written: which there are, their sealing, and which of them go.

Every change of what there is begins with the manifest. Readers follow it with the next head that the writer publishes,
so files that the manifest no longer names, or names in another form, stay until that is done.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path

from millstream.failpoint import failpoint
from millstream.journal.files import SEGMENTS, disk_errors, sync_directory
from millstream.journal.manifest import Entry, Manifest
from millstream.journal.pruned import Pruned
from millstream.journal.retention import pruned_after, removable, size_of
from millstream.journal.sealing import Sealed, Sealer
from millstream.journal.segment import EVERY_FORM, OPEN_FORM, remove_segment


class ClosedSegments:
    """All methods are the writer thread's. After JournalFull what was asked for can be asked for again."""

    def __init__(self, path: Path, manifest: Manifest, superseded: Iterable[int], sealer: Sealer) -> None:
        """`superseded`: segments with files in a form that nobody needs any more."""
        self._path = path
        self._segments = path / SEGMENTS
        self._manifest = manifest
        self._superseded: dict[int, float | None] = dict.fromkeys(superseded)
        """With when the head began to say so; None: it does not yet."""
        self._sealer = sealer
        self.submit(*manifest.entries)

    @property
    def entries(self) -> tuple[Entry, ...]:
        """The oldest first."""
        return self._manifest.entries

    @property
    def version(self) -> int:
        """The manifest's, for the head."""
        return self._manifest.version

    @property
    def size(self) -> int:
        """What they take on disk; the former forms of some, which go soon, not counted."""
        return sum(size_of(entry) for entry in self.entries)

    def add(self, *entries: Entry) -> None:
        """Segments that were just closed, durably in the manifest when it returns."""
        self._save(self._manifest.adding(*entries))

    def _save(self, manifest: Manifest) -> None:
        manifest.save(self._path)
        self._manifest = manifest
        failpoint("journal.manifest_published")

    # Sealing

    @property
    def backlog(self) -> int:
        """How many are not sealed yet, the one at work included."""
        return self._sealer.backlog

    def submit(self, *entries: Entry) -> None:
        """Have these sealed, those of them that are not."""
        self._sealer.submit(*(entry for entry in entries if not entry.sealed))

    def seal_next(self) -> None:
        """Begin to seal the next one in the background, unless one is at work."""
        self._sealer.start(self._manifest)

    def collect(self, *, wait: bool = False) -> bool:
        """Take in a sealing that has ended, if one has. Raises what it raised."""
        return self._take_in(self._sealer.collect(wait))

    def finish(self) -> bool:
        """Stop sealing. Whether one had come to its end and was taken in."""
        return self._take_in(self._sealer.close())

    def close(self) -> None:
        """Stop sealing; what it has come to is left to the next writer. Idempotent."""
        self._sealer.close()

    def _take_in(self, sealed: Sealed | None) -> bool:
        if sealed is None:
            return False
        self._save(self._manifest.adding(sealed.entry).without(sealed.absorbed))
        self._superseded[sealed.entry.number] = None
        if sealed.absorbed is not None:
            self._superseded[sealed.absorbed] = None
        return True

    # What goes

    def published(self) -> None:
        """A head has named this version of the manifest: batches are planned by it from now on."""
        for number, since in self._superseded.items():
            if since is None:
                self._superseded[number] = time.time()

    def drop_superseded(self, planned_before: float) -> None:
        """Remove forms of segments whose next form was published before this unix time.

        The caller knows that no batch planned before that time is still running.
        """
        ready = [number for number, since in self._superseded.items() if since is not None and since < planned_before]
        sealed = {entry.number: entry.sealed for entry in self.entries} if ready else {}
        for number in ready:
            # What is not in the manifest has been taken over by the next one.
            forms = OPEN_FORM if sealed.get(number) else EVERY_FORM if number not in sealed else ()
            with disk_errors(self._segments, "remove a superseded segment"):
                remove_segment(self._segments, number, forms)
            del self._superseded[number]
        if ready:
            sync_directory(self._segments)
            failpoint("journal.superseded_dropped")

    def prunable(self) -> tuple[Entry, ...]:
        """Those that may go, as far as sealing is concerned. One that is being taken over stays, and all after it."""
        numbers = [entry.number for entry in self.entries]
        absorbing = self._sealer.absorbing
        return self.entries[: numbers.index(absorbing)] if absorbing in numbers else self.entries

    def prune(self, segment: int, rows_after: int, publish: Callable[[], None]) -> Pruned | None:
        """Forget all segments up to this one, as far as transactions end with them. None if there are none.

        `rows_after`: how many rows follow those that may go. `publish` has the head name the new manifest.
        """
        going = removable(self.prunable(), segment, open_rows=rows_after)
        if not going:
            return None
        pruned = pruned_after(self._manifest.pruned, going)
        pruned.save(self._path)
        failpoint("retention.decided")
        self._save(self._manifest.after(pruned))
        failpoint("retention.manifest_published")
        publish()
        taken_over = {number for number in self._superseded if number <= pruned.segment}
        for number in sorted({entry.number for entry in going} | taken_over):
            self._superseded.pop(number, None)
            with disk_errors(self._segments, "remove a pruned segment"):
                remove_segment(self._segments, number)
            failpoint("retention.segment_removed")
        sync_directory(self._segments)
        return pruned
