"""What every part of `Engine` can rely on: the home, and having something done there."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TypeVar

from millstream.engine.home import Home
from millstream.engine.operations import Operations
from millstream.model import Json
from millstream.observe import Observers
from millstream.state.base import StateStore

T = TypeVar("T")


class EnginePart(ABC):
    """`Engine` is made of parts, one for each kind of thing that can be asked of it. This is what they share."""

    _home: Home
    _observers: Observers

    @property
    @abstractmethod
    def is_running(self) -> bool:
        """Whether this process runs the streams of the home."""

    @abstractmethod
    def _do(self, act: Callable[[Operations], T]) -> T:
        """Have the control do something, and wait for it. Only while it is running."""

    @abstractmethod
    def _do_later(self, act: Callable[[Operations], Future[T]]) -> T:
        """Have the control begin something, and wait for its end."""

    @abstractmethod
    def _ask(self, verb: str, arguments: Json) -> Json:
        """Have the process that runs the home do it, or do it here if none does."""

    @contextmanager
    def _reading(self) -> Iterator[StateStore | None]:
        """The home's state; None when there is none yet."""
        if not self._home.state_path.exists():
            yield None
            return
        store = self._home.open_state(read_only=True)
        try:
            yield store
        finally:
            store.close()
