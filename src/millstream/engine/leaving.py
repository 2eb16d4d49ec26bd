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
    queries: tuple[DeliveryQuery, ...]
    threads: tuple[threading.Thread, ...]
    then: Callable[[], Json]
    answer: Future[Json]


class Leaving:
    """One thread: the control's."""

    def __init__(self, running: RunningStreams) -> None:
        self._running = running
        self._endings: list[_Ending] = []

    def begin(self, targets: Iterable[tuple[str, str]], then: Callable[[], Json]) -> Future[Json]:
        """End the delivery to these targets, each named with its stream, and then do `then`. Returns at once.

        The answer is what `then` gives, or raises. Until then the deliveries count as running, so that none of them is
        started again. Other things may have been done meanwhile: `then` looks at what there is.
        """
        wanted = set(targets)
        for name in sorted({stream for stream, _ in wanted}):
            self._running.on_leaving(name)
        queries = tuple(
            delivery.query
            for member in self._running.members
            for target, delivery in member.deliveries.items()
            if (member.name, target) in wanted
        )
        threads = tuple(threading.Thread(target=_stop, args=(one,), name="stop", daemon=True) for one in queries)
        for thread in threads:
            thread.start()
        self._endings.append(_Ending(queries, threads, then, Future()))
        return self._endings[-1].answer

    def serve(self) -> None:
        """Go on with what has ended."""
        for ending in [one for one in self._endings if not any(thread.is_alive() for thread in one.threads)]:
            self._endings.remove(ending)
            try:
                ending.answer.set_result(ending.then())
            except Exception as failed:  # noqa: BLE001 - handed to whoever asked
                self._let_go(ending.queries)
                ending.answer.set_exception(failed)

    def _let_go(self, queries: tuple[DeliveryQuery, ...]) -> None:
        """Nothing came of what they were ended for: they are started again."""
        for member in self._running.members:
            for target in [target for target, one in member.deliveries.items() if one.query in queries]:
                del member.deliveries[target]


def _stop(query: DeliveryQuery) -> None:
    # Who takes it off the list stops it once more, and is told what is wrong with that.
    with suppress(Exception):
        query.stop()
