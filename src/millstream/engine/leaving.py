"""Deliveries that are ended without anybody waiting for them: a batch may take long to end, or be stuck.

Each is stopped on a thread of its own. What follows is the control's again, when it next looks (`serve`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from millstream.model import Json

if TYPE_CHECKING:
    from millstream.engine.delivery import DeliveryQuery
    from millstream.engine.running import RunningStreams


@dataclass(frozen=True)
class _Ending:
    threads: tuple[threading.Thread, ...]
    then: Callable[[], Json]
    answer: Future[Json]


class Leaving:
    """One thread: the control's."""

    def __init__(self, running: RunningStreams) -> None:
        self._running = running
        self._endings: list[_Ending] = []

    def begin(self, name: str, targets: Iterable[str], then: Callable[[], Json]) -> Future[Json]:
        """End the delivery to these targets of a stream, and then do `then`. Returns at once.

        The answer is what `then` gives, or raises. Until then the deliveries count as running, so that none of them is
        started again.
        """
        self._running.on_leaving(name)
        wanted = set(targets)
        queries = [
            delivery.query
            for member in self._running.members
            for target, delivery in member.deliveries.items()
            if member.name == name and target in wanted
        ]
        threads = tuple(
            threading.Thread(target=_stop, args=(one,), name=f"stop-{name}", daemon=True) for one in queries
        )
        for thread in threads:
            thread.start()
        self._endings.append(_Ending(threads, then, Future()))
        return self._endings[-1].answer

    def serve(self) -> None:
        """Go on with what has ended."""
        for ending in [one for one in self._endings if not any(thread.is_alive() for thread in one.threads)]:
            self._endings.remove(ending)
            try:
                ending.answer.set_result(ending.then())
            except Exception as failed:  # noqa: BLE001 - handed to whoever asked
                ending.answer.set_exception(failed)


def _stop(query: DeliveryQuery) -> None:
    # Who takes it off the list stops it once more, and is told what is wrong with that.
    with suppress(Exception):
        query.stop()
