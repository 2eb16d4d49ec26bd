"""Waits that come in turns: a generator gives nothing at each turn of a wait, and the answer at its end."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Generic, TypeVar

from millstream.sources.base import Block

Answer = TypeVar("Answer")


class _Wait(Generic[Answer]):
    """The turns of a wait, and its `answer` when they are over."""

    answer: Answer

    def __init__(self, waiting: Generator[None, None, Answer]) -> None:
        self._waiting = waiting

    def __iter__(self) -> Iterator[None]:
        self.answer = yield from self._waiting


def turns(waiting: Generator[None, None, Answer]) -> Generator[Block, None, Answer]:
    """An empty block for every turn of a wait: capture does other things meanwhile."""
    wait = _Wait(waiting)
    for _ in wait:
        yield Block()
    return wait.answer


def awaited(waiting: Generator[None, None, Answer]) -> Answer:
    """Wait to the end: a task has nothing else to do."""
    wait = _Wait(waiting)
    for _ in wait:
        pass
    return wait.answer
