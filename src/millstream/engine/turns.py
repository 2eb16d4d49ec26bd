"""Whose turn it is at a target: a batch's, or that of somebody who must have it for himself."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from millstream.errors import TargetUnavailable


class Turns:
    """Of one delivery. From any thread. `stopping` ends every wait of a batch for its turn."""

    def __init__(self, stopping: threading.Event) -> None:
        self._stopping = stopping
        self._changed = threading.Condition()
        self._in_batch = False
        self._aside = False

    def begin(self) -> bool:
        """A batch begins. False: the delivery shall end, and it must not."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopping.is_set() or not self._aside)
            self._in_batch = not self._stopping.is_set()
            return self._in_batch

    def end(self) -> None:
        """It has ended, or was given up."""
        with self._changed:
            self._in_batch = False
            self._changed.notify_all()

    def await_end(self, timeout: float) -> None:
        """Wait for the batch at hand; one that waits for its turn gives up if `stopping` is set."""
        with self._changed:
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._in_batch, timeout)

    @contextmanager
    def aside(self, patience: float) -> Iterator[None]:
        """Let no batch begin while the block runs. Raises TargetUnavailable if the one at hand does not end in time."""
        with self._changed:
            free = self._changed.wait_for(lambda: not self._in_batch and not self._aside, patience)
            if not free:
                raise TargetUnavailable(f"the batch at hand has not ended within {patience:g} s")
            self._aside = True
        try:
            yield
        finally:
            with self._changed:
                self._aside = False
                self._changed.notify_all()
